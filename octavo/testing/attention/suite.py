"""The contract of an attention backend as a test class.

    from octavo.testing import AttentionBackendSuite

    class TestEager(AttentionBackendSuite):
        backend = "eager"          # a registered name, or the class itself

What the backend does not declare is skipped with its own reasons. A failure ends with the line that tries it again.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import pytest

from octavo.core.interfaces.attention import AttentionBackend
from octavo.testing.attention.capture import CaptureTests
from octavo.testing.attention.declarations import DeclarationTests
from octavo.testing.attention.exercise import AttentionExercise, abilities_of, own
from octavo.testing.attention.gathering import GatherTests
from octavo.testing.attention.memory import MemoryTests
from octavo.testing.attention.numbers import NumberTests


@own
class AttentionBackendSuite(DeclarationTests, NumberTests, MemoryTests, GatherTests, CaptureTests):
    """Every promise of `AttentionBackend`, each tried with each ability that the backend declares.

    Set `backend`. What else can be set is in `AttentionExercise`:

        device = "cuda"                                       where the tensors are
        plain = {"head_dim": 576, ...}                        fields of every spec
        specs = {"my_window": {"window": 4096}}               more abilities
        tolerances = {"float32": 1e-3}                        largest errors, by dtype
        options = {"tile": 64}                                what the backend's own Options take
    """

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Give each test the abilities that it is run with, those of `specs` included."""
        abilities = abilities_of(type(self), metafunc.function)
        if abilities is not None:
            metafunc.parametrize("ability", abilities)


def list_tests(suite: type[AttentionExercise]) -> dict[str, tuple[str, ...] | None]:
    """Return the name of every test, and the abilities that it is run with; None for a test of none in particular."""
    return {name: abilities_of(suite, getattr(suite, name)) for name in dir(suite) if name.startswith("test_")}


def reproduce(
    backend: str | type[AttentionBackend] | type[AttentionExercise],
    ability: str = "plain",
    *,
    seed: int = 0,
    test: str | None = None,
) -> None:
    """Run a test again, outside of pytest.

    Args:
        backend: A registered name, the class, or the suite.
        ability: A name of `ABILITIES`, of `SIZES` or of the suite's `specs`, or several joined by "+".
        seed: Of everything random.
        test: The test method; every one that tries abilities when not given.

    Raises:
        Fault: As the test does.
        pytest.skip.Exception: The backend does not declare what the test that was named takes.
    """
    suite = _once(backend, seed)
    tests = list_tests(suite)
    if test is not None and test not in tests:
        close = difflib.get_close_matches(test, tests, n=1)
        raise ValueError(f"No test is called {test!r}.{f' Did you mean {close[0]!r}?' if close else ''}")
    for name in [test] if test is not None else [name for name, abilities in tests.items() if abilities is not None]:
        method: Callable[..., None] = getattr(suite(), name)
        with nullcontext() if test is not None else suppress(pytest.skip.Exception):
            method() if tests[name] is None else method(ability)


def _once(backend: str | type[AttentionBackend] | type[AttentionExercise], seed: int) -> type[AttentionExercise]:
    """Return the suite of a backend with one seed."""
    fields: dict[str, Any] = {"seeds": (seed,)}
    if isinstance(backend, type) and issubclass(backend, AttentionExercise):
        # The name is what a complaint tells to try again.
        names = {"__module__": backend.__module__, "__qualname__": backend.__qualname__}
        return type(backend.__name__, (backend,), {**fields, **names})
    return type("Reproduced", (AttentionBackendSuite,), {**fields, "backend": backend})
