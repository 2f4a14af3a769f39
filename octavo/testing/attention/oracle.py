"""Random paged batches, to hold a backend to attention by its definition.

case = random_case(rng, spec)                 histories, queries, pages, tables
output, lse = case.run(backend)               through the backend's own bind, write, plan, attend
wanted_output, wanted_lse = case.expected()   from the histories, without a page in sight
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.core.interfaces.attention import AttentionBackend, AttentionBatch, AttentionSpec
from octavo.core.interfaces.kv_cache_spec import FullAttentionSpec, KVCacheSpec
from octavo.core.interfaces.kv_format import KV_FORMATS
from octavo.testing.attention.definition import attend_by_definition, sees
from octavo.testing.attention.stored_numbers import Floats, stored_numbers

# Every element type reads bytes of ones as NaN, scales included; but int8 alone has another code for it.
NAN_BYTE = 0xFF
INT8_NAN_BYTE = 0x80

# Formats that cut off what is too large, infinities too. They take numbers as they come, so numbers of size 1 would
# have three or four codes of int8 between them.
CUTTING_OFF = ("fp8_e4m3", "int8")
INT8_NUMBER_SIZE = 40.0


@dataclass(frozen=True)
class KeysOnlySpec(KVCacheSpec):
    """One key a token, whose first numbers are the value too.

    Attributes:
        head_dim: Numbers in one key.
        dtype: How numbers are stored, a name of KV_FORMATS.
    """

    kind: ClassVar[str] = "keys_only"
    head_dim: int
    dtype: str

    @property
    def page_bytes(self) -> int:
        return KV_FORMATS[self.dtype].page_bytes(self.block_size, self.head_dim)


def kv_cache_spec_for(spec: AttentionSpec) -> KVCacheSpec:
    """Return what a layer of `spec` keeps, as plain as it can be."""
    if spec.value_is_key_prefix:
        return KeysOnlySpec(spec.block_size, spec.head_dim, spec.kv_dtype)
    return FullAttentionSpec(spec.block_size, spec.num_kv_heads, spec.head_dim, spec.kv_dtype)


def number_size(spec: AttentionSpec) -> float:
    """Return the typical size of a case's keys and values, such that the codes of a format are put to use."""
    return INT8_NUMBER_SIZE if spec.kv_dtype == "int8" else 1.0


