"""Prefix-cache keys that know what they stand for, for the debug mode `verify_prefix_cache`.

A key is a digest, and two different prefixes may have the same one. These keys are equal only when what they stand for
is, so that the block pool, which looks them up in a dict, never takes one prefix for another.
"""

from array import array
from collections.abc import Sequence

from octavo.core.prefix_hash import ExtraKey, PrefixHasher


class ContentKey(bytes):
    """A block's key, with the tokens and extra keys that it was made from.

    Attributes:
        token_ids: The block's tokens, int32.
        extra_keys: What else the block stands for.
        parent: The key of the block before it.
    """

    token_ids: bytes
    extra_keys: tuple[ExtraKey, ...]
    parent: "ContentKey | None"

    # Equal keys have equal digests, so the digest's hash does.
    __hash__ = bytes.__hash__

    def __eq__(self, other: object) -> bool:
        """Say whether both stand for the same prefix; of a key and plain bytes, whether the digest is the same."""
        if not isinstance(other, ContentKey):
            return isinstance(other, bytes) and bytes(self) == other
        mine: ContentKey | None = self
        theirs: ContentKey | None = other
        while mine is not theirs:
            if mine is None or theirs is None:
                return False
            if mine.token_ids != theirs.token_ids or mine.extra_keys != theirs.extra_keys:
                return False
            mine, theirs = mine.parent, theirs.parent
        # From here on they share what is before them: the next comparison ends early, and one of the two is freed.
        self.parent = other.parent
        return True

    def __ne__(self, other: object) -> bool:
        return not self == other


class ContentHasher(PrefixHasher):
    """Computes keys of consecutive blocks that are `ContentKey`s. Arguments as in `PrefixHasher`."""

    def extend(self, keys: list[bytes], token_ids: "array[int]", first_block_extra: Sequence[ExtraKey] = ()) -> None:
        first, size = len(keys), self.block_size
        super().extend(keys, token_ids, first_block_extra)
        parent = keys[first - 1] if first else None
        for block in range(first, len(keys)):
            key = ContentKey(keys[block])
            key.token_ids = token_ids[block * size : (block + 1) * size].tobytes()
            key.extra_keys = () if block else tuple(first_block_extra)
            key.parent = parent if isinstance(parent, ContentKey) else None
            keys[block] = parent = key
