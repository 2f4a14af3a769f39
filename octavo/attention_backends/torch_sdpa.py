"""The reference attention backend: plain PyTorch, any device, any head size, every ability of `AttentionSpec`.

    plan     rows ──► units: which blocks to fetch, which of their slots count, which queries read them
    attend   for each unit: fetch blocks into scratch ──► dense keys and values ──► softmax ──► output rows

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
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from octavo.core.interfaces.attention import AttentionBackend, AttentionBatch, AttentionSpec
from octavo.core.interfaces.kv_cache_spec import DTYPE_BYTES, KVCacheSpec
from octavo.errors import ConfigError, PluginUnsuitable

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
# Scores that the explicit softmax holds at a time, in numbers.
EXPLICIT_SCORES = 16 << 20

# Position of a slot that no query sees: later than every query.
NEVER = np.iinfo(np.int32).max

Ints = NDArray[np.int64]


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
        scratch: Fetched keys, and values unless they are the keys' prefix.
            [1 or 2, most slots of a unit, num_kv_heads, head_dim]
    """

    units: list[Unit]
    num_planned_tokens: int
    scratch: Tensor


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

    def __getitem__(self, rows: slice) -> Reach:
        return Reach(
            self.first_seen[rows],
            self.last_seen[rows],
            self.num_front[rows],
            self.main_start[rows],
            self.main_end[rows],
        )


