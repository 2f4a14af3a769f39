"""A picture of measurements: rates as bars, and how the requests' times are distributed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from octavo.benchmark.measure import Measurement
from octavo.errors import ConfigError, MissingExtraError

# Times that differ more get a logarithmic axis.
LARGEST_LINEAR_RATIO = 5
KINDS = (".png", ".svg", ".pdf")


def check_plot(path: Path) -> None:
    """See that a picture could be drawn and written, before anything is measured for it.

    Raises:
        MissingExtraError: matplotlib is not installed.
        ConfigError: The file cannot be there, or is of no kind that matplotlib writes.
    """
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise MissingExtraError("--plot needs matplotlib; install it with: pip install 'octavo[plot]'") from None
    if not path.parent.is_dir():
        raise ConfigError(f"The picture {str(path)!r} cannot be written: there is no folder {str(path.parent)!r}.")
    if path.suffix.lower() not in KINDS:
        raise ConfigError(f"The picture {str(path)!r} cannot be written: its name must end in {' or '.join(KINDS)}.")


def draw(measurements: Sequence[Measurement], title: str, path: Path) -> None:
    """Draw and write a picture; `check_plot` says beforehand whether that can be done."""
    from matplotlib.figure import Figure

    # Made without pyplot, which would look for a screen.
    figure = Figure(figsize=(12, 4), layout="constrained")
    rates, first_tokens, tokens = figure.subplots(1, 3)
    _draw_rates(rates, measurements)
    first = {m.workload.name: [s for run in m.runs for s in run.first_token_seconds] for m in measurements}
    _draw_distributions(first_tokens, first, "time to first token, ms")
    later = {m.workload.name: [s for run in m.runs for s in run.token_seconds] for m in measurements}
    _draw_distributions(tokens, later, "time per output token, ms")
    figure.suptitle(title, fontsize="medium")
    figure.savefig(path, dpi=120)


def _draw_rates(axes: Any, measurements: Sequence[Measurement]) -> None:
    names = [measurement.workload.name for measurement in measurements]
    bars = axes.bar(names, [measurement.output_tokens_per_s for measurement in measurements])
    axes.bar_label(bars, fmt="%.0f")
    axes.set_ylabel("output tokens/s, median run")


def _draw_distributions(axes: Any, seconds_by_workload: dict[str, list[float]], label: str) -> None:
    """Draw, for each workload, the share of requests that took at most so long."""
    from matplotlib.ticker import LogLocator

    for name, seconds in seconds_by_workload.items():
        if seconds:
            axes.ecdf([1e3 * value for value in seconds], label=name)
    axes.set_xlabel(label)
    axes.set_ylabel("share of requests")
    drawn = [value for seconds in seconds_by_workload.values() for value in seconds]
    if not drawn:
        return
    axes.legend()
    if max(drawn) > LARGEST_LINEAR_RATIO * min(drawn):
        axes.set_xscale("log", subs=())
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter("{x:g}")
