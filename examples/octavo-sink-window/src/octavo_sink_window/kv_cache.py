"""What a layer keeps, and the manager that keeps it: the first blocks and the last ones, the middle is dropped.

table of a long text     [ 7  3  0  0  0  0  9 12  5 ]
                           first  dropped    last
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from octavo.core.interfaces import FullAttentionSpec, KVCacheSpec, SingleTypeKVCacheManager


@dataclass(frozen=True)
class SinkWindowSpec(FullAttentionSpec):
    """Keys and values of the first tokens and of the last ones.

    It is a `FullAttentionSpec` that says what may be dropped, so a manager that drops nothing can serve it too.

    Attributes:
        keep_first: Tokens at the start that every query reads.
        window: Tokens that a query reads before those that follow it, its own included.
    """

    kind: ClassVar[str] = "sink_window"
    keep_first: int
    window: int

    def without_recycling(self) -> KVCacheSpec:
        return FullAttentionSpec(self.block_size, self.num_kv_heads, self.head_dim, self.dtype)

    @property
    def num_first_blocks(self) -> int:
        """Blocks at the start that stay."""
        return -(-self.keep_first // self.block_size)

    def first_block_in_window(self, num_tokens: int) -> int:
        """Return the first block that the window of a query at position `num_tokens` reaches into."""
        return max(num_tokens - self.window + 1, 0) // self.block_size


class SinkWindowManager(SingleTypeKVCacheManager):
    """Keeps the blocks that a later query reads: the first ones, and those that its window reaches."""

    contract_version = 1
    serves: ClassVar[type[KVCacheSpec]] = SinkWindowSpec
    spec: SinkWindowSpec

    def skipped_blocks(self, num_computed_tokens: int) -> range:
        # Seen from the last full block, so that a follow-up prompt, whose hit ends there, finds its window complete.
        num_full_tokens = num_computed_tokens - num_computed_tokens % self.block_size
        return range(self.spec.num_first_blocks, self.spec.first_block_in_window(num_full_tokens))

    def longest_prefix(self, is_cached: Callable[[int], bool], max_blocks: int, alignment_blocks: int) -> int:
        num_first_blocks = self.spec.num_first_blocks
        for block in range(min(num_first_blocks, max_blocks)):
            if not is_cached(block):
                return block - block % alignment_blocks
        end = max_blocks - max_blocks % alignment_blocks
        while end > num_first_blocks:
            window = range(max(self.spec.first_block_in_window(end * self.block_size), num_first_blocks), end)
            missing = next((block for block in reversed(window) if not is_cached(block)), None)
            if missing is None:
                return end
            # Every prefix that ends between the missing block and here needs it as well.
            end = missing - missing % alignment_blocks
        return end

    @classmethod
    def max_blocks_per_request(cls, spec: KVCacheSpec, max_model_len: int, max_tokens_in_flight: int) -> int:
        assert isinstance(spec, SinkWindowSpec)
        in_window = -(-(spec.window - 1) // spec.block_size)
        # A step's tokens may begin anywhere in a block.
        in_flight = -(-(spec.block_size - 1 + max_tokens_in_flight) // spec.block_size)
        return min(spec.num_first_blocks + in_window + in_flight, -(-max_model_len // spec.block_size))
