"""Cases in processes of their own, watched: what hangs is ended, what breaks costs one case, and the rest goes on.

A process reports over a pipe, a JSON object a line:

    {"event": "cases", "cases": [...]}           it found its cases itself
    {"event": "start", "case": "bf16"}           and a moment later  {"event": "step", "step": "triton"}
    {"event": "line", "line": {...}}             as `Line.as_json`
    {"event": "value", "name": ..., "value": ...}
    {"event": "end", "case": "bf16"}

When it ends early, or a case takes too long, a new one gets what is left. A case that was in a named step is tried
again without that step; any other one has failed.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpu_check.lines import Line, last_lines

# The variable that tells a process which file descriptor it reports to.
EVENTS_VARIABLE = "GPU_CHECK_EVENTS"
# The variable with what a process has to do, as JSON.
TASK_VARIABLE = "GPU_CHECK_TASK"
# Lines of a dead process's output that are shown.
SHOWN_LINES = 4
# What a process that was killed may take to be gone.
EXIT_SECONDS = 5.0


def report(event: str, **fields: Any) -> None:
    """Tell the watching process something. Called in a worker."""
    os.write(int(os.environ[EVENTS_VARIABLE]), (json.dumps({"event": event, **fields}) + "\n").encode())


def tell(line: Line) -> None:
    """Report a line. Called in a worker."""
    report("line", line=line.as_json())


def task() -> dict[str, Any]:
    """Return what this worker has to do."""
    given: dict[str, Any] = json.loads(os.environ[TASK_VARIABLE])
    return given


@dataclass(frozen=True)
class Limits:
    """When a process is ended.

    Attributes:
        deadline: Of all cases together, as `time.monotonic` tells it.
        case_seconds: What a case may take, or a step of it.
        start_seconds: What may pass before the first case.
    """

    deadline: float
    case_seconds: float
    start_seconds: float = 60.0


@dataclass
class Worker:
    """A process, and what is known of it.

    Attributes:
        part: What its lines belong to.
        command: What is run.
        task: What it finds in its environment, as JSON: "cases" and "without" are filled in here.
        cases: What is left to do; None until the process has said what there is.
        case: The case under way.
        step: The step of it that is under way.
        since: When the process last said that something began or ended.
        num_ended: Cases that the present process has struck off the list.
        without: Steps that a process ended over, by case.
        done: Cases that were struck off.
    """

    part: str
    command: Sequence[str]
    task: Mapping[str, Any]
    environment: Mapping[str, str]
    cases: list[str] | None
    case: str | None = None
    step: str | None = None
    since: float = 0.0
    num_ended: int = 0
    without: dict[str, list[str]] = field(default_factory=dict)
    done: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._buffer = b""

    def start(self, selector: selectors.BaseSelector) -> None:
        read_end, write_end = os.pipe()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115
        task = {**self.task, "cases": self.cases, "without": self.without}
        variables = {EVENTS_VARIABLE: str(write_end), TASK_VARIABLE: json.dumps(task)}
        self._process = subprocess.Popen(
            self.command,
            env={**self.environment, **variables},
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            pass_fds=(write_end,),
            # A group of its own, so that what it starts ends with it.
            start_new_session=True,
        )
        os.close(write_end)
        self._read_end = read_end
        self.case, self.step, self.since, self.num_ended, self._buffer = None, None, time.monotonic(), 0, b""
        selector.register(read_end, selectors.EVENT_READ, self)

    def read(self) -> list[dict[str, Any]] | None:
        """Return what the process said since the last time; None when it says nothing more."""
        got = os.read(self._read_end, 1 << 16)
        if not got:
            return None
        *whole, self._buffer = (self._buffer + got).split(b"\n")
        return [json.loads(line) for line in whole]

    def stop(self, selector: selectors.BaseSelector) -> str:
        """End the process and what it started; return how it ended, with the last of what it printed."""
        process = self._process
        if process is None:
            return ""
        self._process = None
        selector.unregister(self._read_end)
        os.close(self._read_end)
        # It closed its end of the pipe, or is about to be ended.
        try:
            status: int | None = process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            status = None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        # The driver may take a while to stop what runs on the device.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=EXIT_SECONDS)
        self._output.seek(0)
        printed = self._output.read().decode(errors="replace")
        self._output.close()
        how = "it was ended" if status is None else _how_it_ended(status)
        return f"{how}; it printed: {last_lines(printed, SHOWN_LINES) or 'nothing'}"

    def kill(self) -> None:
        """End the process at once."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def take(self, event: Mapping[str, Any]) -> None:
        """Note where the process is."""
        match event["event"]:
            case "cases":
                self.cases = list(event["cases"])
            case "start":
                self.case, self.step, self.since = event["case"], None, time.monotonic()
            case "step":
                self.step, self.since = event["step"], time.monotonic()
            case "end":
                self.leave(event["case"])

    def leave(self, case: str) -> None:
        """Strike a case off the list."""
        self.done.append(case)
        self.cases = [left for left in self.cases or [] if left != case]
        self.case, self.step, self.since, self.num_ended = None, None, time.monotonic(), self.num_ended + 1