@dataclass(frozen=True)
class RowHistory:
    """One row: everything its tokens ever stored, and the queries of its new ones.

    Attributes:
        keys: [context_len, num_kv_heads, head_dim]
        values: [context_len, num_kv_heads, head_dim_v]
        queries: Of the last `num_queries` tokens. [num_queries, num_query_heads, head_dim]
        blocks: Block ids of its positions, 0 for a block that no query sees. [ceil(context_len / block_size)]
    """

    keys: Tensor
    values: Tensor
    queries: Tensor
    blocks: NDArray[np.int32]

    @property
    def context_len(self) -> int:
        return len(self.keys)

    @property
    def num_queries(self) -> int:
        return len(self.queries)

    def slots(self, start: int, end: int, block_size: int) -> NDArray[np.int64]:
        """Return where positions [start, end) are stored: -1 for those in the null block. [end - start]"""
        positions = np.arange(start, end)
        blocks = self.blocks[positions // block_size].astype(np.int64)
        return np.where(blocks == 0, -1, blocks * block_size + positions % block_size)


@dataclass(frozen=True)
class PagedCase:
    """A batch in the middle of its life: rows with a history, laid out in pages.

    Attributes:
        spec: The layer.
        rows: Rows of the batch, those of exactly one query first; some may have neither tokens nor context.
        num_blocks: Blocks of the cache, the null block included.
        max_blocks: Width of the block table.
        table_filler: What fills table entries past each row's context. [num_rows, max_blocks]
        sinks: Sink logits, when the spec says that there are any. [num_query_heads]
        seed: Of the garbage in the cache, and of how the histories are cut into steps.
        page_padding_bytes: Bytes between the pages of two blocks.
    """

    spec: AttentionSpec
    rows: list[RowHistory]
    num_blocks: int
    max_blocks: int
    table_filler: NDArray[np.int32]
    sinks: Tensor | None = None
    seed: int = 0
    page_padding_bytes: int = 0
    kv_cache_spec: KVCacheSpec = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "kv_cache_spec", kv_cache_spec_for(self.spec))

    def only(self, row: int) -> PagedCase:
        """Return the same case with one row alone in the batch, its pages where they were."""
        return replace_rows(self, [row])

    def batch(self) -> AttentionBatch:
        """Return the step that computes every row's queries."""
        query_starts = np.cumsum([0, *(row.num_queries for row in self.rows)]).astype(np.int32)
        context_lens = np.array([row.context_len for row in self.rows], dtype=np.int32)
        block_table = self.table_filler.copy()
        for r, row in enumerate(self.rows):
            block_table[r, : len(row.blocks)] = row.blocks
        return make_batch(query_starts, context_lens, block_table, self.new_slots(), self.spec.device)

    def new_slots(self) -> NDArray[np.int64]:
        """Return where the step stores its tokens. [num_tokens]"""
        block_size = self.spec.block_size
        return np.concatenate(
            [row.slots(row.context_len - row.num_queries, row.context_len, block_size) for row in self.rows]
        )

    def queries(self) -> Tensor:
        """Return the new tokens' queries. [num_tokens, num_query_heads, head_dim]"""
        return torch.cat([row.queries for row in self.rows]).to(self.spec.device)

    def new_keys_and_values(self) -> tuple[Tensor, Tensor | None]:
        """Return what the step stores. [num_tokens, num_kv_heads, head_dim] and [..., head_dim_v]"""
        keys = torch.cat([row.keys[row.context_len - row.num_queries :] for row in self.rows])
        values = torch.cat([row.values[row.context_len - row.num_queries :] for row in self.rows])
        return keys.to(self.spec.device), self._stored_values(values)

    def empty_rows(self) -> Tensor:
        """Return the bytes of a cache in which every slot holds NaN. [num_blocks, page bytes and padding]"""
        row_bytes = self.kv_cache_spec.page_bytes + self.page_padding_bytes
        nan_byte = INT8_NAN_BYTE if self.spec.kv_dtype == "int8" else NAN_BYTE
        return torch.full((self.num_blocks, row_bytes), nan_byte, dtype=torch.uint8, device=self.spec.device)

    def write_history(self, backend: AttentionBackend, kv_cache: Any) -> None:
        """Store what came before the step in several steps of random size, as chunked prefill would.

        Rows may share blocks: each slot is written once, and those that the step itself fills are left out. Afterwards
        the kept slots that no query of the step sees are overwritten with infinities, or with NaN in a format that has
        no infinity: what is there is nobody's business any more.
        """
        infinity = torch.nan if self.spec.kv_dtype in CUTTING_OFF else torch.inf
        rng = np.random.default_rng(self.seed)
        done = [0] * len(self.rows)
        ends = [row.context_len - row.num_queries for row in self.rows]
        while any(d < e for d, e in zip(done, ends, strict=True)):
            starts = list(done)
            done = [min(e, d + int(rng.integers(0, 2 + e))) for d, e in zip(done, ends, strict=True)]
            self._write_spans(backend, kv_cache, starts, done)
        seen_slots = np.concatenate([self._seen_history_slots(row) for row in self.rows])
        for row in self.rows:
            first_query = row.context_len - row.num_queries
            slots = row.slots(0, first_query, self.spec.block_size)
            unseen = np.flatnonzero(~np.isin(slots, seen_slots) & (slots >= 0))
            if len(unseen):
                garbage = torch.full_like(row.keys[unseen], infinity)
                values = torch.full_like(row.values[unseen], -infinity)
                backend.write(
                    garbage.to(self.spec.device),
                    self._stored_values(values),
                    kv_cache,
                    torch.from_numpy(slots[unseen]).to(self.spec.device),
                )

    def write_at_once(self, backend: AttentionBackend, kv_cache: Any) -> None:
        """Store all that came before the step in one go."""
        ends = [row.context_len - row.num_queries for row in self.rows]
        self._write_spans(backend, kv_cache, [0] * len(ends), ends)

    def write_new_tokens(self, backend: AttentionBackend, kv_cache: Any) -> None:
        """Store what the step itself stores."""
        keys, values = self.new_keys_and_values()
        backend.write(keys, values, kv_cache, self.batch().slots)

    def filled_cache(self, backend: AttentionBackend) -> Any:
        """Return a fresh cache, bound, with histories and new tokens written."""
        kv_cache = backend.bind(self.empty_rows(), self.kv_cache_spec)
        self.write_history(backend, kv_cache)
        self.write_new_tokens(backend, kv_cache)
        return kv_cache

    def attend(self, backend: AttentionBackend, kv_cache: Any, plan: Any) -> tuple[Tensor, Tensor]:
        """Return the backend's output and log-sum-exp over a filled cache."""
        result = backend.attend(self.queries(), kv_cache, plan, sinks=self.sinks, return_lse=True)
        assert isinstance(result, tuple)
        return result

    def attend_without_lse(self, backend: AttentionBackend, kv_cache: Any, plan: Any) -> Tensor:
        """Return the backend's output when nobody asks for the log-sum-exp: often another code path."""
        result = backend.attend(self.queries(), kv_cache, plan, sinks=self.sinks)
        assert isinstance(result, Tensor)
        return result

    def run(self, backend: AttentionBackend) -> tuple[Tensor, Tensor]:
        """Return output and log-sum-exp, the output computed without asking for the latter."""
        kv_cache = self.filled_cache(backend)
        plan = backend.plan(self.batch())
        output = self.attend_without_lse(backend, kv_cache, plan)
        _, lse = self.attend(backend, kv_cache, plan)
        return output, lse

    def expected(self, spec: AttentionSpec | None = None) -> tuple[Floats, Floats]:
        """Return output and log-sum-exp by definition.

        Args:
            spec: The rule to follow, when not the case's own: to see what a mistake in it would change.

        Returns:
            [num_tokens, num_query_heads, head_dim_v] and [num_tokens, num_query_heads]
        """
        spec = spec or self.spec
        sinks = _float64(self.sinks) if self.sinks is not None and spec.sinks else None
        results = [
            attend_by_definition(spec, _float64(row.queries), *stored_keys_and_values(row, spec), sinks)
            for row in self.rows
        ]
        return np.concatenate([output for output, _ in results]), np.concatenate([lse for _, lse in results])

    def _write_spans(
        self, backend: AttentionBackend, kv_cache: Any, starts: Sequence[int], ends: Sequence[int]
    ) -> None:
        spans = list(zip(self.rows, starts, ends, strict=True))
        keys = torch.cat([row.keys[s:e] for row, s, e in spans]).to(self.spec.device)
        values = torch.cat([row.values[s:e] for row, s, e in spans])
        slots = np.concatenate([row.slots(s, e, self.spec.block_size) for row, s, e in spans])
        is_first = np.zeros(len(slots), dtype=np.bool_)
        is_first[np.unique(slots, return_index=True)[1]] = True
        slots = np.where(is_first & ~np.isin(slots, self.new_slots()), slots, -1)
        backend.write(keys, self._stored_values(values), kv_cache, torch.from_numpy(slots).to(self.spec.device))

    def _seen_history_slots(self, row: RowHistory) -> NDArray[np.int64]:
        """Return where those tokens of a row's past are that some query of the step sees. [num_seen]"""
        first_query = row.context_len - row.num_queries
        is_seen = sees(self.spec, np.arange(first_query, row.context_len), np.arange(first_query)).any(axis=0)
        return row.slots(0, first_query, self.spec.block_size)[is_seen]

    def _stored_values(self, values: Tensor) -> Tensor | None:
        return None if self.spec.value_is_key_prefix else values.to(self.spec.device)