class TorchSDPABackend(AttentionBackend):
    """Fetches each row's blocks and calls `scaled_dot_product_attention`.

    Soft caps, sinks and the log-sum-exp, which that function does not offer, take a softmax written out in float32.

    A plan's memory grows with (new tokens) x (context) bytes for rows that need a mask: those of more than one new
    token that have a prefix, or a window or chunk shorter than the context.
    """

    def __init__(self, spec: AttentionSpec) -> None:
        """Raise PluginUnsuitable when `cannot_serve` names a reason."""
        super().__init__(spec)
        if reasons := self.cannot_serve(spec):
            raise PluginUnsuitable("torch_sdpa cannot serve this attention: " + " ".join(reasons))
        self._device = torch.device(spec.device)
        self._dtype: torch.dtype = getattr(torch, spec.dtype)
        self._kv_dtype: torch.dtype = getattr(torch, spec.kv_dtype)
        # CPUs without float16 arithmetic convert it number by number inside the kernel, many times over; converting
        # once up front is some three times as fast, and more accurate.
        needs_float32 = self._device.type == "cpu" and self._dtype == torch.float16
        self._compute_dtype = torch.float32 if needs_float32 else self._dtype
        self._group_size = spec.num_query_heads // spec.num_kv_heads

    @classmethod
    def cannot_serve(cls, spec: AttentionSpec) -> list[str]:
        """Return every reason why this backend cannot serve `spec`, as sentences; an empty list when it can."""
        reasons = []
        for name in ("dtype", "kv_dtype"):
            if getattr(spec, name) not in DTYPE_BYTES:
                reasons.append(f"{name} {getattr(spec, name)!r} is not one of {', '.join(DTYPE_BYTES)}.")
        try:
            torch.device(spec.device)
        except RuntimeError:
            reasons.append(f"device {spec.device!r} is not a device that torch knows.")
        for name in ("num_query_heads", "num_kv_heads", "head_dim", "head_dim_v", "block_size"):
            if getattr(spec, name) < 1:
                reasons.append(f"{name} is {getattr(spec, name)}; it must be at least 1.")
        if spec.num_kv_heads >= 1 and spec.num_query_heads % spec.num_kv_heads:
            reasons.append(f"{spec.num_query_heads} query heads are not a multiple of {spec.num_kv_heads} KV heads.")
        if spec.value_is_key_prefix and spec.num_kv_heads != 1:
            reasons.append(f"value_is_key_prefix needs 1 KV head, and there are {spec.num_kv_heads}.")
        if spec.value_is_key_prefix and spec.head_dim_v > spec.head_dim:
            reasons.append(f"A value of {spec.head_dim_v} numbers is no prefix of a key of {spec.head_dim}.")
        if not spec.value_is_key_prefix and spec.head_dim_v != spec.head_dim:
            reasons.append(
                f"head_dim_v {spec.head_dim_v} differs from head_dim {spec.head_dim}, which is served only with "
                "value_is_key_prefix."
            )
        if not math.isfinite(spec.scale):
            reasons.append(f"scale {spec.scale} is not a finite number.")
        for name in ("window", "chunk"):
            size = getattr(spec, name)
            if size is not None and size < 1:
                reasons.append(f"{name} is {size}; it must be at least 1, or None.")
        if spec.keep_first < 0:
            reasons.append(f"keep_first is {spec.keep_first}; it must not be negative.")
        if spec.soft_cap is not None and not (math.isfinite(spec.soft_cap) and spec.soft_cap > 0):
            reasons.append(f"soft_cap is {spec.soft_cap}; it must be finite and above 0, or None.")
        return reasons

    def bind(self, rows: Tensor, spec: KVCacheSpec) -> Tensor:
        """View a layer's bytes as keys and values. Nothing is copied.

        The layout follows from `AttentionSpec` alone, so `spec` may be of any class whose page has room for it.

        Args:
            rows: One row a block, uint8, any stride that is a multiple of the element size.
                [num_blocks, >= spec.page_bytes]
            spec: What the layer keeps.

        Returns:
            [num_blocks, 2, block_size, num_kv_heads, head_dim], or with `value_is_key_prefix`
            [num_blocks, block_size, head_dim].

        Raises:
            ConfigError: The bytes cannot be viewed so.
        """
        element_bytes = DTYPE_BYTES[self.spec.kv_dtype]
        shape = self._page_shape()
        layout_bytes = math.prod(shape) * element_bytes
        if rows.dtype != torch.uint8 or rows.dim() != 2:
            raise ConfigError(f"torch_sdpa binds a matrix of uint8, not {rows.dim()} dimensions of {rows.dtype}.")
        if spec.block_size != self.spec.block_size:
            raise ConfigError(
                f"The KV-cache spec has blocks of {spec.block_size} tokens and the attention blocks of "
                f"{self.spec.block_size}. Give both the same block_size."
            )
        if spec.page_bytes < layout_bytes or rows.shape[1] < layout_bytes:
            raise ConfigError(
                f"A block of this layer takes {layout_bytes} bytes; the KV-cache spec's page has {spec.page_bytes} "
                f"and the rows have {rows.shape[1]}. Heads, head_dim or dtype of the two specs differ."
            )
        if rows.stride(1) != 1 or rows.stride(0) % element_bytes or rows.storage_offset() % element_bytes:
            raise ConfigError(
                f"Rows with strides {rows.stride()} from byte {rows.storage_offset()} on cannot be viewed as "
                f"{self.spec.kv_dtype}. Let them start at multiples of {element_bytes} bytes, their bytes in a row."
            )
        return torch.unflatten(rows[:, :layout_bytes].view(self._kv_dtype), 1, shape)

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
            decode_rows = decode_rows[order]
            reach = self._reach(positions[order], positions[order])
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
        # An ordinary tensor even within inference mode: `attend` may run outside of it.
        with torch.inference_mode(False):
            scratch = torch.empty(
                (1 if self.spec.value_is_key_prefix else 2, most_slots, self.spec.num_kv_heads, self.spec.head_dim),
                dtype=self._kv_dtype,
                device=self._device,
            )
        return Plan(units, planned, scratch)

    def write(self, key: Tensor, value: Tensor | None, kv_cache: Tensor, slots: Tensor) -> None:
        """Store the new tokens' keys and values, converted to `kv_dtype`; a token whose slot is -1 is not stored.

        Args:
            key: [num_tokens, num_kv_heads, head_dim]
            value: [num_tokens, num_kv_heads, head_dim_v]; None with `value_is_key_prefix`.
            kv_cache: What `bind` returned for this layer.
            slots: block * block_size + offset, int64, or -1. [num_tokens]
        """
        if not len(slots):
            return
        all_stored = slots.device.type == "cpu" and int(slots.min()) >= 0
        # Picking the stored tokens would make a GPU wait for their number. Instead a token that is not stored puts
        # back what slot 0 holds, in the null block, which no other token is written to.
        places = slots if all_stored else slots.clamp(min=0)
        index = (torch.div(places, self.spec.block_size, rounding_mode="floor"), places % self.spec.block_size)
        for new, stored in zip((key, value), self._keys_and_values(kv_cache), strict=False):
            if new is None:
                raise ValueError("write got no values, and value_is_key_prefix is off.")
            new = new.to(self._kv_dtype)
            if not all_stored:
                new = torch.where((slots >= 0)[:, None, None], new, stored[index])
            stored.index_put_(index, new)

    def attend(
        self, query: Tensor, kv_cache: Tensor, plan: Plan, *, sinks: Tensor | None = None, return_lse: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend from each new token to its row's context, itself included.

        A token that sees nothing gets zeros, and the log-sum-exp of its sinks alone (-inf without).

        Args:
            query: New tokens of all rows, back to back. [num_tokens, num_query_heads, head_dim]
            kv_cache: What `bind` returned for this layer.
            plan: What `plan` returned for this step.
            sinks: This layer's sink logits, when the spec says that there are any. [num_query_heads]
            return_lse: Whether to return the log of the softmax's denominator too.

        Returns:
            One row per query row, same order and dtype. [num_tokens, num_query_heads, head_dim_v]
            With `return_lse` also the natural log-sum-exp of the scores, sinks included, float32.
            [num_tokens, num_query_heads]

        Raises:
            ValueError: `sinks` is missing although the spec has sinks, or given although it has none.
        """
        if (sinks is not None) != self.spec.sinks:
            raise ValueError(f"The spec says sinks={self.spec.sinks}, and attend got sinks={sinks is not None}.")
        shape = (query.shape[0], self.spec.num_query_heads, self.spec.head_dim_v)
        everything_planned = plan.num_planned_tokens == query.shape[0]
        output = query.new_empty(shape) if everything_planned else query.new_zeros(shape)
        lse: Tensor | None = None
        if return_lse:
            lse = query.new_full(shape[:2], -math.inf, dtype=torch.float32)
            if sinks is not None:
                lse.copy_(sinks)
        is_explicit = return_lse or self.spec.sinks or self.spec.soft_cap is not None
        stored = self._keys_and_values(kv_cache)
        for unit in plan.units:
            keys, values = self._fetch(stored, plan.scratch, unit)
            queries = torch.unflatten(query[unit.tokens].to(self._compute_dtype), 1, (-1, self._group_size))
            # Both forms are [batch, heads, num_queries, head_dim]. In a bucket a KV head's queries take the place
            # of positions: grouped heads become plain attention without repeating the keys.
            #   bucket  [num_rows, num_kv_heads, group, head_dim]
            #   tile    [num_kv_heads, group, num_queries, head_dim], the keys repeated by a stride of 0
            if not unit.is_bucket:
                queries = queries.permute(1, 2, 0, 3)
                keys = keys.transpose(0, 1).expand(-1, self._group_size, -1, -1)
                values = values.transpose(0, 1).expand(-1, self._group_size, -1, -1)
            if is_explicit:
                result, unit_lse = self._explicit_softmax(queries, keys, values, unit, sinks)
                if lse is not None:
                    lse[unit.tokens] = _by_token(unit_lse[..., None], unit)[..., 0].to(lse.dtype)
            else:
                result = F.scaled_dot_product_attention(
                    queries, keys, values, attn_mask=unit.mask, is_causal=unit.is_causal, scale=self.spec.scale
                )
            output[unit.tokens] = _by_token(result[..., : self.spec.head_dim_v], unit).to(output.dtype)
        return output if lse is None else (output, lse)

    def _page_shape(self) -> tuple[int, ...]:
        if self.spec.value_is_key_prefix:
            return (self.spec.block_size, self.spec.head_dim)
        return (2, self.spec.block_size, self.spec.num_kv_heads, self.spec.head_dim)

    def _keys_and_values(self, kv_cache: Tensor) -> tuple[Tensor, ...]:
        """Return views of the keys, and of the values if they are stored.

        [num_blocks, block_size, num_kv_heads, head_dim] each
        """
        if self.spec.value_is_key_prefix:
            return (kv_cache.unsqueeze(2),)
        return kv_cache.unbind(1)

    def _to_device(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)

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
        return scratch_bytes // (math.prod(self._page_shape()) * DTYPE_BYTES[self.spec.kv_dtype])

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

    def _fetch(self, stored: tuple[Tensor, ...], scratch: Tensor, unit: Unit) -> tuple[Tensor, Tensor]:
        """Copy a unit's blocks into scratch and return its keys and values.

        Keys are the values too with `value_is_key_prefix`: the caller cuts the result, because kernels want values as
        wide as keys.

        Returns:
            [num_rows, num_kv_heads, end - first, head_dim] each, in the dtype to compute in.
        """
        num_slots = len(unit.block_ids) * self.spec.block_size
        fetched = []
        for source, buffer in zip(stored, scratch, strict=True):
            target = buffer[:num_slots]
            torch.index_select(source, 0, unit.block_ids, out=torch.unflatten(target, 0, (-1, self.spec.block_size)))
            if unit.unseen is not None:
                target.index_fill_(0, unit.unseen, 0)
            rows = torch.unflatten(target, 0, (unit.num_rows, -1))[:, unit.first : unit.end]
            fetched.append(rows.transpose(1, 2).to(self._compute_dtype))
        return fetched[0], fetched[-1]

    def _explicit_softmax(
        self, queries: Tensor, keys: Tensor, values: Tensor, unit: Unit, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Attend by the definition, in float32 at least, with soft cap, sinks and log-sum-exp.

        Args:
            queries: [batch, heads, num_queries, head_dim]
            keys: [batch, heads, num_keys, head_dim]
            values: As `keys`.
            sinks: [num_query_heads]

        Returns:
            Output, [batch, heads, num_queries, head_dim], and log-sum-exp, [batch, heads, num_queries].
        """
        precise = torch.promote_types(self._compute_dtype, torch.float32)
        transposed_keys, values = keys.to(precise).transpose(-1, -2), values.to(precise)
        if sinks is not None:
            sinks = sinks.to(precise).view(-1, self._group_size)
            sinks = sinks if unit.is_bucket else sinks[..., None]
        outputs, lses = [], []
        num_keys = keys.shape[2]
        step = max(1, EXPLICIT_SCORES // (queries.shape[0] * queries.shape[1] * num_keys))
        # A bucket is small enough by construction, and its third dimension is heads.
        step = queries.shape[2] if unit.is_bucket else step
        for start in range(0, queries.shape[2], step):
            part = queries[:, :, start : start + step].to(precise)
            scores = part @ transposed_keys * self.spec.scale
            if self.spec.soft_cap is not None:
                scores = torch.tanh(scores / self.spec.soft_cap) * self.spec.soft_cap
            if unit.is_causal:
                is_seen = torch.ones(part.shape[2], num_keys, dtype=torch.bool, device=scores.device).tril(start)
                scores = scores.masked_fill(~is_seen, -math.inf)
            elif unit.mask is not None:
                mask = unit.mask if unit.is_bucket else unit.mask[:, :, start : start + step]
                scores = scores.masked_fill(~mask, -math.inf)
            lse = torch.logsumexp(scores, dim=-1)
            if sinks is not None:
                lse = torch.logaddexp(lse, sinks)
            # A query that sees nothing has a log-sum-exp of -inf; its weights must become 0, not exp(-inf + inf).
            weights = torch.exp(scores - lse.masked_fill(lse == -math.inf, 0)[..., None])
            outputs.append(weights @ values)
            lses.append(lse)
        return torch.cat(outputs, dim=2), torch.cat(lses, dim=2)


def _by_token(result: Tensor, unit: Unit) -> Tensor:
    """Bring a unit's result back to one row per query token. [num_tokens, num_query_heads, width]"""
    if not unit.is_bucket:
        result = result.permute(2, 0, 1, 3)
    return result.flatten(1, 2)
