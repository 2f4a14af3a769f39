"""A step's tensors on a GPU: everything goes over in one copy, and what can be worked out is worked out there.

host     token ids, query starts, context lengths, rows, changed cells ──► one int32 buffer
                                    │  one copy
device   token ids ─► int64         ▼
         changed cells ─► DeviceTables ─► rows of block tables
         query starts, context lengths, tables ─► positions, slots
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from octavo.core.device_tables import DeviceTables
from octavo.core.interfaces import AttentionBatch
from octavo.core.step_inputs import StepInputs, query_starts_of
from octavo.core.step_plan import Int32Array, StepPlan

# Each column of the buffer begins at a multiple of 16 bytes, so that Triton compiles its kernels once: it makes other
# code for pointers that are multiples of 16 than for those that are not.
_ALIGNMENT = 4


class SlotFiller(Protocol):
    """Works out where tokens stand and where their keys and values go."""

    def __call__(
        self,
        query_starts: Tensor,
        context_lens: Tensor,
        rows: Tensor,
        tables: DeviceTables,
        *,
        positions: Tensor,
        slots: Tensor,
    ) -> None:
        """Fill in positions and slots. The tokens of a row without context are padding: position 0, and slot -1.

        Args:
            query_starts: int32. [num_rows + 1]
            context_lens: int32. [num_rows]
            rows: Each row's place in the tables: 0 for null, r + 1 for the request in row r. int32. [num_rows]
            tables: Of all groups.
            positions: To be filled, int64. [num_tokens]
            slots: To be filled: block * block_size + offset, int64. [num_groups, num_tokens]
        """


def slot_filler(device: str) -> SlotFiller:
    """Return the kernel where Triton can compile and start it, and torch's operations elsewhere."""
    # Triton builds what starts a kernel with a C compiler.
    has_compiler = "CC" in os.environ or any(map(shutil.which, ("clang", "gcc")))
    if torch.device(device).type == "cuda" and find_spec("triton") is not None and has_compiler:
        # Imported here, for only a GPU needs it, and it is not installed everywhere.
        from octavo.core.slot_kernel import fill_slots

        return fill_slots
    return fill_slots_with_torch


def fill_slots_with_torch(
    query_starts: Tensor,
    context_lens: Tensor,
    rows: Tensor,
    tables: DeviceTables,
    *,
    positions: Tensor,
    slots: Tensor,
) -> None:
    """See `SlotFiller`. It waits for nothing on the device."""
    num_tokens = len(positions)
    row_of_token = torch.repeat_interleave(query_starts.diff(), output_size=num_tokens)
    offsets_to_end = query_starts[1:][row_of_token] - torch.arange(num_tokens, device=positions.device)
    has_context = context_lens[row_of_token] > 0
    positions.copy_((context_lens[row_of_token] - offsets_to_end).masked_fill(~has_context, 0))
    place_of_token = rows[row_of_token]
    for group_id, block_size in enumerate(tables.block_sizes):
        table = tables.table(group_id)
        if not table.shape[1]:
            slots[group_id].fill_(-1)
            continue
        columns = torch.div(positions, block_size, rounding_mode="floor")
        blocks = table[place_of_token, columns.clamp(max=table.shape[1] - 1)].long()
        has_block = has_context & (columns < table.shape[1])
        slots[group_id].copy_((blocks * block_size + positions % block_size).masked_fill(~has_block, -1))


def send(columns: Sequence[Int32Array], device: str) -> list[Tensor]:
    """Copy columns of numbers to a device, all at once and without waiting. int32

    On a GPU they go through page-locked memory that is new each time: torch keeps such memory when it is given back,
    and hands it out again only after every copy from it has passed. So nothing here has to know how far the device is,
    as it would with buffers that take turns.
    """
    starts = [0]
    for column in columns:
        starts.append(starts[-1] + -(-len(column) // _ALIGNMENT) * _ALIGNMENT)
    staging = torch.empty(starts[-1], dtype=torch.int32, pin_memory=torch.device(device).type == "cuda")
    buffer = staging.numpy()
    for start, column in zip(starts, columns, strict=False):
        buffer[start : start + len(column)] = column
    sent = staging.to(device, non_blocking=True)
    return [sent[start : start + len(column)] for start, column in zip(starts, columns, strict=False)]


class DeviceInputs:
    """Makes the tensors of a step on a GPU; see `InputMaker`.

    Args:
        block_sizes: Tokens in a block, for each KV-cache group.
        device: Where the tensors go, as torch names it.
        fill_slots: What works out positions and slots; as `slot_filler` says when not given.
    """

    def __init__(self, block_sizes: Sequence[int], device: str, *, fill_slots: SlotFiller | None = None) -> None:
        self.device = device
        self.tables = DeviceTables(block_sizes, device)
        self.fill_slots = slot_filler(device) if fill_slots is None else fill_slots

    def make(self, plan: StepPlan) -> StepInputs:
        """See `InputMaker.make`."""
        query_starts_host = query_starts_of(plan)
        context_lens_host = plan.first_positions + plan.num_new_tokens
        changes = self.tables.stage(plan.rows, plan.block_tables)
        token_ids, query_starts, context_lens, rows, sample_rows, places, block_ids = send(
            [
                plan.token_ids,
                query_starts_host,
                context_lens_host,
                plan.rows + np.int32(1),
                (query_starts_host[1:] - 1)[plan.samples],
                changes.places,
                changes.block_ids,
            ],
            self.device,
        )
        self.tables.write(changes, places, block_ids)
        positions = torch.empty(plan.num_tokens, dtype=torch.int64, device=self.device)
        # Of even length, so that each group's begin at a multiple of 16 bytes.
        even = plan.num_tokens + plan.num_tokens % 2
        slots = torch.empty((self.tables.num_groups, even), dtype=torch.int64, device=self.device)[:, : plan.num_tokens]
        self.fill_slots(query_starts, context_lens, rows, self.tables, positions=positions, slots=slots)
        batches = {
            group_id: AttentionBatch(
                num_decode_rows=plan.num_decode_entries,
                query_starts=query_starts,
                context_lens=context_lens,
                block_table=self.tables.gather(group_id, rows, table.shape[1]),
                slots=slots[group_id],
                query_starts_host=query_starts_host,
                context_lens_host=context_lens_host,
                block_table_host=table,
            )
            for group_id, table in enumerate(plan.block_tables)
        }
        return StepInputs(token_ids.long(), positions, sample_rows, batches)
