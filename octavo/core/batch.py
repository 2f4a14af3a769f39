"""One step as a model sees it: its tensors, and attention over the KV cache through each layer's backend."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from octavo.core.interfaces import AttentionBackend, AttentionBatch, LatentProjection
from octavo.core.latent_attention import (
    LatentDims,
    LatentRows,
    attend_expanded,
    divide_rows,
    offers_expansion,
    rows_to_expand,
)
from octavo.core.static_scales import StaticScales
from octavo.core.step_inputs import StepInputs


@dataclass(frozen=True)
class LayerCache:
    """An attention layer, bound to its backend and its part of the KV cache.

    Attributes:
        backend: Shared by layers with equal attention specs.
        kv_cache: What the backend's `bind` returned.
        group_id: Whose block tables the layer follows.
        block_size: Tokens in a block of that group.
        scales: Of what is stored, where neither the backend nor a page has them; None for 1.
    """

    backend: AttentionBackend
    kv_cache: Any
    group_id: int
    block_size: int
    scales: StaticScales | None = None


class StepBatch:
    """Implements `ForwardBatch` for one step.

    Args:
        inputs: The step's tensors.
        layers: The model's attention layers, in its own numbering.
    """

    def __init__(self, inputs: StepInputs, layers: list[LayerCache]) -> None:
        self._layers = layers
        self._batches = inputs.batches
        self.token_ids = inputs.token_ids
        self.positions = inputs.positions
        # Layers that share a backend and a group share a plan. MLA layers plan when they are first run: only their
        # projections say which rows take which way.
        self._plans: dict[tuple[int, int], Any] = {}
        self._latent_plans: dict[tuple[int, int, LatentDims], _LatentPlan] = {}
        for layer in layers:
            if not layer.backend.spec.value_is_key_prefix:
                self._plan_of(layer)

    def attention(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor | None, *, sinks: Tensor | None = None
    ) -> Tensor:
        """See `ForwardBatch.attention`."""
        plan = self._plan_of(self._layers[layer])
        self._write(layer, key, value)
        return self._attend(layer, query, plan, sinks)

    def latent_attention(self, layer: int, query: Tensor, latents: Tensor, projection: LatentProjection) -> Tensor:
        """See `ForwardBatch.latent_attention`."""
        plan = self._latent_plan_of(self._layers[layer], projection)
        self._write(layer, latents[:, None], None)
        if not plan.rows.expanded:
            return projection.project(self._attend(layer, projection.absorb(query), plan.of_absorbed))
        output = query.new_empty(*query.shape[:2], projection.value_dim)
        if (tokens := plan.rows.absorbed_tokens) is not None:
            attended = self._attend(layer, projection.absorb(query[tokens]), plan.of_absorbed)
            output[tokens] = projection.project(attended)
        scale = self._layers[layer].backend.spec.scale
        for row in plan.rows.expanded:
            output[row.tokens] = attend_expanded(query[row.tokens], self._gather(layer, row.slots), projection, scale)
        return output

    def _write(self, layer: int, key: Tensor, value: Tensor | None) -> None:
        """Store all rows' tokens before any row reads: it may use blocks that another one fills in this very step."""
        cache = self._layers[layer]
        if cache.scales is not None:
            key, value = cache.scales.stored_key(key), cache.scales.stored_value(value)
        with _noting(cache.backend, f"layer {layer}"):
            cache.backend.write(key, value, cache.kv_cache, self._batches[cache.group_id].slots)

    def _attend(self, layer: int, query: Tensor, plan: Any, sinks: Tensor | None = None) -> Tensor:
        cache = self._layers[layer]
        if cache.scales is not None:
            query = cache.scales.query(query)
        with _noting(cache.backend, f"layer {layer}"):
            output = cache.backend.attend(query, cache.kv_cache, plan, sinks=sinks)
            output = _checked("attend", output, (*query.shape[:2], cache.backend.spec.head_dim_v), query.dtype)
        return output if cache.scales is None else cache.scales.output(output)

    def _gather(self, layer: int, slots: Tensor) -> Tensor:
        cache = self._layers[layer]
        spec = cache.backend.spec
        with _noting(cache.backend, f"layer {layer}"):
            keys = cache.backend.gather(cache.kv_cache, slots)
            keys = _checked("gather", keys, (len(slots), spec.head_dim), getattr(torch, spec.dtype))
        return keys if cache.scales is None else cache.scales.gathered(keys)

    def _plan_of(self, layer: LayerCache) -> Any:
        key = (id(layer.backend), layer.group_id)
        if key not in self._plans:
            self._plans[key] = _plan(layer.backend, self._batches[layer.group_id])
        return self._plans[key]

    def _latent_plan_of(self, layer: LayerCache, projection: LatentProjection) -> _LatentPlan:
        dims = LatentDims.of(layer.backend.spec, projection)
        key = (id(layer.backend), layer.group_id, dims)
        if key not in self._latent_plans:
            batch = self._batches[layer.group_id]
            # Rows of one token never are: where there are no others, host arrays are not looked at.
            may_expand = batch.num_decode_rows < batch.num_rows and offers_expansion(layer.backend)
            expanded = rows_to_expand(dims, batch) if may_expand else np.empty(0, np.intp)
            rows = divide_rows(batch, expanded, layer.block_size)
            of_absorbed = None if rows.absorbed is None else _plan(layer.backend, rows.absorbed)
            self._latent_plans[key] = _LatentPlan(rows, of_absorbed)
        return self._latent_plans[key]


@dataclass(frozen=True)
class _LatentPlan:
    """Which rows take which way through MLA layers, and the backend's plan of those that it attends for."""

    rows: LatentRows
    of_absorbed: Any


def _plan(backend: AttentionBackend, batch: AttentionBatch) -> Any:
    with _noting(backend, "planning"):
        return backend.plan(batch)


@contextmanager
def _noting(backend: AttentionBackend, what: str) -> Iterator[None]:
    """Note on an exception which backend it came from, and what that was doing."""
    try:
        yield
    except Exception as error:
        error.add_note(f"in the attention backend {type(backend).__module__}.{type(backend).__qualname__}, {what}")
        raise


def _checked(method: str, result: Any, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return what a backend's method returned; raise when that is something else than was promised."""
    if not isinstance(result, Tensor) or result.shape != shape or result.dtype != dtype:
        got = f"{result.dtype} {tuple(result.shape)}" if isinstance(result, Tensor) else type(result).__name__
        raise TypeError(f"{method} returned {got}; it must return {dtype} {shape}")
    return result
