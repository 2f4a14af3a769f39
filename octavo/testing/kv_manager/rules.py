"""The rules of a manager's verbs, as sentences, and a block pool that says when one of its own is broken."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from octavo.core.block_pool import BlockPool
from octavo.core.interfaces import HashFunction, SingleTypeKVCacheManager
from octavo.core.interfaces.kv_cache_manager import NULL_BLOCK
from octavo.testing.conformance import RuleBroken

READS_ARE_THERE = "Every position that a query reads is in the row's table, and holds what was written for it."
POOL_IS_USED_RIGHT = "Blocks are taken from the pool and given back as BlockSource says."
NULL_IS_NOT_FREED = "The null block is never given back: it is in tables and nowhere else."
REFERENCES_ADD_UP = "A block has as many references as it has entries in tables."
TABLE_HAS_ITS_LENGTH = "A row's table has num_blocks_needed entries for the tokens it was given, and null behind them."
BLOCKS_STAY_BOUNDED = "A request never holds more blocks than max_blocks_per_request says."
PREDICTION_IS_EXACT = "get_num_blocks_to_allocate is what adopting and allocating then take from the free queue."
NOTHING_IS_LEFT = "free leaves nothing of the row: no block, no entry, no count."
SKIPPED_IS_DROPPED = "remove_skipped_blocks frees what skipped_blocks names, and leaves null there and the rest alone."
DEEPEST_GOES_FIRST = "Blocks are given back from the end of the table: the deepest is evicted first."
KEYS_ARE_TRUE = "What can be found under a key holds what the key stands for."
KEYS_ARE_TAKEN_OFF = "uncache_blocks makes a row's blocks unfindable from an entry on, and counts them as unregistered."
FULL_BLOCKS_ARE_REGISTERED = "cache_blocks registers each full block that the row holds, once, and counts them."
HIT_IS_WHAT_IS_CACHED = "A hit is as long as the cached blocks support, names them where they are read, else null."
GETS_TO_ITS_END = "A request that is alone, with blocks for all its tokens, gets to its end."
ROWS_CAN_BE_ADDED = "reserve_rows adds empty rows, keeps what the others hold, and never takes a row away."


class ShortHash(HashFunction):
    """BLAKE2b with 16 bytes, to make keys with."""

    contract_version = 1

    def digest(self, data: bytes) -> bytes:
        return hashlib.blake2b(data, digest_size=16).digest()


class CheckedPool(BlockPool):
    """A block pool that says which rule of its contract is broken by whom.

    Attributes:
        on_new_blocks: Called with the blocks that were handed out.
    """

    on_new_blocks: Callable[[list[int]], None] | None = None

    def get_new_blocks(self, count: int) -> list[int]:
        if not 0 <= count <= self.num_free_blocks:
            raise RuleBroken(
                PREDICTION_IS_EXACT if count > 0 else POOL_IS_USED_RIGHT,
                f"{count} blocks are asked for and {self.num_free_blocks} are free",
            )
        block_ids = super().get_new_blocks(count)
        if self.on_new_blocks is not None:
            self.on_new_blocks(block_ids)
        return block_ids

    def free_blocks(self, block_ids: Iterable[int]) -> None:
        given = [int(block_id) for block_id in block_ids]
        if NULL_BLOCK in given:
            raise RuleBroken(NULL_IS_NOT_FREED, f"free_blocks got {given}")
        for block_id in given:
            if self.ref_count(block_id) < given.count(block_id):
                raise RuleBroken(
                    POOL_IS_USED_RIGHT, f"block {block_id} is given back more often than it is held; given: {given}"
                )
        super().free_blocks(given)

    def cache_full_blocks(self, block_ids: Sequence[int], keys: Sequence[bytes], group_id: int) -> None:
        if len(block_ids) != len(keys):
            raise RuleBroken(POOL_IS_USED_RIGHT, f"{len(block_ids)} blocks are registered under {len(keys)} keys")
        registered = self.blocks_with_keys()
        for block_id in block_ids:
            if block_id == NULL_BLOCK or self.ref_count(block_id) == 0:
                raise RuleBroken(POOL_IS_USED_RIGHT, f"block {block_id} is registered, and nobody holds it")
            if block_id in registered or list(block_ids).count(block_id) > 1:
                raise RuleBroken(FULL_BLOCKS_ARE_REGISTERED, f"block {block_id} is registered a second time")
        super().cache_full_blocks(block_ids, keys, group_id)

    def uncache_blocks(self, block_ids: Iterable[int]) -> None:
        given = [int(block_id) for block_id in block_ids]
        for block_id in given:
            if block_id == NULL_BLOCK or self.ref_count(block_id) == 0:
                raise RuleBroken(POOL_IS_USED_RIGHT, f"uncache_blocks got block {block_id}, which nobody holds")
        super().uncache_blocks(given)

    def blocks_with_keys(self) -> set[int]:
        """Return the blocks that can be found."""
        return {block_id for block_ids in self.cached_blocks().values() for block_id in block_ids}


def snapshot(pool: BlockPool, manager: SingleTypeKVCacheManager) -> tuple[Any, ...]:
    """Return all that a pool and a manager's tables hold, to compare with what they hold later."""
    references = [pool.ref_count(block_id) for block_id in range(pool.num_blocks)]
    tables = (manager.block_tables.tolist(), manager.num_blocks.tolist(), manager.num_cached_blocks.tolist())
    return pool.free_queue(), pool.cached_blocks(), pool.generation, references, tables
