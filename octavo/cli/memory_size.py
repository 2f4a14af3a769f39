"""Sizes of memory as people write them: "8GiB", "1.5 gb", "8G", "4096"."""

import re
from decimal import Decimal

from octavo.errors import ConfigError

_UNITS = {"": 1, "b": 1, "byte": 1, "bytes": 1}
_UNITS |= {f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", 1)}
_UNITS |= {f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", 1)}
# A letter alone is as in GNU's tools, Java and Docker.
_UNITS |= {prefix: 1024**power for power, prefix in enumerate("kmgt", 1)}
# A capital and a small b, such as Gb: elsewhere bits are written so, and nobody measures memory in them.
_BITS = re.compile(r"(?P<prefix>[KMGT]i?)b")
_SIZE = re.compile(r"\s*(?P<number>[0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*(?P<unit>[a-z]*)\s*", re.IGNORECASE)
# Digits in the largest number that is read, fractions included.
_MAX_CHARS = 64


def parse_memory_size(flag: str, text: str) -> int:
    """Return the whole bytes that a flag's value means.

    Raises:
        ConfigError: It is no size, or less than a byte.
    """
    match = _SIZE.fullmatch(text) if len(text) <= _MAX_CHARS else None
    unit = None if match is None else _UNITS.get(match["unit"].lower())
    if match is None or unit is None:
        shown = repr(text) if len(text) <= _MAX_CHARS else f"{text[:_MAX_CHARS]!r}..."
        raise ConfigError(
            f"{flag} is {shown}; it must be a number above 0 and a unit, such as 8GiB or 1.5GB. Units: B, KiB, MiB, "
            "GiB, TiB (each 1024 of the one before it; K, M, G, T are the same), KB, MB, GB, TB (each 1000); a number "
            "alone is bytes."
        )
    if (bits := _BITS.fullmatch(match["unit"])) is not None:
        raise ConfigError(
            f"{flag} is {text!r}, and {match['unit']} is how bits are written; for bytes write "
            f"{match['number']}{bits['prefix']}B."
        )
    num_bytes = int(Decimal(match["number"]) * unit)
    if num_bytes < 1:
        raise ConfigError(f"{flag} is {text!r}, which is less than one byte; give the memory of the KV cache, as 8GiB.")
    return num_bytes
