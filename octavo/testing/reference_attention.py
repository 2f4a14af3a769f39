"""What is kept for each kind of attention, in plain Python. Read this first, then `reference_cache.py`."""

import math


class FullAttention:
    """What one kind of attention reads, and so what is kept for it. This one reads all that came before."""

    # Whether each beginning of a prefix that can be used can be used, too.
    shorter_prefixes_hold = True

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many table entries so many tokens take."""
        return -(-num_tokens // self.block_size)

    def first_read(self, num_tokens: int) -> int:
        """Return the first table entry of those that the tokens behind the first `num_tokens` read."""
        return 0

    def first_kept(self, num_computed: int, alignment: int) -> int:
        """Return the first table entry that is kept for them, and for a hit at the last length that one may have."""
        return self.first_read(num_computed - num_computed % alignment)

    def most_blocks(self, num_tokens: int, num_in_flight: int) -> int:
        """Return how many blocks a request of so many tokens holds at a time at most."""
        return self.blocks_for(num_tokens)


class SlidingWindow(FullAttention):
    """A token reads itself and the `window - 1` tokens before it. Of those before it one is kept in any case."""

    shorter_prefixes_hold = False

    def __init__(self, block_size: int, window: int) -> None:
        super().__init__(block_size)
        self.num_before = max(window - 1, 1)

    def first_read(self, num_tokens: int) -> int:
        return max(num_tokens - self.num_before, 0) // self.block_size

    def most_blocks(self, num_tokens: int, num_in_flight: int) -> int:
        in_flight = self.blocks_for(self.block_size - 1 + num_in_flight)
        return min(self.blocks_for(self.num_before) + in_flight, self.blocks_for(num_tokens))


class ChunkedLocal(FullAttention):
    """A token reads from the start of its own chunk on."""

    shorter_prefixes_hold = False

    def __init__(self, block_size: int, chunk: int) -> None:
        super().__init__(block_size)
        self.chunk = chunk

    def first_read(self, num_tokens: int) -> int:
        return (num_tokens - num_tokens % self.chunk) // self.block_size

    def first_kept(self, num_computed: int, alignment: int) -> int:
        # Where blocks are all of a size, a chunk goes as a whole when the next one begins.
        return super().first_kept(num_computed, 1 if alignment == self.block_size else alignment)

    def most_blocks(self, num_tokens: int, num_in_flight: int) -> int:
        # The most of another chunk that stands in the block in which one begins.
        before_chunk = self.block_size - math.gcd(self.chunk, self.block_size)
        in_chunk = self.blocks_for(before_chunk + self.chunk - 1 + num_in_flight)
        return min(in_chunk, self.blocks_for(num_tokens))