def run_workers(
    workers: Sequence[Worker],
    limits: Limits,
    on_line: Callable[[Line], None],
    on_value: Callable[[str, Any], None] = lambda name, value: None,
    on_end: Callable[[Worker, str], None] = lambda worker, case: None,
) -> None:
    """Run several processes side by side until each has done its cases, or the deadline has come.

    Args:
        on_line: Gets each line when it comes, those that are said here of a case that broke or hung included.
        on_value: Gets each named value.
        on_end: Gets each case that was struck off.
    """
    with selectors.DefaultSelector() as selector:
        try:
            for worker in workers:
                if worker.cases != []:
                    worker.start(selector)
            while selector.get_map():
                now = time.monotonic()
                if now >= limits.deadline:
                    return
                alive = [key.data for key in selector.get_map().values()]
                waits = [_patience(worker, limits) - now for worker in alive] + [limits.deadline - now]
                ready = selector.select(timeout=max(min(waits), 0.0))
                for key, _ in ready:
                    _hear(key.data, selector, limits, on_line, on_value, on_end)
                if not ready:
                    for worker in alive:
                        if time.monotonic() >= min(_patience(worker, limits), limits.deadline):
                            _give_up(worker, selector, limits, on_line, on_end)
        finally:
            for worker in workers:
                worker.kill()
                worker.stop(selector)


def _patience(worker: Worker, limits: Limits) -> float:
    """Return until when a process may say nothing that ends a case."""
    return worker.since + (limits.start_seconds if worker.case is None else limits.case_seconds)


def _hear(
    worker: Worker,
    selector: selectors.BaseSelector,
    limits: Limits,
    on_line: Callable[[Line], None],
    on_value: Callable[[str, Any], None],
    on_end: Callable[[Worker, str], None],
) -> None:
    events = worker.read()
    if events is None:
        how = worker.stop(selector)
        if worker.cases:
            _go_on_after(worker, f"the process ended in the middle: {how}", selector, on_line, on_end)
        elif worker.cases is None:
            on_line(Line(worker.part, "the process itself", "failed", f"it found no cases: {how}"))
        return
    for event in events:
        worker.take(event)
        if event["event"] == "line":
            on_line(Line.from_json(event["line"]))
        elif event["event"] == "value":
            on_value(event["name"], event["value"])
        elif event["event"] == "end":
            on_end(worker, event["case"])
    if worker.cases == []:
        # All is said. Waiting for the process would cost more time than some parts have.
        worker.kill()
        worker.stop(selector)


def _give_up(
    worker: Worker,
    selector: selectors.BaseSelector,
    limits: Limits,
    on_line: Callable[[Line], None],
    on_end: Callable[[Worker, str], None],
) -> None:
    if time.monotonic() >= limits.deadline:
        return
    waited = limits.start_seconds if worker.case is None else limits.case_seconds
    worker.kill()
    how = worker.stop(selector)
    _go_on_after(worker, f"nothing came of it in {waited:.0f} s; {how}", selector, on_line, on_end)


def _go_on_after(
    worker: Worker,
    why: str,
    selector: selectors.BaseSelector,
    on_line: Callable[[Line], None],
    on_end: Callable[[Worker, str], None],
) -> None:
    """Say what failed, and start the process again with the rest."""
    case, step = worker.case, worker.step
    if case is not None and step is not None:
        on_line(Line(worker.part, f"{case}, {step}", "failed", why))
        worker.without.setdefault(case, []).append(step)
    elif case is not None:
        on_line(Line(worker.part, case, "failed", why))
        worker.leave(case)
        on_end(worker, case)
    elif not worker.num_ended:
        # Between cases, and no case was done: another try would end as this one did.
        on_line(Line(worker.part, "the process itself", "failed", why))
        return
    if worker.cases:
        worker.start(selector)


def _how_it_ended(status: int) -> str:
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"
