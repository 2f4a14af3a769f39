"""A step's tensors as a GPU gets them, made on a CPU: the same as those that a CPU gets."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import random_plan

from octavo.core.device_inputs import DeviceInputs, fill_slots_with_torch, send
from octavo.core.device_tables import DeviceTables
from octavo.core.step_inputs import HostInputs

FIELDS = ("query_starts", "context_lens", "block_table", "slots")


def assert_equal(made, wanted):
    for name in ("token_ids", "positions"):
        assert getattr(made, name).dtype == torch.int64
        assert getattr(made, name).tolist() == getattr(wanted, name).tolist()
    assert made.sample_rows.tolist() == wanted.sample_rows.tolist()
    assert made.batches.keys() == wanted.batches.keys()
    for group_id, batch in made.batches.items():
        other = wanted.batches[group_id]
        assert batch.num_decode_rows == other.num_decode_rows
        for name in FIELDS:
            assert getattr(batch, name).dtype == getattr(other, name).dtype
            assert getattr(batch, name).tolist() == getattr(other, name).tolist()
        for name in FIELDS[:3]:
            host = getattr(batch, f"{name}_host")
            assert host.dtype == np.int32
            assert host.tolist() == getattr(batch, name).tolist()


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), block_sizes=st.lists(st.sampled_from([1, 4, 16]), min_size=1, max_size=3))
def test_a_gpu_is_given_what_a_cpu_is_given(seed, block_sizes):
    rng = np.random.default_rng(seed)
    on_device, on_host = DeviceInputs(block_sizes, "cpu"), HostInputs(block_sizes)
    for _ in range(3):
        plan = random_plan(rng, block_sizes)
        assert_equal(on_device.make(plan), on_host.make(plan))


def test_one_copy_takes_everything_over(monkeypatch):
    copies = []
    plain = torch.Tensor.to

    def recording(tensor, *arguments, **named):
        copies.append((tensor.dtype, named))
        return plain(tensor, *arguments, **named)

    inputs, plan = DeviceInputs([16, 4], "cpu"), random_plan(np.random.default_rng(0), [16, 4], new_tokens=[1, 1, 5])
    inputs.make(plan)
    monkeypatch.setattr(torch.Tensor, "to", recording)
    grown = [np.pad(table, ((0, 0), (0, 1)), constant_values=7) for table in plan.block_tables]
    inputs.make(dataclasses.replace(plan, block_tables=tuple(grown)))
    assert copies == [(torch.int32, {"non_blocking": True})]


def test_columns_are_sent_side_by_side_each_at_a_multiple_of_16_bytes():
    columns = [np.arange(length, dtype=np.int32) + 10 * length for length in (5, 0, 1, 4, 3)]
    sent = send(columns, "cpu")
    assert [part.tolist() for part in sent] == [column.tolist() for column in columns]
    assert {(part.data_ptr() - sent[0].data_ptr()) % 16 for part in sent if len(part)} == {0}
    assert len({part.untyped_storage().data_ptr() for part in sent}) == 1


def test_each_step_has_memory_of_its_own():
    first = send([np.array([1, 2], np.int32)], "cpu")
    send([np.array([3, 4], np.int32)], "cpu")
    assert first[0].tolist() == [1, 2]


@pytest.mark.parametrize(
    ("block_size", "table", "context_len", "slot"),
    [
        (16, [5, 12], 18, 193),
        (16, [7, 21, 9], 33, 144),
        (16, [5, 12], 1, 80),
        # Behind the end of the table, and a row of padding.
        (16, [5, 12], 33, -1),
        (16, [5, 12], 0, -1),
    ],
)
def test_a_decode_rows_slot(block_size, table, context_len, slot):
    tables = DeviceTables([block_size], "cpu")
    rows = np.array([0], np.int32)
    changes = tables.stage(rows, (np.array([table], np.int32),))
    tables.write(changes, torch.from_numpy(changes.places), torch.from_numpy(changes.block_ids))
    positions, slots = torch.full((1,), 99), torch.full((1, 1), 99)
    query_starts = torch.tensor([0, 1], dtype=torch.int32)
    fill_slots_with_torch(
        query_starts,
        torch.tensor([context_len], dtype=torch.int32),
        torch.tensor([1], dtype=torch.int32),
        tables,
        positions=positions,
        slots=slots,
    )
    assert (positions.tolist(), slots.tolist()) == ([max(context_len - 1, 0)], [[slot]])
