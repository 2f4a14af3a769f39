"""Runs one step of the model: plan in, sampled tokens out. Owns the KV-cache memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from octavo.core.batch import LayerCache, StepBatch
from octavo.core.interfaces import AttentionBackend, KVCacheSpec, Model
from octavo.core.kv_cache_config import KVCacheConfig
from octavo.core.sampler import Sampler
from octavo.core.step_plan import StepPlan, StepResult


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
        self._layers = _bind_layers(backends, kv_cache_config, device)

    def run(self, plan: StepPlan) -> StepResult:
        """Compute a step. An empty plan computes nothing."""
        for row in plan.new_rows:
            self.sampler.set_row(row)
        if not plan.num_tokens:
            return StepResult()
        with torch.inference_mode():
            logits = self.logits(plan)
            if logits is None:
                return StepResult()
            positions = plan.first_positions + plan.num_new_tokens
            return self.sampler.sample(logits, plan.rows[plan.samples].tolist(), positions[plan.samples].tolist())

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
    page_bytes = max(group.spec.page_bytes for group in config.groups)
    num_slots = max(len(group.layers) for group in config.groups)
    shape = (config.num_blocks, page_bytes)
    # Zeros, because whatever else lies in fresh memory may be NaN to a backend that multiplies before it masks. On a
    # CPU from numpy, which gets them from the system page by page as they are used; torch would write them all.
    if device == "cpu":
        return [torch.from_numpy(np.zeros(shape, np.uint8)) for _ in range(num_slots)]
    return [torch.zeros(shape, dtype=torch.uint8, device=device) for _ in range(num_slots)]


def _shape_of(result: object) -> str:
    return f"{result.dtype} {tuple(result.shape)}" if isinstance(result, Tensor) else type(result).__name__


def try_bind(backend: AttentionBackend, spec: KVCacheSpec, device: str) -> None:
    """Let a backend bind a cache of two blocks: a layout that does not fit shows before any weight is read."""
    backend.bind(torch.zeros((2, spec.page_bytes), dtype=torch.uint8, device=device), spec)


def _bind_layers(backends: Sequence[AttentionBackend], config: KVCacheConfig, device: str) -> list[LayerCache]:
    buffers = allocate_kv_cache(config, device)
    layers: dict[int, LayerCache] = {}
    for group_id, group in enumerate(config.groups):
        for slot, layer in enumerate(group.layers):
            backend = backends[layer]
            layers[layer] = LayerCache(
                backend, backend.bind(buffers[slot], group.spec), group_id, group.spec.block_size
            )
    return [layers[layer] for layer in range(len(backends))]
