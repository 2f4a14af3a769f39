"""Block tables that stay on the device, and are told what changes.

    host     plan's tables ── differ from the mirror? ──► changed cells: places, block ids
                                                                │  with the step's other numbers, in one copy
    device   cells ◄── one scatter ─────────────────────────────┘
               │
               └── rows of the step ──► AttentionBatch.block_table

In most decode steps no request gets a block, and then nothing is sent. Row 0 of every table is null and stays so: it is
what a padding row has. A request's row r is row r + 1 here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from octavo.core.step_plan import Int32Array
from octavo.errors import ConfigError

# Places of cells are sent as int32.
MOST_CELLS = 2**31 - 1


@dataclass(frozen=True)
class CellChanges:
    """Cells in which the device does not have what a step's tables say.

    Attributes:
        places: Each cell's place among those of all tables, int32. [num_changes]
        block_ids: What belongs there, int32. [num_changes]
    """

    places: Int32Array
    block_ids: Int32Array


@dataclass(frozen=True)
class TableLayout:
    """Where the tables lie among the cells: one behind the other, each row by row.

    Attributes:
        num_rows: Rows of every table.
        widths: Of each table.
    """

    num_rows: int
    widths: tuple[int, ...]

    @property
    def starts(self) -> list[int]:
        """Return the place of each table's first cell, and the number of all cells."""
        return [self.num_rows * sum(self.widths[:group_id]) for group_id in range(len(self.widths) + 1)]

    @property
    def num_cells(self) -> int:
        return self.num_rows * sum(self.widths)

    def cells_of(self, group_id: int) -> slice:
        """Return where a group's table lies."""
        return slice(*self.starts[group_id : group_id + 2])

    def shape_of(self, group_id: int) -> tuple[int, int]:
        """Return rows and columns of a group's table."""
        return self.num_rows, self.widths[group_id]

    def grown(self, num_rows: int, widths: Sequence[int]) -> TableLayout:
        """Return one with room for so many rows and columns.

        What has to grow at least doubles, unless there would be more cells than can be told apart.
        """
        needed = list(zip(self.widths, widths, strict=True))
        doubled = TableLayout(_doubled(self.num_rows, num_rows), tuple(_doubled(*each) for each in needed))
        if doubled.num_cells <= MOST_CELLS:
            return doubled
        return TableLayout(max(self.num_rows, num_rows), tuple(max(each) for each in needed))


def _doubled(size: int, needed: int) -> int:
    return size if needed <= size else max(needed, 2 * size)


class DeviceTables:
    """One block table for each KV-cache group, and the same on the host.

    Args:
        block_sizes: Tokens in a block, for each KV-cache group.
        device: Where the tables are, as torch names it.

    Attributes:
        block_sizes: As given.
        cells: All tables, int32. [num_cells]
        places: Of each table its first cell, its width and its group's block size, int64. [num_groups, 3]
    """

    def __init__(self, block_sizes: Sequence[int], device: str) -> None:
        self.block_sizes = tuple(block_sizes)
        self._device = device
        self._layout = TableLayout(1, (0,) * len(self.block_sizes))
        self._mirror: Int32Array = np.zeros(0, np.int32)
        self.cells = torch.zeros(0, dtype=torch.int32, device=device)
        self.places = torch.zeros((len(self.block_sizes), 3), dtype=torch.int64, device=device)

    @property
    def num_groups(self) -> int:
        return len(self.block_sizes)

    @property
    def widths(self) -> tuple[int, ...]:
        return self._layout.widths

    def make_room(self, num_rows: int, widths: Sequence[int]) -> None:
        """Be ready for requests in the rows before `num_rows`, and for so many blocks in each group's table.

        Raises:
            ConfigError: There would be more cells than can be told apart.
        """
        old, new = self._layout, self._layout.grown(num_rows + 1, widths)
        if new == old:
            return
        if new.num_cells > MOST_CELLS:
            raise ConfigError(
                f"The block tables of {num_rows} requests have {new.num_cells} entries on the device, and at most "
                f"{MOST_CELLS} can be told apart; lower max_num_seqs or max_model_len, or raise block_size."
            )
        # All of it is there before any of it is taken: memory may run out in between.
        mirror: Int32Array = np.zeros(new.num_cells, np.int32)
        cells = torch.zeros(new.num_cells, dtype=torch.int32, device=self._device)
        places = torch.tensor(list(zip(new.starts, new.widths, self.block_sizes, strict=False)), device=self._device)
        for group_id, width in enumerate(old.widths):
            after, shape = new.cells_of(group_id), new.shape_of(group_id)
            mirror[after].reshape(shape)[: old.num_rows, :width] = self._mirror_of(group_id)
            cells[after].view(shape)[: old.num_rows, :width] = self.table(group_id)
        self._layout, self._mirror, self.cells, self.places = new, mirror, cells, places

    def stage(self, rows: Int32Array, block_tables: Sequence[Int32Array]) -> CellChanges:
        """Return what has to be written before a step's tables can be gathered; make room for it.

        Only what the step reads is looked at: the cells that its tables have, in its rows.

        Args:
            rows: The requests' rows. [num_entries]
            block_tables: `StepPlan.block_tables`.
        """
        self.make_room(int(rows.max(initial=-1)) + 1, [table.shape[1] for table in block_tables])
        rows = rows + 1
        places, block_ids = [], []
        for group_id, table in enumerate(block_tables):
            entries, columns = np.nonzero(table != self._mirror_of(group_id)[rows, : table.shape[1]])
            if len(entries):
                width = self._layout.widths[group_id]
                places.append(self._layout.starts[group_id] + rows[entries].astype(np.int64) * width + columns)
                block_ids.append(table[entries, columns])
        if not places:
            return CellChanges(np.zeros(0, np.int32), np.zeros(0, np.int32))
        return CellChanges(np.concatenate(places).astype(np.int32), np.concatenate(block_ids))

    def write(self, changes: CellChanges, places: Tensor, block_ids: Tensor) -> None:
        """Write staged cells.

        Args:
            changes: What `stage` returned last.
            places: The same on the device. [num_changes]
            block_ids: Likewise. [num_changes]
        """
        if not len(changes.places):
            return
        self.cells.index_copy_(0, places.long(), block_ids)
        # Only now: had the step failed before, the next one would have to send them again.
        self._mirror[changes.places] = changes.block_ids

    def table(self, group_id: int) -> Tensor:
        """Return a group's table, a view. [num_rows + 1, width]"""
        return self.cells[self._layout.cells_of(group_id)].view(self._layout.shape_of(group_id))

    def gather(self, group_id: int, rows: Tensor, width: int, *, out: Tensor | None = None) -> Tensor:
        """Copy rows of a group's table.

        Args:
            rows: Rows of `table`: 0 for null, r + 1 for the request in row r. int32. [num_rows]
            width: How many columns.
            out: Where to, if there is a place already. [num_rows, width]

        Returns:
            [num_rows, width]
        """
        return torch.index_select(self.table(group_id)[:, :width], 0, rows, out=out)

    def _mirror_of(self, group_id: int) -> Int32Array:
        return self._mirror[self._layout.cells_of(group_id)].reshape(self._layout.shape_of(group_id))
