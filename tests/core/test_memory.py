"""How much memory there is for the KV cache, and the step that finds out."""

from types import SimpleNamespace

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.attention_backends.torch_sdpa import TorchSDPABackend
from octavo.core.kv_cache_config import KVCacheConfig, make_groups
from octavo.core.memory import (
    accelerator_kv_cache_bytes,
    cpu_free_bytes,
    cpu_kv_cache_bytes,
    graph_bytes,
    num_profiling_blocks,
    profiling_plan,
)
from octavo.core.model_runner import ModelRunner
from octavo.models.checkpoint import open_checkpoint
from octavo.models.llama import LlamaModel
from octavo.testing.tiny_models import tiny_llama

GIB = 2**30


@pytest.fixture(autouse=True)
def ten_gib_free(monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=10 * GIB))


@pytest.fixture
def cgroup(tmp_path):
    """Makes the folder in which the kernel shows a container its limit."""

    def make(limit, used, inactive_file=0):
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        (tmp_path / "memory.current").write_text(f"{used}\n")
        (tmp_path / "memory.stat").write_text(f"anon 5\ninactive_file {inactive_file}\nactive_file 7\n")
        return tmp_path

    return make


# -- a CPU ------------------------------------------------------------------------------------------------------


def test_without_a_container_all_free_memory_is_free(tmp_path):
    assert cpu_free_bytes(tmp_path) == 10 * GIB


def test_a_containers_limit_is_heeded(cgroup):
    assert cpu_free_bytes(cgroup(4 * GIB, 3 * GIB)) == GIB


def test_a_limit_above_what_the_machine_has_frees_nothing(cgroup):
    assert cpu_free_bytes(cgroup(64 * GIB, 3 * GIB)) == 10 * GIB


def test_a_container_without_a_limit_has_the_machines_memory(cgroup):
    assert cpu_free_bytes(cgroup("max", 3 * GIB)) == 10 * GIB


def test_a_container_over_its_limit_has_nothing_rather_than_less(cgroup):
    assert cpu_free_bytes(cgroup(4 * GIB, 5 * GIB)) == 0


def test_weight_files_that_the_kernel_still_keeps_in_memory_do_not_count_as_used(cgroup):
    assert cpu_free_bytes(cgroup(8 * GIB, 7 * GIB, inactive_file=5 * GIB)) == 6 * GIB


def test_the_kv_cache_takes_a_share_of_free_memory():
    assert cpu_kv_cache_bytes(0.25) == int(cpu_free_bytes() * 0.25)
    assert 0 < cpu_kv_cache_bytes(0.25) <= 2.5 * GIB


# -- an accelerator ---------------------------------------------------------------------------------------------


class FakeAccelerator:
    """Has 80 GiB, of which others use 3; weights take 16, and whatever runs meanwhile takes its share."""

    def __init__(self):
        self.allocated = 16 * GIB

    def total(self):
        return 80 * GIB

    def used_by_others(self):
        return 3 * GIB

    def peak_allocated_during(self, work):
        work()
        return self.allocated

    def kept_by(self, work):
        return work()


def test_the_kv_cache_gets_the_utilization_less_others_weights_and_the_largest_step():
    memory = FakeAccelerator()

    def forward():
        memory.allocated += 5 * GIB

    assert accelerator_kv_cache_bytes(memory, 0.9, forward) == 72 * GIB - 3 * GIB - 21 * GIB
    assert memory.allocated == 21 * GIB, "the forward ran once"


def test_a_device_that_is_full_already_leaves_less_than_nothing_for_the_caller_to_report():
    assert accelerator_kv_cache_bytes(FakeAccelerator(), 0.2, lambda: None) == 16 * GIB - 19 * GIB


def test_captured_steps_are_taken_off_too():
    wanted = accelerator_kv_cache_bytes(FakeAccelerator(), 0.9, lambda: None) - 2 * GIB
    assert accelerator_kv_cache_bytes(FakeAccelerator(), 0.9, lambda: None, lambda: 2 * GIB) == wanted


@pytest.mark.parametrize(
    ("sizes", "captured", "size"),
    [
        ((), [], 0),
        ((64,), [[64]], 1000 + 10),
        ((1, 64), [[64], [1, 64]], 1000 + 2 * 10),
        ((1, 2, 4, 8, 64), [[64], [1, 64]], 1000 + 5 * 10),
    ],
)
def test_what_captured_steps_take_follows_from_the_largest_and_the_smallest(sizes, captured, size):
    asked = []

    def capture(some_sizes):
        asked.append(list(some_sizes))
        return 1000 + 10 * len(some_sizes)

    assert graph_bytes(FakeAccelerator(), sizes, capture) == size
    assert asked == captured


# -- the step that is tried out ---------------------------------------------------------------------------------


@given(num_tokens=st.integers(1, 300), num_rows=st.integers(1, 80), block_size=st.integers(1, 40))
def test_the_profiling_step_spends_the_whole_budget_over_all_rows(num_tokens, num_rows, block_size):
    plan = profiling_plan(num_tokens, num_rows, [block_size])
    assert plan.num_tokens == num_tokens == plan.num_new_tokens.sum()
    assert plan.num_entries == min(num_rows, num_tokens)
    assert plan.samples.all()
    assert len(plan.samples) == plan.num_entries
    assert not plan.first_positions.any()
    is_decode = plan.num_new_tokens == 1
    assert is_decode[: plan.num_decode_entries].all()
    assert not is_decode[plan.num_decode_entries :].any()
    assert plan.rows.tolist() == [sampling.row for sampling in plan.new_rows] == list(range(plan.num_entries))
    assert len(set(plan.request_ids)) == len(set(plan.arrivals)) == plan.num_entries


@given(num_tokens=st.integers(1, 300), num_rows=st.integers(1, 80), block_size=st.integers(1, 40))
def test_the_profiling_step_gives_each_row_blocks_of_its_own(num_tokens, num_rows, block_size):
    plan = profiling_plan(num_tokens, num_rows, [block_size])
    (table,) = plan.block_tables
    used = table[table > 0]
    assert len(used) == len(set(used.tolist()))
    assert (np.count_nonzero(table, axis=1) == -(-plan.num_new_tokens // block_size)).all()
    # Null entries stand behind the others, never between them.
    assert (np.diff((table > 0).astype(int), axis=1) <= 0).all()
    assert num_profiling_blocks(num_tokens, num_rows, [block_size]) == used.max() + 1 == len(used) + 1


def test_the_profiling_step_pays_for_truncated_sampling():
    assert all(sampling.temperature > 0 and sampling.top_p < 1 for sampling in profiling_plan(5, 2, [4]).new_rows)


def test_the_profiling_step_runs_through_a_real_model(tmp_path):
    checkpoint = open_checkpoint(str(tiny_llama(tmp_path)))
    model = LlamaModel.from_checkpoint(checkpoint, dtype="float32", device="cpu")
    formats = {"dtype": "float32", "device": "cpu", "block_size": 16, "kv_dtype": "float32"}
    spec = LlamaModel.spec_from_config(checkpoint.config, **formats)
    backends = [TorchSDPABackend(attention) for attention in spec.attention_specs]
    config = KVCacheConfig(num_profiling_blocks(70, 4, [16]), make_groups(spec.kv_cache_specs))
    result = ModelRunner(model, backends, config, "cpu").run(profiling_plan(70, 4, [16]))
    assert result.failed == [False] * 4
    assert all(0 <= token_id < spec.vocab_size for token_id in result.token_ids)
