"""Positions and slots by a Triton kernel: one launch a step, for all tokens of all KV-cache groups.

    slot = table[row, position // block_size] * block_size + position % block_size

Imported only where it is used: on a GPU, or with Triton's interpreter.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.core.device_tables import DeviceTables

# Tokens that a program does.
TOKENS_PER_PROGRAM = 128
# How often the rows among which a token's row is looked for are halved: enough for 65536, the most that can run.
NUM_HALVINGS = 16


@triton.jit(do_not_specialize=["num_tokens", "num_rows", "slots_stride"])  # type: ignore[untyped-decorator]
def slots_kernel(  # type: ignore[no-untyped-def]
    query_starts,
    context_lens,
    rows,
    cells,
    places,
    positions,
    slots,
    num_tokens,
    num_rows,
    slots_stride,
    TOKENS: tl.constexpr,
    HALVINGS: tl.constexpr,
):
    """Fill in positions and slots as `SlotFiller` says, some tokens of a group a program.

    Args:
        cells: `DeviceTables.cells`.
        places: `DeviceTables.places`.
        slots_stride: From one group's slots to the next one's.
    """
    group = tl.program_id(1)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    is_token = token < num_tokens
    # The last row that begins at the token or before it: query_starts[first] <= token < query_starts[end].
    first = tl.zeros([TOKENS], tl.int32)
    end = first + num_rows
    for _ in tl.static_range(HALVINGS):
        middle = (first + end) // 2
        begins_before = tl.load(query_starts + middle, mask=is_token, other=0) <= token
        first = tl.where(begins_before, middle, first)
        end = tl.where(begins_before, end, middle)
    row_end = tl.load(query_starts + first + 1, mask=is_token, other=0)
    context_len = tl.load(context_lens + first, mask=is_token, other=0)
    position = tl.where(context_len > 0, context_len - row_end + token, 0).to(tl.int64)

    table = tl.load(places + 3 * group)
    width = tl.load(places + 3 * group + 1)
    block_size = tl.load(places + 3 * group + 2)
    column = position // block_size
    # A row without context is padding, and has no blocks.
    has_block = (context_len > 0) & (column < width)
    row_of_table = tl.load(rows + first, mask=is_token, other=0)
    block = tl.load(cells + table + row_of_table * width + column, mask=has_block, other=0).to(tl.int64)
    slot = tl.where(has_block, block * block_size + position % block_size, -1)
    tl.store(slots + group.to(tl.int64) * slots_stride + token, slot, mask=is_token)
    # All groups have the same positions.
    if group == 0:
        tl.store(positions + token, position, mask=is_token)


def fill_slots(
    query_starts: Tensor,
    context_lens: Tensor,
    rows: Tensor,
    tables: DeviceTables,
    *,
    positions: Tensor,
    slots: Tensor,
) -> None:
    """See `SlotFiller`. A group's slots lie back to back; the groups may lie further apart."""
    kernel: Any = slots_kernel
    # Triton launches on the current device, which need not be the one of the tensors.
    with torch.cuda.device_of(slots):  # type: ignore[no-untyped-call]
        kernel[(triton.cdiv(len(positions), TOKENS_PER_PROGRAM), tables.num_groups)](
            query_starts,
            context_lens,
            rows,
            tables.cells,
            tables.places,
            positions,
            slots,
            len(positions),
            len(context_lens),
            slots.stride(0),
            TOKENS=TOKENS_PER_PROGRAM,
            HALVINGS=NUM_HALVINGS,
            num_warps=TOKENS_PER_PROGRAM // 32,
            # There is nothing to fuse; left open, newer versions warn.
            enable_fp_fusion=False,
        )
