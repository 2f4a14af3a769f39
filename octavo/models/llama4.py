"""Llama 4: chunked attention with rope, full attention without, and experts that see inputs already weighted."""

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
from octavo.models.llama4_config import Llama4Config, read_config
from octavo.models.mixture_of_experts import Experts, Routing, choose_experts, gated
from octavo.models.rope import Rope, apply_rope
from octavo.models.weight_loader import WeightLoader

# What a checkpoint with images holds beside the decoder. Token ids alone never reach it.
_VISION_PREFIXES = ("vision_model.", "multi_modal_projector.")


@dataclass(frozen=True)
class GatedMLP:
    """An MLP that every token visits.

    Attributes:
        gate_up: The two inner projections, stacked. [2 * intermediate_size, hidden_size]
        down: [hidden_size, intermediate_size]
    """

    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True)
class MixtureOfExperts:
    """The experts of a layer, of which each token visits some.

    Attributes:
        router: [num_experts, hidden_size]
    """

    router: Tensor
    experts: Experts


@dataclass(frozen=True)
class Llama4Layer:
    """One layer's weights.

    Attributes:
        qkv: Queries', keys' and values' projection, stacked; where there is rope, its pairs lie as `apply_rope` has
            them. [(num_query_heads + 2 * num_kv_heads) * head_dim, hidden_size]
        output: [hidden_size, num_query_heads * head_dim]
        qkv_bias: And output_bias: one number a row of their projection, or None.
        attention_norm: [hidden_size]
        mlp_norm: [hidden_size]
        mlp: The whole MLP, or the expert that all tokens share.
        mixture: The other experts, or None.
    """

    qkv: Tensor
    output: Tensor
    qkv_bias: Tensor | None
    output_bias: Tensor | None
    attention_norm: Tensor
    mlp_norm: Tensor
    mlp: GatedMLP
    mixture: MixtureOfExperts | None


@dataclass(frozen=True)
class _Positions:
    """What follows from a step's positions, for all layers.

    Attributes:
        cos: And signed_sin: as `apply_rope` takes them, float32. [num_tokens, 1, head_dim]
        temperature: Factor on the queries of layers without rope, float32, or None. [num_tokens, 1, 1]
    """

    cos: Tensor
    signed_sin: Tensor
    temperature: Tensor | None


