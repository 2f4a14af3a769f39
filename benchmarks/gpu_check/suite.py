"""The conformance suite, uninterpreted: the most telling tests first, spread over processes, as far as the time goes.

Each process takes every n-th test of one order. It reports over a pipe as all workers do, so that a test that hangs, or
breaks the GPU for its process, is one failure, and the process's other tests go on in a new one.
"""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpu_check.lines import Line, first_line
from gpu_check.workers import Limits, Worker, run_workers

MOST_PROCESSES = 8
# With compilation, which other processes wait for too.
TEST_SECONDS = 30.0
# Failures of one backend that are printed each; the rest is counted.
MOST_SHOWN_FAILURES = 8
# bfloat16 first: it is what models run in, and what no interpreter computes rightly.
DTYPES = ("bfloat16", "float32")

# What tells most, first. A test belongs to the first entry that it fits: name of the test, begin of the ability.
ORDER = (
    ("test_output_and_lse_equal_the_definition", "plain"),
    ("test_output_and_lse_equal_the_definition", "grouped_query"),
    ("test_output_and_lse_equal_the_definition", "window"),
    ("test_output_and_lse_equal_the_definition", "value_is_key_prefix"),
    ("test_long_rows_have_no_seam", ""),
    ("test_a_recorded_step_can_be_replayed_with_other_numbers", ""),
    ("test_output_and_lse_equal_the_definition", "bfloat16_and_"),
    ("test_output_and_lse_equal_the_definition", "fp8_"),
    ("test_output_and_lse_equal_the_definition", "int8"),
    ("test_output_and_lse_equal_the_definition", "head_dim_"),
    ("test_output_and_lse_equal_the_definition", "soft_cap"),
    ("test_output_and_lse_equal_the_definition", "sinks"),
    ("test_output_and_lse_equal_the_definition", "chunk"),
    ("test_slot_minus_one_writes_nothing", ""),
    ("test_a_write_touches_no_other_block", ""),
    ("test_gathered_keys_are_those_that_were_written", ""),
    ("test_many_rows_have_no_seam", ""),
    ("test_a_prefill_in_pieces_equals_a_whole_one", ""),
    ("test_contexts_around_the_edges_of_blocks_and_rules", ""),
    ("test_large_scores_do_not_overflow", ""),
    ("test_output_and_lse_equal_the_definition", ""),
    ("test_the_same_call_gives_the_same_bits", ""),
)
# These compile more kernels than they tell, or look at what the other tests look at too.
LAST = ("test_abilities_work_together", "test_what_is_accepted_can_be_built")


def order_of(nodeid: str, suites: Sequence[Mapping[str, str]]) -> tuple[int, int]:
    """Return where a test comes: by what it tells, then by its backend.

    Args:
        nodeid: As pytest writes it, "suite_tests.py::Test_triton_bfloat16::test_x[plain]".
        suites: Backends and dtypes, the most telling first.
    """
    suite, test, ability = parts_of(nodeid)
    rank = len(ORDER) + (1 if test in LAST else 0)
    for number, (name, start) in enumerate(ORDER):
        if test == name and ability.startswith(start):
            rank = number
            break
    place = [*map(class_name, suites)].index(suite)
    # Another dtype of a backend comes when the first one has been through the order.
    dtypes = list(dict.fromkeys(suite["dtype"] for suite in suites))
    dtype = dtypes.index(suites[place]["dtype"])
    return (dtype * (len(ORDER) + 2) + rank, place)


def class_name(suite: Mapping[str, str]) -> str:
    """Return the name of the class of a backend's tests in a dtype."""
    return re.sub(r"\W+", "_", f"Test_{suite['backend']}_{suite['dtype']}")


def parts_of(nodeid: str) -> tuple[str, str, str]:
    """Return a test's class, its name, and the ability, "" without one."""
    _, suite, test = nodeid.split("::")
    name, _, ability = test.removesuffix("]").partition("[")
    return suite, name, ability


