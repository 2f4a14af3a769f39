"""Sliding-window attention: a query reads the last tokens, so that older blocks are given back as a text grows.

window 5, block 2, 11 tokens computed     [ 0  0  0  6  4  9 ]
                                           given back │ read at 10 │ not full yet
"""

from collections.abc import Callable
from typing import ClassVar

from octavo.core.interfaces import KVCacheSpec, SingleTypeKVCacheManager, SlidingWindowSpec


class SlidingWindowManager(SingleTypeKVCacheManager):
    """Keeps the blocks that a window ending at the last full block reaches."""

    contract_version = 1

    serves: ClassVar[type[KVCacheSpec]] = SlidingWindowSpec
    spec: SlidingWindowSpec

    def skipped_blocks(self, num_computed_tokens: int) -> range:
        # Seen from the last full block: there a follow-up prompt's hit ends, and it needs its window complete.
        num_full_tokens = num_computed_tokens - num_computed_tokens % self.block_size
        return range(max(num_full_tokens - _num_tokens_before(self.spec), 0) // self.block_size)

    def longest_prefix(self, is_cached: Callable[[int], bool], max_blocks: int, alignment_blocks: int) -> int:
        num_needed = -(-_num_tokens_before(self.spec) // self.block_size)
        end = max_blocks - max_blocks % alignment_blocks
        while end > 0:
            # From the left: where nothing is cached, this leaves out a whole run at a time.
            run = range(max(end - num_needed, 0), end)
            missing = next((block for block in run if not is_cached(block)), None)
            if missing is None:
                return end
            # Every prefix that ends between the missing block and here needs it as well.
            end = missing - missing % alignment_blocks
        return 0

    @classmethod
    def max_blocks_per_request(cls, spec: KVCacheSpec, max_model_len: int, max_tokens_in_flight: int) -> int:
        assert isinstance(spec, SlidingWindowSpec)
        in_window = -(-_num_tokens_before(spec) // spec.block_size)
        # A step's tokens may begin anywhere in a block.
        in_flight = -(-(spec.block_size - 1 + max_tokens_in_flight) // spec.block_size)
        return min(in_window + in_flight, -(-max_model_len // spec.block_size))


def _num_tokens_before(spec: SlidingWindowSpec) -> int:
    """Return how many tokens before a query are kept for it.

    With a window of 1 it reads none of them. The last one is kept all the same, for a hit has to rest on something.
    """
    return max(spec.window - 1, 1)
