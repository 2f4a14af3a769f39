"""How much memory the KV cache may take on a device."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import psutil
import torch

from octavo.core.step_plan import Int32Array, RowSampling, StepPlan


class AcceleratorMemory(Protocol):
    """What an accelerator tells about its memory, in bytes."""

    def total(self) -> int:
        """All memory of the device."""

    def used_by_others(self) -> int:
        """What is in use outside this process's allocator."""

    def peak_allocated_during(self, work: Callable[[], None]) -> int:
        """Run `work`; return the most that this process had allocated meanwhile, weights included."""

    def kept_by(self, work: Callable[[], object]) -> int:
        """Run `work`; return how much less of the device is free while what it returned is kept. Then let go of it."""


class CudaMemory:
    """`AcceleratorMemory` of a CUDA device."""

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)

    def total(self) -> int:
        return int(torch.cuda.mem_get_info(self._device)[1])

    def used_by_others(self) -> int:
        free, total = torch.cuda.mem_get_info(self._device)
        return max(int(total - free) - torch.cuda.memory_reserved(self._device), 0)

    def peak_allocated_during(self, work: Callable[[], None]) -> int:
        torch.cuda.reset_peak_memory_stats(self._device)
        work()
        torch.cuda.synchronize(self._device)
        peak = int(torch.cuda.max_memory_allocated(self._device))
        torch.cuda.empty_cache()
        return peak

    def kept_by(self, work: Callable[[], object]) -> int:
        before = self._free()
        kept = work()
        after = self._free()
        del kept
        self._free()
        return max(before - after, 0)

    def _free(self) -> int:
        """Return what is free on the device once this process has given back what it does not need."""
        gc.collect()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(self._device)[0])


def graph_bytes(memory: AcceleratorMemory, sizes: Sequence[int], capture: Callable[[Sequence[int]], object]) -> int:
    """Return about what captured decode steps take: memory that no other step can use.

    The largest one brings its activations and its tensors, and all share them. What each further one adds is found
    with one of them, so that an engine's start does not capture everything twice.

    Args:
        memory: The device's.
        sizes: Numbers of rows to capture steps for, in order; may be empty.
        capture: Captures steps of some sizes and returns what keeps them.
    """
    if not sizes:
        return 0
    of_largest = memory.kept_by(lambda: capture(sizes[-1:]))
    if len(sizes) == 1:
        return of_largest
    of_two = memory.kept_by(lambda: capture([sizes[0], sizes[-1]]))
    return of_largest + max(of_two - of_largest, 0) * (len(sizes) - 1)


def accelerator_kv_cache_bytes(
    memory: AcceleratorMemory,
    utilization: float,
    profiling_forward: Callable[[], None],
    bytes_of_graphs: Callable[[], int] = lambda: 0,
) -> int:
    """Return what is left of `utilization` of the device after the weights, the largest step and captured steps.

    Args:
        memory: The device's.
        utilization: Share of the device to use in all, 0 to 1.
        profiling_forward: Runs a step as large as any will be.
        bytes_of_graphs: Finds out what captured steps will take.
    """
    peak = memory.peak_allocated_during(profiling_forward)
    # Before the graphs: kernels that are loaded for them stay, and count as theirs.
    by_others = memory.used_by_others()
    return int(memory.total() * utilization) - by_others - peak - bytes_of_graphs()


def total_bytes(device: str) -> int:
    """Return all memory of a device."""
    if device == "cpu":
        return int(psutil.virtual_memory().total)
    return CudaMemory(device).total()


def cpu_kv_cache_bytes(share: float) -> int:
    """Return `share` of the memory that is free now, weights being loaded.

    No step is tried out: on a CPU that takes seconds, and the rest of the free memory is there for activations.
    """
    return int(cpu_free_bytes() * share)


def cpu_free_bytes(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes that this process can still take, heeding a container's limit where there is one."""
    free = int(psutil.virtual_memory().available)
    try:
        limit = int((cgroup / "memory.max").read_text())
        used = int((cgroup / "memory.current").read_text()) - _unused_page_cache(cgroup)
    except (OSError, ValueError):
        # No cgroup v2, or "max": no limit.
        return free
    return min(free, max(limit - used, 0))


def _unused_page_cache(cgroup: Path) -> int:
    """Return the bytes of files that a container has read and could drop: weights, most of them, once loaded."""
    for line in (cgroup / "memory.stat").read_text().splitlines():
        name, _, value = line.partition(" ")
        if name == "inactive_file":
            return int(value)
    return 0


def give_back_freed_memory() -> None:
    """Ask the C library to return to the system what was freed.

    glibc keeps freed blocks of up to 32 MiB for later, which after a model is a model's worth.
    """
    # Elsewhere than on glibc there is no such function, and no need.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def profiling_plan(num_tokens: int, num_rows: int, block_sizes: Sequence[int]) -> StepPlan:
    """Return a plan as large as any step: the whole token budget over as many rows as may run, all sampling.

    Args:
        num_tokens: The token budget.
        num_rows: Rows that may run at a time.
        block_sizes: Tokens in a block, for each KV-cache group. All groups use blocks 1 .. num_profiling_blocks - 1:
            what the step computes is thrown away.
    """
    num_rows = min(num_rows, num_tokens)
    lengths = np.full(num_rows, num_tokens // num_rows, np.int32)
    lengths[: num_tokens % num_rows] += 1
    lengths.sort()
    return StepPlan(
        request_ids=[f"profile-{row}" for row in range(num_rows)],
        arrivals=list(range(num_rows)),
        rows=np.arange(num_rows, dtype=np.int32),
        num_new_tokens=lengths,
        first_positions=np.zeros(num_rows, np.int32),
        token_ids=np.zeros(num_tokens, np.int32),
        samples=np.ones(num_rows, np.bool_),
        num_decode_entries=int((lengths == 1).sum()),
        block_tables=tuple(_consecutive_blocks(-(-lengths // block_size)) for block_size in block_sizes),
        # Truncated sampling, which needs more memory than the greedy kind.
        new_rows=[
            RowSampling(
                row=row,
                temperature=1.0,
                top_p=0.9,
                top_k=0,
                min_p=0.0,
                seed=0,
                choice=0,
                num_prompt_tokens=1,
                min_tokens=0,
                masked_before_min_tokens=(),
                num_logprobs=None,
            )
            for row in range(num_rows)
        ],
    )


def num_profiling_blocks(num_tokens: int, num_rows: int, block_sizes: Sequence[int]) -> int:
    """Return how many blocks `profiling_plan` uses, the null block included."""
    return 1 + max(int(table.max()) for table in profiling_plan(num_tokens, num_rows, block_sizes).block_tables)


def _consecutive_blocks(num_blocks_by_row: Int32Array) -> Int32Array:
    """Return a block table in which each row has blocks of its own, from block 1 on. [num_rows, most blocks]"""
    table = np.zeros((len(num_blocks_by_row), int(num_blocks_by_row.max())), np.int32)
    next_block = 1
    for row, count in enumerate(num_blocks_by_row.tolist()):
        table[row, :count] = range(next_block, next_block + count)
        next_block += count
    return table
