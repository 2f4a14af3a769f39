"""Full attention's three questions, and the verbs that every manager inherits, through one that drops blocks."""

from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.block_pool import BlockPool
from octavo.core.interfaces import FullAttentionSpec, KVCacheSpec, SingleTypeKVCacheManager
from octavo.kv_managers.full_attention import FullAttentionManager
from octavo.testing import KVCacheManagerSuite


class TestFullAttention(KVCacheManagerSuite):
    manager = "full_attention"


class LastBlocksManager(SingleTypeKVCacheManager):
    """Whatever comes next reads the last two full blocks before it, and what follows them."""

    serves: ClassVar[type[KVCacheSpec]] = FullAttentionSpec

    def skipped_blocks(self, num_computed_tokens):
        return range(max(num_computed_tokens // self.block_size - 2, 0))

    def longest_prefix(self, is_cached, max_blocks, alignment_blocks):
        for num_blocks in range(max_blocks, 0, -1):
            needed = range(max(num_blocks - 2, 0), num_blocks)
            if num_blocks % alignment_blocks == 0 and all(map(is_cached, needed)):
                return num_blocks
        return 0


def make_manager(manager_class=FullAttentionManager, *, block_size=4, num_usable_blocks=12, num_rows=2):
    spec = FullAttentionSpec(block_size, num_kv_heads=1, head_dim=1, dtype="float32")
    return manager_class(spec, BlockPool(num_usable_blocks + 1), 0, num_rows)


def keys(count):
    return [bytes([number]) for number in range(count)]


def cached(manager, count):
    """Let row 0 compute, register and give back `count` blocks; they are 1, 2, 3..."""
    assert manager.allocate_new_blocks(0, count * manager.block_size) == list(range(1, count + 1))
    manager.cache_blocks(0, keys(count), count * manager.block_size)
    manager.free(0)


# -- the three questions ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_tokens", "num_blocks"),
    [(0, 0), (1, 1), (16, 1), (17, 2), (50, 4), (100, 7), (200, 13), (2000, 125), (2050, 129), (2350, 147)],
)
def test_a_request_takes_a_block_for_every_sixteen_tokens_begun(num_tokens, num_blocks):
    manager = make_manager(block_size=16)
    assert manager.num_blocks_needed(num_tokens) == num_blocks
    assert FullAttentionManager.max_blocks_per_request(manager.spec, num_tokens, 2048) == num_blocks


@pytest.mark.parametrize("num_computed_tokens", [0, 1, 16, 4096])
def test_full_attention_reads_every_block_for_ever(num_computed_tokens):
    manager = make_manager(block_size=16)
    assert not manager.skipped_blocks(num_computed_tokens)
    manager.allocate_new_blocks(0, 40)
    manager.remove_skipped_blocks(0, 40)
    assert manager.block_table(0).tolist() == [1, 2, 3]


@given(pattern=st.lists(st.booleans(), max_size=12), max_blocks=st.integers(0, 12), alignment=st.integers(1, 4))
def test_a_hit_is_the_longest_aligned_run_from_the_start(pattern, max_blocks, alignment):
    max_blocks = min(max_blocks, len(pattern))
    asked = []

    def is_cached(index):
        asked.append(index)
        return pattern[index]

    hit = make_manager().longest_prefix(is_cached, max_blocks, alignment)
    supported = [n for n in range(max_blocks + 1) if n % alignment == 0 and all(pattern[:n])]
    assert hit == max(supported)
    # From the left, none twice, and nothing past the first that is missing.
    first_missing = pattern.index(False) if False in pattern else len(pattern)
    assert asked == list(range(min(first_missing + 1, max_blocks)))


# -- finding and adopting ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("max_num_tokens", "hit"),
    [(0, []), (3, []), (4, [1]), (11, [1, 2]), (12, [1, 2, 3]), (100, [1, 2, 3])],
)
def test_a_hit_covers_whole_blocks_up_to_the_limit_and_changes_nothing(max_num_tokens, hit):
    manager = make_manager()
    cached(manager, 3)
    before = (manager.pool.free_queue(), manager.pool.generation)
    assert manager.find_longest_cache_hit(keys(5), max_num_tokens, 4) == hit
    assert (manager.pool.free_queue(), manager.pool.generation) == before


