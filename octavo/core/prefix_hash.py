"""Keys of the prefix cache: each block's key stands for its tokens and everything before them.

    key[i] = digest(encode(key[i - 1], token ids of block i, extra keys of block i)),   key[-1] = root

The encoding is canonical and framed by lengths, so no two different inputs give the same bytes. Extra keys are
typed by their first item, so a salt never equals an adapter of the same name.
"""

import os
import struct
import sys
from array import array
from collections.abc import Sequence

import numpy as np

from octavo.core.interfaces.hash_function import HashFunction
from octavo.errors import PluginContractError

# ("salt", text), ("lora", name, weights epoch), ("mm", content id, offset), ("embeds", digest)
ExtraKey = tuple[str | int | bytes, ...]


MIN_DIGEST_BYTES = 16


def check_hash_function(hash_function: HashFunction) -> None:
    """Raise when a hash function cannot make keys: two blocks of the same key would be taken for one.

    Raises:
        PluginContractError: Its digests are no bytes, too short, not always as long, or not always the same.
    """
    name = type(hash_function).__qualname__
    if hash_function.encoding not in ("framed", "cbor"):
        raise PluginContractError(
            f"The hash function {name} has the encoding {hash_function.encoding!r}; it must be 'framed' or 'cbor'."
        )
    inputs = (b"", b"0", b"octavo", bytes(range(256)) * 9)
    digests = [hash_function.digest(data) for data in inputs]
    for digest in digests:
        if not isinstance(digest, bytes) or len(digest) < MIN_DIGEST_BYTES:
            raise PluginContractError(
                f"The hash function {name} returns {digest!r} as a digest; it must be bytes, at least "
                f"{MIN_DIGEST_BYTES} of them."
            )
    if len({len(digest) for digest in digests}) > 1 or len(set(digests)) < len(inputs):
        raise PluginContractError(
            f"The hash function {name} returns digests of {sorted(map(len, digests))} bytes, {len(set(digests))} "
            f"different ones for {len(inputs)} inputs; each input must have its own, and all must be of one length."
        )
    if digests != [hash_function.digest(data) for data in inputs]:
        raise PluginContractError(
            f"The hash function {name} returns another digest when it is asked again; the same bytes must give the "
            "same one."
        )


def hash_root(hash_function: HashFunction, seed: str | None) -> bytes:
    """Return the key before the first block.

    Args:
        hash_function: What makes the keys.
        seed: The same text gives the same root everywhere, which sharing a cache between processes needs.
            None makes a random root, so that nobody outside the process can predict a key.
    """
    source = os.urandom(32) if seed is None else seed.encode("utf-8", "surrogatepass")
    return hash_function.digest(b"octavo prefix root\0" + source)


def hash_seed_from_environment() -> str | None:
    """Return PYTHONHASHSEED where it fixes a seed; None where it is unset, empty or "random"."""
    seed = os.environ.get("PYTHONHASHSEED", "")
    return None if seed in ("", "random") else seed


class PrefixHasher:
    """Computes the keys of consecutive blocks.

    Args:
        hash_function: Turns encoded bytes into a key.
        block_size: Tokens in a block.
        root: What `hash_root` returned.
    """

    def __init__(self, hash_function: HashFunction, block_size: int, root: bytes) -> None:
        self.block_size = block_size
        self.root = root
        self._digest = hash_function.digest
        self._name = type(hash_function).__qualname__
        self._key_bytes = len(hash_function.digest(b""))
        self._is_framed = hash_function.encoding == "framed"
        self._encode = {"framed": _encode_framed, "cbor": _encode_cbor}[hash_function.encoding]

    def extend(self, keys: list[bytes], token_ids: "array[int]", first_block_extra: Sequence[ExtraKey] = ()) -> None:
        """Append to `keys` those of all full blocks of `token_ids` that it does not have yet.

        Args:
            keys: Keys of the first blocks, as an earlier call left them.
            token_ids: The request's tokens, int32.
            first_block_extra: What else the first block stands for, such as a cache salt. The chain carries it on.
        """
        size = self.block_size
        first, end = len(keys), len(token_ids) // size
        if first == end:
            return
        if self._is_framed and end - first > 1 and sys.byteorder == "little":
            self._extend_framed(keys, token_ids, first_block_extra)
            return
        for block in range(first, end):
            parent = keys[-1] if keys else self.root
            extra = first_block_extra if block == 0 else ()
            keys.append(self._key(self._encode(parent, token_ids[block * size : (block + 1) * size], extra)))

    def _extend_framed(self, keys: list[bytes], token_ids: "array[int]", first_block_extra: Sequence[ExtraKey]) -> None:
        """As `extend`, for many blocks: all but the first differ in their parent and tokens alone."""
        size, digest, key_bytes = self.block_size, self._digest, self._key_bytes
        if not keys:
            keys.append(self._key(_encode_framed(self.root, token_ids[:size], first_block_extra)))
        parent, first, num_bytes = keys[-1], len(keys), size * token_ids.itemsize
        head = struct.pack("<III", len(parent), size, 0)
        num_blocks = len(token_ids) // size - first
        # All blocks are cut in one go. The array is dropped at once: while it lives, the request's tokens cannot grow.
        blocks: list[bytes] = np.frombuffer(token_ids, f"V{num_bytes}", num_blocks, offset=first * num_bytes).tolist()
        for block in blocks:
            parent = digest(head + parent + block)
            if type(parent) is not bytes or len(parent) != key_bytes:
                raise self._fault_of(parent)
            keys.append(parent)

    def _key(self, encoded: bytes) -> bytes:
        key = self._digest(encoded)
        # A short key stands for many blocks, and whoever has it would be given another's keys and values.
        if type(key) is not bytes or len(key) != self._key_bytes:
            raise self._fault_of(key)
        return key

    def _fault_of(self, key: object) -> PluginContractError:
        return PluginContractError(
            f"The hash function {self._name} returns {key!r} as a digest, and returned {self._key_bytes} bytes before; "
            "it must return as many bytes for each input."
        )


def _encode_framed(parent: bytes, token_ids: "array[int]", extra_keys: Sequence[ExtraKey]) -> bytes:
    if sys.byteorder == "big":
        token_ids = array(token_ids.typecode, token_ids)
        token_ids.byteswap()
    parts = [struct.pack("<III", len(parent), len(token_ids), len(extra_keys)), parent, token_ids.tobytes()]
    for extra_key in extra_keys:
        parts.append(struct.pack("<I", len(extra_key)))
        for item in extra_key:
            kind, content = _tagged(item)
            parts.append(struct.pack("<cI", kind, len(content)))
            parts.append(content)
    return b"".join(parts)


def _tagged(item: str | int | bytes) -> tuple[bytes, bytes]:
    match item:
        case str():
            return b"s", item.encode()
        case int():
            return b"i", str(item).encode()
        case bytes():
            return b"b", item
    raise TypeError(f"an extra key holds text, whole numbers or bytes, not {type(item).__name__}")


def _encode_cbor(parent: bytes, token_ids: "array[int]", extra_keys: Sequence[ExtraKey]) -> bytes:
    """[parent, [ids], [[extra key], ...] or null], in RFC 8949's deterministic form."""
    import cbor2

    extra = [list(extra_key) for extra_key in extra_keys] or None
    return cbor2.dumps([parent, np.frombuffer(token_ids, np.int32).tolist(), extra], canonical=True)
