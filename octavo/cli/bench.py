"""`octavo bench`: how fast an engine does a fixed piece of work."""

import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from octavo.cli.options import with_engine_options, with_model
from octavo.config import EngineConfig
from octavo.errors import ConfigError

if TYPE_CHECKING:
    from octavo.benchmark.measure import Measurement, NotRun, Run
    from octavo.benchmark.workloads import Workload
    from octavo.cli.bench_report import StreamBound
    from octavo.engine_thread import EngineThread

# What the command exits with when a workload was not run.
EXIT_NOT_RUN = 1


@dataclass(frozen=True)
class CustomSize:
    """What the flags say of a workload of the user's own; None where a flag is not given."""

    num_prompts: int | None
    input_len: int | None
    output_len: int | None

    @property
    def is_wanted(self) -> bool:
        return (self.num_prompts, self.input_len, self.output_len) != (None, None, None)


@with_engine_options
def bench(
    *,
    model_argument: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="As --model. Without it, the demo model.")
    ] = None,
    config: EngineConfig,
    workload: Annotated[
        str | None,
        typer.Option(
            help="What to do, with commas: single, batch, prefix, long. Without it all four, in turn; or, where one of "
            "your own is given, that alone."
        ),
    ] = None,
    num_prompts: Annotated[
        int | None, typer.Option(min=1, help="Requests of a workload of your own. [default: 1]", show_default=False)
    ] = None,
    input_len: Annotated[
        int | None, typer.Option(min=1, help="Tokens of each of its prompts. [default: 128]", show_default=False)
    ] = None,
    output_len: Annotated[
        int | None, typer.Option(min=1, help="Tokens that each generates. [default: 128]", show_default=False)
    ] = None,
    workload_seed: Annotated[
        int | None,
        typer.Option(min=0, help="Draws the token ids of a workload of your own. [default: 0]", show_default=False),
    ] = None,
    runs: Annotated[int, typer.Option(min=1, help="Times that each workload is run; the median counts.")] = 3,
    limits: Annotated[bool, typer.Option("--limits", help="Measure what the machine can do at most, too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print an object for a program to read.")] = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Draw the figures; needs the extra 'plot'.")
    ] = None,
) -> None:
    """Measure how fast MODEL does a fixed piece of work here. All requests of a workload arrive at once and are greedy;
    the prefix cache is empty at the start of each run."""
    config = with_model(config, model_argument)
    size = CustomSize(num_prompts, input_len, output_len)
    make_workloads = _workloads(workload, size, workload_seed)
    if plot is not None:
        from octavo.benchmark.plot import check_plot, draw

        check_plot(plot)
    from octavo.benchmark.machine import describe_machine, describe_versions
    from octavo.cli.bench_report import Report, as_object, table_lines

    # What a package prints when it is imported or told must not get between the lines of the answer.
    with redirect_stdout(sys.stderr), _engine(config) as thread:
        started = thread.assembly.started
        machine = thread.call(lambda: describe_machine(started.device))
        bound = _measure_bound(thread) if limits else None
        results = _run_all(thread, make_workloads, runs)
    report = Report(config, started, describe_versions(), machine, runs, results, bound)
    print(json.dumps(as_object(report)) if as_json else "\n".join(table_lines(report)))
    if plot is not None:
        draw(report.measurements, report.headline, plot)
    if len(report.measurements) < len(results):
        raise typer.Exit(EXIT_NOT_RUN)


def _workloads(names: str | None, size: CustomSize, seed: int | None) -> Callable[[int], "list[Workload]"]:
    """Return what makes the wanted workloads, once the size of the vocabulary is known.

    Raises:
        ConfigError: One is named that does not exist, or a seed is given that draws nothing.
    """
    from octavo.benchmark.workloads import WORKLOAD_NAMES, custom_workload, named_workload

    if seed is not None and not size.is_wanted:
        raise ConfigError(
            "--workload-seed draws the token ids of a workload of your own, and none is given; make one with "
            "--num-prompts, --input-len or --output-len, or leave the seed out."
        )
    if names is None:
        chosen: Sequence[str] = () if size.is_wanted else WORKLOAD_NAMES
    else:
        # Each once: the same work again would only be a further run.
        chosen = list(dict.fromkeys(name.strip() for name in names.split(",")))
    named = [named_workload(name) for name in chosen]

    def make(vocab_size: int) -> "list[Workload]":
        if not size.is_wanted:
            return named
        custom = custom_workload(
            size.num_prompts or 1, size.input_len or 128, size.output_len or 128, vocab_size=vocab_size, seed=seed or 0
        )
        return [*named, custom]

    return make


@contextmanager
def _engine(config: EngineConfig) -> "Iterator[EngineThread]":
    from octavo.assembly import build_engine
    from octavo.engine_thread import EngineThread

    thread = EngineThread(lambda: build_engine(config))
    try:
        yield thread
    finally:
        thread.stop()


def _run_all(
    thread: "EngineThread", make_workloads: Callable[[int], "list[Workload]"], num_runs: int
) -> "list[Measurement | NotRun]":
    """Run the workloads; say on standard error how far it is."""
    from octavo.benchmark.measure import measure, warm_up

    warm_up(thread)
    results = []
    for workload in make_workloads(thread.assembly.engine.vocab_size):
        results.append(measure(thread, workload, num_runs, on_run=_progress(workload.name, num_runs)))
    return results


def _progress(name: str, num_runs: int) -> "Callable[[Run], None]":
    """Return what shows each of a workload's runs when it is done."""
    numbers = itertools.count(1)

    def show(run: "Run") -> None:
        print(f"{name}: run {next(numbers)} of {num_runs} took {run.seconds:.2f} s", file=sys.stderr)

    return show


def _measure_bound(thread: "EngineThread") -> "StreamBound":
    from octavo.benchmark.limits import measure_limits, weight_bytes_per_token
    from octavo.cli.bench_report import StreamBound
    from octavo.core.model_runner import ModelRunner

    assembly = thread.assembly
    runner = assembly.engine.runner
    assert isinstance(runner, ModelRunner)
    started, spec = assembly.started, assembly.selection.needs.spec
    # In the engine's thread: a second thread that computes would slow the engine down for good.
    machine = thread.call(lambda: measure_limits(started.dtype, started.device))
    weight_bytes = weight_bytes_per_token(runner.model, spec.vocab_size)
    return StreamBound(machine, weight_bytes)
