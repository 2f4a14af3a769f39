"""How `torch_sdpa` cuts a step into dense pieces.

    rows ──► units: which blocks to fetch, which of their slots count, which queries read them

A unit is either a bucket of decode rows with contexts of similar length, or a tile of one row's queries. Only what
some query of a unit sees takes part: blocks that none sees are not fetched, and slots of a fetched block that
none sees are zeroed, since a masked NaN would still spoil the sum (0 * NaN is NaN).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.core.interfaces.attention import AttentionBatch, AttentionSpec
from octavo.core.interfaces.kv_format import KV_FORMATS

# Queries of one row that share a mask and a fetch. Fewer repeat the fetch of the prefix more often; more compute
# more products that a window then discards.
QUERIES_PER_TILE = 256
# Two decode rows share a bucket while the longer has at most this many times the blocks of the shortest: then at
# most a quarter of the bucket is padding. Below the slack a bucket of its own costs more than the padding does.
BUCKET_GROWTH = 4 / 3
BUCKET_SLACK_TOKENS = 32
# Fetched keys and values of a unit. On a CPU they should still be in the last-level cache when they are read.
SCRATCH_BYTES_CPU = 8 << 20
SCRATCH_BYTES_GPU = 256 << 20

FLOAT32_BYTES = 4

# Position of a slot that no query sees: later than every query.
NEVER = np.iinfo(np.int32).max

Ints = NDArray[np.int64]
# The tensors in which keys, or values, are stored: numbers or codes, and scales where pages hold any.
Parts = tuple[Tensor, ...]


@dataclass(frozen=True)
class Unit:
    """Queries and keys that meet in one dense softmax: a bucket of decode rows, or a tile of one row's queries.

    Attributes:
        tokens: Which rows of the query tensor. [num_rows] of a bucket, a slice of a tile.
        is_bucket: Whether every query has keys of its own; in a tile, all queries share one row's keys.
        block_ids: Blocks to fetch, row after row. [num_rows * blocks_per_row]
        num_rows: Rows whose blocks are fetched; 1 for a tile.
        first: First fetched slot of a row that some query sees.
        end: One past the last such slot.
        unseen: Fetched slots to zero, counted over all rows; None when there are none. [num_unseen]
        mask: Which keys which query sees; None when all, or when `is_causal` says it.
            [num_rows, 1, num_queries, end - first]
        is_causal: Whether query i sees exactly the keys 0 to i.
    """

    tokens: Tensor | slice
    is_bucket: bool
    block_ids: Tensor
    num_rows: int
    first: int
    end: int
    unseen: Tensor | None
    mask: Tensor | None
    is_causal: bool = False


@dataclass(frozen=True)
class Plan:
    """One step's units, and the scratch that they take turns in.

    Attributes:
        units: In any order; each query token is in at most one.
        num_planned_tokens: Query tokens that are in a unit. The others see nothing.
        scratch: Fetched keys, and values unless they are the keys' prefix, as they are stored: numbers or codes, and
            scales where pages hold any.
            [most slots of a unit, num_kv_heads, head_dim] and [most slots of a unit, num_kv_heads]
    """

    units: list[Unit]
    num_planned_tokens: int
    scratch: tuple[Parts, ...]


@dataclass(frozen=True)
class Reach:
    """What some queries of each row see, in blocks. All arrays: [num_rows]

    A row's fetched blocks are its first `num_front` ones, kept by `keep_first`, and `[main_start, main_end)`.
    """

    first_seen: Ints
    last_seen: Ints
    num_front: Ints
    main_start: Ints
    main_end: Ints

    @property
    def num_blocks(self) -> Ints:
        return self.num_front + self.main_end - self.main_start

    def __getitem__(self, rows: slice | Ints) -> Reach:
        return Reach(
            self.first_seen[rows],
            self.last_seen[rows],
            self.num_front[rows],
            self.main_start[rows],
            self.main_end[rows],
        )


class Planner:
    """Plans steps for layers of one spec.

    A plan's memory grows with (new tokens) x (context) bytes for rows that need a mask: those of more than one new
    token that have a prefix, or a window or chunk shorter than the context.
    """

    def __init__(self, spec: AttentionSpec, device: torch.device) -> None:
        self.spec = spec
        self._device = device
        self._format = KV_FORMATS[spec.kv_dtype]
        self._scratch_dtype = as_movable(torch.empty(0, dtype=self._format.torch_dtype)).dtype

    def plan(self, batch: AttentionBatch) -> Plan:
        """Prepare one step: bucket the decode rows, tile the others, and find what each reads.

        Rows without new tokens, or without context, take part in nothing.
        """
        query_starts = batch.query_starts_host.astype(np.int64)
        context_lens = batch.context_lens_host.astype(np.int64)
        query_lens = np.diff(query_starts)
        units: list[Unit] = []
        # Any row of one token is served as a decode row, wherever it stands.
        decode_rows = np.flatnonzero((query_lens == 1) & (context_lens > 0))
        if decode_rows.size:
            positions = context_lens[decode_rows] - 1
            reach = self._reach(positions, positions)
            order = np.argsort(reach.num_blocks, kind="stable")
            decode_rows, reach = decode_rows[order], reach[order]
            for bucket in self._buckets(reach.num_blocks):
                rows = decode_rows[bucket]
                tokens = self._to_device(query_starts[rows])
                units += self._unit(tokens, True, batch.block_table_host[rows], reach[bucket], context_lens[rows] - 1)
        for row in np.flatnonzero((query_lens > 1) & (context_lens > 0)).tolist():
            units += self._tiles(
                int(query_starts[row]), int(query_lens[row]), int(context_lens[row]), batch.block_table_host[row]
            )
        most_slots = max((len(unit.block_ids) * self.spec.block_size for unit in units), default=0)
        planned = sum(u.tokens.stop - u.tokens.start if isinstance(u.tokens, slice) else len(u.tokens) for u in units)
        return Plan(units, planned, self._scratch(most_slots))

    def _scratch(self, num_slots: int) -> tuple[Parts, ...]:
        vectors = (num_slots, self.spec.num_kv_heads)
        sizes: list[tuple[tuple[int, ...], torch.dtype]] = [((*vectors, self.spec.head_dim), self._scratch_dtype)]
        if self._format.has_page_scales:
            sizes.append((vectors, torch.float32))
        # Ordinary tensors even within inference mode: `attend` may run outside of it.
        with torch.inference_mode(False):
            return tuple(
                tuple([torch.empty(shape, dtype=dtype, device=self._device) for shape, dtype in sizes])
                for _ in range(1 if self.spec.value_is_key_prefix else 2)
            )

    def _reach(self, first_queries: Ints, last_queries: Ints) -> Reach:
        """Find what the queries at positions [first_queries[r], last_queries[r]] of each row see."""
        # The lower bound never falls as the position grows, and each query sees itself, so that the union over the
        # queries has no hole: from the first query's bound to the last query.
        first_seen = np.zeros_like(first_queries)
        if self.spec.window is not None:
            first_seen = np.maximum(first_seen, first_queries - self.spec.window + 1)
        if self.spec.chunk is not None:
            first_seen = np.maximum(first_seen, first_queries - first_queries % self.spec.chunk)
        main_start = first_seen // self.spec.block_size
        num_front = np.minimum(-(-self.spec.keep_first // self.spec.block_size), main_start)
        return Reach(first_seen, last_queries, num_front, main_start, last_queries // self.spec.block_size + 1)

    def _max_blocks_per_unit(self) -> int:
        scratch_bytes = SCRATCH_BYTES_CPU if self._device.type == "cpu" else SCRATCH_BYTES_GPU
        # Quantised numbers are computed with in float32.
        bytes_per_number = FLOAT32_BYTES if self._format.is_quantised else self._format.element_bytes
        return scratch_bytes // (math.prod(page_shape(self.spec)) * bytes_per_number)

    def _buckets(self, num_blocks: Ints) -> Iterator[slice]:
        """Cut rows, sorted by the number of their blocks, into runs that are padded to their longest row."""
        slack = -(-BUCKET_SLACK_TOKENS // self.spec.block_size)
        start = 0
        while start < len(num_blocks):
            longest = max(int(num_blocks[start] * BUCKET_GROWTH), int(num_blocks[start]) + slack)
            end = int(np.searchsorted(num_blocks, longest, side="right"))
            end = min(end, start + max(1, self._max_blocks_per_unit() // int(num_blocks[end - 1])))
            yield slice(start, end)
            start = end

    def _tiles(self, start: int, num_queries: int, context_len: int, table: NDArray[np.int32]) -> list[Unit]:
        """Cut one row's queries into units: a single causal one where the whole context is new and seen."""
        first_query = context_len - num_queries
        num_blocks = -(-context_len // self.spec.block_size)
        block_ids = table[:num_blocks]
        limits = [size for size in (self.spec.window, self.spec.chunk) if size is not None]
        if first_query == 0 and all(size >= context_len for size in limits) and block_ids.all():
            tokens = slice(start, start + num_queries)
            return [Unit(tokens, False, self._to_device(block_ids), 1, 0, context_len, None, None, is_causal=True)]
        units = []
        for offset in range(0, num_queries, QUERIES_PER_TILE):
            end = min(offset + QUERIES_PER_TILE, num_queries)
            positions = np.arange(first_query + offset, first_query + end)
            reach = self._reach(positions[:1], positions[-1:])
            units += self._unit(slice(start + offset, start + end), False, table[None], reach, positions)
        return units

    def _unit(
        self, tokens: Tensor | slice, is_bucket: bool, tables: NDArray[np.int32], reach: Reach, positions: Ints
    ) -> list[Unit]:
        """Lay out what a bucket or a tile fetches. Empty when no query sees anything.

        Args:
            tables: Block ids of each row. [num_rows, max_blocks]
            positions: Of the queries. [num_rows] of a bucket, [num_queries] of a tile.
        """
        num_rows, block_size = len(tables), self.spec.block_size
        num_blocks = reach.num_blocks[:, None]
        columns = np.arange(int(num_blocks.max(initial=0)))
        # Shorter rows are padded with copies of their own first block: whatever is in it belongs to the row.
        is_padding = columns >= num_blocks
        columns = np.where(is_padding, 0, columns)
        blocks = np.where(
            columns < reach.num_front[:, None], columns, columns - reach.num_front[:, None] + reach.main_start[:, None]
        )
        block_ids = np.take_along_axis(tables, blocks, axis=1)
        # [num_rows, num_columns, block_size]: what each fetched slot holds, and whether it is of any use.
        key_positions = blocks[..., None] * block_size + np.arange(block_size)
        is_clean = (
            (block_ids != 0)[..., None]
            & (key_positions <= reach.last_seen[:, None, None])
            & ((key_positions >= reach.first_seen[:, None, None]) | (key_positions < self.spec.keep_first))
        )
        is_seen = (is_clean & ~is_padding[..., None]).reshape(num_rows, -1)
        seen_columns = np.flatnonzero(is_seen.any(axis=0))
        if not seen_columns.size:
            return []
        first, end = int(seen_columns[0]), int(seen_columns[-1]) + 1
        is_unseen = ~is_clean.reshape(num_rows, -1)
        is_unseen[:, :first] = False
        is_unseen[:, end:] = False
        unseen = np.flatnonzero(is_unseen)
        is_masked = bool(not is_bucket or not is_seen[:, first:end].all())
        return [
            Unit(
                tokens,
                is_bucket,
                self._to_device(block_ids.reshape(-1)),
                num_rows,
                first,
                end,
                self._to_device(unseen) if unseen.size else None,
                self._mask(
                    positions.reshape(num_rows, -1),
                    np.where(is_seen, key_positions.reshape(num_rows, -1), NEVER)[:, first:end],
                )
                if is_masked
                else None,
            )
        ]

    def _mask(self, query_positions: Ints, key_positions: Ints) -> Tensor:
        """Return, on the device, which query sees which key by the rule of `AttentionSpec`.

        Args:
            query_positions: [num_rows, num_queries]
            key_positions: [num_rows, num_keys]

        Returns:
            [num_rows, 1, num_queries, num_keys]
        """
        query = self._to_device(query_positions)[:, None, :, None]
        key = self._to_device(key_positions)[:, None, None, :]
        is_near = torch.ones((), dtype=torch.bool, device=self._device)
        if self.spec.window is not None:
            is_near = is_near & (key > query - self.spec.window)
        if self.spec.chunk is not None:
            is_near = is_near & (key >= query - query % self.spec.chunk)
        return (key <= query) & (is_near | (key < self.spec.keep_first))

    def _to_device(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)


def page_shape(spec: AttentionSpec) -> tuple[int, ...]:
    """Return the shape of one block: keys and values, or with `value_is_key_prefix` the keys alone."""
    if spec.value_is_key_prefix:
        return (spec.block_size, spec.head_dim)
    return (2, spec.block_size, spec.num_kv_heads, spec.head_dim)


def as_movable(numbers: Tensor) -> Tensor:
    """View float8 as bytes, since torch lacks float8 kernels for much that only moves or clears numbers."""
    return numbers.view(torch.uint8) if numbers.dtype == torch.float8_e4m3fn else numbers