class Tally:
    """Counts outcomes, by class of tests, and makes lines of them.

    Args:
        suites: Backends and dtypes.
        on_line: Gets each failure when it comes.
    """

    def __init__(self, suites: Sequence[Mapping[str, str]], on_line: Callable[[Line], None]) -> None:
        self._names = {class_name(suite): suite for suite in suites}
        self._on_line = on_line
        self._counts: dict[str, Counter[str]] = {name: Counter() for name in self._names}
        self._reasons: dict[str, Counter[str]] = {name: Counter() for name in self._names}
        self._shown: Counter[str] = Counter()

    def add(self, outcome: Mapping[str, str]) -> None:
        """Count what became of a test."""
        suite, test, ability = parts_of(outcome["case"])
        self._counts[suite][outcome["outcome"]] += 1
        if outcome["outcome"] == "skipped":
            self._reasons[suite][first_line(outcome["message"])] += 1
        elif outcome["outcome"] == "failed":
            self._show(Line("suite", self._what(suite, test, ability), "failed", first_line(outcome["message"])))

    def add_line(self, line: Line) -> None:
        """Take a failure that is no test's own: it hung, or its process ended."""
        if "::" not in line.what:
            self._on_line(line)
            return
        suite, test, ability = parts_of(line.what)
        self._counts[suite]["failed"] += 1
        self._show(Line("suite", self._what(suite, test, ability), "failed", line.text))

    def lines(self, left: Sequence[str]) -> list[Line]:
        """Return a line for each backend and dtype.

        Args:
            left: Tests that were not reached.
        """
        not_reached = Counter(parts_of(nodeid)[0] for nodeid in left)
        return [self._line(name, not_reached[name]) for name in self._names]

    def _line(self, name: str, not_reached: int) -> Line:
        counts = self._counts[name]
        figures = {**{key: counts[key] for key in ("passed", "failed", "skipped")}, "not_reached": not_reached}
        said = ", ".join(f"{count} {key.replace('_', ' ')}" for key, count in figures.items() if count)
        hidden = counts["failed"] - MOST_SHOWN_FAILURES
        said += f" ({hidden} failures not shown)" if hidden > 0 else ""
        suite = self._names[name]
        what = f"{suite['backend']}, {suite['dtype']}"
        if counts["failed"]:
            return Line("suite", what, "failed", said, figures)
        if counts["passed"]:
            return Line("suite", what, "passed", said, figures)
        if reasons := self._reasons[name].most_common(1):
            return Line("suite", what, "not run", f"{said}; {reasons[0][0]}", figures)
        why = f"no time was left: {said}" if not_reached else "none of its tests was among those chosen"
        return Line("suite", what, "not run", why, figures)

    def _show(self, line: Line) -> None:
        suite = line.what.partition(", test")[0]
        self._shown[suite] += 1
        if self._shown[suite] <= MOST_SHOWN_FAILURES:
            self._on_line(line)

    def _what(self, suite: str, test: str, ability: str) -> str:
        of = self._names[suite]
        return f"{of['backend']}, {of['dtype']}, {test}[{ability}]"


def run_suite(
    given: Mapping[str, Any],
    environment: Mapping[str, str],
    deadline: float,
    on_line: Callable[[Line], None],
    num_tests: int | None = None,
) -> None:
    """Run the suites of several backends until the deadline.

    Args:
        given: The task: device, backends.
        environment: Of the processes.
        on_line: Gets each failure when it comes, and in the end a line for each backend and dtype.
        num_tests: Of the order, the first so many; None for all.
    """
    suites = [{"backend": backend, "dtype": dtype} for dtype in DTYPES for backend in given["backends"]]
    tally = Tally(suites, on_line)
    count = num_processes(given["device"])
    task = {**given, "suites": suites, "num_shards": count, "num_tests": num_tests}
    workers = [Worker("suite", command(), {**task, "shard": shard}, environment, None) for shard in range(count)]
    run_workers(
        workers,
        Limits(deadline, TEST_SECONDS),
        on_line=tally.add_line,
        on_value=lambda name, value: tally.add(value) if name == "outcome" else None,
    )
    for line in tally.lines([case for worker in workers for case in worker.cases or []]):
        on_line(line)


def num_processes(device: str) -> int:
    """Return how many processes the tests are spread over: on a CPU two, for they all compute there."""
    available = len(os.sched_getaffinity(0))
    return max(1, min(available, MOST_PROCESSES if device.startswith("cuda") else 2))


def command() -> list[str]:
    """Return what runs the tests of one process. No settings of the checkout's own tests are read."""
    folder = Path(__file__).parent
    flags = ["-c", os.devnull, "--rootdir", str(folder), "-p", "no:cacheprovider", "-p", "gpu_check.suite_plugin", "-q"]
    return [sys.executable, "-m", "pytest", *flags, str(folder / "suite_tests.py")]
