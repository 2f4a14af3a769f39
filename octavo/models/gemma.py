"""Gemma 2 and Gemma 3: layers that see a window between layers that see everything."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.core.interfaces.attention import AttentionSpec
from octavo.core.interfaces.model import Checkpoint, ForwardBatch, Model, ModelSpec
from octavo.errors import CheckpointError
from octavo.models.config_values import ACTIVATIONS
from octavo.models.gemma_config import GemmaConfig, read_config
from octavo.models.kept import kept_by
from octavo.models.linear import linear
from octavo.models.rope import Rope, apply_rope
from octavo.models.weight_loader import WeightLoader

# Where the language model's weights are in a checkpoint that also has a vision tower: as on the hub, and as later
# versions of transformers name them.
_PARTS = (("language_model.model", "language_model.lm_head"), ("model.language_model", "lm_head"))
_VISION = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")


@dataclass(frozen=True)
class GemmaLayer:
    """One layer's weights. Projections of the same input are stacked, so that each is one matrix product.

    Attributes:
        qkv: Queries', keys' and values' projection. [(num_query_heads + 2 * num_kv_heads) * head_dim, hidden_size]
        output: [hidden_size, num_query_heads * head_dim]
        gate_up: The MLP's two inner projections. [2 * intermediate_size, hidden_size]
        down: [hidden_size, intermediate_size]
        attention_norm: Before attention. [hidden_size]
        attended_norm: After attention, before the sum. [hidden_size]
        mlp_norm: Before the MLP. [hidden_size]
        mlp_output_norm: After the MLP, before the sum. [hidden_size]
        query_norm: And key_norm: per head, or None. [head_dim]
    """

    qkv: Tensor
    output: Tensor
    gate_up: Tensor
    down: Tensor
    attention_norm: Tensor
    attended_norm: Tensor
    mlp_norm: Tensor
    mlp_output_norm: Tensor
    query_norm: Tensor | None
    key_norm: Tensor | None


class GemmaModel(Model):
    """A decoder of the Gemma 2 or Gemma 3 family."""

    contract_version = 1
    can_capture = True

    def __init__(
        self,
        config: GemmaConfig,
        *,
        embedding: Tensor,
        layers: list[GemmaLayer],
        final_norm: Tensor,
        output_embedding: Tensor,
    ) -> None:
        """Put weights together; `from_checkpoint` reads them.

        Args:
            embedding: [vocab_size, hidden_size]
            layers: Norms as the checkpoint has them: a factor's distance from 1.
            final_norm: Likewise. [hidden_size]
            output_embedding: The same tensor as `embedding` where the two are tied. [vocab_size, hidden_size]
        """
        self.config = config
        self._embedding = embedding
        # Rounded as the weights are, since the model was trained so: in bfloat16 sqrt(640) is 25.25.
        self._embedding_scale = torch.tensor(config.hidden_size**0.5, dtype=embedding.dtype, device=embedding.device)
        self._layers = [_with_factors(layer) for layer in layers]
        self._final_norm = _factors(final_norm)
        self._output_embedding = output_embedding
        self._dtype = embedding.dtype
        self._ropes = [Rope.from_spec(rope, device=str(embedding.device)) for rope in config.ropes]
        function, arguments = ACTIVATIONS[config.activation]
        self._activation: Callable[[Tensor], Tensor] = partial(getattr(F, function), **arguments)

    @classmethod
    def spec_from_config(
        cls, config: Mapping[str, Any], *, dtype: str, device: str, block_size: int, kv_dtype: str
    ) -> ModelSpec:
        read = read_config(config)
        # For its errors: what rope cannot be computed with is refused before the weights are read.
        for rope in read.ropes:
            Rope.from_spec(rope, device="cpu")
        attention_specs = tuple(
            AttentionSpec(
                num_query_heads=read.num_query_heads,
                num_kv_heads=read.num_kv_heads,
                head_dim=read.head_dim,
                head_dim_v=read.head_dim,
                scale=read.scale,
                block_size=block_size,
                dtype=dtype,
                kv_dtype=kv_dtype,
                device=device,
                window=window,
                soft_cap=read.attention_soft_cap,
            )
            for window in read.windows
        )
        kept = tuple(map(kept_by, attention_specs))
        return ModelSpec(read.vocab_size, read.max_position, attention_specs, kept)

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint, *, dtype: str, device: str) -> GemmaModel:
        config = read_config(checkpoint.config)
        loader = WeightLoader(checkpoint, dtype=getattr(torch, dtype), device=device)
        body, head = _part_names(checkpoint) if config.is_part else ("model", "lm_head")
        embedding = loader.tensor(f"{body}.embed_tokens.weight", config.vocab_size, config.hidden_size)
        layers = [_layer(loader, config, f"{body}.layers.{index}") for index in range(config.num_layers)]
        final_norm = loader.tensor(f"{body}.norm.weight", config.hidden_size)
        output_embedding = (
            embedding
            if config.tie_word_embeddings
            else loader.tensor(f"{head}.weight", config.vocab_size, config.hidden_size)
        )
        # Beside tied embeddings, some files repeat the embedding as the head. Nobody can send a picture here.
        loader.refuse_unclaimed(
            lambda name: name == f"{head}.weight" or (config.is_part and name.startswith(_VISION)),
        )
        loader.load()
        return cls(config, embedding=embedding, layers=layers, final_norm=final_norm, output_embedding=output_embedding)

    def forward(self, batch: ForwardBatch) -> Tensor:
        hidden = F.embedding(batch.token_ids, self._embedding) * self._embedding_scale
        rotations = [rope.rotations(batch.positions, self._dtype) for rope in self._ropes]
        for index, layer in enumerate(self._layers):
            cos, signed_sin = rotations[self.config.rope_of_layer[index]]
            attended = self._attend(batch, index, layer, self._norm(hidden, layer.attention_norm), cos, signed_sin)
            hidden += self._norm(attended, layer.attended_norm)
            hidden += self._norm(self._mlp(layer, self._norm(hidden, layer.mlp_norm)), layer.mlp_output_norm)
        return self._norm(hidden, self._final_norm)

    def logits(self, hidden: Tensor) -> Tensor:
        logits = linear(hidden, self._output_embedding)
        cap = self.config.final_soft_cap
        return logits if cap is None else (logits / cap).tanh() * cap

    def _attend(
        self, batch: ForwardBatch, index: int, layer: GemmaLayer, hidden: Tensor, cos: Tensor, signed_sin: Tensor
    ) -> Tensor:
        num_query_heads, num_kv_heads = self.config.num_query_heads, self.config.num_kv_heads
        heads = linear(hidden, layer.qkv).view(hidden.shape[0], -1, self.config.head_dim)
        query_key, value = torch.split(heads, [num_query_heads + num_kv_heads, num_kv_heads], dim=1)
        if layer.query_norm is not None and layer.key_norm is not None:
            query, key = torch.split(query_key, [num_query_heads, num_kv_heads], dim=1)
            query_key = torch.cat((self._norm(query, layer.query_norm), self._norm(key, layer.key_norm)), dim=1)
        # Queries and keys of a token turn alike, so one call does both.
        query_key = apply_rope(query_key, cos, signed_sin)
        query, key = torch.split(query_key, [num_query_heads, num_kv_heads], dim=1)
        return linear(batch.attention(index, query, key, value).flatten(1), layer.output)

    def _mlp(self, layer: GemmaLayer, hidden: Tensor) -> Tensor:
        gate, up = linear(hidden, layer.gate_up).chunk(2, dim=-1)
        return linear(self._activation(gate) * up, layer.down)

    def _norm(self, hidden: Tensor, factors: Tensor) -> Tensor:
        # All of it in float32, whatever the dtype, and rounded once.
        return F.rms_norm(hidden.float(), factors.shape, factors, self.config.rms_norm_eps).to(hidden.dtype)


def _factors(norm: Tensor) -> Tensor:
    """Return what a norm multiplies with, float32."""
    return 1.0 + norm.float()


def _with_factors(layer: GemmaLayer) -> GemmaLayer:
    norms = {field.name: getattr(layer, field.name) for field in fields(layer) if field.name.endswith("_norm")}
    factors: dict[str, Any] = {name: None if norm is None else _factors(norm) for name, norm in norms.items()}
    return replace(layer, **factors)


def _part_names(checkpoint: Checkpoint) -> tuple[str, str]:
    """Return how the names of the language model's weights begin, and its head's, in a checkpoint with more in it."""
    names = frozenset(checkpoint.tensor_names())
    for body, head in _PARTS:
        if f"{body}.embed_tokens.weight" in names:
            return body, head
    raise CheckpointError(
        "The checkpoint of a Gemma 3 with vision has no language model where it is looked for: neither "
        f"{' nor '.join(repr(f'{body}.embed_tokens.weight') for body, _ in _PARTS)} is there. Fetch its files again, "
        "or save it with a current transformers."
    )


def _layer(loader: WeightLoader, config: GemmaConfig, prefix: str) -> GemmaLayer:
    hidden_size, head_dim, intermediate_size = config.hidden_size, config.head_dim, config.intermediate_size
    query_rows, kv_rows = config.num_query_heads * head_dim, config.num_kv_heads * head_dim
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    rows = {"q_proj": query_rows, "k_proj": kv_rows, "v_proj": kv_rows}
    gate_up = (f"{mlp}.gate_proj.weight", f"{mlp}.up_proj.weight")
    return GemmaLayer(
        qkv=loader.stacked({f"{attention}.{name}.weight": count for name, count in rows.items()}, hidden_size),
        output=loader.tensor(f"{attention}.o_proj.weight", hidden_size, query_rows),
        gate_up=loader.stacked(dict.fromkeys(gate_up, intermediate_size), hidden_size),
        down=loader.tensor(f"{mlp}.down_proj.weight", hidden_size, intermediate_size),
        attention_norm=loader.tensor(f"{prefix}.input_layernorm.weight", hidden_size),
        attended_norm=loader.tensor(f"{prefix}.post_attention_layernorm.weight", hidden_size),
        mlp_norm=loader.tensor(f"{prefix}.pre_feedforward_layernorm.weight", hidden_size),
        mlp_output_norm=loader.tensor(f"{prefix}.post_feedforward_layernorm.weight", hidden_size),
        query_norm=loader.tensor(f"{attention}.q_norm.weight", head_dim) if config.qk_norm else None,
        key_norm=loader.tensor(f"{attention}.k_norm.weight", head_dim) if config.qk_norm else None,
    )
