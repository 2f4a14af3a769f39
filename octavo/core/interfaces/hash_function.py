"""The contract of a hash function for prefix-cache keys."""

from abc import ABC, abstractmethod
from typing import ClassVar, Literal

from octavo.core.interfaces.version import CONTRACT_VERSION

# "framed": Octavo's own length-framed bytes. "cbor": RFC 8949 deterministic encoding, for keys that other
# programs must be able to reproduce.
Encoding = Literal["framed", "cbor"]


class HashFunction(ABC):
    """Turns the canonical bytes of a block into its key.

    Core does the encoding and the chaining; a hash function sees bytes and returns bytes. The same bytes give the
    same digest in every process and on every machine.
    """

    contract_version: ClassVar[int] = CONTRACT_VERSION
    encoding: ClassVar[Encoding] = "framed"
    # A function whose collisions can be constructed must not separate tenants: it is refused for requests
    # that carry a cache salt.
    is_collision_resistant: ClassVar[bool] = True

    @abstractmethod
    def digest(self, data: bytes) -> bytes:
        """Return the digest of `data`, at least 16 bytes and always as many."""
