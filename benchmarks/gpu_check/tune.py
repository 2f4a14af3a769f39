"""A search through the options of the Triton backend, one at a time, for what the rules of thumb should say."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

from gpu_check.broken import leave_if_broken
from gpu_check.chosen import part_of
from gpu_check.clocks import Clock, alternate, clock_for
from gpu_check.contenders import BackendContender, Data, NotServedError
from gpu_check.lines import Line, first_line
from gpu_check.shapes import Shape, decode_shapes, prefill_shapes
from gpu_check.sizes import Sizes
from gpu_check.speed import make_ready
from gpu_check.workers import report, tell

TUNED_BACKEND = "triton"
# What is tried of each option, after the backend's own choice. Those that the installed backend does not
# have are left out, and said to be.
CANDIDATES: Mapping[str, tuple[Any, ...]] = {
    "splits": (1, 2, 4, 8, 16, 32),
    "tile_keys": (16, 32, 64, 128),
    "num_warps": (2, 4, 8),
    "num_stages": (1, 2, 3, 4, 5),
}
# Options that change nothing in a prefill.
DECODE_ONLY = ("splits",)
# What a setting must gain to be taken, so that noise is not.
LEAST_GAIN = 0.02
MEASURED_SECONDS = 0.3


def cases_of(
    sizes: Sizes, device: str, limits: Mapping[str, float], seconds: float
) -> dict[str, Callable[[Sequence[str]], None]]:
    """Return what tunes each shape, by its name.

    Args:
        seconds: What all shapes together may take; each gets the same.
    """
    clock = clock_for(device)
    shapes = [*decode_shapes(sizes, device), *prefill_shapes(sizes, device)]
    # A setting that was begun is finished, and the process takes its time to start.
    each = 0.8 * seconds / len(shapes)
    return {shape.name: partial(tune_shape, shape, clock, sizes.rounds, limits, each) for shape in shapes}


def tune_shape(
    shape: Shape,
    clock: Clock,
    rounds: int,
    limits: Mapping[str, float],
    max_seconds: float,
    without: Sequence[str],
) -> None:
    """Change one option after the other as long as it gains something; report the best of each shape.

    Args:
        max_seconds: No setting is begun after so long, and the best one so far is reported.
        without: Settings that a process ended over.
    """
    start = time.monotonic()
    known = getattr(part_of(TUNED_BACKEND).loaded.Options, "model_fields", {})
    data = Data(shape)
    tried: dict[str, float | None] = {}

    def seconds_with(options: Mapping[str, Any]) -> float | None:
        name = options_name(options)
        if name not in tried:
            tried[name] = None if name in without else _seconds(shape, data, options, clock, rounds)
        return tried[name]

    untuned = seconds_with({})
    if untuned is None:
        return
    best: dict[str, Any] = {}
    best_seconds = untuned
    settings = [(option, value) for option in options_for(shape, known) for value in CANDIDATES[option]]
    num_left = len(settings)
    for option, value in settings:
        if time.monotonic() - start > max_seconds:
            break
        num_left -= 1
        options = {**best, option: value}
        seconds = seconds_with(options)
        if seconds is not None and seconds < best_seconds * (1 - LEAST_GAIN):
            best, best_seconds = options, seconds
    said = [
        f"{options_name(best)}: {best_seconds * 1e3:.3f} ms, {untuned / best_seconds:.2f} times as fast as untuned",
        f"{len(tried)} settings in {time.monotonic() - start:.0f} s",
    ]
    if num_left:
        said.append(f"no time was left for {num_left} more")
    if lacking := [name for name in CANDIDATES if name not in known]:
        said.append(f"the backend has no option {', '.join(lacking)}")
    figures = {"options": best, "seconds": best_seconds, "untuned_seconds": untuned, "tried": tried}
    if "copy_bytes_per_s" in limits:
        figures["share_of_copy_bytes_per_s"] = shape.read_bytes / best_seconds / limits["copy_bytes_per_s"]
    tell(Line("tune", shape.name, "measured", "; ".join(said), figures))


def options_for(shape: Shape, known: Collection[str]) -> list[str]:
    """Return which options to try with a shape, of those that a backend has."""
    return [name for name in CANDIDATES if name in known and (shape.is_decode or name not in DECODE_ONLY)]


def _seconds(shape: Shape, data: Data, options: Mapping[str, Any], clock: Clock, rounds: int) -> float | None:
    """Return the time of one setting; None, with a line, where it does not work."""
    name = options_name(options)
    report("step", step=name)
    try:
        _, work = make_ready(BackendContender(TUNED_BACKEND, options), data, clock)
        return alternate(clock, {name: work}, rounds, MEASURED_SECONDS)[name]
    except NotServedError as reason:
        tell(Line("tune", f"{shape.name}, {name}", "not run", str(reason)))
    except Exception as error:
        leave_if_broken(error)
        said = f"{type(error).__name__}: {first_line(str(error))}"
        # Tiles that do not fit into shared memory are no fault of the backend's: they were asked for.
        tell(Line("tune", f"{shape.name}, {name}", "not run" if options else "failed", said))
    return None


def options_name(options: Mapping[str, Any]) -> str:
    """Return options as a line calls them."""
    return ", ".join(f"{name}={value}" for name, value in sorted(options.items())) or "the backend's own choice"
