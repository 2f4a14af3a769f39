"""A pytest plugin: puts the tests in the order of `suite.py`, keeps one process's share, and reports each test."""

from __future__ import annotations

from typing import Any

import pytest

from gpu_check.broken import leave_if_broken
from gpu_check.clocks import use_device
from gpu_check.suite import order_of
from gpu_check.workers import report, task


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    given = task()
    use_device(given["device"])
    in_order = sorted(items, key=lambda item: order_of(item.nodeid, given["suites"]))
    if given["num_tests"] is not None:
        in_order = in_order[: given["num_tests"]]
    own = in_order[given["shard"] :: given["num_shards"]]
    if given["cases"] is None:
        report("cases", cases=[item.nodeid for item in own])
    else:
        left = set(given["cases"])
        own = [item for item in own if item.nodeid in left]
    items[:] = own


def pytest_runtest_logstart(nodeid: str) -> None:
    report("start", case=nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    # A failing set-up or tear-down is the test's failure; a skip comes from either of the first two.
    if report.when == "call" or not report.passed:
        _report_outcome(report.nodeid, report.outcome, "" if report.passed else _message_of(report))


def pytest_runtest_logfinish(nodeid: str) -> None:
    report("end", case=nodeid)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    made = yield
    if call.excinfo is not None and made.outcome == "failed":
        error = call.excinfo.value
        leave_if_broken(error if isinstance(error, Exception) else RuntimeError(repr(error)))
    return made


def _report_outcome(nodeid: str, outcome: str, message: str) -> None:
    report("value", name="outcome", value={"case": nodeid, "outcome": outcome, "message": message})


def _message_of(made: pytest.TestReport) -> str:
    if isinstance(made.longrepr, tuple):
        return str(made.longrepr[2])
    crash = getattr(made.longrepr, "reprcrash", None)
    return str(crash.message if crash is not None else made.longrepr)
