"""Decode and prefill: every backend and torch's FlashAttention in turn, and what of the machine's limits they reach."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from gpu_check.broken import leave_if_broken
from gpu_check.clocks import Clock, Work, alternate, clock_for
from gpu_check.contenders import BackendContender, Contender, Data, NotServedError, peers_for
from gpu_check.lines import Line, Status, Target, first_line, first_sentence, rate
from gpu_check.shapes import Shape, decode_shapes, prefill_shapes
from gpu_check.sizes import FULL, Sizes
from gpu_check.workers import report, tell

# What the measurements of one shape may take in all, preparations aside.
MEASURED_SECONDS = 2.0
# Calls before the first measurement: they compile, tune, and fill caches of memory.
WARM_UP_CALLS = 3
# The backend that the targets are for, and the targets.
TARGETED_BACKEND = "triton"
DECODE_TARGET, PREFILL_TARGET = 0.8, 0.6


def measure_shape(
    part: str,
    shape: Shape,
    backends: Sequence[str],
    clock: Clock,
    limits: Mapping[str, float],
    rounds: int,
    has_target: bool,
    without: Sequence[str] = (),
) -> None:
    """Measure one shape and report a line a contender.

    Args:
        limits: Of the machine, as `measure_limits` names them; those that are missing are no share of anything.
        rounds: Measurements of each contender, at most.
        has_target: Whether the targets are for this shape.
        without: Contenders that a process ended over.
    """
    contenders: list[Contender] = [*(BackendContender(name) for name in backends), *peers_for(shape)]
    contenders = [contender for contender in contenders if contender.name not in without]
    data = Data(shape)
    ready: dict[str, Work] = {}
    notes: dict[str, dict[str, Any]] = {}
    for contender in contenders:
        report("step", step=contender.name)
        try:
            notes[contender.name], ready[contender.name] = make_ready(contender, data, clock)
        except NotServedError as reason:
            tell(Line(part, f"{shape.name}, {contender.name}", "not run", str(reason)))
        except Exception as error:
            leave_if_broken(error)
            status: Status = "not run" if contender.is_peer else "failed"
            # What torch's kernels do not take is no fault to be looked for, and torch lists all that it knows.
            shorten = first_sentence if contender.is_peer else first_line
            said = f"{type(error).__name__}: {shorten(str(error))}"
            tell(Line(part, f"{shape.name}, {contender.name}", status, said))
    seconds = alternate(clock, ready, rounds, MEASURED_SECONDS, on_turn=lambda name: report("step", step=name))
    report("step", step=None)
    peer = fastest_peer(contenders, seconds)
    for contender in contenders:
        if contender.name not in seconds:
            continue
        taken, noted = seconds[contender.name], notes[contender.name]
        line = line_of(part, shape, contender, taken, peer, limits, noted, has_target)
        tell(line)
        if has_target and contender.name == TARGETED_BACKEND and line.target is None:
            tell(Line(part, f"{line.what}, target", "not run", why_not_judged(shape)))


def make_ready(contender: Contender, data: Data, clock: Clock) -> tuple[dict[str, Any], Work]:
    """Prepare a contender, look at its output, and warm it up.

    Returns:
        Figures of the preparation, and what computes the step.

    Raises:
        NotServedError: It does not take the shape.
        WrongError: Its output is wrong.
    """
    start = time.perf_counter()
    prepared = contender.prepare(data)
    error = data.check(prepared.attend())
    notes: dict[str, Any] = {"largest_error": error, "prepare_seconds": time.perf_counter() - start}
    for _ in range(WARM_UP_CALLS):
        prepared.attend()
    clock.wait()
    if prepared.plan is not None:
        start = time.perf_counter()
        prepared.plan()
        clock.wait()
        notes["plan_seconds"] = time.perf_counter() - start
    return notes, prepared.attend


def line_of(
    part: str,
    shape: Shape,
    contender: Contender,
    seconds: float,
    peer: tuple[str, float] | None,
    limits: Mapping[str, float],
    notes: Mapping[str, Any],
    has_target: bool,
) -> Line:
    """Say what a time means: rates, shares of the limits, and a ratio to torch's FlashAttention."""
    bytes_per_s, flop_per_s = shape.read_bytes / seconds, shape.flops / seconds
    figures: dict[str, Any] = {"seconds": seconds, "bytes": shape.read_bytes, "flops": shape.flops, **notes}
    said = [f"{seconds * 1e3:.3f} ms", rate(bytes_per_s, "B/s"), rate(flop_per_s, "FLOP/s")]
    for name, value, what in (
        ("copy_bytes_per_s", bytes_per_s, "the copy bandwidth"),
        ("matrix_flop_per_s", flop_per_s, "the matrix rate"),
    ):
        if name in limits:
            figures[f"share_of_{name}"] = value / limits[name]
            said.append(f"{value / limits[name]:.2f} of {what}")
        else:
            said.append(f"no share of {what}, which was not measured")
    if peer is not None and not contender.is_peer:
        figures |= {"peer": peer[0], "ratio_to_peer": peer[1] / seconds}
        said.append(f"{peer[1] / seconds:.2f} times as fast as {peer[0]}")
    elif not contender.is_peer and peers_for(shape):
        said.append("none of torch's FlashAttention ran beside it")
    target = target_of(shape, contender, figures) if has_target else None
    return Line(part, f"{shape.name}, {contender.name}", "measured", ", ".join(said), figures, target)


def target_of(shape: Shape, contender: Contender, figures: Mapping[str, Any]) -> Target | None:
    """Return the target and what was reached of it; None for a contender without one, or without the figure."""
    if contender.name != TARGETED_BACKEND:
        return None
    if shape.is_decode:
        share = figures.get("share_of_copy_bytes_per_s")
        return None if share is None else Target(DECODE_TARGET, share, "the copy bandwidth")
    ratio = figures.get("ratio_to_peer")
    return None if ratio is None else Target(PREFILL_TARGET, ratio, "the speed of torch's FlashAttention")


def why_not_judged(shape: Shape) -> str:
    """Return what was missing where `target_of` found no figure."""
    if shape.is_decode:
        return f"no copy bandwidth was measured, of which {DECODE_TARGET:g} are wanted; the part `limits` does that"
    return f"none of torch's FlashAttention ran beside it, of whose speed {PREFILL_TARGET:g} are wanted"


def fastest_peer(contenders: Iterable[Contender], seconds: Mapping[str, float]) -> tuple[str, float] | None:
    """Return the name and the time of the fastest of those that are there to compare with; None without any."""
    times = [(seconds[peer.name], peer.name) for peer in contenders if peer.is_peer and peer.name in seconds]
    if not times:
        return None
    least, name = min(times)
    return name, least


def cases_of(
    part: str, sizes: Sizes, device: str, backends: Sequence[str], limits: Mapping[str, float]
) -> dict[str, Callable[[Sequence[str]], None]]:
    """Return what measures each shape of "decode" or "prefill", by its name.

    The targets are for a GPU and full sizes: of decoding for the first shape alone, of prefill for all.
    """
    shapes = decode_shapes(sizes, device) if part == "decode" else prefill_shapes(sizes, device)
    clock = clock_for(device)

    def measure(shape: Shape, has_target: bool, without: Sequence[str]) -> None:
        measure_shape(part, shape, backends, clock, limits, sizes.rounds, has_target, without)

    is_for_targets = sizes == FULL and device.startswith("cuda")
    return {
        shape.name: partial(measure, shape, is_for_targets and (part == "prefill" or number == 0))
        for number, shape in enumerate(shapes)
    }
