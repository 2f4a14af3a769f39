"""Runs one manager per KV-cache group over one block pool.

A coordinator never asks what class a manager is. Three forms behind one interface, by what the configuration needs:
no prefix cache, one group, several groups that agree on a hit.

    keys of 16 tokens      k0  k1  k2  k3  k4  k5        what the hasher makes: the largest unit that divides all blocks
    group with blocks of 16   k0  k1  k2  k3  k4  k5
    group with blocks of 32       k1      k3      k5     a key stands for all before it, so the last one of a block does
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from octavo.core.interfaces.kv_cache_manager import SingleTypeKVCacheManager
from octavo.core.kv_cache_config import hit_alignment, most_blocks_by_group
from octavo.core.step_plan import Int32Array


@dataclass(frozen=True)
class PrefixHit:
    """Cached blocks that a request can start from.

    Attributes:
        blocks: For each group the first entries of the table, null where nothing later reads. [num_groups][...]
        num_tokens: Prompt tokens that need not be computed.
        junction: Tokens of the longest prefix that one group was found to have, if not all. Others have come this way:
            the request does well to leave behind what the rest of the groups lacks there.
    """

    blocks: tuple[tuple[int, ...], ...]
    num_tokens: int
    junction: int = 0

    def block_ids(self) -> set[int]:
        """Return the ids of all groups together, the null block included where it occurs."""
        return {block_id for group in self.blocks for block_id in group}


class KVCacheCoordinator(ABC):
    """What a request holds and can find, over all groups.

    Args:
        managers: One for each KV-cache group, by group id.
        hash_unit: Tokens that one of the prefix cache's keys stands for; divides every group's block size.
        drafter_groups: Ids of the groups of a drafter that reads one position ahead. For these a hit counts only if
            the block behind it is cached as well.
    """

    def __init__(
        self, managers: Sequence[SingleTypeKVCacheManager], hash_unit: int, drafter_groups: Collection[int] = ()
    ) -> None:
        self.managers = tuple(managers)
        self.hash_unit = hash_unit
        self.alignment = hit_alignment(manager.spec for manager in self.managers)
        self.no_hit = PrefixHit(tuple(() for _ in self.managers), 0)
        self._drafter_groups = frozenset(drafter_groups)
        self._manager_classes = [type(manager) for manager in self.managers]
        self._specs = [manager.spec for manager in self.managers]
        # Of the latter a prefix needs some blocks and not others, and so they may give blocks back on the way.
        self._lasting = [manager for manager in self.managers if manager.shorter_prefixes_hold]
        self._recycling = [manager for manager in self.managers if not manager.shorter_prefixes_hold]

    @abstractmethod
    def find_longest_cache_hit(self, keys: Sequence[bytes], max_num_tokens: int) -> PrefixHit:
        """Return the longest prefix of at most `max_num_tokens` tokens that every group supports.

        Args:
            keys: One for each `hash_unit` tokens.
            max_num_tokens: The hit may not be longer.
        """

    @abstractmethod
    def cache_blocks(self, row: int, keys: Sequence[bytes], num_tokens: int) -> list[int]:
        """Register the full blocks among the row's first `num_tokens` tokens; return those that are new."""

    # -- what requests take -------------------------------------------------------------------------------------

    def num_blocks_needed(self, num_tokens: int) -> int:
        """Return how many table entries a request of `num_tokens` tokens takes, over all groups."""
        return sum(manager.num_blocks_needed(num_tokens) for manager in self.managers)

    def get_num_blocks_to_allocate(self, row: int, num_tokens: int, hit: PrefixHit) -> int:
        """Return how many free blocks it takes for the row to hold `num_tokens` tokens after adopting `hit`."""
        return sum(self.num_blocks_to_allocate_by_group(row, num_tokens, hit))

    def num_blocks_to_allocate_by_group(self, row: int, num_tokens: int, hit: PrefixHit) -> list[int]:
        """Return the same for each group."""
        return [
            manager.get_num_blocks_to_allocate(row, num_tokens, blocks)
            for manager, blocks in zip(self.managers, hit.blocks, strict=True)
        ]

    def max_blocks_by_group(self, num_tokens: int, max_tokens_in_flight: int) -> list[int]:
        """Return the most blocks that a request of up to `num_tokens` tokens holds at a time, for each group."""
        return most_blocks_by_group(
            self._manager_classes, self._specs, num_tokens, max_tokens_in_flight, self._drafter_groups
        )

    def most_new_blocks(self, num_new_tokens: Int32Array) -> int:
        """Return how many blocks rows that get so many new tokens could take together at most."""
        return sum(int((-(-num_new_tokens // manager.block_size) + 1).sum()) for manager in self.managers)

    def quiet_until(self, num_computed_tokens: int, num_tokens: int) -> int:
        """Return up to how many tokens nothing changes, in any group, about the blocks of a row of `num_tokens`.

        Args:
            num_computed_tokens: Those of the tokens that are not new. What only the new ones make useless is to be
                given back next.
            num_tokens: All tokens that the row has slots for.
        """
        for manager in self._recycling:
            if self._skipped_blocks(manager, num_computed_tokens) != self._skipped_blocks(manager, num_tokens):
                return num_tokens
        return min(manager.quiet_until(num_tokens) for manager in self.managers)

    def last_hits(self, num_prompt_tokens: int) -> tuple[int, ...]:
        """Return the lengths of the longest hits on a prompt that comes again, alone and with more behind it."""
        again = num_prompt_tokens - 1 - (num_prompt_tokens - 1) % self.alignment
        if not self._drafter_groups:
            return (again,)
        # A drafter needs the block behind a hit, and the last one of a prompt has none.
        longer = num_prompt_tokens - num_prompt_tokens % self.alignment
        return again - self.alignment, longer - self.alignment

    # -- what a row holds ---------------------------------------------------------------------------------------

    def block_ids(self, row: int) -> list[int]:
        """Return the blocks that the row holds, over all groups, without null entries."""
        return [block_id for blocks in self.block_ids_by_group(row) for block_id in blocks]

    def block_ids_by_group(self, row: int) -> list[list[int]]:
        """Return the same for each group."""
        return [[block_id for block_id in manager.block_table(row).tolist() if block_id] for manager in self.managers]

    def num_table_entries(self, rows: Iterable[int]) -> int:
        """Return how many table entries the rows have together, null entries included."""
        rows = list(rows)
        return sum(int(manager.num_blocks[rows].sum()) for manager in self.managers)

    def num_cached_blocks(self, row: int) -> list[int]:
        """Return how many table entries at the row's front are registered, by group."""
        return [int(manager.num_cached_blocks[row]) for manager in self.managers]

    def recycled_keys(self, row: int, keys: Sequence[bytes]) -> list[tuple[int, bytes]]:
        """Return group and key of what the row registered and holds no longer."""
        return [
            (manager.group_id, key)
            for manager in self.managers
            for block_id, key in zip(
                manager.block_table(row)[: manager.num_cached_blocks[row]].tolist(),
                self._keys_of(manager, keys),
                strict=False,
            )
            if not block_id
        ]

    def skipped_and_unneeded(self, row: int, num_computed_tokens: int, prefixes: Sequence[int]) -> list[int]:
        """Return the blocks that `remove_skipped_blocks` would free and that a hit on none of some prefixes reads.

        Args:
            row: Whose blocks.
            num_computed_tokens: How many of its tokens are computed.
            prefixes: Their lengths in tokens.
        """
        unneeded: list[int] = []
        for manager in self._recycling:
            leaving = self._leaving(manager, row, num_computed_tokens)
            if not leaving:
                continue
            read = [self._entries_read(manager, num_tokens) for num_tokens in prefixes]
            block_ids = manager.block_tables[row, leaving.start : leaving.stop].tolist()
            unneeded += [
                block_id
                for index, block_id in zip(leaving, block_ids, strict=True)
                if not any(index in entries for entries in read)
            ]
        return unneeded

    def _leaving(self, manager: SingleTypeKVCacheManager, row: int, num_computed_tokens: int) -> range:
        """Return the table entries of a row that are skipped and not null yet."""
        skipped = self._skipped_blocks(manager, num_computed_tokens)
        first = end = max(min(skipped.stop, int(manager.num_blocks[row])), skipped.start)
        table = manager.block_tables[row]
        while first > skipped.start and table[first - 1]:
            first -= 1
        return range(first, end)

    def _entries_read(self, manager: SingleTypeKVCacheManager, num_tokens: int) -> Collection[int]:
        """Return the table entries that a hit of so many tokens reads."""
        end = num_tokens // manager.block_size + (manager.group_id in self._drafter_groups)
        skipped = manager.skipped_blocks(num_tokens)
        return range(skipped.stop, end) if not skipped.start else {*range(end)} - {*skipped}

    # -- changes ------------------------------------------------------------------------------------------------

    def allocate(self, row: int, num_tokens: int, hit: PrefixHit) -> None:
        """Adopt `hit`, then give the row the blocks that it lacks for `num_tokens` tokens."""
        if hit.num_tokens:
            # All groups adopt before any group allocates: an allocation could evict what another is about to adopt.
            for manager, blocks in zip(self.managers, hit.blocks, strict=True):
                manager.allocate_new_computed_blocks(row, blocks)
        for manager in self.managers:
            manager.allocate_new_blocks(row, num_tokens)

    def remove_skipped_blocks(self, row: int, num_computed_tokens: int) -> None:
        """Free the row's blocks that neither a later token nor a hit behind what is computed will read."""
        for manager in self._recycling:
            manager.remove_skipped_blocks(row, self._last_hit(manager, num_computed_tokens))

    def uncache_blocks(self, row: int, first_blocks: Sequence[int]) -> None:
        """Take the keys off the row's blocks from entry `first_blocks[group]` on."""
        for manager, first_block in zip(self.managers, first_blocks, strict=True):
            manager.uncache_blocks(row, first_block)

    def free(self, row: int) -> None:
        """Give all blocks of the row back."""
        for manager in self.managers:
            manager.free(row)

    def reserve_rows(self, num_rows: int) -> None:
        """Make room for rows 0 .. num_rows - 1."""
        for manager in self.managers:
            manager.reserve_rows(num_rows)

    # -- for the forms ------------------------------------------------------------------------------------------

    def _find_in_group(
        self, manager: SingleTypeKVCacheManager, keys: Sequence[bytes], max_num_tokens: int
    ) -> list[int]:
        """Return the longest hit of at most so many tokens in one group; `keys` are the group's own."""
        blocks = manager.find_longest_cache_hit(keys, max_num_tokens, self.alignment)
        if manager.group_id not in self._drafter_groups:
            return blocks
        while blocks and not self._is_cached(manager, keys, len(blocks)):
            shorter = len(blocks) * manager.block_size - self.alignment
            blocks = manager.find_longest_cache_hit(keys, shorter, self.alignment)
        return blocks

    def _is_cached(self, manager: SingleTypeKVCacheManager, keys: Sequence[bytes], index: int) -> bool:
        return index < len(keys) and manager.pool.get_cached_block(keys[index], manager.group_id) is not None

    def _keys_of(self, manager: SingleTypeKVCacheManager, keys: Sequence[bytes]) -> Sequence[bytes]:
        """Return the keys of a group's blocks."""
        units = manager.block_size // self.hash_unit
        return keys if units == 1 else keys[units - 1 :: units]

    def _cache_blocks(
        self, manager: SingleTypeKVCacheManager, row: int, keys: Sequence[bytes], num_tokens: int
    ) -> list[int]:
        # Behind the last possible hit nothing could be found.
        num_findable = num_tokens - num_tokens % self.alignment
        if manager.group_id in self._drafter_groups:
            num_findable = min(num_findable + manager.block_size, num_tokens)
        return manager.cache_blocks(row, self._keys_of(manager, keys), num_findable)

    def _skipped_blocks(self, manager: SingleTypeKVCacheManager, num_computed_tokens: int) -> range:
        return manager.skipped_blocks(self._last_hit(manager, num_computed_tokens))

    def _last_hit(self, manager: SingleTypeKVCacheManager, num_computed_tokens: int) -> int:
        """Return from which position on a group's blocks are read, by the request or by one that follows it up.

        Where blocks are all of a size, managers see to that themselves.
        """
        if manager.group_id in self._drafter_groups:
            num_computed_tokens = max(num_computed_tokens - manager.block_size, 0)
        if manager.block_size == self.alignment:
            return num_computed_tokens
        return num_computed_tokens - num_computed_tokens % self.alignment


class NoCacheCoordinator(KVCacheCoordinator):
    """Prefix caching is off: nothing is registered, nothing is found."""

    def find_longest_cache_hit(self, keys: Sequence[bytes], max_num_tokens: int) -> PrefixHit:
        return self.no_hit

    def cache_blocks(self, row: int, keys: Sequence[bytes], num_tokens: int) -> list[int]:
        return []


class UnitaryCoordinator(KVCacheCoordinator):
    """All layers form one group, so what its manager finds is the answer."""

    def __init__(
        self, managers: Sequence[SingleTypeKVCacheManager], hash_unit: int, drafter_groups: Collection[int] = ()
    ) -> None:
        super().__init__(managers, hash_unit, drafter_groups)
        (self._manager,) = self.managers

    def find_longest_cache_hit(self, keys: Sequence[bytes], max_num_tokens: int) -> PrefixHit:
        blocks = self._find_in_group(self._manager, self._keys_of(self._manager, keys), max_num_tokens)
        num_tokens = len(blocks) * self._manager.block_size
        return PrefixHit((tuple(blocks),), num_tokens, num_tokens)

    def cache_blocks(self, row: int, keys: Sequence[bytes], num_tokens: int) -> list[int]:
        return self._cache_blocks(self._manager, row, keys, num_tokens)


class HybridCoordinator(KVCacheCoordinator):
    """Several groups: a hit is the longest prefix, in whole blocks of all groups, that each of them supports.

    It is found from above: each group in turn lowers the length to the longest that it supports, until a round lowers
    nothing. No supported length is passed over, for no group lowers below one.
    """

    def find_longest_cache_hit(self, keys: Sequence[bytes], max_num_tokens: int) -> PrefixHit:
        keys_of = {manager.group_id: self._keys_of(manager, keys) for manager in self.managers}
        found: dict[int, list[int]] = {}
        num_tokens, junction = max_num_tokens, 0

        def lower(manager: SingleTypeKVCacheManager) -> None:
            nonlocal num_tokens, junction
            blocks = self._find_in_group(manager, keys_of[manager.group_id], num_tokens)
            found[manager.group_id] = blocks
            num_tokens = len(blocks) * manager.block_size
            junction = max(junction, num_tokens)

        # These are asked once: their answer holds for each shorter prefix.
        for manager in self._lasting:
            lower(manager)
        while num_tokens:
            upper = num_tokens
            for manager in self._recycling:
                lower(manager)
            # What one group alone supports it supports when it is asked once more.
            if num_tokens == upper or len(self._recycling) == 1:
                break
        if not num_tokens:
            return PrefixHit(self.no_hit.blocks, 0, junction)
        blocks = tuple(tuple(found[manager.group_id][: num_tokens // manager.block_size]) for manager in self.managers)
        return PrefixHit(blocks, num_tokens, junction)

    def cache_blocks(self, row: int, keys: Sequence[bytes], num_tokens: int) -> list[int]:
        return [
            block_id for manager in self.managers for block_id in self._cache_blocks(manager, row, keys, num_tokens)
        ]


def make_coordinator(
    managers: Sequence[SingleTypeKVCacheManager], hash_unit: int | None, drafter_groups: Collection[int] = ()
) -> KVCacheCoordinator:
    """Return the form that the configuration needs.

    Args:
        managers: One for each KV-cache group.
        hash_unit: Tokens that a key stands for; None without a prefix cache.
        drafter_groups: See `KVCacheCoordinator`.

    Raises:
        ValueError: A group's blocks do not consist of whole units.
    """
    if hash_unit is None:
        return NoCacheCoordinator(managers, 1, drafter_groups)
    for manager in managers:
        if manager.block_size % hash_unit:
            raise ValueError(
                f"keys stand for {hash_unit} tokens each, and blocks of {manager.block_size} tokens (KV-cache group "
                f"{manager.group_id}) are no multiple of that; {hash_unit_of(managers)} would do"
            )
    return (UnitaryCoordinator if len(managers) == 1 else HybridCoordinator)(managers, hash_unit, drafter_groups)


def hash_unit_of(managers: Iterable[SingleTypeKVCacheManager]) -> int:
    """Return how many tokens a key is to stand for: the most of which every group's blocks consist."""
    return math.gcd(*(manager.block_size for manager in managers))
