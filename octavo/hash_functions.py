"""Octavo's own hash functions, each registered under `octavo.hash_functions` like anybody's."""

from hashlib import blake2b, sha256
from typing import ClassVar

from octavo.core.interfaces import Encoding, HashFunction
from octavo.errors import MissingExtraError


class Sha256(HashFunction):
    """SHA-256 over Octavo's framed bytes. The default."""

    contract_version = 1

    def digest(self, data: bytes) -> bytes:
        return sha256(data).digest()


class Blake2b(HashFunction):
    """BLAKE2b with 32-byte digests; as strong, and faster where the processor has no SHA instructions."""

    contract_version = 1

    def digest(self, data: bytes) -> bytes:
        return blake2b(data, digest_size=32).digest()


class Sha256Cbor(Sha256):
    """SHA-256 over deterministic CBOR, for keys that other programs must reproduce."""

    contract_version = 1
    encoding: ClassVar[Encoding] = "cbor"


class Xxh3(HashFunction):
    """XXH3 with 128 bits: much faster, and collisions can be constructed, so cache salts are refused with it."""

    contract_version = 1
    is_collision_resistant: ClassVar[bool] = False

    def __init__(self) -> None:
        try:
            from xxhash import xxh3_128_digest
        except ImportError:
            raise MissingExtraError(
                "The hash functions xxh3_128 and xxh3_128_cbor need xxhash; install it with: "
                "pip install 'octavo[xxhash]'"
            ) from None
        self._digest = xxh3_128_digest

    def digest(self, data: bytes) -> bytes:
        digest: bytes = self._digest(data)
        return digest


class Xxh3Cbor(Xxh3):
    """XXH3 with 128 bits over deterministic CBOR."""

    contract_version = 1
    encoding: ClassVar[Encoding] = "cbor"
