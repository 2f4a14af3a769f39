"""Cases in watched processes: what hangs, breaks or never starts costs itself alone, and the deadline holds."""

import os
import sys
import textwrap
import time
from pathlib import Path

import pytest
from gpu_check.lines import Line
from gpu_check.workers import Limits, Worker, run_workers

ROOT = Path(__file__).parents[3]

# What each process begins with. `cases` is what it has to do, `without` the steps to leave out.
BEGIN = """
import os, sys, time
from gpu_check.workers import report, task

cases = task()["cases"]
if cases is None:
    cases = ["a", "b", "c"]
    report("cases", cases=cases)
without = task()["without"]

def line(case):
    report("line", line={"part": "p", "what": case, "status": "measured", "text": str(os.getpid()), "figures": {}})
"""


def worker(code, **fields):
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "benchmarks")}
    command = [sys.executable, "-c", BEGIN + textwrap.dedent(code)]
    return Worker("p", command, {"part": "p"}, environment, **{"cases": None, **fields})


def run(*workers, seconds=20.0, case_seconds=20.0, start_seconds=20.0):
    lines, values = [], {}
    limits = Limits(time.monotonic() + seconds, case_seconds, start_seconds)
    run_workers(workers, limits, lines.append, values.__setitem__)
    return lines, values


def ways(lines):
    return [(line.what, line.status) for line in lines]


def test_every_case_is_run_in_one_process_and_values_come_through():
    lines, values = run(
        worker("""
        for case in cases:
            report("start", case=case)
            line(case)
            report("value", name=case, value={"is": 1})
            report("end", case=case)
        """)
    )
    assert ways(lines) == [("a", "measured"), ("b", "measured"), ("c", "measured")]
    assert len({line.text for line in lines}) == 1
    assert values == {"a": {"is": 1}, "b": {"is": 1}, "c": {"is": 1}}


def test_nobody_waits_for_a_process_that_has_said_everything():
    start = time.monotonic()
    run(
        worker("""
        for case in cases:
            report("start", case=case)
            report("end", case=case)
        time.sleep(60)
        """)
    )
    assert time.monotonic() - start < 10


def test_a_case_that_ends_its_process_has_failed_and_the_others_go_on_in_a_new_one():
    lines, _ = run(
        worker("""
        for case in cases:
            report("start", case=case)
            if case == "b":
                print("bad luck", file=sys.stderr, flush=True)
                os.abort()
            line(case)
            report("end", case=case)
        """)
    )
    assert ways(lines) == [("a", "measured"), ("b", "failed"), ("c", "measured")]
    assert lines[1].text == "the process ended in the middle: killed by SIGABRT; it printed: bad luck"
    assert lines[0].text != lines[2].text


def test_a_case_that_takes_too_long_has_failed_and_its_process_is_ended(tmp_path):
    pid_file = tmp_path / "pid"
    lines, _ = run(
        worker(f"""
        for case in cases:
            report("start", case=case)
            if case == "b":
                open({str(pid_file)!r}, "w").write(str(os.getpid()))
                time.sleep(1000)
            line(case)
            report("end", case=case)
        """),
        case_seconds=1.0,
    )
    assert ways(lines) == [("a", "measured"), ("b", "failed"), ("c", "measured")]
    assert lines[1].text.startswith("nothing came of it in 1 s; killed by SIGKILL")
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)


def test_a_step_that_breaks_fails_alone_and_its_case_is_tried_again_without_it():
    lines, _ = run(
        worker("""
        for case in cases:
            report("start", case=case)
            for step in ("one", "two", "three"):
                if step in without.get(case, ()):
                    continue
                report("step", step=step)
                if (case, step) in (("a", "two"), ("a", "three")):
                    sys.exit(7)
                line(case + step)
            report("end", case=case)
        """)
    )
    assert ways(lines) == [
        ("aone", "measured"),
        ("a, two", "failed"),
        ("aone", "measured"),
        ("a, three", "failed"),
        ("aone", "measured"),
        *((case + step, "measured") for case in "bc" for step in ("one", "two", "three")),
    ]
    assert lines[1].text == "the process ended in the middle: exit status 7; it printed: nothing"


def test_a_process_that_breaks_before_its_first_case_is_not_started_again():
    lines, _ = run(worker("raise SystemExit('no such device')"))
    assert ways(lines) == [("the process itself", "failed")]
    assert lines[0].text == "the process ended in the middle: exit status 1; it printed: no such device"


def test_a_process_that_finds_no_cases_says_what_it_printed():
    environment = {**os.environ, "PYTHONPATH": ""}
    command = [sys.executable, "-c", "raise ImportError('no module')"]
    lines, _ = run(Worker("p", command, {}, environment, None))
    assert ways(lines) == [("the process itself", "failed")]
    assert lines[0].text.startswith("it found no cases: exit status 1; it printed: ")
    assert lines[0].text.endswith("ImportError: no module")


def test_a_process_that_never_starts_a_case_is_given_up():
    lines, _ = run(worker("time.sleep(1000)"), start_seconds=1.0)
    assert ways(lines) == [("the process itself", "failed")]


def test_at_the_deadline_everything_ends_and_the_cases_that_are_left_are_known():
    begun = time.monotonic()
    watched = worker("""
        report("start", case="a")
        report("end", case="a")
        report("start", case="b")
        report("step", step="slow")
        time.sleep(1000)
        """)
    lines, _ = run(watched, seconds=2.0)
    assert time.monotonic() - begun < 10
    assert lines == []
    assert (watched.cases, watched.case, watched.step) == (["b", "c"], "b", "slow")


def test_what_a_process_started_ends_with_it(tmp_path):
    pid_file = tmp_path / "pid"
    run(
        worker(f"""
        import subprocess
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
        open({str(pid_file)!r}, "w").write(str(child.pid))
        report("start", case="a")
        time.sleep(1000)
        """),
        seconds=3.0,
    )
    pid = int(pid_file.read_text())
    for _ in range(50):
        # A child whose parent is gone is somebody else's to collect, so it may stay as a zombie.
        stat = Path(f"/proc/{pid}/stat")
        if not stat.exists() or " Z " in stat.read_text():
            return
        time.sleep(0.1)
    pytest.fail(f"process {pid} is still there")


def test_processes_run_side_by_side():
    code = """
        for case in cases:
            report("start", case=case)
            time.sleep(0.8)
            line(case)
            report("end", case=case)
        """
    start = time.monotonic()
    lines, _ = run(worker(code, cases=["a"]), worker(code, cases=["b"]), worker(code, cases=["c"]))
    assert sorted(ways(lines)) == [("a", "measured"), ("b", "measured"), ("c", "measured")]
    assert len({line.text for line in lines}) == 3
    assert time.monotonic() - start < 15


def test_nothing_is_started_where_nothing_is_to_be_done():
    assert run(worker("raise SystemExit(1)", cases=[])) == ([], {})


def test_lines_are_lines():
    lines, _ = run(
        worker(
            """
        report("start", case="a")
        line("x")
        report("end", case="a")
        """,
            cases=["a"],
        )
    )
    assert lines == [Line("p", "x", "measured", lines[0].text)]
