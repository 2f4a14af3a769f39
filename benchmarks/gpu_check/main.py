"""The order of the parts, and the time that each may take.

    scripts/gpu_check                            everything, within four minutes
    scripts/gpu_check --parts limits,decode      some parts
    scripts/gpu_check --tune --budget 600        a search through the Triton backend's options
    scripts/gpu_check --compile-only             the Triton kernels compiled for three GPUs, without a GPU
    scripts/gpu_check --device cpu --small       a look at the script itself, without a GPU

Exit status: 0, also where targets were missed or something was not run; 1 where anything failed; 2 without a GPU, or
where the arguments make no sense; 141 where nobody reads what it prints.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_check.lines import Line, Report
from gpu_check.needs import ROOT, backend_names, environment_with, missing, register_checkout
from gpu_check.suite import run_suite
from gpu_check.workers import Limits, Worker, run_workers

BUDGET_SECONDS = 240.0
# Kept for ending processes, and for the table.
RESERVED_SECONDS = 8.0
# What each part gets of the time that is left when it begins, in proportion to the parts that come after it. What one
# leaves goes to the others.
SHARES = {"environment": 16, "limits": 18, "suite": 62, "engine": 50, "decode": 42, "prefill": 60}
ALONE = {"tune": 200, "compile": 200}
# What a case of a part, or a step of it, may take before it counts as hung. Compilation counts.
CASE_SECONDS = {"environment": 20.0, "limits": 20.0, "engine": 40.0, "decode": 25.0, "prefill": 40.0}
LONG_CASE_SECONDS = 60.0
# What the first process may take, which imports torch and wakes the driver on a machine that has done neither before.
PROBE_SECONDS = 90.0
# The third is for a torch whose own FlashAttention reads no pages: keys are copied out of them first.
BACKENDS = ("triton", "flash_attn", "flash_attn+provider=torch_gather", "torch_sdpa")
# Those that use the backends, and do without one that cannot be used.
BACKEND_PARTS = ("suite", "engine", "decode", "prefill")
# Tests of the suite where only the script is looked at.
SMALL_TESTS = 12
DEVICE = re.compile(r"cpu|cuda(:[0-9]+)?")
# What a shell says of a program that SIGPIPE ended.
NOBODY_READS = 141


@dataclass(frozen=True)
class Arguments:
    """What was asked for; see `parse`."""

    device: str
    is_small: bool
    parts: tuple[str, ...]
    backends: tuple[str, ...]
    budget_seconds: float
    json_file: Path | None
    num_tests: int | None


def parse(words: Sequence[str]) -> Arguments:
    parser = argparse.ArgumentParser(prog="scripts/gpu_check", description="Check Octavo on one GPU, in four minutes.")
    parser.add_argument("--device", default="cuda:0", help="cuda, cuda:N or cpu; cpu looks at the script itself")
    parser.add_argument("--small", action="store_true", help="tiny sizes, for a look at the script itself")
    parser.add_argument("--parts", help=f"some of {','.join(SHARES)}, by commas; all of them by default")
    backends_help = "attention backends, by commas; options stand behind one as +option=value; default %(default)s"
    parser.add_argument("--backends", default=",".join(BACKENDS), help=backends_help)
    parser.add_argument("--tune", action="store_true", help="search the Triton backend's options, after the limits")
    parser.add_argument("--compile-only", action="store_true", help="compile the Triton kernels; needs no GPU")
    parser.add_argument("--budget", type=float, default=BUDGET_SECONDS, help="seconds in all; default %(default)s")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write everything to a file too, anew after each part"
    )
    parser.add_argument("--tests", type=int, metavar="N", help="the first N tests of the suite; all by default")
    given = parser.parse_args(words)
    parts = ("compile",) if given.compile_only else _parts(parser, given.parts, given.tune)
    if given.budget <= RESERVED_SECONDS:
        parser.error(f"--budget is {given.budget:g}; it must be more than {RESERVED_SECONDS:g} seconds")
    if given.tests is not None and given.tests < 1:
        parser.error(f"--tests is {given.tests}; it must be at least 1")
    if not DEVICE.fullmatch(given.device):
        parser.error(f"--device is {given.device}; it must be cpu, cuda, or cuda:N with the number of a GPU")
    if given.json is not None:
        _require_writable(parser, given.json)
    num_tests = given.tests or (SMALL_TESTS if given.small else None)
    backends = _backends(parser, given.backends)
    device = "cpu" if given.compile_only else "cuda:0" if given.device == "cuda" else given.device
    return Arguments(device, given.small, parts, backends, given.budget, given.json, num_tests)


def _parts(parser: argparse.ArgumentParser, listed: str | None, has_tune: bool) -> tuple[str, ...]:
    """Return the parts in their order."""
    if listed is None:
        return ("environment", "limits", "tune") if has_tune else tuple(SHARES)
    names = [name for name in listed.split(",") if name]
    if unknown := [name for name in names if name not in SHARES]:
        parser.error(f"--parts has {', '.join(unknown)}; parts are {', '.join(SHARES)}")
    return tuple(name for name in SHARES if name in names) + (("tune",) if has_tune else ())


def _backends(parser: argparse.ArgumentParser, listed: str) -> tuple[str, ...]:
    backends, known = tuple(name for name in listed.split(",") if name), backend_names()
    # A package may stand before the name: "package:name+option=value".
    names = {backend: backend.partition("+")[0].rpartition(":")[2] for backend in backends}
    if unknown := [backend for backend, name in names.items() if name not in known]:
        parser.error(f"--backends has {', '.join(unknown)}; attention backends are {', '.join(known)}")
    return backends


def _require_writable(parser: argparse.ArgumentParser, path: Path) -> None:
    """Refuse a path now that could not be written after minutes."""
    is_there = path.exists()
    try:
        path.open("a").close()
    except OSError as error:
        parser.error(f"--json is {path}, which cannot be written: {error.strerror}")
    if not is_there:
        path.unlink()


def main(words: Sequence[str] | None = None) -> int:
    """Run the check; return the exit status."""
    arguments = parse(sys.argv[1:] if words is None else words)
    try:
        return check(arguments)
    except BrokenPipeError:
        # Python writes what is left once more when it ends, and would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return NOBODY_READS


def check(arguments: Arguments) -> int:
    """Run the parts that were asked for; return the exit status."""
    if missing("environment"):
        print("gpu_check needs torch, with CUDA, and it is not installed.", file=sys.stderr)
        return 2
    report = Report(sys.stdout)
    run = Run(arguments, report, deadline=time.monotonic() + arguments.budget_seconds - RESERVED_SECONDS)
    with tempfile.TemporaryDirectory() as folder:
        run.register(Path(folder))
        if (reason := run.reason_against_the_device()) is not None:
            print(reason, file=sys.stderr)
            return 2
        for part in arguments.parts:
            run.run_part(part)
            if arguments.json_file is not None:
                report.write_json(arguments.json_file, run.about)
    report.print_table()
    return report.exit_status


class Run:
    """One run of the check.

    Args:
        deadline: As `time.monotonic` tells it.

    Attributes:
        about: What the run is on, for the JSON.
    """

    def __init__(self, arguments: Arguments, report: Report, deadline: float) -> None:
        self._arguments, self._report, self._deadline = arguments, report, deadline
        self._folder = ""
        self._environment: dict[str, str] = {}
        self._limits: dict[str, float] = {}
        # Backends that nothing can be asked of, and why.
        self._unusable: dict[str, str] = {}
        self.about: dict[str, Any] = {
            "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "device": arguments.device,
            "is_small": arguments.is_small,
            "budget_seconds": arguments.budget_seconds,
            "parts": list(arguments.parts),
            "parts_done": [],
            "backends": list(arguments.backends),
        }

    def register(self, folder: Path) -> None:
        """Make the environment of the processes. `folder` is theirs, for files and on their path."""
        self._folder = str(folder / "files")
        folders = [register_checkout(folder / "site"), ROOT, Path(__file__).parents[1]]
        self._environment = environment_with(folders, {"PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"})

    def reason_against_the_device(self) -> str | None:
        """Return why nothing can be run, None when it can. Asked in a process of its own, for it touches the GPU."""
        if not self._arguments.device.startswith("cuda"):
            return None
        found: dict[str, Any] = {}
        limits = Limits(min(time.monotonic() + PROBE_SECONDS, self._deadline), PROBE_SECONDS)
        worker = self._worker("device", limits)
        run_workers([worker], limits, self._report.add, found.__setitem__)
        reason: str | None = found.get("reason", "gpu_check found out nothing about the GPU: torch did not answer.")
        return reason

    def run_part(self, part: str) -> None:
        """Run a part as far as its time goes, and say what of it was not reached."""
        self._run_part(part)
        self.about["parts_done"].append(part)

    def _run_part(self, part: str) -> None:
        if lacking := missing(part):
            names = ", ".join(lacking)
            self._report.add(Line(part, "all of it", "not run", f"not installed: {names}", {"missing": lacking}))
            return
        if part in BACKEND_PARTS:
            for backend, reason in self._unusable.items():
                self._add(Line(part, f"{backend}, all of it", "not run", reason))
        limits = self._limits_of(part)
        self._report.say(f"{part}: at most {limits.deadline - time.monotonic():.0f} s")
        if part == "suite":
            run_suite(
                self._task(part, limits), self._environment, limits.deadline, self._add, self._arguments.num_tests
            )
            return
        worker = self._worker(part, limits)
        run_workers([worker], limits, self._add, self._keep)
        for case in worker.cases or ():
            self._add(Line(part, case, "not run", _why_not_run(worker, case)))
        if worker.cases is None and not any(line.part == part for line in self._report.lines):
            self._add(Line(part, "all of it", "not run", "no time was left"))

    def _limits_of(self, part: str) -> Limits:
        """Return a part's share of what is left."""
        now = time.monotonic()
        shares = {**SHARES, **ALONE}
        parts = self._arguments.parts
        later = parts[parts.index(part) :] if part in parts else parts
        share = shares[part] / max(sum(shares[name] for name in later), shares[part])
        return Limits(now + max(self._deadline - now, 0.0) * share, CASE_SECONDS.get(part, LONG_CASE_SECONDS))

    def _worker(self, part: str, limits: Limits) -> Worker:
        command = [sys.executable, "-m", "gpu_check.worker"]
        # A process either interprets Triton's kernels or compiles them.
        dropped = ("TRITON_INTERPRET",) if part == "compile" else ()
        environment = {name: value for name, value in self._environment.items() if name not in dropped}
        return Worker(part, command, self._task(part, limits), environment, None)

    def _task(self, part: str, limits: Limits) -> dict[str, Any]:
        return {
            "part": part,
            "device": self._arguments.device,
            "backends": [name for name in self._arguments.backends if name not in self._unusable],
            "is_small": self._arguments.is_small,
            "limits": self._limits,
            "seconds": limits.deadline - time.monotonic(),
            "folder": self._folder,
        }

    def _add(self, line: Line) -> None:
        self._report.add(line)

    def _keep(self, name: str, value: Any) -> None:
        """Keep a value that a process reported: a limit for later parts, or what the run is on."""
        if name.endswith("_per_s"):
            self._limits[name] = value
        elif name == "unusable":
            self._unusable = value
        else:
            self.about[name] = value


def _why_not_run(worker: Worker, case: str) -> str:
    if case != worker.case:
        return "no time was left"
    return "the time of the part ended in it" + (f", at {worker.step}" if worker.step is not None else "")
