"""gpt-oss: sinks in every attention layer, windows in some, and experts with biases and a clamped gate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.core.interfaces.attention import AttentionSpec
from octavo.core.interfaces.model import Checkpoint, ForwardBatch, Model, ModelSpec
from octavo.models.gpt_oss_config import GptOssConfig, read_config
from octavo.models.kept import kept_by
from octavo.models.linear import linear
from octavo.models.mixture_of_experts import Experts, Routing, choose_experts
from octavo.models.rope import Rope, apply_rope
from octavo.models.weight_loader import WeightLoader


@dataclass(frozen=True)
class GptOssLayer:
    """One layer's weights.

    Attributes:
        qkv: Queries', keys' and values' projection, stacked.
            [(num_query_heads + 2 * num_kv_heads) * head_dim, hidden_size]
        output: [hidden_size, num_query_heads * head_dim]
        qkv_bias: And output_bias: one number a row of their projection, or None.
        sinks: A logit that takes part in each query's softmax and carries no value. [num_query_heads]
        attention_norm: [hidden_size]
        mlp_norm: [hidden_size]
        router: [num_experts, hidden_size]
        router_bias: [num_experts]
    """

    qkv: Tensor
    output: Tensor
    qkv_bias: Tensor | None
    output_bias: Tensor | None
    sinks: Tensor
    attention_norm: Tensor
    mlp_norm: Tensor
    router: Tensor
    router_bias: Tensor
    experts: Experts


class GptOssModel(Model):
    """The decoder of gpt-oss."""

    contract_version = 1

    def __init__(
        self,
        config: GptOssConfig,
        *,
        embedding: Tensor,
        layers: list[GptOssLayer],
        final_norm: Tensor,
        output_embedding: Tensor,
    ) -> None:
        """Put weights together; `from_checkpoint` reads them.

        Args:
            embedding: [vocab_size, hidden_size]
            final_norm: [hidden_size]
            output_embedding: The same tensor as `embedding` where the two are tied. [vocab_size, hidden_size]
        """
        self.config = config
        self._embedding = embedding
        self._layers = layers
        self._final_norm = final_norm
        self._output_embedding = output_embedding
        self._dtype = embedding.dtype
        self._rope = Rope.from_spec(config.rope, device=str(embedding.device))

    @classmethod
    def spec_from_config(
        cls, config: Mapping[str, Any], *, dtype: str, device: str, block_size: int, kv_dtype: str
    ) -> ModelSpec:
        read = read_config(config)
        # For its errors: what rope cannot be computed with is refused before the weights are read.
        Rope.from_spec(read.rope, device="cpu")
        attention_specs = tuple(
            AttentionSpec(
                num_query_heads=read.num_query_heads,
                num_kv_heads=read.num_kv_heads,
                head_dim=read.head_dim,
                head_dim_v=read.head_dim,
                scale=read.head_dim**-0.5,
                block_size=block_size,
                dtype=dtype,
                kv_dtype=kv_dtype,
                device=device,
                window=window,
                sinks=True,
            )
            for window in read.windows
        )
        kept = tuple(map(kept_by, attention_specs))
        return ModelSpec(read.vocab_size, read.rope.max_position, attention_specs, kept)

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint, *, dtype: str, device: str) -> GptOssModel:
        config = read_config(checkpoint.config)
        loader = WeightLoader(checkpoint, dtype=getattr(torch, dtype), device=device)
        embedding = loader.tensor("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        layers = [_layer(loader, config, f"model.layers.{index}") for index in range(config.num_layers)]
        final_norm = loader.tensor("model.norm.weight", config.hidden_size)
        output_embedding = (
            embedding
            if config.tie_word_embeddings
            else loader.tensor("lm_head.weight", config.vocab_size, config.hidden_size)
        )
        # Beside tied embeddings, some files repeat the embedding as lm_head.
        loader.refuse_unclaimed(lambda name: name == "lm_head.weight")
        loader.load()
        return cls(config, embedding=embedding, layers=layers, final_norm=final_norm, output_embedding=output_embedding)

    def forward(self, batch: ForwardBatch) -> Tensor:
        hidden = F.embedding(batch.token_ids, self._embedding)
        cos, signed_sin = self._rope.rotations(batch.positions, self._dtype)
        for index, layer in enumerate(self._layers):
            hidden += self._attend(batch, index, layer, self._norm(hidden, layer.attention_norm), cos, signed_sin)
            hidden += self._feed_forward(layer, self._norm(hidden, layer.mlp_norm))
        return self._norm(hidden, self._final_norm)

    def logits(self, hidden: Tensor) -> Tensor:
        return linear(hidden, self._output_embedding)

    def _attend(
        self, batch: ForwardBatch, index: int, layer: GptOssLayer, hidden: Tensor, cos: Tensor, signed_sin: Tensor
    ) -> Tensor:
        num_query_heads, num_kv_heads = self.config.num_query_heads, self.config.num_kv_heads
        heads = linear(hidden, layer.qkv, layer.qkv_bias).view(hidden.shape[0], -1, self.config.head_dim)
        query_key, value = torch.split(heads, [num_query_heads + num_kv_heads, num_kv_heads], dim=1)
        # Queries and keys of a token turn alike, so one call does both.
        query_key = apply_rope(query_key, cos, signed_sin)
        query, key = torch.split(query_key, [num_query_heads, num_kv_heads], dim=1)
        attended = batch.attention(index, query, key, value, sinks=layer.sinks)
        return linear(attended.flatten(1), layer.output, layer.output_bias)

    def _feed_forward(self, layer: GptOssLayer, hidden: Tensor) -> Tensor:
        scores = linear(hidden, layer.router, layer.router_bias)
        chosen = choose_experts(scores, self.config.num_experts_per_token)
        return layer.experts.mix(hidden, Routing(chosen.experts, chosen.weights.softmax(dim=-1)))

    def _norm(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(hidden, weight.shape, weight, self.config.rms_norm_eps)


def _clamped_gate(gate_up: Tensor, *, alpha: float, limit: float) -> Tensor:
    """Return (up + 1) * gate * sigmoid(alpha * gate) of rows in which gates and ups take turns, both clamped.

    Args:
        gate_up: [num_rows, 2 * intermediate_size]

    Returns:
        [num_rows, intermediate_size]
    """
    gate = gate_up[:, ::2].clamp(max=limit)
    up = gate_up[:, 1::2].clamp(min=-limit, max=limit)
    return (up + 1) * (gate * torch.sigmoid(gate * alpha))


def _layer(loader: WeightLoader, config: GptOssConfig, prefix: str) -> GptOssLayer:
    attention, router = f"{prefix}.self_attn", f"{prefix}.mlp.router"
    hidden_size, num_experts = config.hidden_size, config.num_experts
    query_rows, kv_rows = config.num_query_heads * config.head_dim, config.num_kv_heads * config.head_dim

    def qkv(kind: str, *row_shape: int) -> Tensor:
        rows = {"q_proj": query_rows, "k_proj": kv_rows, "v_proj": kv_rows}
        return loader.stacked({f"{attention}.{name}.{kind}": count for name, count in rows.items()}, *row_shape)

    return GptOssLayer(
        qkv=qkv("weight", hidden_size),
        output=loader.tensor(f"{attention}.o_proj.weight", hidden_size, query_rows),
        qkv_bias=qkv("bias") if config.attention_bias else None,
        output_bias=loader.tensor(f"{attention}.o_proj.bias", hidden_size) if config.attention_bias else None,
        sinks=loader.tensor(f"{attention}.sinks", config.num_query_heads),
        attention_norm=loader.tensor(f"{prefix}.input_layernorm.weight", hidden_size),
        mlp_norm=loader.tensor(f"{prefix}.post_attention_layernorm.weight", hidden_size),
        router=loader.tensor(f"{router}.weight", num_experts, hidden_size),
        router_bias=loader.tensor(f"{router}.bias", num_experts),
        experts=_experts(loader, config, f"{prefix}.mlp.experts"),
    )


def _experts(loader: WeightLoader, config: GptOssConfig, prefix: str) -> Experts:
    num_experts, hidden_size, intermediate_size = config.num_experts, config.hidden_size, config.intermediate_size
    # Stored the other way round: a row for each input.
    gate_up = loader.tensor(f"{prefix}.gate_up_proj", num_experts, hidden_size, 2 * intermediate_size)
    down = loader.tensor(f"{prefix}.down_proj", num_experts, intermediate_size, hidden_size)
    return Experts(
        gate_up.transpose(1, 2),
        down.transpose(1, 2),
        partial(_clamped_gate, alpha=config.swiglu_alpha, limit=config.swiglu_limit),
        gate_up_bias=loader.tensor(f"{prefix}.gate_up_proj_bias", num_experts, 2 * intermediate_size),
        down_bias=loader.tensor(f"{prefix}.down_proj_bias", num_experts, hidden_size),
    )
