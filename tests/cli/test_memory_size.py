"""Sizes of memory, as people write them."""

import pytest

from octavo.cli.memory_size import parse_memory_size
from octavo.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("4096", 4096),
        ("4096 B", 4096),
        ("1 byte", 1),
        ("7 bytes", 7),
        ("1KiB", 1024),
        ("1KB", 1000),
        ("2MiB", 2 * 1024**2),
        ("2MB", 2_000_000),
        ("8GiB", 8 * 1024**3),
        ("8GB", 8_000_000_000),
        ("1TiB", 1024**4),
        ("1TB", 1_000_000_000_000),
        ("1K", 1024),
        ("512M", 512 * 1024**2),
        ("8G", 8 * 1024**3),
        ("8 g", 8 * 1024**3),
        ("1.5T", 3 * 512 * 1024**3),
        ("8gb", 8_000_000_000),
        ("8gB", 8_000_000_000),
        ("8gib", 8 * 1024**3),
        ("8 gIB", 8 * 1024**3),
        ("  1.5  GiB ", 3 * 512 * 1024**2),
        (".5MB", 500_000),
        ("3.GiB", 3 * 1024**3),
        # As exact as it is written: no float has this.
        ("0.1TB", 100_000_000_000),
        ("9007199254740993", 9007199254740993),
        # What is less than a byte is cut off.
        ("1.9", 1),
        ("0.7KiB", 716),
    ],
)
def test_a_size_is_a_number_and_a_unit_of_1024_or_1000(text, num_bytes):
    assert parse_memory_size("--memory", text) == num_bytes


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "GiB",
        "-1GiB",
        "+1GiB",
        "nan",
        "inf",
        "NaN GiB",
        "1e9",
        "1,5GiB",
        "8 PiB",
        "8P",
        "8Gbit",
        "1.2.3GB",
        "0x10",
    ],
)
def test_what_is_no_size_is_refused_with_those_that_are(text):
    with pytest.raises(ConfigError) as caught:
        parse_memory_size("--memory", text)
    assert str(caught.value) == (
        f"--memory is {text!r}; it must be a number above 0 and a unit, such as 8GiB or 1.5GB. Units: B, KiB, MiB, "
        "GiB, TiB (each 1024 of the one before it; K, M, G, T are the same), KB, MB, GB, TB (each 1000); a number "
        "alone is bytes."
    )


@pytest.mark.parametrize(
    ("text", "bits", "way_out"),
    [("8Gb", "Gb", "8GB"), ("1.5 Mb", "Mb", "1.5MB"), ("1Kb", "Kb", "1KB"), ("2Gib", "Gib", "2GiB")],
)
def test_bits_are_refused_with_the_same_number_of_bytes(text, bits, way_out):
    with pytest.raises(ConfigError) as caught:
        parse_memory_size("--memory", text)
    assert str(caught.value) == (
        f"--memory is {text!r}, and {bits} is how bits are written; for bytes write {way_out}."
    )


@pytest.mark.parametrize("text", ["0", "0GiB", "0.0", "0.9", "0.0001KiB"])
def test_less_than_a_byte_is_refused(text):
    with pytest.raises(ConfigError) as caught:
        parse_memory_size("--memory", text)
    assert str(caught.value) == (
        f"--memory is {text!r}, which is less than one byte; give the memory of the KV cache, as 8GiB."
    )


def test_a_text_that_is_too_long_is_not_shown_whole():
    with pytest.raises(ConfigError, match=r"^--memory is '1{64}'\.\.\.; it must be a number") as caught:
        parse_memory_size("--memory", "1" * 100_000)
    assert len(str(caught.value)) < 400
