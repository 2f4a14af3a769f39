"""Chunked local attention: a query reads from the start of its own chunk on; with a chunk its blocks become useless.

chunk 6, block 2, 9 tokens computed     [ 0  0  0  6  4 ]
                                          chunk 0 │ chunk 1
"""

import math
from collections.abc import Callable
from typing import ClassVar

from octavo.core.interfaces import ChunkedLocalSpec, KVCacheSpec, SingleTypeKVCacheManager


class ChunkedLocalManager(SingleTypeKVCacheManager):
    """Keeps the blocks of the chunk that the next token belongs to. Where a chunk begins, that is none."""

    contract_version = 1

    serves: ClassVar[type[KVCacheSpec]] = ChunkedLocalSpec
    spec: ChunkedLocalSpec

    def skipped_blocks(self, num_computed_tokens: int) -> range:
        return range(self._first_block_of_chunk(num_computed_tokens))

    def longest_prefix(self, is_cached: Callable[[int], bool], max_blocks: int, alignment_blocks: int) -> int:
        end = max_blocks - max_blocks % alignment_blocks
        while end > 0:
            first = self._first_block_of_chunk(end * self.block_size)
            missing = next((block for block in range(first, end) if not is_cached(block)), None)
            if missing is None:
                return end
            # Every prefix of this chunk that ends behind the missing block needs it as well.
            end = missing - missing % alignment_blocks
        return 0

    @classmethod
    def max_blocks_per_request(cls, spec: KVCacheSpec, max_model_len: int, max_tokens_in_flight: int) -> int:
        assert isinstance(spec, ChunkedLocalSpec)
        # The most that are computed of a chunk before it is complete, and the tokens of a step.
        num_tokens = spec.chunk - 1 + max_tokens_in_flight
        # Tokens of the chunk before it in its first block: chunks begin at multiples of the common divisor in a block.
        before_chunk = spec.block_size - math.gcd(spec.chunk, spec.block_size)
        return min(-(-(before_chunk + num_tokens) // spec.block_size), -(-max_model_len // spec.block_size))

    def _first_block_of_chunk(self, position: int) -> int:
        """Return the block in which the chunk of a position begins."""
        return (position - position % self.spec.chunk) // self.block_size
