"""What the GPU can do at most, measured: copying, reading, and multiplying matrices."""

from __future__ import annotations

import torch

from gpu_check.clocks import Clock, Work, alternate
from gpu_check.lines import Line, rate
from gpu_check.sizes import Sizes
from gpu_check.workers import report, tell

CASES = ("memory", "matrices")
MEASURED_SECONDS = 2.0


def measure_limit(case: str, sizes: Sizes, device: str, clock: Clock) -> None:
    """Measure one of CASES; report the figures and the values that later parts take shares of."""
    if case == "memory":
        measure_memory(sizes, device, clock)
    else:
        measure_matrices(sizes, device, clock)


def measure_memory(sizes: Sizes, device: str, clock: Clock) -> None:
    """A copy counts twice, for it is read and written."""
    source = torch.arange(sizes.copy_bytes // 8, dtype=torch.int64, device=device)
    target = torch.empty_like(source)
    works: dict[str, Work] = {"copy": lambda: target.copy_(source), "read": source.sum}
    for work in works.values():
        work()
    seconds = alternate(clock, works, sizes.rounds, MEASURED_SECONDS)
    for name, factor in (("copy", 2), ("read", 1)):
        figure = factor * source.nbytes / seconds[name]
        key = f"{name}_bytes_per_s"
        report("value", name=key, value=figure)
        size = f"{source.nbytes / 2**20:.0f} MiB"
        tell(Line("limits", f"memory, {name} of {size}", "measured", rate(figure, "B/s"), {key: figure}))


def measure_matrices(sizes: Sizes, device: str, clock: Clock) -> None:
    """The product of two square matrices of bfloat16; a multiplication and an addition are two operations."""
    rows = sizes.matrix_rows
    generator = torch.Generator(device).manual_seed(0)
    left, right = (
        torch.randn((rows, rows), device=device, dtype=torch.bfloat16, generator=generator) for _ in range(2)
    )
    product = torch.empty_like(left)
    for _ in range(3):
        torch.mm(left, right, out=product)
    seconds = alternate(clock, {"product": lambda: torch.mm(left, right, out=product)}, sizes.rounds, MEASURED_SECONDS)
    figure = 2 * rows**3 / seconds["product"]
    report("value", name="matrix_flop_per_s", value=figure)
    what = f"matrices, bfloat16, {rows} x {rows}"
    tell(Line("limits", what, "measured", rate(figure, "FLOP/s"), {"matrix_flop_per_s": figure}))
