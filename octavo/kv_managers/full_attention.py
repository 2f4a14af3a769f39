"""Full attention: every token is read by all later ones, so every block stays."""

from collections.abc import Callable
from itertools import filterfalse
from typing import ClassVar

from octavo.core.interfaces import FullAttentionSpec, KVCacheSpec, SingleTypeKVCacheManager


class FullAttentionManager(SingleTypeKVCacheManager):
    """Blocks fill from the left, none is dropped, and a prefix hit ends at the first block that is missing."""

    contract_version = 1

    serves: ClassVar[type[KVCacheSpec]] = FullAttentionSpec

    def longest_prefix(self, is_cached: Callable[[int], bool], max_blocks: int, alignment_blocks: int) -> int:
        num_blocks = next(filterfalse(is_cached, range(max_blocks)), max_blocks)
        return num_blocks - num_blocks % alignment_blocks
