"""A small decoder whose queries read the beginning of the text and a window of its last tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.core.interfaces import AttentionSpec, Checkpoint, ForwardBatch, Model, ModelSpec
from octavo_sink_window.kv_cache import SinkWindowSpec


class SinkWindowModel(Model):
    """Token and position embeddings, then layers of attention and MLP, each behind an RMS norm.

    Args:
        config: The checkpoint's; `octavo_sink_window.checkpoint.TINY_CONFIG` has the names.
        weights: By name, as the checkpoint has them.
    """

    contract_version = 1

    def __init__(self, config: Mapping[str, Any], weights: dict[str, Tensor]) -> None:
        self._num_layers: int = config["num_layers"]
        self._head_dim: int = config["head_dim"]
        self._weights = weights

    @classmethod
    def spec_from_config(
        cls, config: Mapping[str, Any], *, dtype: str, device: str, block_size: int, kv_dtype: str
    ) -> ModelSpec:
        num_kv_heads, head_dim = config["num_kv_heads"], config["head_dim"]
        keep_first, window = config["keep_first"], config["window"]
        attention = AttentionSpec(
            num_query_heads=config["num_query_heads"],
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            head_dim_v=head_dim,
            scale=head_dim**-0.5,
            block_size=block_size,
            dtype=dtype,
            kv_dtype=kv_dtype,
            device=device,
            window=window,
            keep_first=keep_first,
        )
        kept = SinkWindowSpec(block_size, num_kv_heads, head_dim, kv_dtype, keep_first, window)
        num_layers = config["num_layers"]
        return ModelSpec(
            config["vocab_size"], config["max_position_embeddings"], (attention,) * num_layers, (kept,) * num_layers
        )

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint, *, dtype: str, device: str) -> SinkWindowModel:
        weights = {
            name: checkpoint.tensor(name).to(device, getattr(torch, dtype)) for name in checkpoint.tensor_names()
        }
        return cls(checkpoint.config, weights)

    def forward(self, batch: ForwardBatch) -> Tensor:
        weights = self._weights
        hidden = F.embedding(batch.token_ids, weights["embedding"]) + F.embedding(batch.positions, weights["positions"])
        for layer in range(self._num_layers):
            normed = self._norm(hidden, f"{layer}.attention_norm")
            query, key, value = (
                torch.unflatten(F.linear(normed, weights[f"{layer}.{name}"]), 1, (-1, self._head_dim))
                for name in ("query", "key", "value")
            )
            attended = batch.attention(layer, query, key, value)
            hidden = hidden + F.linear(attended.flatten(1), weights[f"{layer}.output"])
            inner = F.silu(F.linear(self._norm(hidden, f"{layer}.mlp_norm"), weights[f"{layer}.up"]))
            hidden = hidden + F.linear(inner, weights[f"{layer}.down"])
        return self._norm(hidden, "final_norm")

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self._weights["lm_head"])

    def _norm(self, hidden: Tensor, name: str) -> Tensor:
        weight = self._weights[name]
        return F.rms_norm(hidden, weight.shape, weight, 1e-5)
