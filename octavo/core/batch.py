"""One step's tensors, made from a plan: what the model reads, and what each attention backend reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from octavo.core.interfaces import AttentionBackend, AttentionBatch
from octavo.core.step_plan import Int32Array, StepPlan


@dataclass(frozen=True)
class LayerCache:
    """An attention layer, bound to its backend and its part of the KV cache.

    Attributes:
        backend: Shared by layers with equal attention specs.
        kv_cache: What the backend's `bind` returned.
        group_id: Whose block tables the layer follows.
        block_size: Tokens in a block of that group.
    """

    backend: AttentionBackend
    kv_cache: Any
    group_id: int
    block_size: int


class StepBatch:
    """Implements `ForwardBatch` for one step.

    Args:
        plan: What to compute.
        layers: The model's attention layers, in its own numbering.
        device: Where the tensors go, as torch names it.
    """

    def __init__(self, plan: StepPlan, layers: list[LayerCache], device: str) -> None:
        self._layers = layers
        query_starts = np.zeros(plan.num_entries + 1, np.int32)
        np.cumsum(plan.num_new_tokens, out=query_starts[1:])
        # Token t of entry e stands at first_positions[e] + (t - query_starts[e]).
        entry_of_token = np.repeat(np.arange(plan.num_entries), plan.num_new_tokens)
        offsets = np.arange(plan.num_tokens) - query_starts[entry_of_token]
        positions = (plan.first_positions[entry_of_token] + offsets).astype(np.int64)
        self.token_ids = _to_device(plan.token_ids.astype(np.int64), device)
        self.positions = _to_device(positions, device)
        # Rows of the hidden states from which a next token is sampled. [num_samples]
        self.sample_rows = _to_device((query_starts[1:] - 1)[plan.samples].astype(np.int64), device)

        groups = {layer.group_id: layer.block_size for layer in layers}
        batches = {
            group_id: _attention_batch(
                plan, plan.block_tables[group_id], block_size, query_starts, entry_of_token, positions, device
            )
            for group_id, block_size in groups.items()
        }
        self._slots = {group_id: batch.slots for group_id, batch in batches.items()}
        # Layers that share a backend and a group share a plan.
        self._plans: dict[tuple[int, int], Any] = {}
        for layer in layers:
            key = (id(layer.backend), layer.group_id)
            if key not in self._plans:
                try:
                    self._plans[key] = layer.backend.plan(batches[layer.group_id])
                except Exception as error:
                    error.add_note(f"in the attention backend {_name(layer.backend)}, planning")
                    raise

    def attention(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor | None, *, sinks: Tensor | None = None
    ) -> Tensor:
        """See `ForwardBatch.attention`."""
        cache = self._layers[layer]
        plan = self._plans[id(cache.backend), cache.group_id]
        try:
            # All rows write before any row reads: a row may use blocks that another one fills in this very step.
            cache.backend.write(key, value, cache.kv_cache, self._slots[cache.group_id])
            output = cache.backend.attend(query, cache.kv_cache, plan, sinks=sinks)
            checked = _checked(output, query, cache.backend.spec.head_dim_v)
        except Exception as error:
            error.add_note(f"in the attention backend {_name(cache.backend)}, layer {layer}")
            raise
        return checked


def _name(backend: AttentionBackend) -> str:
    return f"{type(backend).__module__}.{type(backend).__qualname__}"


def _checked(output: Any, query: Tensor, head_dim_v: int) -> Tensor:
    """Return what `attend` returned; raise when that is something else than a row for each query."""
    wanted = (*query.shape[:2], head_dim_v)
    if not isinstance(output, Tensor) or output.shape != wanted or output.dtype != query.dtype:
        got = f"{output.dtype} {tuple(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
        raise TypeError(f"attend returned {got}; it must return {query.dtype} {wanted}")
    return output


def _attention_batch(
    plan: StepPlan,
    block_table: Int32Array,
    block_size: int,
    query_starts: Int32Array,
    entry_of_token: np.ndarray[Any, Any],
    positions: np.ndarray[Any, Any],
    device: str,
) -> AttentionBatch:
    context_lens = plan.first_positions + plan.num_new_tokens
    blocks = block_table[entry_of_token, positions // block_size].astype(np.int64)
    return AttentionBatch(
        num_decode_rows=plan.num_decode_entries,
        query_starts=_to_device(query_starts, device),
        context_lens=_to_device(context_lens, device),
        block_table=_to_device(block_table, device),
        slots=_to_device(blocks * block_size + positions % block_size, device),
        query_starts_host=query_starts,
        context_lens_host=context_lens,
        block_table_host=block_table,
    )


def _to_device(column: np.ndarray[Any, Any], device: str) -> Tensor:
    return torch.from_numpy(column).to(device, non_blocking=True)
