"""What the conformance suites share: rules that fail with a sentence, and random traces that shorten themselves.

A suite is a class of test methods. Its author subclasses it, names the part to test, and pytest does the rest:

    class TestMine(RequestQueueSuite):
        queue = "mine"

A failure says which rule was broken, by what, after which operations, and with which line to see it again.
"""

from __future__ import annotations

import ast
import functools
import inspect
import os
import random
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, ParamSpec, Protocol, TypeVar

from octavo.core.interfaces import CONTRACT_VERSION
from octavo.errors import PluginError, PluginOptionsError
from octavo.plugins.families import Family
from octavo.plugins.part import checked_options
from octavo.plugins.registry import scan

RAISES_NOTHING = "It raises nothing but what its contract names."
STATES_ITS_VERSION = "The class states the contract version that it was built for, as a plain number."

# Runs that shortening a trace may take: past some dozens a shorter trace is worth less than the wait.
MAX_SHORTENING_RUNS = 120
# Lines of a trace that a message shows; the last ones, if there are more.
MAX_SHOWN_LINES = 40

P = ParamSpec("P")
T = TypeVar("T")


class RuleBroken(AssertionError):
    """A part broke a rule of its contract.

    Attributes:
        rule: The rule, as a sentence.
        found: What was found instead, with the numbers.
        context: Further lines: the operations that led here, and how to see it again.
    """

    def __init__(self, rule: str, found: str, context: Sequence[str] = ()) -> None:
        self.rule = rule
        self.found = found
        self.context = tuple(context)
        super().__init__("\n".join([f"Rule broken: {rule}", f"Found: {found}", *context]))

    def with_context(self, *lines: str) -> RuleBroken:
        """Return the same failure with further lines."""
        return RuleBroken(self.rule, self.found, (*self.context, *lines))


class SuiteMisusedError(TypeError):
    """A suite was not told what to test, or with what."""


class ConformanceSuite:
    """Base of the suites.

    Attributes:
        options: Options of the part, by name, where its class has a model of them.
    """

    options: ClassVar[Mapping[str, Any]] = {}

    def _load(self, family: Family, attribute: str, contract: type[Any]) -> type[Any]:
        """Return the class that the suite's `attribute` gives, itself or by the name that it is registered under."""
        part = getattr(self, attribute, None)
        if isinstance(part, str):
            loaded: type[Any] = scan().load(family, part)
            return loaded
        if not isinstance(part, type):
            raise SuiteMisusedError(
                f"{type(self).__name__}.{attribute} is {part!r}; it has to be a class, or the name that a class is "
                f"registered under in {family.group}."
            )
        if not issubclass(part, contract):
            raise SuiteMisusedError(f"{part.__name__} is not a subclass of {contract.__name__}, which it must be.")
        return part

    def _options_for(self, part: type[Any]) -> dict[str, Any]:
        """Return the keyword argument that hands the part its options; none where it takes none."""
        try:
            options = checked_options(f"the class {part.__name__}", part, self.options)
        except PluginOptionsError as error:
            raise SuiteMisusedError(f"{type(self).__name__}.options: {error}") from None
        return {} if options is None else {"options": options}


