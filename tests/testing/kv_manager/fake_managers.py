"""Two managers that drop blocks, right in every respect, for the suite's own tests to pass and to break."""

from dataclasses import dataclass
from typing import ClassVar

from octavo.core.interfaces import KVCacheSpec, SingleTypeKVCacheManager


@dataclass(frozen=True)
class WindowSpec(KVCacheSpec):
    """Keys and values of the last tokens."""

    kind: ClassVar[str] = "window_for_tests"
    window: int = 8

    @property
    def page_bytes(self):
        return 8 * self.block_size


class WindowManager(SingleTypeKVCacheManager):
    """A query reads itself and the `window - 1` tokens before it."""

    contract_version = 1
    serves: ClassVar[type[KVCacheSpec]] = WindowSpec

    def skipped_blocks(self, num_computed_tokens):
        full = num_computed_tokens - num_computed_tokens % self.block_size
        return range(max(full - self.spec.window + 1, 0) // self.block_size)

    def longest_prefix(self, is_cached, max_blocks, alignment_blocks):
        run_needed = -(-(self.spec.window - 1) // self.block_size)
        for end in range(max_blocks - max_blocks % alignment_blocks, 0, -alignment_blocks):
            if all(is_cached(block) for block in range(end - 1, max(end - run_needed, 0) - 1, -1)):
                return end
        return 0

    @classmethod
    def max_blocks_per_request(cls, spec, max_model_len, max_tokens_in_flight):
        # The window before a block's first token, that block as far as it was filled, and the new tokens.
        behind = -(-(spec.window - 1) // spec.block_size)
        ahead = -(-(spec.block_size - 1 + max_tokens_in_flight) // spec.block_size)
        return min(behind + ahead, -(-max_model_len // spec.block_size))


@dataclass(frozen=True)
class ChunkSpec(KVCacheSpec):
    """Keys and values of the chunk under way; `chunk` is a multiple of the block size."""

    kind: ClassVar[str] = "chunk_for_tests"
    chunk: int = 8

    @property
    def page_bytes(self):
        return 8 * self.block_size


class ChunkManager(SingleTypeKVCacheManager):
    """A query reads from the start of its own aligned chunk on."""

    contract_version = 1
    serves: ClassVar[type[KVCacheSpec]] = ChunkSpec

    def skipped_blocks(self, num_computed_tokens):
        return range((num_computed_tokens - num_computed_tokens % self.spec.chunk) // self.block_size)

    def longest_prefix(self, is_cached, max_blocks, alignment_blocks):
        blocks_per_chunk = self.spec.chunk // self.block_size
        for end in range(max_blocks - max_blocks % alignment_blocks, 0, -alignment_blocks):
            if all(map(is_cached, range(end - end % blocks_per_chunk, end))):
                return end
        return 0

    @classmethod
    def max_blocks_per_request(cls, spec, max_model_len, max_tokens_in_flight):
        return -(-min(spec.chunk + max_tokens_in_flight, max_model_len) // spec.block_size)
