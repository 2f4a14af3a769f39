"""How numbers lie in a page: layouts worked by hand, and quantising held to a definition that converts nothing."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from octavo.core.interfaces.kv_format import DTYPE_BYTES, INT8_NAN, KV_FORMATS, KVFormat, ScaledPages
from octavo.testing.attention.stored_numbers import MAGNITUDES, fp8_e4m3_number, int8_number, stored_numbers

QUANTISED = [kv_format for kv_format in KV_FORMATS.values() if kv_format.is_quantised]
STATIC = [kv_format for kv_format in QUANTISED if not kv_format.has_page_scales]
SCALED = [kv_format for kv_format in QUANTISED if kv_format.has_page_scales]
BY_CODE = {"float8_e4m3fn": fp8_e4m3_number, "int8": int8_number}
TINY = 2.0**-126

each_quantised = pytest.mark.parametrize("kv_format", QUANTISED, ids=lambda each: each.name)
each_static = pytest.mark.parametrize("kv_format", STATIC, ids=lambda each: each.name)
each_scaled = pytest.mark.parametrize("kv_format", SCALED, ids=lambda each: each.name)


def all_codes(kv_format: KVFormat) -> Tensor:
    return torch.arange(256).to(torch.uint8).view(kv_format.torch_dtype)


def bytes_of(codes: Tensor) -> list[int]:
    return codes.contiguous().view(torch.uint8).flatten().tolist()


def read_back(kv_format: KVFormat, vectors: Tensor) -> Tensor:
    return kv_format.dequantise(*kv_format.quantise(vectors))


def stored_bytes(kv_format: KVFormat, *numbers: float) -> list[int]:
    codes, _ = kv_format.quantise(torch.tensor([numbers]))
    return bytes_of(codes)


def assert_as_defined(kv_format: KVFormat, vectors: Tensor) -> None:
    got, wanted = read_back(kv_format, vectors).double().numpy(), stored_numbers(vectors, kv_format.name)
    np.testing.assert_array_equal(got, wanted)


# --- What a format is.


@pytest.mark.parametrize(
    ("name", "num_bytes"), [("float32", 4), ("float16", 2), ("bfloat16", 2), ("float64", 8)], ids=str
)
def test_numbers_that_are_stored_as_they_are_have_a_size_and_no_more(name: str, num_bytes: int) -> None:
    kv_format = KV_FORMATS[name]
    assert (kv_format.is_quantised, kv_format.has_page_scales) == (False, False)
    assert kv_format.torch_dtype == getattr(torch, name)
    assert kv_format.torch_dtype.itemsize == kv_format.element_bytes == DTYPE_BYTES[name] == num_bytes
    with pytest.raises(ValueError, match=f"^{name} is stored as it is; there is nothing to quantise.$"):
        kv_format.quantise(torch.zeros(1, 4))


@each_quantised
def test_a_quantised_number_takes_a_byte_and_is_no_dtype_for_anything_else(kv_format: KVFormat) -> None:
    assert kv_format.torch_dtype.itemsize == kv_format.element_bytes == 1
    assert kv_format.name not in DTYPE_BYTES


def test_there_are_these_and_each_is_found_under_its_name() -> None:
    assert [*KV_FORMATS] == [
        "float32",
        "float16",
        "bfloat16",
        "float64",
        "fp8_e4m3",
        "int8",
        "fp8_e4m3_per_token_head",
        "int8_per_token_head",
    ]
    assert all(name == kv_format.name for name, kv_format in KV_FORMATS.items())


def test_asking_for_sizes_imports_no_torch() -> None:
    code = (
        "import sys; from octavo.core.interfaces.kv_format import KV_FORMATS; "
        "print(KV_FORMATS['int8_per_token_head'].page_bytes(32, 64), 'torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["2176", "False"]


# --- Pages.


@pytest.mark.parametrize(
    ("name", "num_vectors", "head_dim", "num_bytes"),
    [
        # 2 * 16 tokens * 3 heads = 96 vectors of 64 numbers.
        ("float32", 96, 64, 24_576),
        ("bfloat16", 96, 64, 12_288),
        ("fp8_e4m3", 96, 64, 6_144),
        ("int8", 96, 64, 6_144),
        ("fp8_e4m3_per_token_head", 96, 64, 6_144 + 384),
        ("int8_per_token_head", 96, 64, 6_144 + 384),
        # One byte of codes: three of nothing, then a scale of four.
        ("int8", 1, 1, 1),
        ("int8_per_token_head", 1, 1, 8),
        # 14 vectors of 7 numbers: 98 bytes, the next multiple of four is 100.
        ("fp8_e4m3_per_token_head", 14, 7, 100 + 56),
    ],
)
def test_page_bytes_worked_by_hand(name: str, num_vectors: int, head_dim: int, num_bytes: int) -> None:
    assert KV_FORMATS[name].page_bytes(num_vectors, head_dim) == num_bytes


@each_scaled
@given(num_vectors=st.integers(1, 200), head_dim=st.integers(1, 70))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_scales_begin_at_a_multiple_of_four_right_behind_the_codes(
    kv_format: KVFormat, num_vectors: int, head_dim: int
) -> None:
    offset = kv_format.scales_offset(num_vectors, head_dim)
    assert offset % 4 == 0
    assert 0 <= offset - num_vectors * head_dim <= 3
    assert kv_format.page_bytes(num_vectors, head_dim) == offset + 4 * num_vectors


@each_quantised
@pytest.mark.parametrize(
    "shape", [(2, 7, 1, 7), (2, 16, 2, 16), (1, 3), (5, 24), (2, 1, 3, 5)], ids=lambda shape: "x".join(map(str, shape))
)
def test_codes_and_scales_lie_where_the_picture_says_and_nowhere_else(
    kv_format: KVFormat, shape: tuple[int, ...]
) -> None:
    num_vectors, head_dim = math.prod(shape[:-1]), shape[-1]
    page_bytes = kv_format.page_bytes(num_vectors, head_dim)
    stride = -(-page_bytes // 4) * 4 + 8
    buffer = torch.full((3, stride), 0xA5, dtype=torch.uint8)
    pages = kv_format.view_pages(buffer[:, 4:], shape)
    codes = pages.codes if isinstance(pages, ScaledPages) else pages
    assert isinstance(pages, ScaledPages) == kv_format.has_page_scales
    assert (codes.shape, codes.dtype) == ((3, *shape), kv_format.torch_dtype)
    counted = torch.arange(num_vectors * head_dim).to(torch.uint8)
    codes.view(torch.uint8)[1] = counted.view(shape)
    scales = torch.arange(num_vectors) + 0.5
    if isinstance(pages, ScaledPages):
        assert (pages.scales.shape, pages.scales.dtype) == ((3, *shape[:-1]), torch.float32)
        pages.scales[1] = scales.view(shape[:-1])
    wanted = torch.full((3, stride), 0xA5, dtype=torch.uint8)
    wanted[1, 4 : 4 + len(counted)] = counted
    if kv_format.has_page_scales:
        start = 4 + kv_format.scales_offset(num_vectors, head_dim)
        wanted[1, start : start + 4 * num_vectors] = scales.view(torch.uint8)
    assert torch.equal(buffer, wanted)


def test_numbers_that_are_stored_as_they_are_are_viewed_as_they_are() -> None:
    buffer = torch.zeros(3, 2 * 2 * 3 * 4 + 6, dtype=torch.uint8)
    pages = KV_FORMATS["bfloat16"].view_pages(buffer, (2, 2, 3, 2))
    assert isinstance(pages, Tensor)
    assert (pages.shape, pages.dtype) == ((3, 2, 2, 3, 2), torch.bfloat16)
    pages[2, 1, 1, 2, 1] = 1.0
    # 0x3F80, the lower byte first.
    assert (buffer.nonzero().tolist(), buffer[2, 46:48].tolist()) == ([[2, 46], [2, 47]], [0x80, 0x3F])


# --- Codes.


@each_quantised
def test_every_code_stands_for_its_number(kv_format: KVFormat) -> None:
    wanted = np.array([BY_CODE[kv_format.element](code) for code in range(256)])
    scales = torch.full((256,), 0.25) if kv_format.has_page_scales else None
    numbers = kv_format.dequantise(all_codes(kv_format)[:, None], scales)
    assert numbers.dtype == torch.float32
    np.testing.assert_array_equal(numbers[:, 0].numpy(), wanted * (0.25 if kv_format.has_page_scales else 1))


def test_worked_numbers() -> None:
    assert fp8_e4m3_number(0b0_0111_000) == 1.0
    assert fp8_e4m3_number(0b1_0111_100) == -1.5
    assert fp8_e4m3_number(0b0_1111_110) == 448.0
    assert fp8_e4m3_number(0b0_0000_001) == 2.0**-9
    assert fp8_e4m3_number(0b0_0001_000) == 2.0**-6
    assert math.isnan(fp8_e4m3_number(0b1_1111_111))
    assert (int8_number(0x7F), int8_number(0xFF), int8_number(0x81)) == (127.0, -1.0, -127.0)
    assert math.isnan(int8_number(0x80))
    assert INT8_NAN == -128


@each_static
def test_every_number_that_has_a_code_gets_it(kv_format: KVFormat) -> None:
    numbers = kv_format.dequantise(all_codes(kv_format), None)
    codes, scales = kv_format.quantise(numbers)
    assert scales is None
    is_nan = numbers.isnan()
    assert bytes_of(codes[~is_nan]) == bytes_of(all_codes(kv_format)[~is_nan])
    assert kv_format.dequantise(codes, None)[is_nan].isnan().all()


@each_scaled
def test_codes_of_a_vector_that_uses_the_whole_range_are_its_own(kv_format: KVFormat) -> None:
    """Reading and storing again changes neither codes nor scales, whatever the scale is."""
    codes = all_codes(kv_format)
    codes = codes[~kv_format.dequantise(codes[:, None], torch.ones(256))[:, 0].isnan()].expand(6, -1)
    scales = torch.tensor([1.0, 1 / 3, 7e-20, 1.7e5, 3e-36, 1e35])
    again, scales_again = kv_format.quantise(kv_format.dequantise(codes, scales))
    assert scales_again is not None
    assert bytes_of(again) == bytes_of(codes)
    torch.testing.assert_close(scales_again, scales, rtol=2**-23, atol=0)


@each_static
def test_between_two_codes_the_nearest_is_taken_and_of_two_the_even_one(kv_format: KVFormat) -> None:
    magnitudes = torch.from_numpy(MAGNITUDES[kv_format.name]).float()
    middles = (magnitudes[:-1] + magnitudes[1:]) / 2
    even = torch.arange(len(middles)) // 2 * 2 + torch.arange(len(middles)) % 2 * 2
    for sign in (1, -1):
        for vectors, wanted in (
            (middles, even),
            (middles.nextafter(torch.tensor(0.0)), torch.arange(len(middles))),
            (middles.nextafter(torch.tensor(1e9)), torch.arange(len(middles)) + 1),
        ):
            assert torch.equal(read_back(kv_format, sign * vectors), sign * magnitudes[wanted])


def test_rounding_worked_by_hand() -> None:
    int8, fp8 = KV_FORMATS["int8"], KV_FORMATS["fp8_e4m3"]
    assert stored_bytes(int8, 0.5, 1.5, 2.5, -0.5, -1.5, 126.5, -126.5) == [0, 2, 2, 0, 0xFE, 126, 0x82]
    assert stored_bytes(int8, 127.4, 127.5, 1e30, -127.6, -128.0, -1e30) == [127, 127, 127, 0x81, 0x81, 0x81]
    # 1.0 is 0x38 and 1.125 is 0x39; 17 / 16 lies in the middle.
    assert stored_bytes(fp8, 1.0, 17 / 16, 1.07, 19 / 16, 1.125) == [0x38, 0x38, 0x39, 0x3A, 0x39]
    # Subnormals are multiples of 2^-9.
    assert stored_bytes(fp8, 2**-10, 1.01 * 2**-10, 1.5 * 2**-9, 7.5 * 2**-9) == [0, 1, 2, 8]
    assert stored_bytes(fp8, 448, 464, 1e30, -449, -1e30) == [0x7E, 0x7E, 0x7E, 0xFE, 0xFE]


@each_static
def test_static_formats_cut_off_what_is_too_large_and_never_make_nan_of_it(kv_format: KVFormat) -> None:
    largest = kv_format.largest
    assert largest is not None
    vectors = torch.tensor([[math.inf, -math.inf, 3e38, -3e38, largest * 1.04, -largest * 1.04]])
    assert read_back(kv_format, vectors).tolist() == [[largest, -largest] * 3]


@each_quantised
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_nan_is_never_lost(kv_format: KVFormat, dtype: torch.dtype) -> None:
    vectors = torch.ones(3, 8, dtype=dtype)
    vectors[1, 5] = math.nan
    vectors[2, 0] = -math.nan
    is_nan = read_back(kv_format, vectors).isnan()
    wanted = vectors.isnan()
    if kv_format.has_page_scales:
        wanted = wanted.any(dim=-1, keepdim=True).expand_as(wanted)
    assert torch.equal(is_nan, wanted)


@each_scaled
def test_where_each_vector_has_a_scale_an_infinity_makes_it_nan_and_no_other(kv_format: KVFormat) -> None:
    vectors = torch.ones(4, 3, 8)
    vectors[1, 0, 7], vectors[2, 2, 0] = math.inf, -math.inf
    wanted = torch.zeros(4, 3, 8, dtype=torch.bool)
    wanted[1, 0] = wanted[2, 2] = True
    assert torch.equal(read_back(kv_format, vectors).isnan(), wanted)


@each_quantised
def test_zeros_stay_zeros(kv_format: KVFormat) -> None:
    assert torch.equal(read_back(kv_format, torch.zeros(2, 5)), torch.zeros(2, 5))


@each_scaled
def test_tiny_vectors_have_the_smallest_normal_scale_and_huge_ones_lose_nothing(kv_format: KVFormat) -> None:
    largest = kv_format.largest
    assert largest is not None
    vectors = torch.tensor([[0.0, 0.0], [1e-45, 0.0], [TINY, -TINY], [TINY * largest, 0.0], [3.4e38, -1e38]])
    codes, scales = kv_format.quantise(vectors)
    assert scales is not None
    assert scales[:4].tolist() == [TINY] * 4
    assert scales[4].item() == np.float32(3.4e38) / np.float32(largest)
    numbers = kv_format.dequantise(codes, scales)
    assert numbers[2].tolist() == [TINY, -TINY]
    assert numbers.isfinite().all()
    assert numbers[4, 0].item() == pytest.approx(3.4e38, rel=2**-23)
    assert_as_defined(kv_format, vectors)


# --- As the definition says, whatever the numbers are.


@each_quantised
@given(
    seed=st.integers(0, 1 << 20),
    exponent=st.integers(-44, 38),
    spread=st.integers(0, 8),
    head_dim=st.integers(1, 33),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_any_numbers_are_stored_as_the_definition_says(
    kv_format: KVFormat, seed: int, exponent: int, spread: int, head_dim: int, dtype: torch.dtype
) -> None:
    rng = np.random.default_rng(seed)
    sizes = 10.0 ** (exponent - rng.integers(0, spread + 1, size=(4, 2, head_dim)))
    assert_as_defined(kv_format, torch.from_numpy(rng.standard_normal((4, 2, head_dim)) * sizes).to(dtype))


@each_quantised
@given(numbers=st.lists(st.floats(width=32), min_size=1, max_size=12))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_nasty_numbers_are_stored_as_the_definition_says(kv_format: KVFormat, numbers: list[float]) -> None:
    assert_as_defined(kv_format, torch.tensor([numbers]))


@each_quantised
def test_all_numbers_of_half_precision_are_stored_as_the_definition_says(kv_format: KVFormat) -> None:
    for dtype in (torch.float16, torch.bfloat16):
        every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
        assert_as_defined(kv_format, every[every.isfinite()].view(-1, 8))
        assert_as_defined(kv_format, every[:, None])


# --- How far off.


def test_a_normal_number_is_off_by_a_sixteenth_at_most_in_fp8() -> None:
    numbers = torch.logspace(-6, math.log2(448), 40_000, base=2)[None]
    errors = (read_back(KV_FORMATS["fp8_e4m3"], numbers) - numbers).abs() / numbers
    assert errors.max() <= 2**-4
    # The bound is reached between 2^n and the next number, by 1 / 17.
    assert errors.max() > 0.058


def test_a_number_is_off_by_half_a_step_at_most_in_int8() -> None:
    numbers = torch.linspace(-127, 127, 40_001)[None]
    errors = (read_back(KV_FORMATS["int8"], numbers) - numbers).abs()
    assert 0.49 < errors.max() <= 0.5


@each_scaled
def test_with_a_scale_of_its_own_a_vector_has_the_same_error_at_any_size(kv_format: KVFormat) -> None:
    torch.manual_seed(0)
    vectors = torch.randn(2000, 64) * 10.0 ** torch.randint(-30, 30, (2000, 1))
    errors = (read_back(kv_format, vectors) - vectors).abs()
    largest = vectors.abs().amax(dim=-1, keepdim=True)
    # Half a step of int8; half a step of the largest fp8 numbers, which lie 32 apart. A hair for the scale's own.
    step = largest / 127 if kv_format.element == "int8" else largest / 448 * 32
    assert (errors <= step / 2 * (1 + 1e-5)).all()
    relative = (errors / largest).norm() / (vectors / largest).norm()
    assert relative < (0.01 if kv_format.element == "int8" else 0.03)
