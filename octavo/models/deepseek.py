"""DeepSeek V2 and V3: multi-head latent attention, and mixtures of experts with some experts that all tokens share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.core.interfaces.attention import AttentionSpec
from octavo.core.interfaces.kv_cache_spec import MLASpec
from octavo.core.interfaces.model import Checkpoint, ForwardBatch, Model, ModelSpec
from octavo.models.deepseek_config import DeepseekConfig, read_config
from octavo.models.deepseek_layers import AttentionWeights, DeepseekLayer, load_layer, pair_halves
from octavo.models.linear import linear
from octavo.models.rope import Rope, apply_rope, is_rope_table
from octavo.models.weight_loader import WeightLoader

# Latents are normalised with this, whatever the config's rms_norm_eps is.
LATENT_NORM_EPS = 1e-6


class DeepseekModel(Model):
    """A decoder of the DeepSeek V2 and V3 families. The KV cache holds one vector a token and layer."""

    contract_version = 1

    def __init__(
        self,
        config: DeepseekConfig,
        *,
        embedding: Tensor,
        layers: list[DeepseekLayer],
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

    @classmethod
    def spec_from_config(
        cls, config: Mapping[str, Any], *, dtype: str, device: str, block_size: int, kv_dtype: str
    ) -> ModelSpec:
        read = read_config(config)
        # For its errors: what rope cannot be computed with is refused before the weights are read.
        Rope.from_spec(read.rope, device="cpu")
        attention = AttentionSpec(
            num_query_heads=read.num_heads,
            num_kv_heads=1,
            head_dim=read.latent_dim + read.rope_dim,
            head_dim_v=read.latent_dim,
            scale=read.scale,
            block_size=block_size,
            dtype=dtype,
            kv_dtype=kv_dtype,
            device=device,
            value_is_key_prefix=True,
        )
        kept = MLASpec(block_size, read.latent_dim, read.rope_dim, kv_dtype)
        return ModelSpec(
            read.vocab_size, read.rope.max_position, (attention,) * read.num_layers, (kept,) * read.num_layers
        )

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint, *, dtype: str, device: str) -> DeepseekModel:
        config = read_config(checkpoint.config)
        loader = WeightLoader(checkpoint, dtype=getattr(torch, dtype), device=device)
        embedding = loader.tensor("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        layers = [load_layer(loader, config, index) for index in range(config.num_layers)]
        final_norm = loader.tensor("model.norm.weight", config.hidden_size)
        output_embedding = (
            embedding
            if config.tie_word_embeddings
            else loader.tensor("lm_head.weight", config.vocab_size, config.hidden_size)
        )
        _refuse_unclaimed(loader, config)
        loader.load()
        if config.is_interleaved:
            for layer in layers:
                pair_halves(layer.attention, config)
        return cls(config, embedding=embedding, layers=layers, final_norm=final_norm, output_embedding=output_embedding)

    def forward(self, batch: ForwardBatch) -> Tensor:
        hidden = F.embedding(batch.token_ids, self._embedding)
        cos, signed_sin = self._rope.rotations(batch.positions, hidden.dtype)
        for index, layer in enumerate(self._layers):
            attention_input = self._norm(hidden, layer.attention_norm)
            hidden += self._attend(batch, index, layer.attention, attention_input, cos, signed_sin)
            hidden += layer.mlp(self._norm(hidden, layer.mlp_norm))
        return self._norm(hidden, self._final_norm)

    def logits(self, hidden: Tensor) -> Tensor:
        return linear(hidden, self._output_embedding)

    def _attend(
        self,
        batch: ForwardBatch,
        index: int,
        weights: AttentionWeights,
        hidden: Tensor,
        cos: Tensor,
        signed_sin: Tensor,
    ) -> Tensor:
        config = self.config
        query_nope, query_rope = torch.split(self._query(weights, hidden), [config.nope_dim, config.rope_dim], dim=-1)
        kept = linear(hidden, weights.latent, weights.latent_bias)
        latent, key_rope = torch.split(kept, [config.latent_dim, config.rope_dim], dim=-1)
        # The queries and the key of a token turn alike, so one call does both.
        turned = apply_rope(torch.cat((query_rope, key_rope[:, None]), dim=1), cos, signed_sin)
        query = torch.cat((query_nope, turned[:, :-1]), dim=-1)
        latents = torch.cat((_latent_norm(latent, weights.latent_norm), turned[:, -1]), dim=-1)
        attended = batch.latent_attention(index, query, latents, weights.heads)
        return linear(attended.flatten(1), weights.output, weights.output_bias)

    def _query(self, weights: AttentionWeights, hidden: Tensor) -> Tensor:
        """Return each head's query, not turned yet. [num_tokens, num_heads, query_dim]"""
        if weights.query_latent is not None and weights.query_norm is not None:
            compressed = linear(hidden, weights.query_latent, weights.query_latent_bias)
            hidden = _latent_norm(compressed, weights.query_norm)
        return torch.unflatten(linear(hidden, weights.query), 1, (self.config.num_heads, -1))

    def _norm(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(hidden, weight.shape, weight, self.config.rms_norm_eps)


def _latent_norm(latent: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(latent, weight.shape, weight, LATENT_NORM_EPS)


def _refuse_unclaimed(loader: WeightLoader, config: DeepseekConfig) -> None:
    """Raise when the checkpoint holds weights without a place: they would change the result, and were left out."""
    extra_layers = tuple(f"model.layers.{config.num_layers + number}." for number in range(config.num_extra_layers))

    def may_ignore(name: str) -> bool:
        # Beside tied embeddings, some files repeat the embedding as lm_head.
        return name == "lm_head.weight" or name.startswith(extra_layers) or is_rope_table(name)

    loader.refuse_unclaimed(may_ignore)