def stored_keys_and_values(row: RowHistory, spec: AttentionSpec) -> tuple[Floats, Floats]:
    """Return a row's history as it is read back. [context_len, num_kv_heads, head_dim] and [..., head_dim_v]"""
    keys = stored_numbers(row.keys, spec.kv_dtype)
    if spec.value_is_key_prefix:
        return keys, keys[..., : spec.head_dim_v]
    return keys, stored_numbers(row.values, spec.kv_dtype)


def replace_rows(case: PagedCase, rows: Sequence[int]) -> PagedCase:
    """Return `case` with only the given rows, in that order, each in the pages that it had."""
    return replace(case, rows=[case.rows[r] for r in rows], table_filler=case.table_filler[list(rows)])


def move_blocks(case: PagedCase, ids: NDArray[np.int32], places: NDArray[np.integer[Any]]) -> PagedCase:
    """Return `case` with the blocks `ids` where `places` says, and all others where they were."""
    moved = np.arange(max(case.num_blocks, int(ids.max(initial=0)) + 1), dtype=np.int32)
    moved[ids] = places
    return replace(case, rows=[replace(row, blocks=moved[row.blocks]) for row in case.rows])


def make_batch(
    query_starts: NDArray[np.int32],
    context_lens: NDArray[np.int32],
    block_table: NDArray[np.int32],
    slots: NDArray[np.int64],
    device: str = "cpu",
) -> AttentionBatch:
    """Put a step's columns on the device. Counts the rows of one token at the front."""
    is_decode = np.diff(query_starts) == 1
    num_decode_rows = len(is_decode) if is_decode.all() else int(np.argmin(is_decode))
    return AttentionBatch(
        num_decode_rows=num_decode_rows,
        query_starts=torch.from_numpy(query_starts).to(device),
        context_lens=torch.from_numpy(context_lens).to(device),
        block_table=torch.from_numpy(block_table).to(device),
        slots=torch.from_numpy(slots).to(device),
        query_starts_host=query_starts,
        context_lens_host=context_lens,
        block_table_host=block_table,
    )


