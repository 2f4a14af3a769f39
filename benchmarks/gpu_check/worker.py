"""The process that runs the cases of one part: python -m gpu_check.worker, with a task in its environment."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from gpu_check import environment, limits
from gpu_check.broken import leave_if_broken
from gpu_check.clocks import clock_for, use_device
from gpu_check.lines import Line, first_line
from gpu_check.sizes import FULL, SMALL
from gpu_check.workers import report, task, tell

# What runs a case. It gets the steps to leave out.
Case = Callable[[Sequence[str]], None]


def main() -> None:
    given = task()
    try:
        use_device(given["device"])
        cases = cases_of(given)
    except ModuleNotFoundError as error:
        tell(_not_installed(given["part"], "all of it", error))
        report("cases", cases=[])
        return
    run_cases(given, cases)


def cases_of(given: Mapping[str, Any]) -> dict[str, Case]:
    """Return the cases of the part, in order. Only what the part needs is imported.

    Args:
        given: The task: part, device, backends, limits, is_small, seconds that there are, and a folder for files.
    """
    part, device, backends = given["part"], given["device"], given["backends"]
    sizes = SMALL if given["is_small"] else FULL
    if part == "device":
        return {"device": _alone(partial(environment.look_for, device))}
    if part == "environment":
        return {case: _alone(partial(environment.describe, case, device, backends)) for case in environment.CASES}
    if part == "limits":
        clock = clock_for(device)
        return {case: _alone(partial(limits.measure_limit, case, sizes, device, clock)) for case in limits.CASES}
    if part == "engine":
        from gpu_check import engine

        return engine.cases_of(device, backends, Path(given["folder"]), given["is_small"])
    if part == "compile":
        from gpu_check import compile_only

        return compile_only.cases_of()
    if part == "tune":
        from gpu_check import tune

        return tune.cases_of(sizes, device, given["limits"], given["seconds"])
    from gpu_check import speed

    return speed.cases_of(part, sizes, device, backends, given["limits"])


def run_cases(given: Mapping[str, Any], cases: Mapping[str, Case]) -> None:
    """Run those cases that the task names, all where it names none, and report each."""
    names = given["cases"]
    if names is None:
        names = list(cases)
        report("cases", cases=names)
    for name in names:
        report("start", case=name)
        try:
            cases[name](given["without"].get(name, []))
        except ModuleNotFoundError as error:
            tell(_not_installed(given["part"], name, error))
        except Exception as error:
            leave_if_broken(error)
            tell(Line(given["part"], name, "failed", f"{type(error).__name__}: {first_line(str(error))}"))
        report("end", case=name)


def _not_installed(part: str, what: str, error: ModuleNotFoundError) -> Line:
    return Line(part, what, "not run", f"the Python package {error.name} is not installed")


def _alone(run: Callable[[], None]) -> Case:
    return lambda without: run()


if __name__ == "__main__":
    main()
