"""The one place that starts kernels, and counts them."""

from __future__ import annotations

from collections import Counter
from typing import Any, Protocol

import numpy as np

from octavo.attention_backends.triton.formats import INTERPRETED

# How often each kernel was started in this process, by name.
launches: Counter[str] = Counter()


class Start(Protocol):
    """Starts a kernel; see `start`."""

    def __call__(self, kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None: ...


def start(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Start a kernel on the current device.

    Args:
        kernel: What `triton.jit` or `triton.autotune` made.
        grid: Number of programs, in up to three dimensions; none is 0.
        arguments: Of the kernel, those before its constants.
        constants: Its constants, and options of the compiler.
    """
    launches[getattr(kernel, "base_fn", kernel).__name__] += 1
    if not INTERPRETED.value:
        kernel[grid](*arguments, **constants)
        return
    # What a GPU does silently, numpy warns of: infinities that meet, and numbers too large for their type.
    with np.errstate(all="ignore"):
        kernel[grid](*arguments, **constants)
