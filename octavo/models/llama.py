"""Llama, Mistral, Qwen2 and Qwen3: one decoder, which differs in biases, norms and windows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.core.interfaces.attention import AttentionSpec
from octavo.core.interfaces.model import Checkpoint, ForwardBatch, Model, ModelSpec
from octavo.models.config_values import ACTIVATIONS
from octavo.models.kept import kept_by
from octavo.models.linear import linear
from octavo.models.llama_config import LlamaConfig, read_config
from octavo.models.rope import Rope, apply_rope, is_rope_table
from octavo.models.weight_loader import WeightLoader


@dataclass(frozen=True)
class LlamaLayer:
    """One layer's weights. Projections of the same input are stacked, so that each is one matrix product.

    Attributes:
        qkv: Queries', keys' and values' projection. [(num_query_heads + 2 * num_kv_heads) * head_dim, hidden_size]
        output: [hidden_size, num_query_heads * head_dim]
        gate_up: The MLP's two inner projections. [2 * intermediate_size, hidden_size]
        down: [hidden_size, intermediate_size]
        attention_norm: [hidden_size]
        mlp_norm: [hidden_size]
        qkv_bias: And the other biases: one number a row of their projection, or None.
        query_norm: And key_norm: per head, or None. [head_dim]
    """

    qkv: Tensor
    output: Tensor
    gate_up: Tensor
    down: Tensor
    attention_norm: Tensor
    mlp_norm: Tensor
    qkv_bias: Tensor | None
    output_bias: Tensor | None
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    query_norm: Tensor | None
    key_norm: Tensor | None


class LlamaModel(Model):
    """A decoder of the Llama family."""

    contract_version = 1
    can_capture = True

    def __init__(
        self,
        config: LlamaConfig,
        *,
        embedding: Tensor,
        layers: list[LlamaLayer],
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
        function, arguments = ACTIVATIONS[config.activation]
        self._activation: Callable[[Tensor], Tensor] = partial(getattr(F, function), **arguments)

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
            )
            for window in read.windows
        )
        kept = tuple(map(kept_by, attention_specs))
        return ModelSpec(read.vocab_size, read.rope.max_position, attention_specs, kept)

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint, *, dtype: str, device: str) -> LlamaModel:
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
        loader.refuse_unclaimed(lambda name: name == "lm_head.weight" or is_rope_table(name))
        loader.load()
        return cls(config, embedding=embedding, layers=layers, final_norm=final_norm, output_embedding=output_embedding)

    def forward(self, batch: ForwardBatch) -> Tensor:
        hidden = F.embedding(batch.token_ids, self._embedding)
        cos, signed_sin = self._rope.rotations(batch.positions, self._dtype)
        for index, layer in enumerate(self._layers):
            hidden += self._attend(batch, index, layer, self._norm(hidden, layer.attention_norm), cos, signed_sin)
            hidden += self._mlp(layer, self._norm(hidden, layer.mlp_norm))
        return self._norm(hidden, self._final_norm)

    def logits(self, hidden: Tensor) -> Tensor:
        return linear(hidden, self._output_embedding)

    def _attend(
        self, batch: ForwardBatch, index: int, layer: LlamaLayer, hidden: Tensor, cos: Tensor, signed_sin: Tensor
    ) -> Tensor:
        num_query_heads, num_kv_heads = self.config.num_query_heads, self.config.num_kv_heads
        heads = linear(hidden, layer.qkv, layer.qkv_bias).view(hidden.shape[0], -1, self.config.head_dim)
        query_key, value = torch.split(heads, [num_query_heads + num_kv_heads, num_kv_heads], dim=1)
        if layer.query_norm is not None and layer.key_norm is not None:
            query, key = torch.split(query_key, [num_query_heads, num_kv_heads], dim=1)
            query_key = torch.cat((self._norm(query, layer.query_norm), self._norm(key, layer.key_norm)), dim=1)
        # Queries and keys of a token turn alike, so one call does both.
        query_key = apply_rope(query_key, cos, signed_sin)
        query, key = torch.split(query_key, [num_query_heads, num_kv_heads], dim=1)
        attended = batch.attention(index, query, key, value)
        return linear(attended.flatten(1), layer.output, layer.output_bias)

    def _mlp(self, layer: LlamaLayer, hidden: Tensor) -> Tensor:
        gate, up = linear(hidden, layer.gate_up, layer.gate_up_bias).chunk(2, dim=-1)
        return linear(self._activation(gate) * up, layer.down, layer.down_bias)

    def _norm(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(hidden, weight.shape, weight, self.config.rms_norm_eps)


def _layer(loader: WeightLoader, config: LlamaConfig, prefix: str) -> LlamaLayer:
    hidden_size, head_dim, intermediate_size = config.hidden_size, config.head_dim, config.intermediate_size
    query_rows, kv_rows = config.num_query_heads * head_dim, config.num_kv_heads * head_dim
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"

    def qkv(kind: str, *row_shape: int) -> Tensor:
        rows = {"q_proj": query_rows, "k_proj": kv_rows, "v_proj": kv_rows}
        return loader.stacked({f"{attention}.{name}.{kind}": count for name, count in rows.items()}, *row_shape)

    def gate_up(kind: str, *row_shape: int) -> Tensor:
        rows = dict.fromkeys((f"{mlp}.gate_proj.{kind}", f"{mlp}.up_proj.{kind}"), intermediate_size)
        return loader.stacked(rows, *row_shape)

    return LlamaLayer(
        qkv=qkv("weight", hidden_size),
        output=loader.tensor(f"{attention}.o_proj.weight", hidden_size, query_rows),
        gate_up=gate_up("weight", hidden_size),
        down=loader.tensor(f"{mlp}.down_proj.weight", hidden_size, intermediate_size),
        attention_norm=loader.tensor(f"{prefix}.input_layernorm.weight", hidden_size),
        mlp_norm=loader.tensor(f"{prefix}.post_attention_layernorm.weight", hidden_size),
        qkv_bias=qkv("bias") if config.qkv_bias else None,
        output_bias=loader.tensor(f"{attention}.o_proj.bias", hidden_size) if config.output_bias else None,
        gate_up_bias=gate_up("bias") if config.mlp_bias else None,
        down_bias=loader.tensor(f"{mlp}.down_proj.bias", hidden_size) if config.mlp_bias else None,
        query_norm=loader.tensor(f"{attention}.q_norm.weight", head_dim) if config.qk_norm else None,
        key_norm=loader.tensor(f"{attention}.k_norm.weight", head_dim) if config.qk_norm else None,
    )
