"""Rows of block tables beside what every slot holds, and the rules that both must keep at all times.

For a position a slot holds a number that stands for the whole text up to it. So a block that was dropped too early,
adopted wrongly, shared wrongly or found under a stale key shows as a position that a query reads and that holds
something else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from octavo.core.interfaces import SingleTypeKVCacheManager
from octavo.core.interfaces.kv_cache_manager import NULL_BLOCK
from octavo.core.kv_cache_coordinator import PrefixHit
from octavo.core.request import Request
from octavo.testing.conformance import RuleBroken
from octavo.testing.kv_manager.reads import Positions, ReadModel
from octavo.testing.kv_manager.rules import (
    BLOCKS_STAY_BOUNDED,
    DEEPEST_GOES_FIRST,
    FULL_BLOCKS_ARE_REGISTERED,
    HIT_IS_WHAT_IS_CACHED,
    KEYS_ARE_TAKEN_OFF,
    KEYS_ARE_TRUE,
    POOL_IS_USED_RIGHT,
    READS_ARE_THERE,
    REFERENCES_ADD_UP,
    TABLE_HAS_ITS_LENGTH,
    CheckedPool,
)

GARBAGE = -7


@dataclass
class Live:
    """A request of the trace.

    Attributes:
        request: As the scheduler knows it.
        content: For each position the number that stands for the text up to it.
        num_computed: Tokens with a place in the KV cache, those of the open step included.
        num_written: Those of them that were written.
    """

    request: Request
    content: list[int]
    num_computed: int = 0
    num_written: int = 0

    def __str__(self) -> str:
        return self.request.request_id


class CheckedRows:
    """What a manager's rows hold, and the checks of it.

    Args:
        manager: Over `pool`.
        group_id: The manager's.
        model: Who reads what.
        longest_hit: Returns how many blocks a pattern of cached blocks supports, given a limit.
        max_blocks: Blocks that a request may hold at a time.

    Attributes:
        running: Requests with a row.
        planned: Those with tokens in the open step, in the order in which they were planned.
        num_rows: Rows that there are.
    """

    def __init__(
        self,
        manager: SingleTypeKVCacheManager,
        pool: CheckedPool,
        group_id: int,
        model: ReadModel,
        longest_hit: Callable[[Sequence[bool], int], int],
        *,
        max_blocks: int,
        num_rows: int,
    ) -> None:
        self.manager = manager
        self.pool = pool
        self.group_id = group_id
        self.model = model
        self.block_size = model.block_size
        self.max_blocks = max_blocks
        self.num_rows = num_rows
        self.running: list[Live] = []
        self.planned: list[Live] = []
        self._longest_hit = longest_hit
        self._slots = np.full(pool.num_blocks * self.block_size, GARBAGE, np.int64)
        self._content_ids: dict[tuple[int, int], int] = {}
        self._content_of_key: dict[bytes, tuple[int, ...]] = {}
        pool.on_new_blocks = self._forget_content

    # -- content ------------------------------------------------------------------------------------------------

    def _extend_content(self, live: Live) -> None:
        for token in live.request.token_ids[len(live.content) :]:
            before = live.content[-1] if live.content else 0
            live.content.append(self._content_ids.setdefault((before, token), len(self._content_ids) + 1))

    def _learn_keys(self, live: Live) -> None:
        size = self.block_size
        for index, key in enumerate(live.request.block_keys):
            self._content_of_key.setdefault(key, tuple(live.content[index * size : (index + 1) * size]))

    def _forget_content(self, block_ids: list[int]) -> None:
        """What a new block holds is somebody else's."""
        for block_id in block_ids:
            self._slots[block_id * self.block_size : (block_id + 1) * self.block_size] = GARBAGE

    def _places(self, live: Live, positions: Positions) -> Positions:
        """Return the slots of some positions; -1 where the table has no block for one. [num_positions]"""
        table = self.manager.block_table(live.request.row)
        entries = positions // self.block_size
        block_ids = np.where(entries < len(table), table[np.minimum(entries, len(table) - 1)], NULL_BLOCK)
        slots = block_ids.astype(np.int64) * self.block_size + positions % self.block_size
        return np.where(block_ids == NULL_BLOCK, -1, slots)

    def _write(self, live: Live, end: int, garbage: int | None) -> None:
        positions = np.arange(live.num_written, end)
        places = self._places(live, positions)
        if (places < 0).any():
            lost = int(positions[np.argmax(places < 0)])
            raise RuleBroken(READS_ARE_THERE, f"position {lost} of {live} is to be written and has no block")
        self._slots[places] = live.content[live.num_written : end] if garbage is None else garbage

    # -- checks -------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Check everything that always holds."""
        self._check_pool()
        for live in self.running:
            self._check_row(live)
            if live not in self.planned:
                self._check_reads(live, live.num_computed)
        in_use = {live.request.row for live in self.running}
        for row in range(self.num_rows):
            end = int(self.manager.num_blocks[row]) if row in in_use else 0
            if self.manager.block_tables[row, end:].any():
                raise RuleBroken(
                    TABLE_HAS_ITS_LENGTH, f"row {row} has {end} entries, and {self.manager.block_tables[row].tolist()}"
                )
        self._check_keys()

    def _check_pool(self) -> None:
        pool, queue = self.pool, self.pool.free_queue()
        held = [int(b) for live in self.running for b in self.manager.block_table(live.request.row) if b]
        num_entries = Counter(held)
        for block_id in range(1, pool.num_blocks):
            if pool.ref_count(block_id) != num_entries[block_id]:
                raise RuleBroken(
                    REFERENCES_ADD_UP,
                    f"block {block_id} has {pool.ref_count(block_id)} references and {num_entries[block_id]} entries",
                )
        free = {block_id for block_id in range(1, pool.num_blocks) if pool.ref_count(block_id) == 0}
        if NULL_BLOCK in queue or len(queue) != pool.num_free_blocks or set(queue) != free or len(free) != len(queue):
            raise RuleBroken(POOL_IS_USED_RIGHT, f"the free queue is {queue}; without a reference are {sorted(free)}")

    def _check_row(self, live: Live) -> None:
        row = live.request.row
        table = self.manager.block_table(row).tolist()
        wanted = self.manager.num_blocks_needed(live.num_computed)
        if len(table) != wanted:
            raise RuleBroken(
                TABLE_HAS_ITS_LENGTH,
                f"{live} has {len(table)} entries for {live.num_computed} tokens, not {wanted}: {table}",
            )
        held = [block_id for block_id in table if block_id != NULL_BLOCK]
        if len(held) > self.max_blocks:
            raise RuleBroken(
                BLOCKS_STAY_BOUNDED,
                f"{live} holds {len(held)} blocks with {live.num_computed} tokens, {table}; "
                f"max_blocks_per_request says {self.max_blocks}",
            )
        if len(held) != len(set(held)):
            raise RuleBroken(TABLE_HAS_ITS_LENGTH, f"{live} has a block twice: {table}")

    def _check_reads(self, live: Live, query: int) -> None:
        """Check that what the query reads of the text before it, and itself if it was written, is there."""
        positions = self.model.positions_read_by(query)
        positions = positions[positions < (live.num_computed if live in self.planned else live.num_written)]
        if not len(positions):
            return
        places = self._places(live, positions)
        found = np.where(places < 0, GARBAGE, self._slots[places])
        wrong = found != np.array(live.content, np.int64)[positions]
        if wrong.any():
            position = int(positions[np.argmax(wrong)])
            table = self.manager.block_table(live.request.row).tolist()
            entry = position // self.block_size
            state = "is null or missing" if int(places[np.argmax(wrong)]) < 0 else "holds something else"
            raise RuleBroken(
                READS_ARE_THERE,
                f"the query at position {query} of {live} reads position {position}; entry {entry} of its table "
                f"{table} {state}",
            )

    def _check_keys(self) -> None:
        """Check what can be found, except for what the open step is still to write."""
        size = self.block_size
        unwritten = {
            int(block_id)
            for live in self.planned
            for block_id in self.manager.block_table(live.request.row)[live.num_written // size :]
        }
        for (group_id, key), block_ids in self.pool.cached_blocks().items():
            if group_id != self.group_id:
                raise RuleBroken(KEYS_ARE_TRUE, f"a block of group {self.group_id} is registered in group {group_id}")
            wanted = self._content_of_key.get(key)
            for block_id in block_ids:
                found = tuple(self._slots[block_id * size : (block_id + 1) * size].tolist())
                if block_id not in unwritten and found != wanted:
                    raise RuleBroken(KEYS_ARE_TRUE, f"block {block_id} can be found, and holds something else")

    def _check_hit(self, live: Live, hit: PrefixHit) -> None:
        if not self.pool.enable_caching:
            return
        keys, limit = live.request.block_keys, (live.request.num_tokens - 1) // self.block_size
        blocks = hit.blocks[0]
        cached = [self.pool.get_cached_block(key, self.group_id) for key in keys]
        wanted = self._longest_hit([block_id is not None for block_id in cached], min(limit, len(keys)))
        read = self.model.blocks_read_after(wanted * self.block_size, wanted)
        expected = [cached[index] if index in read else NULL_BLOCK for index in range(wanted)]
        if list(blocks) != expected:
            raise RuleBroken(
                HIT_IS_WHAT_IS_CACHED,
                f"{live} of {live.request.num_tokens} tokens finds {list(blocks)}; cached are {cached}, which makes "
                f"{expected}",
            )

    def _check_registered(self, live: Live, first_new: int) -> None:
        """Check the full blocks from entry `first_new` on. Those before it may be forgotten with another request."""
        if not self.pool.enable_caching:
            return
        row, num_full = live.request.row, live.num_computed // self.block_size
        findable = self.pool.blocks_with_keys()
        table = self.manager.block_table(row)[first_new:num_full].tolist()
        missing = [block_id for block_id in table if block_id != NULL_BLOCK and block_id not in findable]
        if missing or int(self.manager.num_cached_blocks[row]) != num_full:
            raise RuleBroken(
                FULL_BLOCKS_ARE_REGISTERED,
                f"{live} fills {num_full} blocks, from entry {first_new} on {table}; not findable: {missing}; "
                f"counted as registered: {int(self.manager.num_cached_blocks[row])}",
            )

    def _check_unfindable(self, live: Live, first_block: int) -> None:
        row = live.request.row
        findable = self.pool.blocks_with_keys()
        left = [int(b) for b in self.manager.block_table(row)[first_block:] if int(b) in findable]
        num_registered = int(self.manager.num_cached_blocks[row])
        if left or num_registered > first_block:
            raise RuleBroken(
                KEYS_ARE_TAKEN_OFF,
                f"from entry {first_block} on nothing of {live} is computed; blocks {left} can still be found, and "
                f"{num_registered} count as registered",
            )

    def _check_eviction_order(self, given_back: Sequence[int]) -> None:
        """Check where blocks, in table order, stand in the free queue: of those with a key, and of those without."""
        findable, queue = self.pool.blocks_with_keys(), self.pool.free_queue()
        place = {block_id: index for index, block_id in enumerate(queue)}
        for has_key in (True, False):
            places = [place[b] for b in reversed(given_back) if b in place and (b in findable) == has_key]
            if places != sorted(places):
                raise RuleBroken(DEEPEST_GOES_FIRST, f"{list(given_back)} were given back; the free queue is {queue}")