def random_lengths(
    rng: np.random.Generator, *, num_decode: int, num_prefill: int, num_padding: int, max_context: int
) -> list[tuple[int, int]]:
    """Draw (queries, context) of each row: decode rows, then prefill rows with and without a prefix and padding."""
    decode = [(1, int(rng.integers(1, max_context + 1))) for _ in range(num_decode)]
    others = []
    for i in range(num_prefill):
        context_len = int(rng.integers(2, max(3, max_context + 1)))
        num_queries = context_len if i % 2 == 0 else int(rng.integers(2, context_len + 1))
        others.append((num_queries, context_len))
    others += [(0, 0)] * num_padding
    return decode + [others[i] for i in rng.permutation(len(others))]


def make_case(
    rng: np.random.Generator,
    spec: AttentionSpec,
    lengths: Sequence[tuple[int, int]],
    *,
    page_padding_bytes: int = 0,
    score_size: float = 1.0,
) -> PagedCase:
    """Lay out rows of given lengths in permuted pages.

    Blocks that no query of their row sees get the null block. Table entries past a row's context are 0, or the id
    of somebody else's block, or one that does not exist.

    Args:
        lengths: (number of queries, context length) of each row, decode rows first.
        page_padding_bytes: Bytes between the pages of two blocks; a multiple of the element size.
        score_size: Typical size of a query's numbers where keys have size 1: larger ones make sharper attention.
    """
    dtype: torch.dtype = getattr(torch, spec.dtype)

    def draw(*shape: int, size: float = 1.0) -> Tensor:
        return torch.from_numpy(rng.standard_normal(shape) * size).to(dtype)

    needed = [-(-context_len // spec.block_size) for _, context_len in lengths]
    num_blocks = 1 + sum(needed) + 3
    free = iter((rng.permutation(num_blocks - 1) + 1).tolist())
    rows = []
    for (num_queries, context_len), num_row_blocks in zip(lengths, needed, strict=True):
        keys = draw(context_len, spec.num_kv_heads, spec.head_dim, size=number_size(spec))
        values = draw(context_len, spec.num_kv_heads, spec.head_dim_v, size=number_size(spec))
        if spec.value_is_key_prefix:
            values = keys[..., : spec.head_dim_v]
        blocks = np.array([next(free) for _ in range(num_row_blocks)], dtype=np.int32)
        query_positions = np.arange(context_len - num_queries, context_len)
        seen = np.flatnonzero(sees(spec, query_positions, np.arange(context_len)).any(axis=0))
        blocks[np.setdiff1d(np.arange(num_row_blocks), seen // spec.block_size)] = 0
        queries = draw(num_queries, spec.num_query_heads, spec.head_dim, size=score_size / number_size(spec))
        rows.append(RowHistory(keys, values, queries, blocks))
    max_blocks = max(needed, default=0) + 2
    filler = rng.choice(
        np.array([0, 1, num_blocks - 1, num_blocks + 1000], dtype=np.int32), size=(len(lengths), max_blocks)
    )
    sinks = draw(spec.num_query_heads).float().to(spec.device) if spec.sinks else None
    return PagedCase(
        spec=spec,
        rows=rows,
        num_blocks=num_blocks,
        max_blocks=max_blocks,
        table_filler=filler,
        sinks=sinks,
        seed=int(rng.integers(1 << 31)),
        page_padding_bytes=page_padding_bytes,
    )


def random_case(
    rng: np.random.Generator,
    spec: AttentionSpec,
    *,
    num_decode: int = 5,
    num_prefill: int = 3,
    num_padding: int = 1,
    max_context: int = 70,
    page_padding_bytes: int = 0,
) -> PagedCase:
    """Draw a batch of decode rows, then prefill rows with and without a prefix, and padding rows between these."""
    lengths = random_lengths(
        rng, num_decode=num_decode, num_prefill=num_prefill, num_padding=num_padding, max_context=max_context
    )
    return make_case(rng, spec, lengths, page_padding_bytes=page_padding_bytes)


def _float64(tensor: Tensor) -> Floats:
    array: Floats = tensor.detach().to("cpu", torch.float64).numpy()
    return array
