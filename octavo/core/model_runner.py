"""Runs one step of the model: plan in, sampled tokens out. Owns the KV-cache memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from octavo.core.batch import LayerCache, StepBatch
from octavo.core.cuda_graphs import CudaGraphRecorder, DecodeGraphs, Recorder
from octavo.core.device_inputs import DeviceInputs
from octavo.core.interfaces import KV_FORMATS, AttentionBackend, KVCacheSpec, Model, ScaledPages
from octavo.core.interfaces.kv_scales import LayerScales
from octavo.core.kv_cache_config import KVCacheConfig, KVCacheGroup, num_slots, page_bytes
from octavo.core.sampler import Sampler
from octavo.core.static_scales import StaticScales, static_scales
from octavo.core.step_inputs import HostInputs, StepInputs
from octavo.core.step_plan import LatestTokens, StepPlan, StepResult
from octavo.errors import ConfigError


class ModelRunner:
    """Turns plans into tokens.

    Args:
        model: The decoder.
        backends: The attention backend of each of the model's attention layers; layers with equal specs share one.
        kv_cache_config: The layout of the KV cache, whose memory is allocated here.
        device: Where the model is, as torch names it.
        kv_scales: Each attention layer's, where its pages have none; empty when all are 1.
        inputs: Makes steps' tensors; when not given, as suits the device.
    """

    def __init__(
        self,
        model: Model,
        backends: Sequence[AttentionBackend],
        kv_cache_config: KVCacheConfig,
        device: str,
        kv_scales: Sequence[LayerScales | None] = (),
        *,
        inputs: HostInputs | DeviceInputs | None = None,
    ) -> None:
        self.model = model
        self.device = device
        self.sampler = Sampler()
        self._groups = kv_cache_config.groups
        self.kv_cache_buffers = allocate_kv_cache(kv_cache_config, device)
        scales = kv_scales or [None] * len(backends)
        layer_scales = [
            static_scales(of_layer, backend.spec, device) for of_layer, backend in zip(scales, backends, strict=True)
        ]
        self._layers = _bind_layers(backends, kv_cache_config.groups, self.kv_cache_buffers, layer_scales)
        self._inputs = _inputs_for(device, kv_cache_config.groups) if inputs is None else inputs
        self._graphs: DecodeGraphs | None = None
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

    def capture_decode_steps(
        self, sizes: Sequence[int], table_widths: Sequence[int], *, recorder: Recorder | None = None
    ) -> None:
        """Record steps of decode rows alone, which later steps of that kind replay; see `cuda_graphs`.

        Args:
            sizes: Numbers of rows, in order; at least one.
            table_widths: Blocks of the longest request, for each KV-cache group.
            recorder: Records; with CUDA graphs when not given.

        Raises:
            ConfigError: The runner is on a CPU, where each step's tensors are new.
        """
        if not isinstance(self._inputs, DeviceInputs):
            raise ConfigError(f"Decode steps are captured on a GPU, and this model runs on {self.device!r}.")
        if recorder is None:
            recorder = CudaGraphRecorder(self.device)
        forward = _Forward(self.model, self._layers)
        with torch.inference_mode():
            self._graphs = DecodeGraphs(forward, self._inputs, sizes, table_widths, recorder)

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
            backend = self._layers[layer].backend
            pages = _pages(buffer, block_ids, group.spec, backend)
            differences[layer] = _largest_difference(pages, _pages(buffer, other_block_ids, group.spec, backend))
        return differences

    def logits(self, plan: StepPlan) -> Tensor | None:
        """Run the model; return the logits of the entries that sample, None when none does. [num_samples, vocab]"""
        hidden, sample_rows = self._hidden_rows(plan)
        num_samples = int(plan.samples.sum())
        if not num_samples:
            return None
        logits = self.model.logits(hidden.index_select(0, sample_rows))
        if not isinstance(logits, Tensor) or logits.shape[:1] != (num_samples,):
            raise TypeError(f"{_name_of(self.model)}.logits returned {_shape_of(logits)} for {num_samples} rows")
        return logits

    def _hidden_rows(self, plan: StepPlan) -> tuple[Tensor, Tensor]:
        """Run the model; return hidden rows, in the order of the plan's tokens, and those of them that sample."""
        size = None if self._graphs is None else self._graphs.size_for(plan)
        if self._graphs is not None and size is not None:
            return self._graphs.run(plan, size)
        inputs = self._inputs.make(plan)
        return _Forward(self.model, self._layers)(inputs), inputs.sample_rows


@dataclass(frozen=True)
class _Forward:
    """Runs the model over a step's tensors.

    An object of its own, so that who keeps it for later does not keep the runner alive.
    """

    model: Model
    layers: list[LayerCache]

    def __call__(self, inputs: StepInputs) -> Tensor:
        """Return the hidden rows. [num_tokens, hidden_size]"""
        hidden = self.model.forward(StepBatch(inputs, self.layers))
        num_tokens = len(inputs.token_ids)
        if not isinstance(hidden, Tensor) or hidden.shape[:1] != (num_tokens,):
            raise TypeError(f"{_name_of(self.model)}.forward returned {_shape_of(hidden)} for {num_tokens} tokens")
        return hidden


def _inputs_for(device: str, groups: Sequence[KVCacheGroup]) -> HostInputs | DeviceInputs:
    block_sizes = [group.spec.block_size for group in groups]
    return HostInputs(block_sizes) if device == "cpu" else DeviceInputs(block_sizes, device)


def _name_of(model: Model) -> str:
    return f"{type(model).__module__}.{type(model).__qualname__}"


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


def _pages(buffer: Tensor, block_ids: Sequence[int], spec: KVCacheSpec, backend: AttentionBackend) -> Tensor:
    """Return the numbers that blocks hold in a layer, at least float32. [num_blocks, numbers in a page]"""
    rows = buffer[list(block_ids), : spec.page_bytes]
    # What has no one element type is compared byte by byte.
    name = getattr(spec, "dtype", "uint8")
    if name not in KV_FORMATS or not KV_FORMATS[name].is_quantised:
        numbers = rows.view(getattr(torch, name))
        return numbers.to(torch.promote_types(numbers.dtype, torch.float32))
    pages = KV_FORMATS[name].view_pages(rows, backend.kv_cache_shape(spec, len(rows))[1:])
    codes, scales = (pages.codes, pages.scales) if isinstance(pages, ScaledPages) else (pages, None)
    return KV_FORMATS[name].dequantise(codes, scales).flatten(1)


def _largest_difference(pages: Tensor, others: Tensor) -> float:
    """Return the largest |a - b| / (|b| + mean of the page's |b|); NaN where a number is not finite."""
    if not (torch.isfinite(pages).all() and torch.isfinite(others).all()):
        return math.nan
    magnitudes = others.abs()
    differences = (pages - others).abs() / (magnitudes + magnitudes.mean(dim=1, keepdim=True))
    # A page of zeros has no magnitude.
    return float(torch.where(pages == others, 0.0, differences).max())


def _bind_layers(
    backends: Sequence[AttentionBackend],
    groups: Sequence[KVCacheGroup],
    buffers: Sequence[Tensor],
    scales: Sequence[StaticScales | None],
) -> list[LayerCache]:
    layers: dict[int, LayerCache] = {}
    for group_id, group in enumerate(groups):
        for slot, layer in enumerate(group.layers):
            backend = backends[layer]
            layers[layer] = LayerCache(
                backend, backend.bind(buffers[slot], group.spec), group_id, group.spec.block_size, scales[layer]
            )
    return [layers[layer] for layer in range(len(backends))]
