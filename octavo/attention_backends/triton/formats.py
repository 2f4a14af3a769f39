"""How stored numbers become numbers to compute with, and back: what all kernels share.

    stored ──decode──► float16, bfloat16 or float32 ──► dot products
    float32 ──round_to / encode──► stored

Triton's interpreter computes products of bfloat16, rounds to bfloat16, reads its subnormal numbers, and casts to and
from fp8, all of it wrongly and silently. `INTERPRETED` therefore selects other lines for it, written with integers.
They are all in this file, but for one in `attention_kernel.py`, which keeps NaN out of numpy's maximum. The host
chooses float32 to compute in, too (`compute_type` of heuristics.py).
"""

from __future__ import annotations

import triton
import triton.language as tl

# Whether kernels run through the interpreter. It is settled when this module is imported, as it is for `triton.jit`.
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))

# 1.5 * 2**23: float32 numbers around it are whole, so adding it rounds to the nearest integer, ties to even.
ROUNDER = tl.constexpr(12582912.0)


@triton.jit
def decode(stored, FORMAT: tl.constexpr, HAS_SCALES: tl.constexpr, COMPUTE: tl.constexpr):
    """Return what stored numbers stand for, without a scale. Codes are exact in every type to compute in.

    Args:
        stored: As loaded; codes of fp8 as uint8.
        FORMAT: "float", "fp8_e4m3" or "int8".
        HAS_SCALES: Whether each vector has a scale, which is NaN where a number is. The code for NaN in int8 then
            need not be looked for, which takes longer than reading it.
        COMPUTE: Type of the result.
    """
    if FORMAT == "fp8_e4m3":
        if INTERPRETED:
            # Exponent and mantissa moved to where float32 has them, and the exponents' biases made equal, 127 - 7.
            bits = stored.to(tl.uint32)
            magnitude = ((bits & 0x7F) << 20) | ((bits & 0x80) << 24)
            numbers = magnitude.to(tl.float32, bitcast=True) * 1.329227995784916e36
            numbers = tl.where((bits & 0x7F) == 0x7F, float("nan"), numbers).to(COMPUTE)
        else:
            numbers = stored.to(tl.float8e4nv, bitcast=True).to(COMPUTE)
    elif FORMAT == "int8" and not HAS_SCALES:
        numbers = tl.where(stored == -128, float("nan"), stored.to(COMPUTE))
    elif INTERPRETED and stored.dtype == tl.bfloat16:
        # A bfloat16 is the upper half of a float32.
        numbers = (stored.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True).to(COMPUTE)
    else:
        numbers = stored.to(COMPUTE)
    return numbers


@triton.jit
def load_numbers(
    places, mask, HAS_MASK: tl.constexpr, FORMAT: tl.constexpr, HAS_SCALES: tl.constexpr, COMPUTE: tl.constexpr
):
    """Load numbers as `decode` returns them. With HAS_MASK, what is masked is not read, and comes as 0."""
    stored = tl.load(places, mask=mask, other=0) if HAS_MASK else tl.load(places)
    return decode(stored, FORMAT, HAS_SCALES, COMPUTE)


@triton.jit
def encode(numbers, FORMAT: tl.constexpr):
    """Return float32 numbers as codes, saturating; NaN stays NaN. Codes of fp8 come as uint8.

    Args:
        numbers: Already divided by their scale.
        FORMAT: "fp8_e4m3" or "int8".
    """
    LARGEST: tl.constexpr = 448.0 if FORMAT == "fp8_e4m3" else 127.0
    # Comparisons with NaN are false, so it passes.
    numbers = tl.where(numbers > LARGEST, LARGEST, numbers)
    numbers = tl.where(numbers < -LARGEST, -LARGEST, numbers)
    if FORMAT == "int8":
        whole = numbers + ROUNDER - ROUNDER
        codes = tl.where(numbers != numbers, -128.0, whole).to(tl.int8)
    elif INTERPRETED:
        bits = numbers.to(tl.uint32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        # Three bits of the mantissa stay. A carry goes up into the exponent, as it should.
        normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
        # Below 2**-6 codes count 2**-9, and so do the last bits of float32 numbers from 2**14 on.
        small = (magnitude.to(tl.float32, bitcast=True) + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
        codes = tl.where(magnitude < 0x3C800000, small, normal)
        codes = tl.where(magnitude > 0x7F800000, 0x7F, codes)
        codes = (codes | ((bits >> 24) & 0x80)).to(tl.uint8)
    else:
        codes = numbers.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    return codes


@triton.jit
def scale_of(numbers, FORMAT: tl.constexpr):
    """Return the scale of each vector: its largest magnitude over the largest code, NaN if it has one.

    Args:
        numbers: float32. [vectors, dims]
    """
    LARGEST: tl.constexpr = 448.0 if FORMAT == "fp8_e4m3" else 127.0
    # Without their sign, the bits of float32 numbers are in the order of the numbers, with NaN as the largest of all;
    # a maximum of floats would pass over it.
    magnitude = numbers.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    largest = tl.max(magnitude, 1).to(tl.float32, bitcast=True)
    scale = tl.div_rn(largest, tl.full(largest.shape, LARGEST, tl.float32))
    return tl.where(scale < 1.1754943508222875e-38, 1.1754943508222875e-38, scale)


@triton.jit
def round_to(numbers, target: tl.constexpr):
    """Return float32 numbers in another float type, rounded to the nearest, ties to even."""
    if INTERPRETED and target == tl.bfloat16:
        bits = numbers.to(tl.uint32, bitcast=True)
        bits = tl.where(numbers != numbers, 0x7FC00000, bits + 0x7FFF + ((bits >> 16) & 1))
        rounded = (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        rounded = numbers.to(target)
    return rounded


@triton.jit
def loop_bound(number):
    """Return a number as `range` takes it."""
    if INTERPRETED:
        # The interpreter of Triton 3.6 makes it an integer in a way that NumPy 2.4 does not allow any more.
        return number.handle.data.item()
    return number