def reproducible(test: Callable[P, None]) -> Callable[P, None]:
    """Make a suite's test say how to run it again, whatever it fails with."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        suite = type(args[0])
        again = f"Again: {one_liner(suite, f'{test.__name__}()')}"
        try:
            test(*args, **kwargs)
        except RuleBroken as broken:
            if any(line.startswith("Again: ") for line in broken.context):
                raise
            raise broken.with_context(again) from broken.__cause__
        except (SuiteMisusedError, PluginError):
            raise
        except Exception as error:
            raise RuleBroken(RAISES_NOTHING, describe(error), [again]) from error

    return run


def describe(error: BaseException) -> str:
    """Return an exception as a line, with the place that raised it."""
    frames = inspect.getinnerframes(error.__traceback__) if error.__traceback__ else []
    place = f" in {frames[-1].function}, line {frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}: {error}{place}"


def one_liner(suite: type[Any], call: str) -> str:
    """Return what to run to see a failure again: a shell command where the suite can be imported, else Python."""
    module, name = suite.__module__, suite.__qualname__
    imported = sys.modules.get(module)
    file = getattr(imported, "__file__", None)
    if file is None or module == "__main__" or getattr(imported, name, None) is not suite:
        return f"{suite.__name__}().{call}"
    folder = os.path.dirname(file)
    for _ in range(module.count(".")):
        folder = os.path.dirname(folder)
    code = f"import sys; sys.path.insert(0, {os.path.relpath(folder)!r}); import {module} as m; m.{name}().{call}"
    return f'python -c "{code}"'


# -- random traces ----------------------------------------------------------------------------------------------


class World(Protocol):
    """Something that random operations happen to.

    Attributes:
        log: The operations so far, a line each.
    """

    log: list[str]

    def do(self, rng: random.Random) -> None:
        """Do one operation and check every rule. RuleBroken where one does not hold."""

    def end(self) -> None:
        """Bring everything to its end, and check what must hold then."""


@dataclass(frozen=True)
class TraceFailure:
    """A trace that broke a rule.

    Attributes:
        broken: The rule, and how.
        operations: Numbers of the operations that were done. Each draws from random numbers of its own, so that any
            part of a trace is a trace.
        log: The same as text.
    """

    broken: RuleBroken
    operations: tuple[int, ...]
    log: tuple[str, ...]


def run_trace(make_world: Callable[[], World], seed: int, operations: Sequence[int]) -> TraceFailure | None:
    """Do the operations on a new world; return how they failed, or None."""
    log: list[str] = []
    done: list[int] = []
    try:
        world = make_world()
        log = world.log
        for operation in operations:
            done.append(operation)
            world.do(random.Random(f"{seed}.{operation}"))
        world.end()
    except RuleBroken as broken:
        return TraceFailure(broken, tuple(done), tuple(log))
    except (SuiteMisusedError, PluginError):
        raise
    except Exception as error:
        unexpected = RuleBroken(RAISES_NOTHING, describe(error))
        unexpected.__cause__ = error
        return TraceFailure(unexpected, tuple(done), tuple(log))
    return None


def shortened(make_world: Callable[[], World], seed: int, failure: TraceFailure) -> TraceFailure:
    """Leave out what the failure does not need, as far as some dozens of runs go."""
    num_runs = 0
    size = max(len(failure.operations) // 2, 1)
    while size:
        start = 0
        while start < len(failure.operations) and num_runs < MAX_SHORTENING_RUNS:
            candidate = failure.operations[:start] + failure.operations[start + size :]
            attempt = run_trace(make_world, seed, candidate)
            num_runs += 1
            if attempt is not None and attempt.broken.rule == failure.broken.rule:
                failure = attempt
            else:
                start += size
        size //= 2
    return failure


def check_trace(
    make_world: Callable[[], World],
    seed: int,
    operations: Sequence[int],
    again: Callable[[Sequence[int]], str],
    subject: str,
) -> None:
    """Run a trace.

    Args:
        subject: What is tested, for the message.
        again: Returns the line that runs the trace with only some of its operations.

    Raises:
        RuleBroken: With the operations that it takes, shortened.
    """
    failure = run_trace(make_world, seed, operations)
    if failure is None:
        return
    short = shortened(make_world, seed, failure)
    lines = [f"  {number}. {line}" for number, line in enumerate(short.log, 1)]
    if len(lines) > MAX_SHOWN_LINES:
        lines = [lines[0], "  ...", *lines[2 - MAX_SHOWN_LINES :]]
    raise short.broken.with_context(
        f"With: {subject}",
        f"After, with seed {seed}, {len(short.operations)} of {len(operations)} operations:",
        *lines,
        f"Again: {again(short.operations)}",
    ) from short.broken.__cause__


# -- what every class states ------------------------------------------------------------------------------------


def check_contract_version(part: type[Any], contract: type[Any]) -> None:
    """Check that a class, or a base of the same author, states a version that this Octavo loads, as a literal."""
    stating = next((base for base in part.__mro__ if "contract_version" in vars(base)), None)
    if stating is None or stating is contract:
        raise RuleBroken(STATES_ITS_VERSION, f"{part.__name__} has no contract_version; write contract_version = 1")
    if _is_octavos(stating) and not _is_octavos(part):
        raise RuleBroken(
            STATES_ITS_VERSION,
            f"{part.__name__} inherits contract_version from Octavo's {stating.__name__}, whose number is always the "
            "current one; write the number into the class",
        )
    version = vars(stating)["contract_version"]
    if type(version) is not int:
        raise RuleBroken(STATES_ITS_VERSION, f"{stating.__name__}.contract_version is {version!r}")
    if version not in (CONTRACT_VERSION - 1, CONTRACT_VERSION):
        raise RuleBroken(
            STATES_ITS_VERSION,
            f"{stating.__name__}.contract_version is {version}; this Octavo has {CONTRACT_VERSION} and refuses it",
        )
    written = _written_version(stating)
    if written is not None and not isinstance(written, ast.Constant):
        raise RuleBroken(
            STATES_ITS_VERSION,
            f"{stating.__name__} has contract_version = {ast.unparse(written)}, which follows the installed Octavo; "
            f"write contract_version = {version}",
        )


def _is_octavos(part: type[Any]) -> bool:
    return part.__module__.partition(".")[0] == "octavo"


def _written_version(part: type[Any]) -> ast.expr | None:
    """Return what the source assigns to contract_version; None where there is no source to look at."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(part)))
    except (OSError, TypeError, SyntaxError):
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            targets, value = node.targets, node.value
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            targets, value = [node.target], node.value
        else:
            continue
        if any(isinstance(target, ast.Name) and target.id == "contract_version" for target in targets):
            return value
    return None
