"""Runs a model over one whole sequence, and transformers over the same."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from octavo.core.interfaces.model import Checkpoint, ModelSpec
from octavo.models.checkpoint import open_checkpoint
from octavo.models.llama import LlamaModel


@dataclass
class DenseBatch:
    """One whole sequence, attended to without a cache: a ForwardBatch in the plainest form."""

    token_ids: Tensor
    windows: tuple[int | None, ...]

    @property
    def positions(self) -> Tensor:
        return torch.arange(len(self.token_ids))

    def attention(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor | None, *, sinks: Tensor | None = None
    ) -> Tensor:
        assert value is not None
        group = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", query, key) * query.shape[-1] ** -0.5
        distance = self.positions[:, None] - self.positions
        visible = distance >= 0
        if (window := self.windows[layer]) is not None:
            visible &= distance < window
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(~visible, -torch.inf).softmax(-1), value)


def logits_of(model: LlamaModel, token_ids: list[int]) -> Tensor:
    """Return the logits after every token. [num_tokens, vocab_size]"""
    windows = model.config.windows
    with torch.inference_mode():
        return model.logits(model.forward(DenseBatch(torch.tensor(token_ids), windows)))


def reference_logits(folder: Path, token_ids: list[int]) -> Tensor:
    """Return what transformers computes for a model's folder. [num_tokens, vocab_size]"""
    import transformers

    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        logits: Tensor = reference(torch.tensor([token_ids])).logits[0]
    return logits


def spec_of(folder: Path, *, kv_dtype: str = "float32") -> ModelSpec:
    """Return what a model's folder says that it needs, in float32 on the CPU with blocks of 16."""
    config = open_checkpoint(str(folder)).config
    return LlamaModel.spec_from_config(config, dtype="float32", device="cpu", block_size=16, kv_dtype=kv_dtype)


def load(checkpoint: Checkpoint | Path) -> LlamaModel:
    if isinstance(checkpoint, Path):
        checkpoint = open_checkpoint(str(checkpoint))
    return LlamaModel.from_checkpoint(checkpoint, dtype="float32", device="cpu")
