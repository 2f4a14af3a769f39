"""Starts the kernels for layers of one spec: what `plan`, `write`, `attend` and `gather` of the backend do.

plan     decode rows ──► grid, splits              from shapes alone
         other rows  ──► tiles, longest first      one copy to the device
attend   decode rows ──► attention kernel (──► join of splits) ┐
         other rows  ──► attention kernel ─────────────────────┴──► output
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from octavo.attention_backends.triton.attention_kernel import LOG2_E, attention_kernel
from octavo.attention_backends.triton.gather_kernel import gather_kernel
from octavo.attention_backends.triton.heuristics import (
    Device,
    HeadDims,
    compute_type,
    decode_tile,
    joined_vectors_per_program,
    next_power_of_two,
    num_splits,
    prefill_tile,
    vectors_per_program,
)
from octavo.attention_backends.triton.launch import Start, start
from octavo.attention_backends.triton.options import TritonOptions
from octavo.attention_backends.triton.pages import BoundPages
from octavo.attention_backends.triton.split_kernel import join_splits_kernel
from octavo.attention_backends.triton.tuning import LEAST_TIMED_TILES, tuned_attention_kernel
from octavo.attention_backends.triton.write_kernel import write_kernel
from octavo.core.interfaces.attention import AttentionBatch, AttentionSpec
from octavo.core.interfaces.kv_format import KV_FORMATS

# Given at every start: the compiler's default depends on a variable of the environment, and Triton 3.9 warns of that.
FUSED = {"enable_fp_fusion": True}
# Quantising has to round as `KVFormat.quantise` does, operation by operation.
UNFUSED = {"enable_fp_fusion": False}
# More than any context has.
MOST_TOKENS = 1 << 30


@dataclass(frozen=True)
class Results:
    """Where a launch of the attention kernel puts what it finds.

    Attributes:
        num_splits: Parts of each row's keys, whose results stand one after another. 1 is the whole.
        output: [num_splits, num_tokens, num_query_heads, head_dim_v], or without the first for the whole.
        lse: float32, natural; None where nobody asks for it. Shaped as `output`, but for its last dimension.
    """

    num_splits: int
    output: Tensor
    lse: Tensor | None


@dataclass(frozen=True)
class Plan:
    """What is the same in all layers of a step. A captured step reads its tensors again, and must keep them.

    Attributes:
        num_tokens: New tokens that are attended from.
        num_decode_rows: Rows at the front with one token each.
        query_starts: As in the batch; so are the next two.
        context_lens: [num_rows]
        block_table: [num_rows, max_blocks]
        splits: Partial results of decode rows, float32, which the layers of a step write one after another. None for
            a single pass, and where there are no decode rows.
        tiles: Row and first line of each program of the other rows, int32; None where there are none. [num_tiles, 2]
        is_long: Whether these programs have enough keys, on average, that timing them means something.
    """

    num_tokens: int
    num_decode_rows: int
    query_starts: Tensor
    context_lens: Tensor
    block_table: Tensor
    splits: Results | None
    tiles: Tensor | None
    is_long: bool = False


class PagedAttention:
    """The kernels, with all that a spec and a device fix about them.

    Args:
        spec: The layers.
        device: What the rules know of the device.
        options: What they are not to decide.
        start: Starts kernels.
    """

    def __init__(self, spec: AttentionSpec, device: Device, options: TritonOptions, start: Start = start) -> None:
        self.spec = spec
        self._start = start
        self.decode_tile = decode_tile(spec, device, options)
        self.prefill_tile = prefill_tile(spec, device, options)
        self._device, self._options = device, options
        self._torch_device = torch.device(spec.device)
        self._dtype: torch.dtype = getattr(torch, spec.dtype)
        self._group = spec.num_query_heads // spec.num_kv_heads
        self._tiles_per_row = -(-self._group // self.decode_tile.lines)
        dims = HeadDims.of(spec, device)
        kv_format = KV_FORMATS[spec.kv_dtype]
        # In the kernels, a format is what a number is: scales are told apart from it.
        stored = {
            "BLOCK_SIZE": spec.block_size,
            "FORMAT": kv_format.name.removesuffix("_per_token_head") if kv_format.is_quantised else "float",
            "HAS_SCALES": kv_format.has_page_scales,
        }
        attention = {
            **stored,
            **FUSED,
            "NUM_KV_HEADS": spec.num_kv_heads,
            "GROUP": self._group,
            "HEAD_MAIN": dims.main,
            "HEAD_REST": dims.rest,
            "BLOCK_D": dims.main_block,
            "BLOCK_REST": dims.rest_block,
            # Positions are int32 there. What is longer than any context limits nothing.
            "WINDOW": _limit(spec.window),
            "CHUNK": _limit(spec.chunk),
            "KEEP_FIRST": min(spec.keep_first, MOST_TOKENS),
            "HAS_CAP": spec.soft_cap is not None,
            "HAS_SINKS": spec.sinks,
            "VALUE_IS_KEY": spec.value_is_key_prefix,
            "COMPUTE": getattr(tl, compute_type(spec, device)),
        }
        decode = {
            **attention,
            "IS_DECODE": True,
            "TILES_PER_ROW": self._tiles_per_row,
            "BLOCK_M": self.decode_tile.lines,
            "BLOCK_N": self.decode_tile.keys,
            "num_warps": self.decode_tile.num_warps,
            "num_stages": self.decode_tile.num_stages,
        }
        self._decode = {**decode, "IS_SPLIT": False}
        self._decode_split = {**decode, "IS_SPLIT": True}
        prefill = {
            **attention,
            "IS_DECODE": False,
            "TILES_PER_ROW": 1,
            "IS_SPLIT": False,
            "BLOCK_M": self.prefill_tile.lines,
            "BLOCK_N": self.prefill_tile.keys,
        }
        self._prefill_tuned = prefill
        self._prefill = {
            **prefill,
            "num_warps": self.prefill_tile.num_warps,
            "num_stages": self.prefill_tile.num_stages,
        }
        self._is_tuned = options.tune and options.num_warps is None and options.num_stages is None
        self._tuned_kernel = tuned_attention_kernel(self.prefill_tile, spec, device)
        self._join_block = joined_vectors_per_program(dims.main_block, device)
        self._join = {**FUSED, "HEAD": dims.main, "BLOCK_D": dims.main_block, "BLOCK_V": self._join_block}
        block = next_power_of_two(spec.head_dim)
        self._vector_block = vectors_per_program(block, device)
        vectors = {**stored, **UNFUSED, "HEAD": spec.head_dim, "BLOCK_D": block, "BLOCK_V": self._vector_block}
        self._write = {**vectors, "NUM_KV_HEADS": spec.num_kv_heads, "HAS_VALUES": not spec.value_is_key_prefix}
        self._gather = vectors
        # The products' scale and the cap, for scores in base 2; with a cap, what `_attend_tile` takes a tanh of.
        cap = spec.soft_cap
        self._score_factor = spec.scale * LOG2_E.value if cap is None else 2 * LOG2_E.value * spec.scale / cap
        self._cap = 0.0 if cap is None else cap * LOG2_E.value

    def plan(self, batch: AttentionBatch) -> Plan:
        """Cut a step into programs. Of decode rows, only shapes are looked at."""
        tiles, is_long = self._tiles(batch) if batch.num_decode_rows < batch.num_rows else (None, False)
        return Plan(
            batch.num_tokens if batch.num_decode_rows < batch.num_rows else batch.num_rows,
            batch.num_decode_rows,
            # The kernels take it that numbers lie next to each other, as the engine has them.
            batch.query_starts.contiguous(),
            batch.context_lens.contiguous(),
            _with_numbers_in_a_row(batch.block_table),
            self._splits(batch.num_decode_rows, batch.block_table.shape[1]),
            tiles,
            is_long,
        )

    def write(self, key: Tensor, value: Tensor | None, pages: BoundPages, slots: Tensor) -> None:
        """Store new tokens' keys and values."""
        num_vectors = len(slots) * self.spec.num_kv_heads
        if not num_vectors:
            return
        key = _with_numbers_in_a_row(key)
        value_strides = (0, 0)
        if value is not None:
            value = _with_numbers_in_a_row(value)
            value_strides = (value.stride(0), value.stride(1))
        with self._on_device():
            self._start(
                write_kernel,
                (-(-num_vectors // self._vector_block),),
                key,
                value,
                slots.contiguous(),
                pages.keys,
                pages.values,
                pages.key_scales,
                pages.value_scales,
                num_vectors,
                key.stride(0),
                key.stride(1),
                *value_strides,
                *pages.strides,
                *pages.scale_strides,
                **self._write,
            )

    def attend(
        self, query: Tensor, pages: BoundPages, plan: Plan, sinks: Tensor | None, return_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from all tokens of a plan; the log-sum-exp is None unless it is asked for."""
        query = _with_numbers_in_a_row(query)
        shape = (query.shape[0], self.spec.num_query_heads, self.spec.head_dim_v)
        # Tokens that no row has see nothing.
        is_whole = plan.num_tokens == query.shape[0]
        output = query.new_empty(shape) if is_whole else query.new_zeros(shape)
        lse = None
        if return_lse:
            lse = output.new_empty(shape[:2], dtype=torch.float32)
            if not is_whole:
                lse.fill_(-math.inf)
        results = Results(1, output, lse)
        with self._on_device():
            if plan.num_decode_rows:
                self._attend_decode_rows(query, pages, plan, sinks, results)
            if plan.tiles is not None:
                self._attend_other_rows(query, pages, plan, plan.tiles, sinks, results)
        return output, lse

    def gather(self, pages: BoundPages, slots: Tensor) -> Tensor:
        """Fetch stored keys. [num_keys, head_dim]"""
        output = torch.empty((len(slots), self.spec.head_dim), dtype=self._dtype, device=pages.keys.device)
        if len(slots):
            with self._on_device():
                self._start(
                    gather_kernel,
                    (-(-len(slots) // self._vector_block),),
                    slots.contiguous(),
                    pages.keys,
                    pages.key_scales,
                    output,
                    len(slots),
                    *pages.strides[:2],
                    *pages.scale_strides[:2],
                    **self._gather,
                )
        return output

    def _splits(self, num_rows: int, table_width: int) -> Results | None:
        num_programs = num_rows * self._tiles_per_row * self.spec.num_kv_heads
        count = num_splits(num_programs, table_width * self.spec.block_size, self._device, self._options)
        if count == 1 or not num_rows:
            return None
        shape = (count, num_rows, self.spec.num_query_heads, self.spec.head_dim_v)
        # Ordinary tensors even within inference mode: `attend` may run outside of it.
        with torch.inference_mode(False):
            output = torch.empty(shape, dtype=torch.float32, device=self._torch_device)
            return Results(count, output, torch.empty(shape[:3], dtype=torch.float32, device=self._torch_device))

    def _tiles(self, batch: AttentionBatch) -> tuple[Tensor | None, bool]:
        """List the programs of rows that are no decode rows, the longest first; and say whether they are long."""
        rows, block = np.arange(batch.num_decode_rows, batch.num_rows), self.prefill_tile.lines
        query_lens = np.diff(batch.query_starts_host)[rows].astype(np.int64)
        num_lines = query_lens * self._group
        tiles_of_row = -(-num_lines // block)
        total = int(tiles_of_row.sum())
        if not total:
            return None, False
        first_of_row = np.cumsum(tiles_of_row) - tiles_of_row
        first_line = (np.arange(total) - np.repeat(first_of_row, tiles_of_row)) * block
        last_line = np.minimum(first_line + block, np.repeat(num_lines, tiles_of_row)) - 1
        first_position = np.repeat(batch.context_lens_host[rows] - query_lens, tiles_of_row)
        num_keys = first_position + last_line // self._group + 1
        order = np.argsort(-num_keys, kind="stable")
        most_seen = min(self.spec.window or num_keys.max(), self.spec.chunk or num_keys.max())
        is_long = bool(np.minimum(num_keys, most_seen).mean() >= LEAST_TIMED_TILES * self.prefill_tile.keys)
        tiles: NDArray[np.int32] = np.stack((np.repeat(rows, tiles_of_row), first_line), axis=1)[order].astype(np.int32)
        return torch.from_numpy(tiles).to(self._torch_device, non_blocking=True), is_long

    def _attend_decode_rows(
        self, query: Tensor, pages: BoundPages, plan: Plan, sinks: Tensor | None, results: Results
    ) -> None:
        found = plan.splits or results
        grid = (plan.num_decode_rows * self._tiles_per_row, self.spec.num_kv_heads, found.num_splits)
        constants = self._decode if plan.splits is None else self._decode_split
        self._attend(attention_kernel, grid, constants, query, pages, plan, None, sinks, found)
        if plan.splits is None:
            return
        num_vectors = plan.num_decode_rows * self.spec.num_query_heads
        self._start(
            join_splits_kernel,
            (-(-num_vectors // self._join_block),),
            found.output,
            found.lse,
            results.output,
            results.lse,
            num_vectors,
            found.num_splits,
            HAS_LSE=results.lse is not None,
            **self._join,
        )

    def _attend_other_rows(
        self, query: Tensor, pages: BoundPages, plan: Plan, tiles: Tensor, sinks: Tensor | None, results: Results
    ) -> None:
        grid = (len(tiles), self.spec.num_kv_heads, 1)
        # Timing pays, and means something, where the GPU has enough to do.
        is_large = plan.is_long and grid[0] * grid[1] >= 2 * self._device.num_processors
        if self._is_tuned and is_large and not self._is_capturing():
            self._attend(self._tuned_kernel, grid, self._prefill_tuned, query, pages, plan, tiles, sinks, results)
        else:
            self._attend(attention_kernel, grid, self._prefill, query, pages, plan, tiles, sinks, results)

    def _attend(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        constants: dict[str, Any],
        query: Tensor,
        pages: BoundPages,
        plan: Plan,
        tiles: Tensor | None,
        sinks: Tensor | None,
        results: Results,
    ) -> None:
        self._start(
            kernel,
            grid,
            query,
            pages.keys,
            pages.values,
            pages.key_scales,
            pages.value_scales,
            None if sinks is None else sinks.contiguous(),
            results.output,
            results.lse,
            plan.query_starts,
            plan.context_lens,
            plan.block_table,
            tiles,
            query.stride(0),
            query.stride(1),
            *pages.strides,
            *pages.scale_strides,
            plan.block_table.stride(0),
            plan.num_decode_rows,
            results.num_splits,
            self._score_factor,
            self._cap,
            HAS_LSE=results.lse is not None,
            **constants,
        )

    def _is_capturing(self) -> bool:
        return self._torch_device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def _on_device(self) -> AbstractContextManager[Any]:
        """Make the spec's GPU the current one: Triton starts kernels there."""
        index = self._torch_device.index
        if self._torch_device.type != "cuda" or index is None or index == torch.cuda.current_device():
            return nullcontext()
        return torch.cuda.device(index)


def _limit(size: int | None) -> int:
    """Return a window or a chunk as the kernels have it: 0 for none."""
    return 0 if size is None or size >= MOST_TOKENS else size


def _with_numbers_in_a_row(vectors: Tensor) -> Tensor:
    """Return the tensor with a last stride of 1, which a projection's views have; tokens and heads may lie apart."""
    return vectors if vectors.stride(-1) == 1 else vectors.contiguous()
