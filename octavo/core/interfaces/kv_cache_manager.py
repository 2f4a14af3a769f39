"""The contract of a KV-cache manager: the block tables of one KV-cache group.

Nearly all that tells managers apart is the answer to three pure questions:

    num_blocks_needed(num_tokens)             how many blocks a request of so many tokens takes
    skipped_blocks(num_computed_tokens)       which of them nothing later will read
    longest_prefix(is_cached, ...)            how long a prefix a pattern of cached blocks supports

The verbs below stand on these. A manager with unusual needs overrides verbs as well.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from itertools import compress
from typing import Any, ClassVar, Protocol

import numpy as np

from octavo.core.interfaces.kv_cache_spec import KVCacheSpec

# Block 0 stands for "no block here". It is in tables, never in the free queue, and is never read or written.
NULL_BLOCK = 0


class BlockSource(Protocol):
    """What a manager asks of the block pool."""

    @property
    def num_free_blocks(self) -> int: ...

    def get_new_blocks(self, count: int) -> list[int]:
        """Take `count` blocks out of the free queue, each with one reference and without a key."""

    def touch(self, block_ids: Iterable[int]) -> None:
        """Add a reference to each block, taking it out of the free queue where it stands there."""

    def free_blocks(self, block_ids: Iterable[int]) -> None:
        """Drop a reference of each block. Order is eviction order: the first is handed out again first.

        The null block is not among them.
        """

    def is_free(self, block_id: int) -> bool:
        """Say whether the block stands in the free queue."""

    def count_free(self, block_ids: Iterable[int]) -> int:
        """Return how many of the blocks stand in the free queue; the null block never does."""

    def get_cached_block(self, key: bytes, group_id: int) -> int | None:
        """Return a block that holds what `key` stands for in this group."""

    def cache_full_blocks(self, block_ids: Sequence[int], keys: Sequence[bytes], group_id: int) -> None:
        """Make full blocks findable, each under its key."""

    def uncache_blocks(self, block_ids: Iterable[int]) -> None:
        """Make blocks unfindable; they keep their references."""


class SingleTypeKVCacheManager(ABC):
    """Keeps the block tables of one KV-cache group.

    A request is known by its `row`, a small number that the scheduler hands out while the request holds blocks.

    Args:
        spec: What each layer of the group keeps.
        pool: Where blocks come from.
        group_id: Which group this is; keys of different groups never meet.
        num_rows: Rows to prepare for; more are added when they come.
    """

    # Each registered class states these: the contract version it was built for, as a number; and, if it takes options,
    # a pydantic model of them, of which its constructor then gets an instance as the keyword argument `options`.
    contract_version: ClassVar[int]
    Options: ClassVar[type[Any] | None] = None
    serves: ClassVar[type[KVCacheSpec]]
    # Whether each beginning of a usable prefix is usable too, because all of its blocks are read. Then a longer answer
    # of `longest_prefix` holds for every shorter prefix, and `skipped_blocks` never names any.
    shorter_prefixes_hold: ClassVar[bool] = False

    def __init__(self, spec: KVCacheSpec, pool: BlockSource, group_id: int, num_rows: int) -> None:
        self.spec = spec
        self.block_size = spec.block_size
        self.pool = pool
        self.group_id = group_id
        # One matrix for all rows, so that a step's tables are one index operation. int32, [num_rows, width]
        self.block_tables: np.ndarray[Any, np.dtype[np.int32]] = np.zeros((num_rows, 8), np.int32)
        self.num_blocks: np.ndarray[Any, np.dtype[np.int32]] = np.zeros(num_rows, np.int32)
        # Blocks at the front of a row's table that are registered, adopted ones and null entries included.
        self.num_cached_blocks: np.ndarray[Any, np.dtype[np.int32]] = np.zeros(num_rows, np.int32)

    # -- the three questions ------------------------------------------------------------------------------------

    def num_blocks_needed(self, num_tokens: int) -> int:
        """Return how many table entries a request of `num_tokens` tokens takes."""
        return -(-num_tokens // self.block_size)

    def skipped_blocks(self, num_computed_tokens: int) -> range:
        """Return the table entries that no token after the first `num_computed_tokens` will read, without a gap."""
        return range(0)

    @abstractmethod
    def longest_prefix(self, is_cached: Callable[[int], bool], max_blocks: int, alignment_blocks: int) -> int:
        """Return how many blocks at the start of a prompt need not be computed.

        Args:
            is_cached: Says whether the pool has block number i of the prompt. Ask for as few as possible.
            max_blocks: The answer may not exceed this.
            alignment_blocks: The answer must be a multiple of this.
        """

    def quiet_until(self, num_tokens: int) -> int:
        """Return up to how many computed tokens nothing changes for a row that has `num_tokens` now.

        Within a block nothing fills up. Needs and skipped blocks only grow, so that they do not change between two
        numbers of tokens at which they are the same.
        """
        last = num_tokens + self.block_size - 1 - num_tokens % self.block_size
        changes = (
            not num_tokens % self.block_size
            or self.num_blocks_needed(last) != self.num_blocks_needed(num_tokens)
            or self.skipped_blocks(last) != self.skipped_blocks(num_tokens)
        )
        return num_tokens if changes else last

    @classmethod
    def max_blocks_per_request(cls, spec: KVCacheSpec, max_model_len: int, max_tokens_in_flight: int) -> int:
        """Return the most blocks that one request ever holds at a time.

        Start-up sizing and admission both use it, so they cannot disagree.

        Args:
            spec: What each layer of the group keeps.
            max_model_len: Tokens in the longest request.
            max_tokens_in_flight: New tokens that a request may have in a step.
        """
        return -(-max_model_len // spec.block_size)

    # -- the verbs ----------------------------------------------------------------------------------------------

    def block_table(self, row: int) -> np.ndarray[Any, np.dtype[np.int32]]:
        """Return the row's table: one block id an entry. A view; it changes with the row."""
        return self.block_tables[row, : self.num_blocks[row]]

    def get_num_blocks_to_allocate(self, row: int, num_tokens: int, hit: Sequence[int] = ()) -> int:
        """Return how many free blocks it takes for the row to hold `num_tokens` tokens after adopting `hit`.

        A hit that stands in the free queue counts: adopting it takes it out of there.
        """
        num_held = (int(self.num_blocks[row]) if row >= 0 else 0) + len(hit)
        num_new = max(self.num_blocks_needed(num_tokens) - num_held, 0)
        return num_new + (self.pool.count_free(hit) if hit else 0)

    def allocate_new_computed_blocks(self, row: int, hit: Sequence[int]) -> None:
        """Adopt cached blocks as the first entries of an empty row. They count as registered."""
        self.pool.touch(hit)
        self._append(row, hit)
        self.num_cached_blocks[row] = len(hit)

    def allocate_new_blocks(self, row: int, num_tokens: int) -> list[int]:
        """Give the row the blocks that it lacks for `num_tokens` tokens; return them."""
        num_new = self.num_blocks_needed(num_tokens) - int(self.num_blocks[row])
        if num_new <= 0:
            return []
        new_blocks = self.pool.get_new_blocks(num_new)
        self._append(row, new_blocks)
        return new_blocks

    def cache_blocks(self, row: int, keys: Sequence[bytes], num_tokens: int) -> list[int]:
        """Register the row's full blocks among its first `num_tokens` tokens; return those that are new."""
        first, last = int(self.num_cached_blocks[row]), num_tokens // self.block_size
        if last <= first:
            return []
        entries = self.block_tables[row, first:last].tolist()
        block_ids = [block_id for block_id in entries if block_id]
        self.pool.cache_full_blocks(block_ids, list(compress(keys[first:last], entries)), self.group_id)
        self.num_cached_blocks[row] = last
        return block_ids

    def uncache_blocks(self, row: int, first_block: int) -> None:
        """Take the keys off the row's blocks from table entry `first_block` on."""
        last = int(self.num_cached_blocks[row])
        if last > first_block:
            self.pool.uncache_blocks(int(b) for b in self.block_tables[row, first_block:last] if b)
            self.num_cached_blocks[row] = first_block

    def remove_skipped_blocks(self, row: int, num_computed_tokens: int) -> None:
        """Free the row's blocks that nothing later will read, leaving null entries in their place.

        Called again for as many tokens, it frees nothing more.
        """
        skipped = self.skipped_blocks(num_computed_tokens)
        table = self.block_tables[row]
        removed = []
        # From the right, up to the first null entry: what is left of it was removed before.
        for index in reversed(range(skipped.start, min(skipped.stop, int(self.num_blocks[row])))):
            if table[index] == NULL_BLOCK:
                break
            removed.append(int(table[index]))
            table[index] = NULL_BLOCK
        if removed:
            self.pool.free_blocks(removed)

    def find_longest_cache_hit(self, keys: Sequence[bytes], max_num_tokens: int, alignment_tokens: int) -> list[int]:
        """Return the blocks of the longest usable prefix of at most `max_num_tokens` tokens.

        Entries that nothing after the prefix will read are null. The prefix length, in tokens, is the length of the
        result times the block size, and a multiple of `alignment_tokens`. Changes nothing.
        """
        found: list[int] = [NULL_BLOCK] * len(keys)
        get_cached_block, group_id = self.pool.get_cached_block, self.group_id

        def is_cached(index: int) -> bool:
            block_id = get_cached_block(keys[index], group_id)
            if block_id is None:
                return False
            found[index] = block_id
            return True

        max_blocks = min(max_num_tokens // self.block_size, len(keys))
        num_blocks = self.longest_prefix(is_cached, max_blocks, alignment_tokens // self.block_size)
        skipped = self.skipped_blocks(num_blocks * self.block_size)
        # A prefix may be supported without that each of its blocks was asked for.
        if NULL_BLOCK in found[:num_blocks]:
            for index in range(num_blocks):
                if found[index] == NULL_BLOCK and index not in skipped:
                    is_cached(index)
        for index in range(skipped.start, min(skipped.stop, num_blocks)):
            found[index] = NULL_BLOCK
        return found[:num_blocks]

    def free(self, row: int) -> None:
        """Give the row's blocks back, the last one first: a block without those before it serves no hit."""
        table = self.block_table(row)
        self.pool.free_blocks([block_id for block_id in table[::-1].tolist() if block_id])
        table[:] = NULL_BLOCK
        self.num_blocks[row] = 0
        self.num_cached_blocks[row] = 0

    def reserve_rows(self, num_rows: int) -> None:
        """Make room for rows 0 .. num_rows - 1."""
        missing = num_rows - len(self.num_blocks)
        if missing > 0:
            self.block_tables = np.pad(self.block_tables, ((0, missing), (0, 0)))
            self.num_blocks = np.pad(self.num_blocks, (0, missing))
            self.num_cached_blocks = np.pad(self.num_cached_blocks, (0, missing))

    def _append(self, row: int, block_ids: Sequence[int]) -> None:
        start = int(self.num_blocks[row])
        end = start + len(block_ids)
        width = self.block_tables.shape[1]
        if end > width:
            # Doubling keeps the cost of growing a table proportional to its final length.
            self.block_tables = np.pad(self.block_tables, ((0, 0), (0, max(end, 2 * width) - width)))
        self.block_tables[row, start:end] = block_ids
        self.num_blocks[row] = end