def test_a_hit_has_no_more_blocks_than_there_are_keys():
    manager = make_manager()
    cached(manager, 3)
    assert manager.find_longest_cache_hit(keys(2), 100, 4) == [1, 2]


def test_a_hit_is_a_multiple_of_the_alignment():
    manager = make_manager()
    cached(manager, 5)
    assert manager.find_longest_cache_hit(keys(5), 100, 8) == [1, 2, 3, 4]


def test_what_nothing_will_read_is_null_in_a_hit():
    manager = make_manager(LastBlocksManager)
    cached(manager, 5)
    assert manager.find_longest_cache_hit(keys(5), 100, 4) == [0, 0, 0, 4, 5]
    assert manager.find_longest_cache_hit(keys(5), 16, 4) == [0, 0, 3, 4]
    assert manager.find_longest_cache_hit(keys(5), 8, 4) == [1, 2]


def test_a_hit_needs_only_the_blocks_that_will_be_read():
    manager = make_manager(LastBlocksManager)
    manager.allocate_new_blocks(0, 20)
    manager.cache_blocks(0, keys(5), 20)
    manager.uncache_blocks(0, 4)
    manager.pool.uncache_blocks([1, 2])
    assert manager.find_longest_cache_hit(keys(5), 100, 4) == [0, 0, 3, 4]
    manager.pool.uncache_blocks([3])
    assert manager.find_longest_cache_hit(keys(5), 100, 4) == []
    manager.free(0)


def test_adopted_blocks_count_as_registered_and_null_entries_are_held_by_nobody():
    manager = make_manager(LastBlocksManager)
    cached(manager, 5)
    hit = manager.find_longest_cache_hit(keys(5), 100, 4)
    free = manager.pool.num_free_blocks
    manager.allocate_new_computed_blocks(1, hit)
    assert manager.block_table(1).tolist() == [0, 0, 0, 4, 5]
    assert manager.pool.num_free_blocks == free - 2
    assert manager.allocate_new_blocks(1, 24) == [6]
    assert manager.cache_blocks(1, keys(6), 24) == [6]
    manager.free(1)
    assert manager.pool.num_free_blocks == 12


# -- registering ------------------------------------------------------------------------------------------------


def test_only_full_blocks_are_registered_and_each_once():
    manager = make_manager()
    manager.allocate_new_blocks(0, 14)
    assert manager.cache_blocks(0, keys(3), 11) == [1, 2]
    assert manager.cache_blocks(0, keys(3), 11) == []
    assert manager.cache_blocks(0, keys(3), 12) == [3]
    assert manager.pool.cached_blocks() == {(0, bytes([i])): [i + 1] for i in range(3)}


def test_blocks_that_were_dropped_before_they_were_registered_are_passed_over():
    manager = make_manager(LastBlocksManager)
    manager.allocate_new_blocks(0, 16)
    manager.remove_skipped_blocks(0, 16)
    assert manager.cache_blocks(0, keys(4), 16) == [3, 4]
    assert manager.pool.cached_blocks() == {(0, b"\x02"): [3], (0, b"\x03"): [4]}
    assert manager.cache_blocks(0, keys(4), 16) == []


def test_keys_can_be_taken_off_from_a_block_on_and_put_on_again():
    manager = make_manager()
    manager.allocate_new_blocks(0, 16)
    manager.cache_blocks(0, keys(4), 16)
    manager.uncache_blocks(0, 2)
    assert manager.find_longest_cache_hit(keys(4), 100, 4) == [1, 2]
    manager.uncache_blocks(0, 3)
    assert manager.cache_blocks(0, keys(4), 16) == [3, 4]


