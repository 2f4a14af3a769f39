"""Runs one step of the model: plan in, sampled tokens out. Owns the KV-cache memory."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from octavo.core.batch import LayerCache, StepBatch
from octavo.core.interfaces import AttentionBackend, KVCacheSpec, Model
from octavo.core.kv_cache_config import KVCacheConfig, KVCacheGroup, num_slots, page_bytes
from octavo.core.sampler import Sampler
from octavo.core.step_plan import LatestTokens, StepPlan, StepResult


class ModelRunner:
    """Turns plans into tokens.

    Args:
        model: The decoder.
        backends: The attention backend of each of the model's attention layers; layers with equal specs share one.
        kv_cache_config: The layout of the KV cache, whose memory is allocated here.
        device: Where the model is, as torch names it.
    """

    def __init__(
        self, model: Model, backends: Sequence[AttentionBackend], kv_cache_config: KVCacheConfig, device: str
    ) -> None:
        self.model = model
        self.device = device
        self.sampler = Sampler()
        self._groups = kv_cache_config.groups
        self.kv_cache_buffers = allocate_kv_cache(kv_cache_config, device)
        self._layers = _bind_layers(backends, kv_cache_config.groups, self.kv_cache_buffers)
        self._latest = LatestTokens()

    def run(self, plan: StepPlan) -> StepResult:
        """Compute a step. An empty plan computes nothing."""
        for row in plan.new_rows:
            self.sampler.set_row(row)
        if not plan.num_tokens:
            return StepResult()
        self._latest.fill_in(plan)
        with torch.inference_mode():
            logits = self.logits(plan)
            result = StepResult() if logits is None else self._sample(logits, plan)
        self._latest.keep(plan, result)
        return result

    def _sample(self, logits: Tensor, plan: StepPlan) -> StepResult:
        positions = plan.first_positions + plan.num_new_tokens
        return self.sampler.sample(logits, plan.rows[plan.samples].tolist(), positions[plan.samples].tolist())

    def fill_kv_cache(self, plan: StepPlan) -> None:
        """Write the keys and values of a plan's tokens. Nothing is sampled, and nothing about other rows changes."""
        with torch.inference_mode():
            self.logits(plan)

    def block_differences(
        self, group_id: int, block_ids: Sequence[int], other_block_ids: Sequence[int]
    ) -> dict[int, float]:
        """See `VerifiableRunner.block_differences`."""
        group = self._groups[group_id]
        differences = {}
        for buffer, layer in zip(self.kv_cache_buffers, group.layers, strict=False):
            pages = _pages(buffer, block_ids, group.spec)
            differences[layer] = _largest_difference(pages, _pages(buffer, other_block_ids, group.spec))
        return differences

    def logits(self, plan: StepPlan) -> Tensor | None:
        """Run the model; return the logits of the entries that sample, None when none does. [num_samples, vocab]"""
        batch = StepBatch(plan, self._layers, self.device)
        hidden = self.model.forward(batch)
        if not isinstance(hidden, Tensor) or hidden.shape[:1] != (plan.num_tokens,):
            raise TypeError(f"{self._model_name}.forward returned {_shape_of(hidden)} for {plan.num_tokens} tokens")
        num_samples = int(plan.samples.sum())
        if not num_samples:
            return None
        logits = self.model.logits(hidden[batch.sample_rows])
        if not isinstance(logits, Tensor) or logits.shape[:1] != (num_samples,):
            raise TypeError(f"{self._model_name}.logits returned {_shape_of(logits)} for {num_samples} rows")
        return logits

    @property
    def _model_name(self) -> str:
        return f"{type(self.model).__module__}.{type(self.model).__qualname__}"


def allocate_kv_cache(config: KVCacheConfig, device: str) -> list[Tensor]:
    """Return a buffer for each layer slot, a row of bytes a block, uint8. [num_blocks, page_bytes]

    Groups alias the same buffers: a block id belongs to one group at a time.
    """
    shape = (config.num_blocks, page_bytes(config.groups))
    # Zeros, because whatever else lies in fresh memory may be NaN to a backend that multiplies before it masks. On a
    # CPU from numpy, which gets them from the system page by page as they are used; torch would write them all.
    if device == "cpu":
        return [torch.from_numpy(np.zeros(shape, np.uint8)) for _ in range(num_slots(config.groups))]
    return [torch.zeros(shape, dtype=torch.uint8, device=device) for _ in range(num_slots(config.groups))]


def _shape_of(result: object) -> str:
    return f"{result.dtype} {tuple(result.shape)}" if isinstance(result, Tensor) else type(result).__name__


def try_bind(backend: AttentionBackend, spec: KVCacheSpec, device: str) -> None:
    """Let a backend bind a cache of two blocks: a layout that does not fit shows before any weight is read."""
    backend.bind(torch.zeros((2, spec.page_bytes), dtype=torch.uint8, device=device), spec)


def _pages(buffer: Tensor, block_ids: Sequence[int], spec: KVCacheSpec) -> Tensor:
    """Return the numbers that blocks hold in a layer, at least float32. [num_blocks, numbers in a page]"""
    # What has no one element type is compared byte by byte.
    dtype: torch.dtype = getattr(torch, getattr(spec, "dtype", "uint8"))
    pages = buffer[list(block_ids), : spec.page_bytes].view(dtype)
    return pages.to(torch.promote_types(pages.dtype, torch.float32))


def _largest_difference(pages: Tensor, others: Tensor) -> float:
    """Return the largest |a - b| / (|b| + mean of the page's |b|); NaN where a number is not finite."""
    if not (torch.isfinite(pages).all() and torch.isfinite(others).all()):
        return math.nan
    magnitudes = others.abs()
    differences = (pages - others).abs() / (magnitudes + magnitudes.mean(dim=1, keepdim=True))
    # A page of zeros has no magnitude.
    return float(torch.where(pages == others, 0.0, differences).max())


def _bind_layers(
    backends: Sequence[AttentionBackend], groups: Sequence[KVCacheGroup], buffers: Sequence[Tensor]
) -> list[LayerCache]:
    layers: dict[int, LayerCache] = {}
    for group_id, group in enumerate(groups):
        for slot, layer in enumerate(group.layers):
            backend = backends[layer]
            layers[layer] = LayerCache(
                backend, backend.bind(buffers[slot], group.spec), group_id, group.spec.block_size
            )
    return [layers[layer] for layer in range(len(backends))]
