"""Block tables on the device: equal to the host's after every step, and told no more than what changed."""

import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import random_table

from octavo.core import device_tables
from octavo.core.device_tables import DeviceTables
from octavo.errors import ConfigError


class Trace:
    """Random requests that come, grow, lose blocks to a window, and go, and the tables that a scheduler would plan."""

    def __init__(self, seed, num_groups, num_rows):
        self.rng = np.random.default_rng(seed)
        self.num_groups, self.num_rows = num_groups, num_rows
        self.tables = {}

    def step(self):
        """Change something, and return some rows and their tables."""
        rng = self.rng
        for row in range(self.num_rows):
            match rng.choice(["come", "grow", "slide", "stay", "go"], p=[0.15, 0.15, 0.1, 0.5, 0.1]):
                case "come":
                    lengths = rng.integers(0, 12, self.num_groups)
                    self.tables[row] = [rng.integers(1, 99, length).tolist() for length in lengths]
                case "grow" if row in self.tables:
                    for table in self.tables[row]:
                        table += rng.integers(1, 99, rng.integers(0, 3)).tolist()
                case "slide" if row in self.tables:
                    for table in self.tables[row]:
                        table[: len(table) // 2] = [0] * (len(table) // 2)
                case "go":
                    self.tables.pop(row, None)
        rows = rng.permutation([row for row in self.tables if rng.random() < 0.8]).astype(np.int32)
        return rows, tuple(self._matrix(rows, group_id) for group_id in range(self.num_groups))

    def _matrix(self, rows, group_id):
        tables = [self.tables[row][group_id] for row in rows.tolist()]
        matrix = np.zeros((len(rows), max(map(len, tables), default=0)), np.int32)
        for entry, table in enumerate(tables):
            matrix[entry, : len(table)] = table
        return matrix


def take(tables, rows, block_tables):
    """Tell the tables about a step, as a runner does; return what was sent."""
    changes = tables.stage(rows, block_tables)
    tables.write(changes, torch.from_numpy(changes.places), torch.from_numpy(changes.block_ids))
    return changes


def gathered(tables, rows, block_tables):
    return [
        tables.gather(group_id, torch.from_numpy(rows + np.int32(1)), table.shape[1]).tolist()
        for group_id, table in enumerate(block_tables)
    ]


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), num_groups=st.integers(1, 3), num_rows=st.integers(1, 6))
def test_the_device_has_what_the_host_has_and_only_what_changed_was_sent(seed, num_groups, num_rows):
    trace = Trace(seed, num_groups, num_rows)
    tables = DeviceTables([16] * num_groups, "cpu")
    # What the device has, by group, row and column.
    known = {}
    for _ in range(12):
        rows, block_tables = trace.step()
        wanted = {
            (group_id, row, column): block_id
            for group_id, table in enumerate(block_tables)
            for row, blocks in zip(rows.tolist(), table.tolist(), strict=True)
            for column, block_id in enumerate(blocks)
        }
        changed = [block_id for cell, block_id in wanted.items() if known.get(cell, 0) != block_id]
        sent = take(tables, rows, block_tables)
        assert sorted(sent.block_ids.tolist()) == sorted(changed)
        assert len(set(sent.places.tolist())) == len(changed)
        known |= wanted
        assert gathered(tables, rows, block_tables) == [table.tolist() for table in block_tables]
        for group_id in range(num_groups):
            assert not tables.table(group_id)[0].any(), "the null row is null"
            whole = {
                (group_id, row - 1, column): block_id
                for row, blocks in enumerate(tables.table(group_id).tolist())
                for column, block_id in enumerate(blocks)
                if block_id
            }
            assert whole == {cell: known[cell] for cell in known if cell[0] == group_id and known[cell]}


def test_nothing_is_sent_while_no_request_gets_a_block():
    tables, rows = DeviceTables([16], "cpu"), np.array([3, 0], np.int32)
    table = np.array([[5, 6, 7], [8, 0, 0]], np.int32)
    assert take(tables, rows, (table,)).block_ids.tolist() == [5, 6, 7, 8]
    assert take(tables, rows, (table,)).block_ids.tolist() == []
    # Another order, and some of them only.
    assert take(tables, rows[::-1].copy(), (table[::-1],)).block_ids.tolist() == []
    table[1, 1] = 9
    assert take(tables, rows, (table,)).block_ids.tolist() == [9]


def test_what_was_staged_and_not_written_is_sent_again():
    tables, rows = DeviceTables([16], "cpu"), np.array([1], np.int32)
    table = np.array([[5, 6]], np.int32)
    tables.stage(rows, (table,))
    assert take(tables, rows, (table,)).block_ids.tolist() == [5, 6]
    assert gathered(tables, rows, (table,)) == [[[5, 6]]]


def test_they_grow_with_what_they_hold_and_keep_it():
    rng = np.random.default_rng(0)
    tables = DeviceTables([16, 4], "cpu")
    rows = np.arange(4, dtype=np.int32)
    block_tables = (random_table(rng, np.array([3, 1, 2, 3])), random_table(rng, np.array([9, 0, 4, 2])))
    take(tables, rows, block_tables)
    tables.make_room(40, [50, 9])
    assert tables.widths == (50, 9)
    assert gathered(tables, rows, block_tables) == [table.tolist() for table in block_tables]
    assert take(tables, rows, block_tables).block_ids.tolist() == []
    assert tables.places.tolist() == [[0, 50, 16], [41 * 50, 9, 4]]
    assert len(tables.cells) == 41 * 59


def test_a_step_without_rows_or_without_blocks_changes_nothing():
    tables = DeviceTables([16], "cpu")
    assert len(tables.stage(np.zeros(0, np.int32), (np.zeros((0, 0), np.int32),)).places) == 0
    assert len(tables.stage(np.array([2], np.int32), (np.zeros((1, 0), np.int32),)).places) == 0


def test_more_cells_than_can_be_told_apart_are_refused_with_the_way_out():
    message = (
        "The block tables of 65536 requests have 2147516416 entries on the device, and at most 2147483647 can be told "
        "apart; lower max_num_seqs or max_model_len, or raise block_size."
    )
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        DeviceTables([16], "cpu").make_room(65536, [32768])


def test_memory_that_runs_out_while_they_grow_leaves_them_as_they_were(monkeypatch):
    tables = DeviceTables((16,), "cpu")
    tables.make_room(2, [3])
    with monkeypatch.context() as full:
        full.setattr(torch, "zeros", _raise_out_of_memory)
        with pytest.raises(torch.OutOfMemoryError):
            tables.stage(np.array([5], np.int32), [np.array([[7, 8, 9, 4]], np.int32)])
    changes = tables.stage(np.array([5], np.int32), [np.array([[7, 8, 9, 4]], np.int32)])
    tables.write(changes, torch.from_numpy(changes.places), torch.from_numpy(changes.block_ids))
    assert tables.gather(0, torch.tensor([6], dtype=torch.int32), 4).tolist() == [[7, 8, 9, 4]]


def test_they_grow_by_what_is_needed_where_twice_as_much_is_too_much(monkeypatch):
    monkeypatch.setattr(device_tables, "MOST_CELLS", 1000)
    tables = DeviceTables((16,), "cpu")
    tables.make_room(19, [20])
    tables.make_room(29, [26])
    assert tables.table(0).shape == (30, 26)


def _raise_out_of_memory(*_, **__):
    raise torch.OutOfMemoryError("no memory is left")
