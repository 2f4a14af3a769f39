"""Makes Triton's interpreter faster, for all tests of the triton backend."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def interpreter_without_overflow_checks() -> Iterator[None]:
    """Have additions and products of integers not checked for overflow, which takes a third of the time."""
    from triton.runtime.interpreter import interpreter_builder

    before = interpreter_builder.options
    interpreter_builder.options = dataclasses.replace(before, sanitize_overflow=False)
    yield
    interpreter_builder.options = before
