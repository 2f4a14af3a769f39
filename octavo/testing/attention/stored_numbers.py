"""What becomes of numbers that are stored in a quantised format, written down once more: by formula, in numpy.

A code is found by looking for the nearest of all numbers that there are codes for, without a conversion of torch's, so
that the two definitions, this one and `KVFormat`, have no line in common.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.float64]

_SMALLEST_NORMAL = np.float32(2.0**-126)


def fp8_e4m3_number(code: int) -> float:
    """Return what a byte stands for in e4m3fn: a sign, four bits of exponent, three of mantissa, no infinity.

    Source: Micikevicius et al., "FP8 Formats for Deep Learning" (2022), table 1.
    """
    sign, exponent, mantissa = -1.0 if code & 0x80 else 1.0, code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    if exponent == 0:
        return sign * mantissa / 8 * 2.0**-6
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


def int8_number(code: int) -> float:
    """Return what a byte stands for in int8: two's complement, and NaN for -128."""
    return float("nan") if code == 0x80 else float(code - 256 if code & 0x80 else code)


# The numbers from 0 on that there are codes for, in order; a number's place in the list is its code.
MAGNITUDES = {
    "fp8_e4m3": np.array([fp8_e4m3_number(code) for code in range(0x7F)]),
    "int8": np.array([int8_number(code) for code in range(0x80)]),
}


def stored_numbers(vectors: Tensor, kv_dtype: str) -> Floats:
    """Return what is read back of vectors that were stored.

    Args:
        vectors: [..., head_dim]
        kv_dtype: A name of KV_FORMATS.

    Returns:
        As `vectors`; each is a number of float32 where the format is quantised, and of `kv_dtype` elsewhere.
    """
    name = kv_dtype.removesuffix("_per_token_head")
    if name not in MAGNITUDES:
        return _float64(vectors.to(getattr(torch, kv_dtype)))
    magnitudes = MAGNITUDES[name]
    # The largest float32, divided by its scale's and multiplied again, may be infinite.
    with np.errstate(invalid="ignore", over="ignore"):
        numbers = _float64(vectors).astype(np.float32)
        if name == kv_dtype:
            return _nearest(numbers.astype(np.float64), magnitudes)
        largest = np.abs(numbers).max(axis=-1, keepdims=True)
        scales = np.maximum(largest / np.float32(magnitudes[-1]), _SMALLEST_NORMAL)
        codes = _nearest((numbers / scales).astype(np.float64), magnitudes)
        products = (codes * scales.astype(np.float64)).astype(np.float32).astype(np.float64)
    return np.where(np.isfinite(largest), products, np.nan)


def _nearest(numbers: Floats, magnitudes: Floats) -> Floats:
    """Return the nearest of some magnitudes, with its sign; of two equally near ones that at the even place."""
    sizes = np.minimum(np.abs(numbers), magnitudes[-1])
    above = np.searchsorted(magnitudes, np.where(np.isnan(sizes), 0, sizes))
    below = np.maximum(above - 1, 0)
    to_above, to_below = magnitudes[above] - sizes, sizes - magnitudes[below]
    takes_below = (to_below < to_above) | ((to_below == to_above) & (below % 2 == 0))
    nearest: Floats = np.where(takes_below, magnitudes[below], magnitudes[above])
    return np.where(np.isnan(numbers), np.nan, np.copysign(nearest, numbers))


def _float64(tensor: Tensor) -> Floats:
    array: Floats = tensor.detach().to("cpu", torch.float64).numpy()
    return array
