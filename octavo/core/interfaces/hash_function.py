"""The contract of a hash function for prefix-cache keys."""

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Literal

# "framed": Octavo's own length-framed bytes. "cbor": RFC 8949 deterministic encoding, for keys that other
# programs must be able to reproduce.
Encoding = Literal["framed", "cbor"]


class HashFunction(ABC):
    """Turns the canonical bytes of a block into its key.

    Core does the encoding and the chaining; a hash function sees bytes and returns bytes. The same bytes give the
    same digest in every process and on every machine. Several threads may call it at once.
    """

    # Each registered class states these: the contract version it was built for, as a number; and, if it takes options,
    # a pydantic model of them, of which its constructor then gets an instance as the keyword argument `options`.
    contract_version: ClassVar[int]
    Options: ClassVar[type[Any] | None] = None
    encoding: ClassVar[Encoding] = "framed"
    # A function whose collisions can be constructed must not separate tenants: it is refused for requests
    # that carry a cache salt.
    is_collision_resistant: ClassVar[bool] = True

    @abstractmethod
    def digest(self, data: bytes) -> bytes:
        """Return the digest of `data`, at least 16 bytes and always as many."""