# -- dropping and giving back -----------------------------------------------------------------------------------


def test_skipped_blocks_are_freed_from_the_right_and_leave_null_entries():
    manager = make_manager(LastBlocksManager)
    manager.allocate_new_blocks(0, 24)
    manager.cache_blocks(0, keys(6), 24)
    manager.remove_skipped_blocks(0, 24)
    assert manager.block_table(0).tolist() == [0, 0, 0, 0, 5, 6]
    # They have keys, so they go to the tail; the first of them is evicted first.
    assert manager.pool.free_queue() == [7, 8, 9, 10, 11, 12, 4, 3, 2, 1]


def test_dropping_again_drops_only_what_has_become_useless_since():
    manager = make_manager(LastBlocksManager)
    manager.allocate_new_blocks(0, 32)
    manager.cache_blocks(0, keys(8), 32)
    for num_computed, free_at_the_tail in [(16, [2, 1]), (16, [2, 1]), (19, [2, 1]), (20, [2, 1, 3]), (20, [2, 1, 3])]:
        manager.remove_skipped_blocks(0, num_computed)
        assert manager.pool.free_queue() == [9, 10, 11, 12, *free_at_the_tail]
    assert manager.block_table(0).tolist() == [0, 0, 0, 4, 5, 6, 7, 8]


def test_more_may_be_skipped_than_the_row_holds():
    manager = make_manager(LastBlocksManager)
    manager.allocate_new_blocks(0, 8)
    manager.remove_skipped_blocks(0, 400)
    assert manager.block_table(0).tolist() == [0, 0]
    assert manager.pool.num_free_blocks == 12


def test_a_row_with_null_entries_gives_back_the_rest_the_last_block_first():
    manager = make_manager(LastBlocksManager)
    manager.allocate_new_blocks(0, 24)
    manager.cache_blocks(0, keys(6), 24)
    manager.remove_skipped_blocks(0, 20)
    manager.free(0)
    assert manager.pool.free_queue() == [7, 8, 9, 10, 11, 12, 3, 2, 1, 6, 5, 4]
    assert manager.block_table(0).tolist() == []
    assert not manager.block_tables.any()
    # The row is as good as new.
    assert manager.allocate_new_blocks(0, 8) == [7, 8]
    assert manager.cache_blocks(0, keys(2), 8) == [7, 8]


# -- tables that grow -------------------------------------------------------------------------------------------


def test_tables_grow_with_the_longest_row_and_keep_what_they_hold():
    manager = make_manager(num_usable_blocks=100)
    manager.allocate_new_blocks(0, 3 * 4)
    for num_blocks in (7, 8, 9, 17, 40):
        manager.allocate_new_blocks(1, num_blocks * 4)
        assert manager.block_table(1).tolist() == list(range(4, 4 + num_blocks))
        assert manager.block_table(0).tolist() == [1, 2, 3]
    # What lies behind a row's last block is null.
    assert not manager.block_tables[0, 3:].any()
    assert not manager.block_tables[1, 40:].any()


def test_rows_grow_when_more_are_needed_and_keep_what_they_hold():
    manager = make_manager(num_rows=1)
    manager.allocate_new_blocks(0, 8)
    manager.cache_blocks(0, keys(2), 8)
    manager.reserve_rows(5)
    manager.reserve_rows(3)
    assert manager.block_tables.shape[0] == len(manager.num_blocks) == len(manager.num_cached_blocks) == 5
    assert manager.allocate_new_blocks(4, 4) == [3]
    assert manager.block_table(0).tolist() == [1, 2]
    assert manager.cache_blocks(0, keys(2), 8) == []


def test_a_row_that_has_enough_takes_nothing():
    manager = make_manager()
    assert manager.allocate_new_blocks(0, 5) == [1, 2]
    assert manager.allocate_new_blocks(0, 8) == []
    assert manager.allocate_new_blocks(0, 3) == []
    assert manager.allocate_new_blocks(0, 9) == [3]
