"""Tensors of decode steps that stay where they are: what a captured step reads, whatever the numbers in them.

row         0       1       2      3 ... size
request     7       2       5      padding: token 0, position 0, context 0, slot -1, a null table row
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from octavo.core.device_inputs import DeviceInputs, send
from octavo.core.interfaces import AttentionBatch
from octavo.core.step_inputs import StepInputs
from octavo.core.step_plan import Int32Array, StepPlan

# The context of each row while steps are tried out, in tokens, as far as the tables go: long enough for kernels that
# measure which of their forms is the fastest.
_TRIED_CONTEXT = 1024


class UnreadableArray:
    """Stands where a batch has a host array whose numbers a captured step must not depend on: it has a shape alone."""

    # So that numpy's functions do not take it for a number.
    __array_ufunc__ = None

    def __init__(self, name: str, *shape: int) -> None:
        self._name = name
        self.shape = shape
        self.ndim = len(shape)
        self.size = math.prod(shape)
        self.dtype = np.dtype(np.int32)

    def __len__(self) -> int:
        return self.shape[0]

    def __getattr__(self, name: str) -> NoReturn:
        # Python and numpy ask for such names to find out what an object can do.
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()

    def __array__(self, *arguments: object, **named: object) -> NoReturn:
        self._refuse()

    def __getitem__(self, key: object) -> NoReturn:
        self._refuse()

    def __iter__(self) -> NoReturn:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise RuntimeError(
            f"{self._name} was read in a step of decode rows that is captured in a CUDA graph, and its numbers are "
            "others in every replay. With can_capture, a backend reads the batch's device tensors, and of its host "
            "arrays the shapes alone."
        )


class StaticInputs:
    """The inputs of padded decode steps, of any size up to the largest.

    Args:
        source: Keeps the block tables, and works out positions and slots.
        max_rows: Rows of the largest step.
        table_widths: Columns of each KV-cache group's block table.
    """

    def __init__(self, source: DeviceInputs, max_rows: int, table_widths: Sequence[int]) -> None:
        self._source = source
        self._table_widths = tuple(table_widths)
        source.tables.make_room(max_rows, table_widths)

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=source.device)

        self._token_ids = zeros(max_rows, dtype=torch.int64)
        self._positions = zeros(max_rows, dtype=torch.int64)
        self._slots = zeros(len(self._table_widths), max_rows, dtype=torch.int64)
        self._query_starts = torch.arange(max_rows + 1, dtype=torch.int32, device=source.device)
        self._context_lens = zeros(max_rows)
        self._block_tables = [zeros(max_rows, width) for width in self._table_widths]

    def hold(self, plan: StepPlan) -> bool:
        """Say whether a plan is one of decode rows alone, whose block tables are no wider than these."""
        return plan.num_tokens == plan.num_entries == plan.num_decode_entries and all(
            table.shape[1] <= width for table, width in zip(plan.block_tables, self._table_widths, strict=True)
        )

    def of_size(self, num_rows: int) -> StepInputs:
        """Return the first `num_rows` rows as a step. What `fill` puts in there later is in it."""
        batches = {
            group_id: AttentionBatch(
                num_decode_rows=num_rows,
                query_starts=self._query_starts[: num_rows + 1],
                context_lens=self._context_lens[:num_rows],
                block_table=block_table[:num_rows],
                slots=self._slots[group_id, :num_rows],
                # The same in every step of this size.
                query_starts_host=np.arange(num_rows + 1, dtype=np.int32),
                context_lens_host=_unreadable("context_lens_host", num_rows),
                block_table_host=_unreadable("block_table_host", num_rows, block_table.shape[1]),
            )
            for group_id, block_table in enumerate(self._block_tables)
        }
        no_rows = self._query_starts[:0]
        return StepInputs(self._token_ids[:num_rows], self._positions[:num_rows], no_rows, batches)

    def fill(self, plan: StepPlan, num_rows: int) -> Tensor:
        """Put a plan that they `hold` into the first `num_rows` rows, those behind its entries being padding.

        Returns:
            The rows that sample. [num_samples]
        """
        tables = self._source.tables
        changes = tables.stage(plan.rows, plan.block_tables)
        token_ids, context_lens, rows, sample_rows, places, block_ids = send(
            [
                _padded(plan.token_ids, num_rows),
                _padded(plan.first_positions + np.int32(1), num_rows),
                _padded(plan.rows + np.int32(1), num_rows),
                np.flatnonzero(plan.samples).astype(np.int32),
                changes.places,
                changes.block_ids,
            ],
            self._source.device,
        )
        tables.write(changes, places, block_ids)
        self._token_ids[:num_rows].copy_(token_ids)
        self._context_lens[:num_rows].copy_(context_lens)
        for group_id, block_table in enumerate(self._block_tables):
            tables.gather(group_id, rows, block_table.shape[1], out=block_table[:num_rows])
        self._source.fill_slots(
            self._query_starts[: num_rows + 1],
            self._context_lens[:num_rows],
            rows,
            tables,
            positions=self._positions[:num_rows],
            slots=self._slots[:, :num_rows],
        )
        return sample_rows

    def fill_for_trial(self) -> None:
        """Put in what a step can be tried out with: contexts of block 1 throughout, and nothing to write.

        Block 1 is there in every cache, and holds numbers.
        """
        longest = min(
            width * block_size
            for width, block_size in zip(self._table_widths, self._source.tables.block_sizes, strict=True)
        )
        self._context_lens.fill_(min(_TRIED_CONTEXT, longest))
        self._positions.fill_(min(_TRIED_CONTEXT, longest) - 1)
        self._slots.fill_(-1)
        for block_table in self._block_tables:
            block_table.fill_(1)


def _padded(column: Int32Array, length: int) -> Int32Array:
    padded = np.zeros(length, np.int32)
    padded[: len(column)] = column
    return padded


def _unreadable(name: str, *shape: int) -> Any:
    """Return an array without numbers, where the type says that there are some."""
    return UnreadableArray(name, *shape)
