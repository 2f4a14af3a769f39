"""Which blocks later queries read, worked out by brute force from which positions a query reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np

Positions = np.ndarray[Any, np.dtype[np.int64]]


class ReadModel:
    """The consequences of a statement of who reads what.

    Args:
        reads: Says whether a query at one position reads the key at another one, which is not later.
        block_size: Tokens in a block.
        max_model_len: Tokens in the longest text that is asked about.
    """

    def __init__(self, reads: Callable[[int, int], bool], block_size: int, max_model_len: int) -> None:
        self.reads = reads
        self.block_size = block_size
        self.max_num_blocks = -(-max_model_len // block_size)
        # Twice as far as anybody asks: what is read again after a pause is seen to be needed during the pause.
        self._num_positions = 2 * max_model_len + block_size
        self._read_by: dict[int, Positions] = {}

    @cached_property
    def last_readers(self) -> list[int]:
        """The last query that reads anything of each block; -1 for none."""
        return [self._last_reader(block) for block in range(self.max_num_blocks)]

    def is_read_after(self, block: int, num_tokens: int) -> bool:
        """Say whether a query at position `num_tokens` or later reads anything of the block."""
        return self.last_readers[block] >= num_tokens

    def blocks_read_after(self, num_tokens: int, num_blocks: int) -> list[int]:
        """Return those of the first blocks that a query at position `num_tokens` or later reads."""
        return [block for block in range(num_blocks) if self.is_read_after(block, num_tokens)]

    def positions_read_by(self, query_position: int) -> Positions:
        """Return the positions, its own included, that a query reads, in order."""
        if query_position not in self._read_by:
            found = [key for key in range(query_position + 1) if self.reads(query_position, key)]
            self._read_by[query_position] = np.array(found, np.int64)
        return self._read_by[query_position]

    def example_of_reading(self, block: int, num_tokens: int) -> tuple[int, int]:
        """Return a query and a position in the block that it reads, for a block that is read after `num_tokens`."""
        for query in range(num_tokens, self._num_positions):
            for key in self._positions_in(block, query):
                if self.reads(query, key):
                    return query, key
        raise ValueError(f"nothing reads block {block} after {num_tokens} tokens")

    def _last_reader(self, block: int) -> int:
        for query in range(self._num_positions - 1, block * self.block_size - 1, -1):
            if any(self.reads(query, key) for key in self._positions_in(block, query)):
                return query
        return -1

    def _positions_in(self, block: int, query: int) -> range:
        return range(block * self.block_size, min((block + 1) * self.block_size, query + 1))


def longest_supported(
    needed: Sequence[frozenset[int]], pattern: Sequence[bool], max_blocks: int, alignment_blocks: int
) -> int:
    """Return the longest prefix, in blocks, that a pattern of cached blocks supports.

    Args:
        needed: Which blocks must be cached for a prefix of 0, 1, 2 ... blocks.
        pattern: Whether each block is cached.
        max_blocks: The answer may not exceed this.
        alignment_blocks: The answer is a multiple of this.
    """
    lengths = range(max_blocks - max_blocks % alignment_blocks, 0, -alignment_blocks)
    return next((length for length in lengths if all(pattern[block] for block in needed[length])), 0)
