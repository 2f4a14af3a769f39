"""Runs a model over one whole sequence, its layers reading what its attention specs say."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octavo.core.interfaces.attention import AttentionSpec
from octavo.core.interfaces.model import Checkpoint, Model, ModelSpec
from octavo.models.checkpoint import open_checkpoint


@dataclass
class SpecBatch:
    """One whole sequence, attended to without a cache, by the definition in `AttentionSpec`."""

    token_ids: Tensor
    specs: tuple[AttentionSpec, ...]

    @property
    def positions(self) -> Tensor:
        return torch.arange(len(self.token_ids))

    def attention(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor | None, *, sinks: Tensor | None = None
    ) -> Tensor:
        spec = self.specs[layer]
        assert value is not None
        assert (sinks is not None) == spec.sinks
        group = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", query, key) * spec.scale
        if spec.soft_cap is not None:
            scores = (scores / spec.soft_cap).tanh() * spec.soft_cap
        newer, older = self.positions[:, None], self.positions
        visible = older <= newer
        if spec.window is not None:
            visible &= newer - older < spec.window
        if spec.chunk is not None:
            visible &= newer // spec.chunk == older // spec.chunk
        scores = scores.masked_fill(~visible, -torch.inf)
        if sinks is not None:
            scores = torch.cat((scores, sinks[:, None, None].expand(-1, len(older), 1)), dim=-1)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(older)], value)


class ChangedCheckpoint:
    """A checkpoint with some of its config and tensors replaced, or added; of the config, None removes a value."""

    def __init__(
        self, source: Checkpoint, config: dict[str, Any] | None = None, tensors: dict[str, Tensor] | None = None
    ) -> None:
        self._source = source
        self._tensors = tensors or {}
        self.config = dict(source.config) | (config or {})
        self.dtype = source.dtype
        self.eos_token_ids = source.eos_token_ids

    def tensor_names(self) -> list[str]:
        return [*self._source.tensor_names(), *self._tensors]

    def tensor(self, name: str) -> Tensor:
        return self._tensors[name] if name in self._tensors else self._source.tensor(name)

    def tokenizer(self) -> Any:
        return self._source.tokenizer()


def logits_of(model_class: type[Model], checkpoint: Checkpoint | Path, token_ids: list[int]) -> Tensor:
    """Return a model's logits after every token, in float32. [num_tokens, vocab_size]"""
    if isinstance(checkpoint, Path):
        checkpoint = open_checkpoint(str(checkpoint))
    specs = spec_of(model_class, checkpoint.config).attention_specs
    model = model_class.from_checkpoint(checkpoint, dtype="float32", device="cpu")
    with torch.inference_mode():
        return model.logits(model.forward(SpecBatch(torch.tensor(token_ids), specs)))


def spec_of(model_class: type[Model], config: Any, *, kv_dtype: str = "float32") -> ModelSpec:
    """Return what a config, or the one in a folder, says that its model needs; on the CPU with blocks of 16."""
    if isinstance(config, Path):
        config = open_checkpoint(str(config)).config
    return model_class.spec_from_config(config, dtype="float32", device="cpu", block_size=16, kv_dtype=kv_dtype)
