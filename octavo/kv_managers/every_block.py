"""What managers have in common that keep every block: a hit is a run of cached blocks from the start."""

from collections.abc import Callable
from itertools import filterfalse

from octavo.core.interfaces import SingleTypeKVCacheManager


class EveryBlockManager(SingleTypeKVCacheManager):
    """Blocks fill from the left, none is dropped, and a prefix hit ends at the first block that is missing."""

    shorter_prefixes_hold = True

    def longest_prefix(self, is_cached: Callable[[int], bool], max_blocks: int, alignment_blocks: int) -> int:
        num_blocks = next(filterfalse(is_cached, range(max_blocks)), max_blocks)
        return num_blocks - num_blocks % alignment_blocks
