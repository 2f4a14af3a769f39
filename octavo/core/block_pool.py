"""The block pool: which blocks are free, in which order they are reused, and which content can be found where.

    free queue   head ─► next to be handed out ........................ last to be evicted ◄─ tail
                 without a key │ never used │ with one, unlikely to be found │ with one, likely to be

A block with a key stays findable while it is free, until it is handed out again. Blocks without a key go to the head of
the queue, others to the end of their part of it.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence

from octavo.core.interfaces.kv_cache_manager import NULL_BLOCK


class BlockPool:
    """Hands out blocks 1 .. num_blocks - 1 and counts who holds them. Block 0 is the null block.

    Args:
        num_blocks: Blocks in the pool, the null block included.
        enable_caching: Whether blocks can be found by key.
    """

    def __init__(self, num_blocks: int, *, enable_caching: bool = True) -> None:
        if num_blocks < 2:
            raise ValueError(
                f"a pool needs the null block and at least one more, so num_blocks={num_blocks} is too few"
            )
        self.num_blocks = num_blocks
        self.enable_caching = enable_caching
        self.num_free_blocks = num_blocks - 1
        # Raised by each change of what can be found, so that a look-up's result can be kept until then.
        self.generation = 0
        self.num_evictions = 0
        self._ref_counts = [0] * num_blocks
        # Two doubly linked rings over block ids. The null block is never free, so its place is the anchor of the first:
        # next[0] is its head and previous[0] its tail. The second, of blocks that are likely to be found, has an anchor
        # that is no block.
        self._likely = num_blocks
        self._next = [*range(1, num_blocks), NULL_BLOCK, self._likely]
        self._previous = [num_blocks - 1, NULL_BLOCK, *range(1, num_blocks - 1), self._likely]
        self._key_of: list[tuple[int, bytes] | None] = [None] * num_blocks
        # A dict for each group: bytes remember their hash, and a tuple of group and key is hashed at each look-up.
        self._block_of: defaultdict[int, dict[bytes, int]] = defaultdict(dict)
        # Further blocks with the content of `_block_of[group][key]`, oldest first. Rare: two requests computed the
        # same block at the same time, or a prompt of full blocks computed its last one again.
        self._twins: dict[tuple[int, bytes], list[int]] = {}
        # Blocks with a key that go to the first ring when they become free.
        self._unlikely: set[int] = set()

    @property
    def num_usable_blocks(self) -> int:
        """Blocks that can hold tokens: all but the null block."""
        return self.num_blocks - 1

    @property
    def num_used_blocks(self) -> int:
        """Blocks that somebody holds."""
        return self.num_usable_blocks - self.num_free_blocks

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that can be found by a key."""
        return sum(map(len, self._block_of.values())) + sum(map(len, self._twins.values()))

    def ref_count(self, block_id: int) -> int:
        """Return how many tables hold the block."""
        return self._ref_counts[block_id]

    def is_free(self, block_id: int) -> bool:
        """Say whether the block stands in the free queue."""
        return block_id != NULL_BLOCK and self._ref_counts[block_id] == 0

    def count_free(self, block_ids: Iterable[int]) -> int:
        """Return how many of the blocks stand in the free queue; the null block never does."""
        ref_counts = self._ref_counts
        return [ref_counts[block_id] for block_id in block_ids if block_id != NULL_BLOCK].count(0)

    def free_queue(self) -> list[int]:
        """Return the free blocks in the order in which they would be handed out. For tests and dumps."""
        return self._ring(NULL_BLOCK) + self._ring(self._likely)

    def cached_blocks(self) -> dict[tuple[int, bytes], list[int]]:
        """Return all blocks that can be found, by (group, key). For tests and dumps."""
        return {
            (group_id, key): [block_id, *self._twins.get((group_id, key), ())]
            for group_id, block_of in self._block_of.items()
            for key, block_id in block_of.items()
        }

    def get_new_blocks(self, count: int) -> list[int]:
        """Take `count` blocks from the head of the free queue, dropping the keys they had.

        Raises:
            ValueError: There are fewer free blocks; nothing has changed.
        """
        if count > self.num_free_blocks:
            raise ValueError(f"{count} blocks were asked for and {self.num_free_blocks} are free")
        block_ids = self._take(NULL_BLOCK, count)
        if len(block_ids) < count:
            block_ids += self._take(self._likely, count - len(block_ids))
        self.num_free_blocks -= count
        return block_ids

    def touch(self, block_ids: Iterable[int]) -> None:
        """Add a reference to each block, taking it out of the free queue where it stands there.

        What is found once is likely to be found again.
        """
        block_ids = list(block_ids)
        if self._unlikely:
            self._unlikely.difference_update(block_ids)
        following, previous, ref_counts = self._next, self._previous, self._ref_counts
        num_taken = 0
        for block_id in block_ids:
            if block_id == NULL_BLOCK:
                continue
            count = ref_counts[block_id]
            ref_counts[block_id] = count + 1
            if count == 0:
                before, after = previous[block_id], following[block_id]
                following[before] = after
                previous[after] = before
                num_taken += 1
        self.num_free_blocks -= num_taken

    def free_blocks(self, block_ids: Iterable[int]) -> None:
        """Drop a reference of each block; those that nobody holds any more become free.

        Args:
            block_ids: In eviction order: of those with a key, the first is reused first. Those without a key go to
                the head of the queue together, keeping their order. Null entries are passed over.

        Raises:
            ValueError: A block is given more often than it is held; nothing has changed.
        """
        block_ids = [block_id for block_id in block_ids if block_id != NULL_BLOCK]
        self._refuse_double_free(block_ids)
        ref_counts, key_of = self._ref_counts, self._key_of
        keyless: list[int] = []
        unlikely: list[int] = []
        likely: list[int] = []
        for block_id in block_ids:
            ref_counts[block_id] -= 1
            if ref_counts[block_id] == 0:
                if key_of[block_id] is None:
                    keyless.append(block_id)
                else:
                    (unlikely if block_id in self._unlikely else likely).append(block_id)
        self._link(keyless, after=NULL_BLOCK)
        self._link(unlikely, after=self._previous[NULL_BLOCK])
        self._link(likely, after=self._previous[self._likely])
        self.num_free_blocks += len(keyless) + len(unlikely) + len(likely)

    def get_cached_block(self, key: bytes, group_id: int) -> int | None:
        """Return the block that was first registered under the key in this group, or None."""
        return self._block_of[group_id].get(key)

    def cache_full_blocks(self, block_ids: Sequence[int], keys: Sequence[bytes], group_id: int) -> None:
        """Make held, full blocks findable, each under its key.

        Raises:
            ValueError: A block is free, or registered already; nothing has changed.
        """
        if not self.enable_caching or not block_ids:
            return
        key_of, block_of = self._key_of, self._block_of[group_id]
        for block_id in block_ids:
            if key_of[block_id] is not None or not self._ref_counts[block_id]:
                state = "free" if key_of[block_id] is None else "registered already"
                raise ValueError(f"block {block_id} cannot be registered, for it is {state}")
        self.generation += 1
        for block_id, key in zip(block_ids, keys, strict=True):
            key_of[block_id] = group_id, key
            if block_of.setdefault(key, block_id) != block_id:
                self._twins.setdefault((group_id, key), []).append(block_id)

    def uncache_blocks(self, block_ids: Iterable[int]) -> None:
        """Make held blocks unfindable; they keep their references.

        Raises:
            ValueError: A block is free, and its place in the queue would be wrong; nothing has changed.
        """
        block_ids = list(block_ids)
        for block_id in block_ids:
            if not self._ref_counts[block_id]:
                raise ValueError(f"block {block_id} cannot be made unfindable, for it is free")
        for block_id in block_ids:
            if self._key_of[block_id] is not None:
                self._forget(block_id)

    def expect_no_hit(self, block_ids: Iterable[int]) -> None:
        """Say of held blocks that they are unlikely to be found: once free, they are evicted before those that are."""
        self._unlikely.update(block_id for block_id in block_ids if self._key_of[block_id] is not None)

    def key_of(self, block_id: int) -> tuple[int, bytes] | None:
        """Return the group and the key by which the block can be found; None where it cannot."""
        return self._key_of[block_id]

    def blocks_of(self, key: bytes, group_id: int) -> list[int]:
        """Return all blocks that are registered under a key in a group, the oldest first."""
        block_id = self.get_cached_block(key, group_id)
        return [] if block_id is None else [block_id, *self._twins.get((group_id, key), ())]

    def forget_blocks(self, block_ids: Iterable[int]) -> None:
        """Make blocks unfindable, held or free. Free ones go to the head of the queue together, keeping their order."""
        freed = []
        for block_id in block_ids:
            if self._key_of[block_id] is None:
                continue
            self._forget(block_id)
            if self._ref_counts[block_id] == 0:
                self._unlink(block_id)
                freed.append(block_id)
        self._link(freed, after=NULL_BLOCK)

    def reset_prefix_cache(self) -> bool:
        """Make every block unfindable, if nobody holds one; return whether that was done."""
        if self.num_used_blocks:
            return False
        self._key_of = [None] * self.num_blocks
        self._block_of.clear()
        self._twins.clear()
        self._unlikely.clear()
        # Nothing is likely to be found any more. The order stays.
        likely = self._ring(self._likely)
        self._next[self._likely] = self._previous[self._likely] = self._likely
        self._link(likely, after=self._previous[NULL_BLOCK])
        self.generation += 1
        return True

    def _forget(self, block_id: int) -> None:
        grouped_key = self._key_of[block_id]
        assert grouped_key is not None
        self._key_of[block_id] = None
        self._unlikely.discard(block_id)
        self.generation += 1
        group_id, key = grouped_key
        block_of = self._block_of[group_id]
        twins = self._twins.get(grouped_key)
        if twins is None:
            del block_of[key]
            return
        if block_of[key] == block_id:
            block_of[key] = twins.pop(0)
        else:
            twins.remove(block_id)
        if not twins:
            del self._twins[grouped_key]

    def _ring(self, anchor: int) -> list[int]:
        """Return the blocks of a ring, from its head on."""
        block_ids = []
        block_id = self._next[anchor]
        while block_id != anchor:
            block_ids.append(block_id)
            block_id = self._next[block_id]
        return block_ids

    def _take(self, anchor: int, count: int) -> list[int]:
        """Take up to `count` blocks from the head of a ring, dropping the keys they had."""
        following, key_of, ref_counts = self._next, self._key_of, self._ref_counts
        block_ids: list[int] = []
        block_id = following[anchor]
        while block_id != anchor and len(block_ids) < count:
            block_ids.append(block_id)
            if key_of[block_id] is not None:
                self._forget(block_id)
                self.num_evictions += 1
            ref_counts[block_id] = 1
            block_id = following[block_id]
        following[anchor] = block_id
        self._previous[block_id] = anchor
        return block_ids

    def _unlink(self, block_id: int) -> None:
        """Take a block out of the free queue."""
        before, after = self._previous[block_id], self._next[block_id]
        self._next[before] = after
        self._previous[after] = before

    def _link(self, block_ids: Sequence[int], *, after: int) -> None:
        """Put blocks into the free queue, in order, behind block `after`, or at the head of the ring of that anchor."""
        following, previous = self._next, self._previous
        end = following[after]
        for block_id in block_ids:
            following[after] = block_id
            previous[block_id] = after
            after = block_id
        following[after] = end
        previous[end] = after

    def _refuse_double_free(self, block_ids: Sequence[int]) -> None:
        ref_counts = self._ref_counts
        if len(set(block_ids)) == len(block_ids):
            too_often = [b for b in block_ids if ref_counts[b] < 1]
        else:
            too_often = [b for b in set(block_ids) if ref_counts[b] < block_ids.count(b)]
        if too_often:
            raise ValueError(f"block {too_often[0]} is freed more often than it is held ({ref_counts[too_often[0]]})")
