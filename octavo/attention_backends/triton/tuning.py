"""Tunes the attention kernel of prefill rows: which number of warps and of stages is the fastest on this GPU.

Tiles are not tuned, since plans are made of them before the kernel runs. Decode rows are not tuned either: their steps
may be captured in a CUDA graph, where nothing can be timed, and they are bound by memory, where little is to be gained.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton

from octavo.attention_backends.triton.attention_kernel import attention_kernel
from octavo.attention_backends.triton.heuristics import Device, Tile, shared_bytes
from octavo.core.interfaces.attention import AttentionSpec

# Few, since each is compiled first.
CANDIDATES = ((4, 3), (4, 5), (8, 3), (8, 5), (8, 7))
# Key tiles of a program, on average, below which neither warps nor stages show.
LEAST_TIMED_TILES = 16
NUM_WARMUPS = 2
NUM_TIMED = 5
# Calls between two events. While one runs the next is started, so that it is the kernels that are timed.
NUM_CALLS = 8


def candidates(tile: Tile, spec: AttentionSpec, device: Device) -> list[Tile]:
    """Return the tiles to time, that of the rules first: fewer or more warps, and as many stages as fit.

    One tile alone, which is then not timed, in the interpreter.
    """
    if device.is_interpreted:
        return [tile]
    others = [Tile(tile.lines, tile.keys, num_warps, num_stages) for num_warps, num_stages in CANDIDATES]
    fitting = [other for other in others if shared_bytes(other, spec, device) <= device.shared_bytes]
    return [tile, *(other for other in fitting if other != tile)]


def tuned_attention_kernel(tile: Tile, spec: AttentionSpec, device: Device) -> Any:
    """Return the kernel with a choice of its own, made when it is first started."""
    configs = [
        triton.Config({}, num_warps=each.num_warps, num_stages=each.num_stages)
        for each in candidates(tile, spec, device)
    ]
    return triton.autotune(configs, key=[], do_bench=_milliseconds)(attention_kernel)


def _milliseconds(call: Callable[[], None], quantiles: Sequence[float]) -> list[float]:
    """Time some calls together. Triton's own way takes 256 MB to clear the cache, for which there may be no room.

    Returns:
        The median, as often as there are quantiles.
    """
    times = []
    for number in range(NUM_WARMUPS + NUM_TIMED):
        start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record()
        for _ in range(NUM_CALLS):
            call()
        end.record()
        end.synchronize()
        if number >= NUM_WARMUPS:
            times.append(start.elapsed_time(end))
    return [sorted(times)[NUM_TIMED // 2]] * len(quantiles)
