"""Two ways through an MLA layer, and which of them a row takes.

absorbed    the query goes to the latents, which the backend reads in their pages; the result is projected back
expanded    the row's latents are gathered and made full keys and values, which are attended to densely

Both give the same numbers. Per pair of query and key the second is cheaper, by as much as a latent is longer than a key
and a value; before that it expands the row's whole context, once a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from octavo.core.interfaces import AttentionBackend, AttentionBatch, AttentionSpec, LatentProjection
from octavo.core.step_plan import Int32Array

# Keys and values that are there at a time, copies of them included. A row's heads are taken in pieces: as many as fit,
# and one at least. Beside them there are the row's gathered latents.
SCRATCH_BYTES_CPU = 64 << 20
SCRATCH_BYTES_GPU = 256 << 20
# Queries that share a mask.
QUERIES_PER_TILE = 256


@dataclass(frozen=True)
class LatentDims:
    """Sizes of an MLA layer, in numbers per head but for the latent, which all heads share.

    Attributes:
        latent: Numbers in a latent.
        rope: Numbers that carry the position.
        key: Numbers in an expanded key, `rope` included.
        value: Numbers in an expanded value.
    """

    latent: int
    rope: int
    key: int
    value: int

    @classmethod
    def of(cls, spec: AttentionSpec, projection: LatentProjection) -> LatentDims:
        return cls(
            latent=spec.head_dim_v,
            rope=spec.head_dim - spec.head_dim_v,
            key=projection.key_dim,
            value=projection.value_dim,
        )


def absorbed_products(dims: LatentDims, num_new_tokens: NDArray[Any], context_lens: NDArray[Any]) -> NDArray[np.int64]:
    """Return how many multiplications a head takes for each row when queries are absorbed. [num_rows]"""
    through_matrices = num_new_tokens.astype(np.int64) * dims.latent * (dims.key - dims.rope + dims.value)
    return _num_pairs(num_new_tokens, context_lens) * (2 * dims.latent + dims.rope) + through_matrices


def expanded_products(dims: LatentDims, num_new_tokens: NDArray[Any], context_lens: NDArray[Any]) -> NDArray[np.int64]:
    """Return how many multiplications a head takes for each row when its context is expanded. [num_rows]"""
    through_matrices = context_lens.astype(np.int64) * dims.latent * (dims.key - dims.rope + dims.value)
    return _num_pairs(num_new_tokens, context_lens) * (dims.key + dims.value) + through_matrices


def rows_to_expand(dims: LatentDims, batch: AttentionBatch) -> NDArray[np.intp]:
    """Return the rows for which expanding takes fewer multiplications, in order.

    Decode rows are never among them: a backend has all of them in one call, and to expand is a call for each row.
    """
    # Multiplications foretell time well. How many times longer absorbing takes, as they say : as measured with
    # torch_sdpa, the sizes of DeepSeek V2 and V3, 16 heads and a context of 2048 (float32, torch 2.13.0, one core of an
    # AMD EPYC):
    #   64 new tokens 0.48 : 0.44    128 0.84 : 0.74    192 1.11 : 1.05    512 1.90 : 1.63    2048 2.71 : 2.47
    num_new_tokens = np.diff(batch.query_starts_host)
    is_cheaper = expanded_products(dims, num_new_tokens, batch.context_lens_host) < absorbed_products(
        dims, num_new_tokens, batch.context_lens_host
    )
    is_cheaper[: batch.num_decode_rows] = False
    return np.flatnonzero(is_cheaper)


def _num_pairs(num_new_tokens: NDArray[Any], context_lens: NDArray[Any]) -> NDArray[np.int64]:
    """Return how many pairs of a query and a key that it sees each row has. [num_rows]"""
    queries, keys = num_new_tokens.astype(np.int64), context_lens.astype(np.int64)
    pairs: NDArray[np.int64] = queries * keys - queries * (queries - 1) // 2
    return pairs


def offers_expansion(backend: AttentionBackend) -> bool:
    """Whether rows of a layer may be expanded: latents can be gathered, and each query sees all keys before it."""
    spec = backend.spec
    limits = (spec.window, spec.chunk, spec.soft_cap)
    return backend.can_gather and not spec.sinks and all(limit is None for limit in limits)


@dataclass(frozen=True)
class ExpandedRow:
    """A row whose context is expanded.

    Attributes:
        tokens: Its new tokens, among those of the step.
        slots: Where its context is stored, its new tokens included, int64. [context_len]
    """

    tokens: slice
    slots: Tensor


@dataclass(frozen=True)
class LatentRows:
    """One step's rows by the way that they take in the MLA layers of a group.

    Attributes:
        absorbed: Those whose queries are absorbed, as a batch of their own; None when there are none.
        absorbed_tokens: Their new tokens, among those of the step; None when that is all. [num_absorbed_tokens]
        expanded: The others.
    """

    absorbed: AttentionBatch | None
    absorbed_tokens: Tensor | None
    expanded: tuple[ExpandedRow, ...]


def divide_rows(batch: AttentionBatch, expanded: NDArray[np.intp], block_size: int) -> LatentRows:
    """Take the rows `expanded` out of a step."""
    if not len(expanded):
        return LatentRows(batch, None, ())
    device = batch.slots.device
    starts = batch.query_starts_host
    rows = tuple(
        ExpandedRow(
            tokens=slice(int(starts[row]), int(starts[row + 1])),
            slots=torch.from_numpy(
                _context_slots(batch.block_table_host[row], int(batch.context_lens_host[row]), block_size)
            ).to(device),
        )
        for row in expanded
    )
    others = np.setdiff1d(np.arange(batch.num_rows), expanded)
    if not len(others):
        return LatentRows(None, None, rows)
    tokens = np.concatenate([np.arange(starts[row], starts[row + 1]) for row in others])
    absorbed_tokens = torch.from_numpy(tokens.astype(np.int64)).to(device)
    return LatentRows(_only(batch, others, absorbed_tokens), absorbed_tokens, rows)


def _only(batch: AttentionBatch, rows: NDArray[np.intp], tokens: Tensor) -> AttentionBatch:
    """Return a batch of some of the rows, and of their new tokens."""
    query_starts = np.zeros(len(rows) + 1, np.int32)
    np.cumsum(np.diff(batch.query_starts_host)[rows], out=query_starts[1:])
    context_lens = batch.context_lens_host[rows]
    block_table = batch.block_table_host[rows]
    device = batch.slots.device
    return AttentionBatch(
        # Only others are taken out.
        num_decode_rows=batch.num_decode_rows,
        query_starts=torch.from_numpy(query_starts).to(device),
        context_lens=torch.from_numpy(context_lens).to(device),
        block_table=torch.from_numpy(block_table).to(device),
        slots=batch.slots[tokens],
        query_starts_host=query_starts,
        context_lens_host=context_lens,
        block_table_host=block_table,
    )


def _context_slots(blocks: Int32Array, context_len: int, block_size: int) -> NDArray[np.int64]:
    positions = np.arange(context_len)
    return blocks[positions // block_size].astype(np.int64) * block_size + positions % block_size


def attend_expanded(query: Tensor, latents: Tensor, projection: LatentProjection, scale: float) -> Tensor:
    """Attend from one row's new tokens to its expanded context.

    At any time the keys and values of some heads are there, up to SCRATCH_BYTES_CPU or _GPU, or else of one head.

    Args:
        query: [num_tokens, num_query_heads, key_dim]
        latents: Of the whole context, the new tokens at its end. [context_len, latent_dim + rope_dim]
        projection: The layer's.
        scale: Factor on every query-key product.

    Returns:
        [num_tokens, num_query_heads, value_dim]
    """
    num_tokens, num_heads, _ = query.shape
    output = query.new_empty(num_tokens, num_heads, projection.value_dim)
    most_bytes = SCRATCH_BYTES_CPU if query.device.type == "cpu" else SCRATCH_BYTES_GPU
    # Twice: what `expand` makes them of, and the values once more, as wide as keys.
    bytes_per_head = 2 * len(latents) * (projection.key_dim + projection.value_dim) * latents.element_size()
    heads_at_a_time = max(1, most_bytes // bytes_per_head)
    for first in range(0, num_heads, heads_at_a_time):
        heads = slice(first, first + heads_at_a_time)
        keys, values = projection.expand(latents, heads)
        output[:, heads] = _attend_causally(query[:, heads], keys, values, scale)
    return output


def _attend_causally(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Attend from the last positions of a context to all of it, each query to itself and what is before it.

    Args:
        query: [num_tokens, num_heads, key_dim]
        keys: [context_len, num_heads, key_dim]
        values: [context_len, num_heads, value_dim]

    Returns:
        [num_tokens, num_heads, value_dim]
    """
    num_tokens, context_len, value_dim = len(query), len(keys), values.shape[2]
    # Kernels that keep no matrix of scores want keys and values of one width. Zeros change no product.
    width = max(keys.shape[2], value_dim)
    query, keys, values = (F.pad(part, (0, width - part.shape[2])).transpose(0, 1) for part in (query, keys, values))
    if num_tokens == context_len:
        attended = F.scaled_dot_product_attention(query[None], keys[None], values[None], is_causal=True, scale=scale)
        return attended[0, ..., :value_dim].transpose(0, 1)
    first_position = context_len - num_tokens
    tiles = []
    for start in range(0, num_tokens, QUERIES_PER_TILE):
        end = min(start + QUERIES_PER_TILE, num_tokens)
        num_seen = first_position + end
        mask = torch.ones(end - start, num_seen, dtype=torch.bool, device=query.device).tril(first_position + start)
        tiles.append(
            F.scaled_dot_product_attention(
                query[None, :, start:end], keys[None, :, :num_seen], values[None, :, :num_seen], mask, scale=scale
            )
        )
    return torch.cat(tiles, dim=2)[0, ..., :value_dim].transpose(0, 1)
