"""What `octavo bench` shows: a table, or an object for a program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from octavo.benchmark.limits import MachineLimits
from octavo.benchmark.machine import Machine, Versions
from octavo.benchmark.measure import Measurement, NotRun
from octavo.config import EngineConfig
from octavo.plugins.hookspecs import EngineStarted

LABEL_WIDTH = 24
COLUMN_WIDTH = 11


@dataclass(frozen=True)
class StreamBound:
    """What the machine's limits mean for the model.

    Attributes:
        machine: As measured.
        weight_bytes: Bytes of weights that a token makes the model read.
    """

    machine: MachineLimits
    weight_bytes: int

    @property
    def tokens_per_s(self) -> float:
        """What one stream cannot exceed."""
        return self.machine.tokens_per_s(self.weight_bytes)


@dataclass(frozen=True)
class Report:
    """All there is to say.

    Attributes:
        config: As asked for.
        started: What became of it.
        versions: What ran.
        machine: What it ran on.
        num_runs: How often each workload was to be run.
        results: One a workload, in order.
        bound: None when it was not asked for.
    """

    config: EngineConfig
    started: EngineStarted
    versions: Versions
    machine: Machine
    num_runs: int
    results: Sequence[Measurement | NotRun]
    bound: StreamBound | None

    @property
    def measurements(self) -> list[Measurement]:
        """The results of the workloads that were run."""
        return [result for result in self.results if isinstance(result, Measurement)]

    @property
    def headline(self) -> str:
        """The model, and what it ran with."""
        started, versions = self.started, self.versions
        return (
            f"{started.model or 'demo model'} on {started.device} in {started.dtype}, octavo {versions.octavo}, "
            f"torch {versions.torch}, Python {versions.python}"
        )


# -- as a table -------------------------------------------------------------------------------------------------


def table_lines(report: Report) -> list[str]:
    """Return the table, a column for each workload, and what stands around it."""
    machine = report.machine
    device = "" if machine.device == machine.cpu else f"{machine.device}, "
    columns = [_column(result, report.num_runs) for result in report.results]
    lines = [
        report.headline,
        f"{device}{machine.cpu}, {_count(machine.num_cpus, 'processor')}, {_count(machine.num_threads, 'thread')}",
        "",
        _row("", [result.workload.name for result in report.results]),
        *(_row(label, [column[label] for column in columns]) for label in columns[0]),
    ]
    for result in report.results:
        if isinstance(result, NotRun):
            lines += ["", f"{result.workload.name} was not run: {result.reason}."]
    if report.bound is not None:
        lines += ["", *_bound_lines(report.bound)]
    return lines


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _row(label: str, cells: Sequence[str]) -> str:
    return (f"{label:{LABEL_WIDTH}}" + "".join(f"{cell:>{COLUMN_WIDTH}}" for cell in cells)).rstrip()


def _column(result: Measurement | NotRun, num_runs: int) -> dict[str, str]:
    """Return a workload's cells by the label of their row."""
    work = result.workload
    cells = {
        "requests": str(len(work.prompts)),
        "prompt tokens": str(work.num_prompt_tokens),
        "output tokens": str(work.num_output_tokens),
    }
    run_labels = [f"seconds, run {number}" for number in range(1, num_runs + 1)]
    if isinstance(result, NotRun):
        return cells | dict.fromkeys([*run_labels, *_FIGURES], "-") | {"seconds, median": "not run"}
    cells |= {label: f"{run.seconds:.2f}" for label, run in zip(run_labels, result.runs, strict=True)}
    return cells | {label: figure(result) for label, figure in _FIGURES.items()}


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.1f}"


_FIGURES: dict[str, Callable[[Measurement], str]] = {
    "seconds, median": lambda m: f"{m.seconds:.2f}",
    "requests/s": lambda m: f"{m.requests_per_s:.2f}",
    "prompt tokens/s": lambda m: f"{m.prompt_tokens_per_s:.1f}",
    "output tokens/s": lambda m: f"{m.output_tokens_per_s:.1f}",
    "first token, median, ms": lambda m: _milliseconds(m.first_token_seconds.median),
    "first token, p99, ms": lambda m: _milliseconds(m.first_token_seconds.p99),
    "per token, median, ms": lambda m: _milliseconds(m.token_seconds.median),
    "per token, p99, ms": lambda m: _milliseconds(m.token_seconds.p99),
    "prefix hit tokens": lambda m: str(m.hit_tokens),
    "preemptions": lambda m: str(m.preemptions),
}


def _bound_lines(bound: StreamBound) -> list[str]:
    machine = bound.machine
    return [
        f"memory read {machine.read_bytes_per_s / 1e9:.1f} GB/s; "
        f"matrix product in {machine.dtype} {machine.matmul_flop_per_s / 1e9:.0f} GFLOP/s",
        f"a token reads {bound.weight_bytes / 1e6:.1f} MB of weights: one stream cannot exceed "
        f"{bound.tokens_per_s:.1f} tokens/s",
    ]


# -- as an object -----------------------------------------------------------------------------------------------


def as_object(report: Report) -> dict[str, Any]:
    """Return the same for a program, with all that was measured of each run."""
    return {
        "versions": asdict(report.versions),
        "machine": asdict(report.machine),
        "engine": asdict(report.started),
        # A hash seed may be a secret: whoever knows it can make the prefix cache's keys.
        "settings": report.config.model_dump(mode="json", exclude={"cache": {"hash_seed"}}),
        "num_runs": report.num_runs,
        "limits": None if report.bound is None else _bound_as_object(report.bound),
        "workloads": [_result_as_object(result) for result in report.results],
    }


def _bound_as_object(bound: StreamBound) -> dict[str, Any]:
    return {**asdict(bound.machine), "weight_bytes": bound.weight_bytes, "tokens_per_s": bound.tokens_per_s}


def _result_as_object(result: Measurement | NotRun) -> dict[str, Any]:
    """Return a workload's figures, without its prompts."""
    work = result.workload
    about = {
        "name": work.name,
        "num_requests": len(work.prompts),
        "num_prompt_tokens": work.num_prompt_tokens,
        "num_output_tokens": work.num_output_tokens,
    }
    if isinstance(result, NotRun):
        return {**about, "not_run": result.reason}
    return {
        **about,
        "not_run": None,
        "seconds": result.seconds,
        "requests_per_s": result.requests_per_s,
        "prompt_tokens_per_s": result.prompt_tokens_per_s,
        "output_tokens_per_s": result.output_tokens_per_s,
        "first_token_seconds": asdict(result.first_token_seconds),
        "token_seconds": asdict(result.token_seconds),
        "hit_tokens": result.hit_tokens,
        "preemptions": result.preemptions,
        "runs": [asdict(run) for run in result.runs],
    }