class Llama4Model(Model):
    """The text decoder of Llama 4."""

    contract_version = 1

    def __init__(
        self,
        config: Llama4Config,
        *,
        embedding: Tensor,
        layers: list[Llama4Layer],
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
        self._rope = Rope.from_spec(config.rope, device=str(embedding.device))
        self._activation = _activation(config)

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
                chunk=chunk,
            )
            for chunk in read.chunks
        )
        kept = tuple(map(kept_by, attention_specs))
        return ModelSpec(read.vocab_size, read.rope.max_position, attention_specs, kept)

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint, *, dtype: str, device: str) -> Llama4Model:
        config = read_config(checkpoint.config)
        loader = WeightLoader(checkpoint, dtype=getattr(torch, dtype), device=device)
        prefix = config.tensor_prefix
        embedding = loader.tensor(f"{prefix}model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        layers = [_layer(loader, config, index) for index in range(config.num_layers)]
        final_norm = loader.tensor(f"{prefix}model.norm.weight", config.hidden_size)
        output_name = f"{prefix}lm_head.weight"
        output_embedding = (
            embedding
            if config.tie_word_embeddings
            else loader.tensor(output_name, config.vocab_size, config.hidden_size)
        )
        # Beside tied embeddings, some files repeat the embedding as lm_head.
        loader.refuse_unclaimed(
            lambda name: name == output_name or (bool(prefix) and name.startswith(_VISION_PREFIXES))
        )
        loader.load()
        for layer, has_rope in zip(layers, config.has_rope, strict=True):
            if has_rope:
                _part_pairs(config, layer.qkv)
                if layer.qkv_bias is not None:
                    _part_pairs(config, layer.qkv_bias)
        return cls(config, embedding=embedding, layers=layers, final_norm=final_norm, output_embedding=output_embedding)

    def forward(self, batch: ForwardBatch) -> Tensor:
        hidden = F.embedding(batch.token_ids, self._embedding)
        positions = self._read_positions(batch.positions)
        for index, layer in enumerate(self._layers):
            hidden += self._attend(batch, index, layer, self._norm(hidden, layer.attention_norm), positions)
            hidden += self._feed_forward(layer, self._norm(hidden, layer.mlp_norm))
        return self._norm(hidden, self._final_norm)

    def logits(self, hidden: Tensor) -> Tensor:
        return linear(hidden, self._output_embedding)

    def _read_positions(self, positions: Tensor) -> _Positions:
        cos, signed_sin = self._rope.rotations(positions, torch.float32)
        tuning = self.config.temperature_tuning
        if tuning is None:
            return _Positions(cos, signed_sin, None)
        num_floors = torch.floor((positions.float() + 1.0) / tuning.floor)
        return _Positions(cos, signed_sin, (torch.log1p(num_floors) * tuning.scale + 1.0)[:, None, None])

    def _attend(
        self, batch: ForwardBatch, index: int, layer: Llama4Layer, hidden: Tensor, positions: _Positions
    ) -> Tensor:
        num_query_heads, num_kv_heads = self.config.num_query_heads, self.config.num_kv_heads
        heads = linear(hidden, layer.qkv, layer.qkv_bias).view(hidden.shape[0], -1, self.config.head_dim)
        query_key, value = torch.split(heads, [num_query_heads + num_kv_heads, num_kv_heads], dim=1)
        if self.config.has_rope[index]:
            query_key = self._rotate(query_key, positions)
        query, key = torch.split(query_key, [num_query_heads, num_kv_heads], dim=1)
        if positions.temperature is not None and not self.config.has_rope[index]:
            query = (query * positions.temperature).to(query.dtype)
        return linear(batch.attention(index, query, key, value).flatten(1), layer.output, layer.output_bias)

    def _rotate(self, query_key: Tensor, positions: _Positions) -> Tensor:
        """Apply rope to queries and keys alike, and the norm that follows. [num_tokens, num_heads, head_dim]"""
        # In float32 whatever the dtype, as transformers does it.
        rotated = apply_rope(query_key.float(), positions.cos, positions.signed_sin).to(query_key.dtype)
        if not self.config.qk_norm:
            return rotated
        return F.rms_norm(rotated, (self.config.head_dim,), None, self.config.rms_norm_eps)

    def _feed_forward(self, layer: Llama4Layer, hidden: Tensor) -> Tensor:
        output = linear(gated(linear(hidden, layer.mlp.gate_up), function=self._activation), layer.mlp.down)
        if layer.mixture is None:
            return output
        routing = choose_experts(linear(hidden, layer.mixture.router), self.config.num_experts_per_token)
        weights = routing.weights.float().sigmoid()
        return output + layer.mixture.experts.mix_weighted_inputs(hidden, Routing(routing.experts, weights))

    def _norm(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(hidden, weight.shape, weight, self.config.rms_norm_eps)


def _activation(config: Llama4Config) -> Callable[[Tensor], Tensor]:
    function, arguments = ACTIVATIONS[config.activation]
    return partial(getattr(F, function), **arguments)


def _part_pairs(config: Llama4Config, projection: Tensor) -> None:
    """Move the rows of queries and keys, in place, so that rope's pairs are i and i + head_dim / 2.

    In the checkpoint they are 2 * i and 2 * i + 1. A score is a sum over a head's numbers, and so is the norm of a
    query or key: neither changes when both have theirs in another order.
    """
    num_rows = (config.num_query_heads + config.num_kv_heads) * config.head_dim
    rows = projection[:num_rows]
    rows.copy_(torch.unflatten(rows, 0, (-1, config.head_dim // 2, 2)).transpose(1, 2).flatten(0, 2))


def _layer(loader: WeightLoader, config: Llama4Config, index: int) -> Llama4Layer:
    prefix = f"{config.tensor_prefix}model.layers.{index}"
    attention, feed_forward = f"{prefix}.self_attn", f"{prefix}.feed_forward"
    hidden_size = config.hidden_size
    query_rows, kv_rows = config.num_query_heads * config.head_dim, config.num_kv_heads * config.head_dim

    def qkv(kind: str, *row_shape: int) -> Tensor:
        rows = {"q_proj": query_rows, "k_proj": kv_rows, "v_proj": kv_rows}
        return loader.stacked({f"{attention}.{name}.{kind}": count for name, count in rows.items()}, *row_shape)

    return Llama4Layer(
        qkv=qkv("weight", hidden_size),
        output=loader.tensor(f"{attention}.o_proj.weight", hidden_size, query_rows),
        qkv_bias=qkv("bias") if config.attention_bias else None,
        output_bias=loader.tensor(f"{attention}.o_proj.bias", hidden_size) if config.attention_bias else None,
        attention_norm=loader.tensor(f"{prefix}.input_layernorm.weight", hidden_size),
        mlp_norm=loader.tensor(f"{prefix}.post_attention_layernorm.weight", hidden_size),
        mlp=(
            _mlp(loader, f"{feed_forward}.shared_expert", hidden_size, config.intermediate_size)
            if config.has_experts[index]
            else _mlp(loader, feed_forward, hidden_size, config.dense_intermediate_size)
        ),
        mixture=_mixture(loader, config, feed_forward) if config.has_experts[index] else None,
    )


def _mlp(loader: WeightLoader, prefix: str, hidden_size: int, intermediate_size: int) -> GatedMLP:
    rows = dict.fromkeys((f"{prefix}.gate_proj.weight", f"{prefix}.up_proj.weight"), intermediate_size)
    return GatedMLP(
        gate_up=loader.stacked(rows, hidden_size),
        down=loader.tensor(f"{prefix}.down_proj.weight", hidden_size, intermediate_size),
    )


def _mixture(loader: WeightLoader, config: Llama4Config, prefix: str) -> MixtureOfExperts:
    num_experts, hidden_size, intermediate_size = config.num_experts, config.hidden_size, config.intermediate_size
    # Stored the other way round: a row for each input.
    gate_up = loader.tensor(f"{prefix}.experts.gate_up_proj", num_experts, hidden_size, 2 * intermediate_size)
    down = loader.tensor(f"{prefix}.experts.down_proj", num_experts, intermediate_size, hidden_size)
    return MixtureOfExperts(
        router=loader.tensor(f"{prefix}.router.weight", num_experts, hidden_size),
        experts=Experts(gate_up.transpose(1, 2), down.transpose(1, 2), partial(gated, function=_activation(config))),
    )
