"""How long something takes on a device, in seconds."""

from __future__ import annotations

import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch

Work = Callable[[], Any]

# Read before each measurement on a GPU: more than any of its caches holds, so that nothing of the work is found there.
# What was written would have to go back to memory while the work is measured.
FLUSHED_BYTES = 512 << 20
# The GPU is then kept busy this long, so that all of the work is in its queue when it begins. In clock cycles: some 0.3
# milliseconds.
BUSY_CYCLES = 500_000
# A median of fewer is none.
LEAST_ROUNDS = 3


def use_device(device: str) -> None:
    """Make a GPU the current one, on whose streams events are recorded. Without torch nothing is done."""
    if torch.device(device).type == "cuda" and torch.cuda.is_available():
        torch.cuda.set_device(device)


class Clock(ABC):
    """Times calls on one device."""

    @abstractmethod
    def seconds(self, work: Work) -> float:
        """Run `work` and return what it took."""

    @abstractmethod
    def wait(self) -> None:
        """Return when the device has nothing more to do."""


class WallClock(Clock):
    """For a CPU, where a call ends when its work is done."""

    def seconds(self, work: Work) -> float:
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    def wait(self) -> None:
        pass


class GPUClock(Clock):
    """Time between two events on the GPU: that of the kernels, not of the Python that starts them.

    That is what a step costs that is replayed from a CUDA graph, or whose kernels take longer than their starts. Work
    that starts very many small kernels may still count some of the starts.

    Args:
        device: As torch names it.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._flushed = torch.empty(FLUSHED_BYTES // 4, dtype=torch.int32, device=device)

    def seconds(self, work: Work) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._flushed.max()
        if hasattr(torch.cuda, "_sleep"):
            torch.cuda._sleep(BUSY_CYCLES)
        start.record()
        work()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    def wait(self) -> None:
        torch.cuda.synchronize(self._device)


def clock_for(device: str) -> Clock:
    """Return the clock of a device."""
    return GPUClock(device) if torch.device(device).type == "cuda" else WallClock()


def alternate(
    clock: Clock,
    works: Mapping[str, Work],
    max_rounds: int,
    max_seconds: float,
    on_turn: Callable[[str], None] = lambda name: None,
) -> dict[str, float]:
    """Time several works in turn, round after round, and return the median of each.

    In turn, so that what changes with time, such as the GPU's frequency, meets all of them alike.

    Args:
        max_rounds: Rounds at most.
        max_seconds: No round is begun after so long, the first ones excepted.
        on_turn: Gets the name of each work before it is timed.
    """
    times: dict[str, list[float]] = {name: [] for name in works}
    start = time.monotonic()
    for number in range(max_rounds):
        if number >= LEAST_ROUNDS and time.monotonic() - start > max_seconds:
            break
        for name, work in works.items():
            on_turn(name)
            times[name].append(clock.seconds(work))
    return {name: statistics.median(taken) for name, taken in times.items()}
