"""Runs one manager per KV-cache group over one block pool.

A coordinator never asks what class a manager is. Three forms behind one interface, by what the configuration needs:
no prefix cache, one group; several groups that agree on a hit belong to a form of their own.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from octavo.core.interfaces.kv_cache_manager import SingleTypeKVCacheManager
from octavo.core.step_plan import Int32Array


@dataclass(frozen=True)
class PrefixHit:
    """Cached blocks that a request can start from.

    Attributes:
        blocks: For each group the first entries of the table, null where nothing later reads. [num_groups][...]
        num_tokens: Prompt tokens that need not be computed.
    """

    blocks: tuple[tuple[int, ...], ...]
    num_tokens: int

    def block_ids(self) -> set[int]:
        """Return the ids of all groups together, the null block included where it occurs."""
        return {block_id for group in self.blocks for block_id in group}


class KVCacheCoordinator(ABC):
    """What a request holds and can find, over all groups.

    Args:
        managers: One for each KV-cache group, by group id.
    """

    def __init__(self, managers: Sequence[SingleTypeKVCacheManager]) -> None:
        self.managers = tuple(managers)
        self.no_hit = PrefixHit(tuple(() for _ in self.managers), 0)

    @abstractmethod
    def find_longest_cache_hit(self, keys: Sequence[bytes], max_num_tokens: int) -> PrefixHit:
        """Return the longest prefix of at most `max_num_tokens` tokens that every group supports."""

    @abstractmethod
    def cache_blocks(self, row: int, keys: Sequence[bytes], num_tokens: int) -> list[int]:
        """Register the full blocks among the row's first `num_tokens` tokens; return those that are new."""

    def num_blocks_needed(self, num_tokens: int) -> int:
        """Return how many table entries a request of `num_tokens` tokens takes, over all groups."""
        return sum(manager.num_blocks_needed(num_tokens) for manager in self.managers)

    def get_num_blocks_to_allocate(self, row: int, num_tokens: int, hit: PrefixHit) -> int:
        """Return how many free blocks it takes for the row to hold `num_tokens` tokens after adopting `hit`."""
        return sum(
            manager.get_num_blocks_to_allocate(row, num_tokens, blocks)
            for manager, blocks in zip(self.managers, hit.blocks, strict=True)
        )

    def block_ids(self, row: int) -> list[int]:
        """Return the blocks that the row holds, over all groups, without null entries."""
        return [block_id for manager in self.managers for block_id in manager.block_table(row).tolist() if block_id]

    def num_table_entries(self, rows: Iterable[int]) -> int:
        """Return how many table entries the rows have together, null entries included."""
        rows = list(rows)
        return sum(int(manager.num_blocks[rows].sum()) for manager in self.managers)

    def max_blocks_per_request(self, num_tokens: int, max_tokens_in_flight: int) -> int:
        """Return the most blocks that a request of up to `num_tokens` tokens holds at a time, over all groups."""
        return sum(
            manager.max_blocks_per_request(manager.spec, num_tokens, max_tokens_in_flight) for manager in self.managers
        )

    def most_new_blocks(self, num_new_tokens: Int32Array) -> int:
        """Return how many blocks rows that get so many new tokens could take together at most."""
        return sum(int((-(-num_new_tokens // manager.block_size) + 1).sum()) for manager in self.managers)

    def quiet_until(self, num_tokens: int) -> int:
        """Return up to how many tokens nothing changes about the blocks, in any group, of a row of `num_tokens`."""
        return min(manager.quiet_until(num_tokens) for manager in self.managers)

    def allocate(self, row: int, num_tokens: int, hit: PrefixHit) -> None:
        """Adopt `hit`, then give the row the blocks that it lacks for `num_tokens` tokens."""
        if hit.num_tokens:
            # All groups adopt before any group allocates: an allocation could evict what another is about to adopt.
            for manager, blocks in zip(self.managers, hit.blocks, strict=True):
                manager.allocate_new_computed_blocks(row, blocks)
        for manager in self.managers:
            manager.allocate_new_blocks(row, num_tokens)

    def remove_skipped_blocks(self, row: int, num_computed_tokens: int) -> None:
        """Free the row's blocks that nothing later will read."""
        for manager in self.managers:
            manager.remove_skipped_blocks(row, num_computed_tokens)

    def num_cached_blocks(self, row: int) -> list[int]:
        """Return how many table entries at the row's front are registered, by group."""
        return [int(manager.num_cached_blocks[row]) for manager in self.managers]

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


class NoCacheCoordinator(KVCacheCoordinator):
    """Prefix caching is off: nothing is registered, nothing is found."""

    def find_longest_cache_hit(self, keys: Sequence[bytes], max_num_tokens: int) -> PrefixHit:
        return self.no_hit

    def cache_blocks(self, row: int, keys: Sequence[bytes], num_tokens: int) -> list[int]:
        return []


class UnitaryCoordinator(KVCacheCoordinator):
    """All layers form one group, so what its manager finds is the answer."""

    def __init__(self, managers: Sequence[SingleTypeKVCacheManager]) -> None:
        super().__init__(managers)
        (self._manager,) = self.managers

    def find_longest_cache_hit(self, keys: Sequence[bytes], max_num_tokens: int) -> PrefixHit:
        block_size = self._manager.block_size
        blocks = self._manager.find_longest_cache_hit(keys, max_num_tokens, alignment_tokens=block_size)
        return PrefixHit((tuple(blocks),), len(blocks) * block_size)

    def cache_blocks(self, row: int, keys: Sequence[bytes], num_tokens: int) -> list[int]:
        return self._manager.cache_blocks(row, keys, num_tokens)


def make_coordinator(
    managers: Sequence[SingleTypeKVCacheManager], *, enable_prefix_caching: bool
) -> KVCacheCoordinator:
    """Return the form that the configuration needs.

    Raises:
        ValueError: Several groups are to share a prefix cache, which no form serves.
    """
    if not enable_prefix_caching:
        return NoCacheCoordinator(managers)
    if len(managers) == 1:
        return UnitaryCoordinator(managers)
    raise ValueError(
        f"A prefix cache over {len(managers)} KV-cache groups is not supported; set enable_prefix_caching=False."
    )
