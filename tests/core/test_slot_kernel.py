"""The kernel that works out slots: through Triton's interpreter, and compiled for GPUs that are not here."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import random_plan, slots_by_definition

from octavo.core.device_inputs import DeviceInputs, fill_slots_with_torch, slot_filler

pytest.importorskip("triton", reason="pip install triton brings it")

from octavo.core import slot_kernel

COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from octavo.core.slot_kernel import NUM_HALVINGS, TOKENS_PER_PROGRAM, slots_kernel

pointers = {"query_starts": "*i32", "context_lens": "*i32", "rows": "*i32", "cells": "*i32"}
pointers |= {"places": "*i64", "positions": "*i64", "slots": "*i64"}
numbers = dict.fromkeys(("num_tokens", "num_rows", "slots_stride"), "i32")
constants = {"TOKENS": TOKENS_PER_PROGRAM, "HALVINGS": NUM_HALVINGS}
source = ASTSource(slots_kernel, pointers | numbers | dict.fromkeys(constants, "constexpr"), constants)
for capability in (80, 90):
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"enable_fp_fusion": False})
    print(capability, len(compiled.asm["cubin"]) > 0)
"""

is_interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU there is no interpreter")


@pytest.mark.parametrize("fill_slots", [slot_kernel.fill_slots, fill_slots_with_torch])
@is_interpreted
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), block_sizes=st.lists(st.sampled_from([1, 3, 7, 16]), min_size=1, max_size=3))
def test_slots_and_positions_are_those_of_the_definition(fill_slots, seed, block_sizes):
    rng = np.random.default_rng(seed)
    inputs = DeviceInputs(block_sizes, "cpu", fill_slots=fill_slots)
    for _ in range(2):
        plan = random_plan(rng, block_sizes)
        made = inputs.make(plan)
        for group_id, block_size in enumerate(block_sizes):
            positions, slots = slots_by_definition(plan, group_id, block_size)
            assert made.positions.tolist() == positions
            assert made.batches[group_id].slots.tolist() == slots
            assert made.batches[group_id].slots.dtype == made.positions.dtype == torch.int64


@is_interpreted
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 127, 128, 129, 1000])
def test_tokens_find_their_row_among_any_number(num_rows):
    rng = np.random.default_rng(num_rows)
    new_tokens = [1] * (num_rows // 2) + rng.integers(2, 9, num_rows - num_rows // 2).tolist()
    plan = random_plan(rng, [16], new_tokens=new_tokens, num_rows=num_rows)
    made = DeviceInputs([16], "cpu", fill_slots=slot_kernel.fill_slots).make(plan)
    assert (made.positions.tolist(), made.batches[0].slots.tolist()) == slots_by_definition(plan, 0, 16)


@is_interpreted
@pytest.mark.parametrize("fill_slots", [slot_kernel.fill_slots, fill_slots_with_torch])
def test_padding_has_no_slot_and_stands_at_position_0(fill_slots):
    """Rows without context: one without tokens between others, and two of one token at the end."""
    inputs = DeviceInputs([4], "cpu", fill_slots=fill_slots)
    tables = inputs.tables
    changes = tables.stage(np.array([0, 1], np.int32), (np.array([[7, 3], [5, 2]], np.int32),))
    tables.write(changes, torch.from_numpy(changes.places), torch.from_numpy(changes.block_ids))
    positions, slots = torch.full((6,), 99), torch.full((1, 6), 99)
    fill_slots(
        torch.tensor([0, 3, 3, 4, 5, 6], dtype=torch.int32),
        torch.tensor([6, 0, 8, 0, 0], dtype=torch.int32),
        torch.tensor([1, 0, 2, 0, 0], dtype=torch.int32),
        tables,
        positions=positions,
        slots=slots,
    )
    assert positions.tolist() == [3, 4, 5, 7, 0, 0]
    assert slots.tolist() == [[31, 12, 13, 11, -1, -1]]


@is_interpreted
def test_the_kernel_is_launched_once_for_all_groups(monkeypatch):
    launches = []

    class Recording:
        def __getitem__(self, grid):
            launches.append(grid)
            return slot_kernel_before[grid]

    slot_kernel_before = slot_kernel.slots_kernel
    monkeypatch.setattr(slot_kernel, "slots_kernel", Recording())
    plan = random_plan(np.random.default_rng(1), [16, 4, 4], new_tokens=[1, 1, 200])
    DeviceInputs([16, 4, 4], "cpu", fill_slots=slot_kernel.fill_slots).make(plan)
    assert launches == [(2, 3)]


def test_it_compiles_for_gpus_of_compute_capability_8_0_and_9_0():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", COMPILE], capture_output=True, text=True, env=environment, check=False
    )
    assert (result.stdout.split("\n")[:2], result.returncode) == (["80 True", "90 True"], 0), result.stderr


def test_a_gpu_gets_the_kernel_and_every_other_device_torchs_operations():
    assert slot_filler("cuda:1") is slot_kernel.fill_slots
    assert slot_filler("cpu") is slot_filler("mps") is fill_slots_with_torch
