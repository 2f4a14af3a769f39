"""What several groups register, take, keep and give back together, beside what each kind of attention reads."""

import itertools
import math
import random

import numpy as np
import pytest
from group_kinds import cache_where, full, make, random_mix, unit_keys, window

from octavo.core.block_pool import BlockPool
from octavo.core.kv_cache_coordinator import (
    HybridCoordinator,
    NoCacheCoordinator,
    UnitaryCoordinator,
    hash_unit_of,
    make_coordinator,
)

# -- keys ---------------------------------------------------------------------------------------------------------


def test_a_larger_block_is_found_under_the_last_key_of_those_it_consists_of():
    coordinator = make([full(2), window(4, 5), full(6)])
    assert coordinator.hash_unit == 2
    coordinator.allocate(0, 12, coordinator.no_hit)
    new_blocks = coordinator.cache_blocks(0, unit_keys(6), 12)
    assert new_blocks == coordinator.block_ids(0)
    assert sorted(coordinator.managers[0].pool.cached_blocks()) == [
        *((0, bytes([key])) for key in range(6)),
        *((1, bytes([key])) for key in (1, 3, 5)),
        *((2, bytes([key])) for key in (2, 5)),
    ]


def test_what_lies_behind_the_last_possible_hit_is_not_registered():
    coordinator = make([full(2), window(4, 5)])
    coordinator.allocate(0, 11, coordinator.no_hit)
    registered = [coordinator.cache_blocks(0, unit_keys(6), num_tokens) for num_tokens in (3, 4, 7, 8, 10, 11)]
    assert [len(blocks) for blocks in registered] == [0, 3, 0, 3, 0, 0]
    assert coordinator.num_cached_blocks(0) == [4, 2]
    assert coordinator.find_longest_cache_hit(unit_keys(6), 11).num_tokens == 8


def test_of_a_drafters_group_one_block_more_is_registered():
    coordinator = make([full(4), full(2, is_of_drafter=True)])
    coordinator.allocate(0, 11, coordinator.no_hit)
    for num_tokens, counts in ((4, [1, 2]), (5, [1, 2]), (6, [1, 3]), (7, [1, 3]), (8, [2, 4]), (11, [2, 5])):
        coordinator.cache_blocks(0, unit_keys(5), num_tokens)
        assert coordinator.num_cached_blocks(0) == counts
    assert coordinator.find_longest_cache_hit(unit_keys(5), 11).num_tokens == 8


def test_keys_of_recycled_blocks_are_those_of_their_group():
    coordinator = make([full(2), window(4, 4)])
    coordinator.allocate(0, 16, coordinator.no_hit)
    coordinator.cache_blocks(0, unit_keys(8), 16)
    coordinator.remove_skipped_blocks(0, 16)
    assert coordinator.recycled_keys(0, unit_keys(8)) == [(1, b"\x01"), (1, b"\x03"), (1, b"\x05")]


@pytest.mark.parametrize("hash_unit", [3, 4])
def test_blocks_must_consist_of_whole_units(hash_unit):
    pool = BlockPool(9)
    managers = [full(4).make(pool, 0), window(6, 5).make(pool, 1)]
    with pytest.raises(ValueError, match="2 would do") as caught:
        make_coordinator(managers, hash_unit)
    size, group = {3: (4, 0), 4: (6, 1)}[hash_unit]
    assert str(caught.value) == (
        f"keys stand for {hash_unit} tokens each, and blocks of {size} tokens (KV-cache group {group}) are no multiple "
        "of that; 2 would do"
    )
    assert hash_unit_of(managers) == 2


def test_the_configuration_decides_on_the_form():
    pool = BlockPool(9)
    managers = [full(4).make(pool, 0), window(4, 5).make(pool, 1)]
    assert type(make_coordinator(managers, 4)) is HybridCoordinator
    assert type(make_coordinator(managers[:1], 2)) is UnitaryCoordinator
    assert type(make_coordinator(managers, None)) is NoCacheCoordinator


def test_without_a_prefix_cache_nothing_is_registered_and_nothing_found():
    pool = BlockPool(20)
    coordinator = make_coordinator([full(2).make(pool, 0), window(2, 3).make(pool, 1)], None)
    coordinator.allocate(0, 8, coordinator.no_hit)
    assert coordinator.cache_blocks(0, unit_keys(4), 8) == []
    assert coordinator.find_longest_cache_hit(unit_keys(4), 8) == coordinator.no_hit
    coordinator.remove_skipped_blocks(0, 8)
    assert coordinator.block_ids_by_group(0) == [[1, 2, 3, 4], [8]]


# -- adopting -----------------------------------------------------------------------------------------------------


def test_all_groups_adopt_before_any_allocates():
    """Group by group, the first one's new block would be the first block of the second one's hit."""
    coordinator = make([full(2), full(2)], num_usable_blocks=8)
    pool = coordinator.managers[0].pool
    first, second, others = (pool.get_new_blocks(count) for count in (3, 3, 2))
    keys = unit_keys(3)
    pool.cache_full_blocks(first, keys, 0)
    pool.cache_full_blocks(second, keys, 1)
    pool.cache_full_blocks(others, [b"x", b"y"], 0)
    # What the second group has stands at the front of the free queue.
    for blocks in (second, first, others):
        pool.free_blocks(blocks)
    hit = coordinator.find_longest_cache_hit(keys, 6)
    assert hit.blocks == (tuple(first), tuple(second))
    assert coordinator.num_blocks_to_allocate_by_group(0, 7, hit) == [4, 4]
    assert coordinator.get_num_blocks_to_allocate(0, 7, hit) == pool.num_free_blocks == 8
    coordinator.allocate(0, 7, hit)
    assert coordinator.block_ids_by_group(0) == [[*first, others[0]], [*second, others[1]]]
    assert pool.num_free_blocks == 0
    assert coordinator.num_cached_blocks(0) == [3, 3]


def test_what_is_predicted_is_what_adopting_and_allocating_take():
    rng = random.Random(3)
    for _ in range(300):
        kinds = random_mix(rng)
        coordinator = make(kinds)
        patterns = [[rng.random() < 0.9 for _ in range(48 // kind.block_size)] for kind in kinds]
        cache_where(coordinator, patterns)
        keys = unit_keys(48 // coordinator.hash_unit)
        hit = coordinator.find_longest_cache_hit(keys, 47)
        other = coordinator.find_longest_cache_hit(keys, rng.randint(0, 47))
        pool = coordinator.managers[0].pool
        # Some of the hit's blocks are somebody else's already.
        coordinator.allocate(1, other.num_tokens, other)
        num_tokens = hit.num_tokens + rng.randint(0, 20)
        predicted, free = coordinator.get_num_blocks_to_allocate(0, num_tokens, hit), pool.num_free_blocks
        assert coordinator.get_num_blocks_to_allocate(-1, num_tokens, hit) == predicted
        coordinator.allocate(0, num_tokens, hit)
        assert free - pool.num_free_blocks == predicted, kinds
        for row in (0, 1):
            coordinator.free(row)
        assert pool.num_used_blocks == 0


# -- what is given back -------------------------------------------------------------------------------------------


def blocks_kept(kinds, kind, num_computed_tokens):
    """Return the blocks of a group that the request, or one that follows it up from the last possible hit on, reads."""
    alignment = math.lcm(*(kind.block_size for kind in kinds))
    last_hit = num_computed_tokens
    if kind.is_of_drafter:
        # A hit is proven by the block behind it.
        last_hit = max(last_hit - kind.block_size, 0)
    last_hit -= last_hit % alignment
    num_begun = -(-num_computed_tokens // kind.block_size)
    return {block for block in range(num_begun) if (block + 1) * kind.block_size > kind.first_token_read(last_hit)}


def grow(coordinator, row, num_computed_tokens, num_tokens, keys):
    """Take a row from some tokens to more, as a step does."""
    coordinator.remove_skipped_blocks(row, num_computed_tokens)
    coordinator.allocate(row, num_tokens, coordinator.no_hit)
    coordinator.cache_blocks(row, keys, num_tokens)


def snapshot(coordinator):
    pool = coordinator.managers[0].pool
    tables = [manager.block_tables.tolist() for manager in coordinator.managers]
    return pool.free_queue(), pool.cached_blocks(), tables


def test_what_is_kept_serves_the_request_and_the_longest_hit_behind_it():
    rng = random.Random(4)
    for _ in range(150):
        kinds, num_computed = random_mix(rng), 0
        coordinator = make(kinds)
        keys = unit_keys(64 // coordinator.hash_unit)
        while num_computed < 64:
            num_tokens = min(num_computed + rng.randint(1, 9), 64)
            grow(coordinator, 0, num_computed, num_tokens, keys)
            num_computed = num_tokens
            coordinator.remove_skipped_blocks(0, num_computed)
            for kind, manager in zip(kinds, coordinator.managers, strict=True):
                kept = {index for index, block_id in enumerate(manager.block_table(0).tolist()) if block_id}
                if kind.name == "chunk" and kind.reach % kind.block_size:
                    # With one size of blocks, a chunk that ends within a block is gone before that block is full.
                    assert kept >= kind.blocks_read(num_computed), (kinds, num_computed)
                else:
                    assert kept == blocks_kept(kinds, kind, num_computed), (kinds, num_computed)
            hit = coordinator.find_longest_cache_hit(keys, num_computed)
            margin = max((kind.block_size for kind in kinds if kind.is_of_drafter), default=0)
            assert hit.num_tokens >= (num_computed - margin) // coordinator.alignment * coordinator.alignment


def test_the_most_that_a_request_holds_is_never_exceeded():
    rng = random.Random(5)
    for _ in range(150):
        kinds, num_computed = random_mix(rng), 0
        coordinator, in_flight = make(kinds), rng.randint(1, 20)
        keys = unit_keys(96 // coordinator.hash_unit)
        most = coordinator.max_blocks_by_group(96, in_flight)
        while num_computed < 96:
            num_tokens = min(num_computed + rng.choice((rng.randint(1, in_flight), in_flight)), 96)
            grow(coordinator, 0, num_computed, num_tokens, keys)
            held = [len(blocks) for blocks in coordinator.block_ids_by_group(0)]
            assert all(map(int.__le__, held, most)), (kinds, num_computed, num_tokens, held, most)
            num_computed = num_tokens


@pytest.mark.parametrize("num_new", [1, 2, 5])
def test_while_it_is_quiet_nothing_is_allocated_registered_or_given_back(num_new):
    rng = random.Random(num_new)
    num_quiet = num_steps = 0
    for _ in range(60):
        num_computed = quiet_until = 0
        # A drafter's chunks of no whole blocks change within a block, and are given back when it is full.
        kinds = [k for k in random_mix(rng) if not (k.is_of_drafter and k.name == "chunk" and k.reach % k.block_size)]
        coordinator = make(kinds or [full(4)])
        keys = unit_keys(80 // coordinator.hash_unit)
        while num_computed < 80:
            num_tokens = min(num_computed + num_new, 80)
            before = snapshot(coordinator)
            grow(coordinator, 0, num_computed, num_tokens, keys)
            if num_tokens <= quiet_until:
                assert snapshot(coordinator) == before, (kinds, num_computed, num_tokens)
                num_quiet += 1
            else:
                quiet_until = coordinator.quiet_until(num_computed, num_tokens)
                assert quiet_until >= num_tokens
            num_computed = num_tokens
            num_steps += 1
    # It is of use: with blocks of four and more, most tokens of a decode change nothing.
    assert num_new > 1 or num_quiet > num_steps // 10


def test_in_a_decode_nothing_changes_but_where_a_block_begins_or_ends():
    coordinator = make([full(16), window(16, 128)])
    for num_tokens in range(1000, 1100):
        quiet_until = coordinator.quiet_until(num_tokens - 1, num_tokens)
        last_in_block = num_tokens - num_tokens % 16 + 15
        assert quiet_until == (last_in_block if num_tokens % 16 else num_tokens)


@pytest.mark.parametrize("in_alignments", [[], [1], [2], [1, 3], [4]])
def test_what_leaves_and_nobody_needs_is_told(in_alignments):
    rng = random.Random(sum(in_alignments))
    for _ in range(60):
        kinds, num_computed = random_mix(rng), 0
        coordinator = make(kinds)
        prefixes = [count * coordinator.alignment for count in in_alignments]
        while num_computed < 60:
            num_tokens = min(num_computed + rng.randint(1, 12), 60)
            coordinator.allocate(0, num_tokens, coordinator.no_hit)
            num_computed = num_tokens
            before = [manager.block_table(0).tolist() for manager in coordinator.managers]
            told = coordinator.skipped_and_unneeded(0, num_computed, prefixes)
            coordinator.remove_skipped_blocks(0, num_computed)
            after = [manager.block_table(0).tolist() for manager in coordinator.managers]
            wanted = [
                entry
                for kind, *tables in zip(kinds, before, after, strict=True)
                for index, (entry, left) in enumerate(zip(*tables, strict=True))
                if entry != left and not any(index in kind.blocks_for_hit(length) for length in prefixes)
            ]
            assert sorted(told) == sorted(wanted), (kinds, num_computed)


# -- counts -------------------------------------------------------------------------------------------------------


def test_counts_are_over_all_groups():
    coordinator = make([full(2), window(4, 5)])
    coordinator.allocate(0, 14, coordinator.no_hit)
    coordinator.allocate(1, 3, coordinator.no_hit)
    assert coordinator.num_blocks_needed(14) == 7 + 4
    assert coordinator.num_table_entries([0, 1]) == 11 + 3
    coordinator.remove_skipped_blocks(0, 14)
    assert coordinator.block_ids_by_group(0) == [[1, 2, 3, 4, 5, 6, 7], [10, 11]]
    assert coordinator.num_table_entries([0]) == 11
    assert coordinator.num_blocks_to_allocate_by_group(0, 17, coordinator.no_hit) == [2, 1]
    coordinator.reserve_rows(5)
    assert [len(manager.num_blocks) for manager in coordinator.managers] == [5, 5]
    coordinator.free(0)
    assert coordinator.block_ids(0) == []


def test_keys_are_taken_off_in_each_group_from_its_own_entry_on():
    coordinator = make([full(2), window(4, 20)])
    coordinator.allocate(0, 16, coordinator.no_hit)
    coordinator.cache_blocks(0, unit_keys(8), 16)
    coordinator.uncache_blocks(0, [2, 3])
    assert coordinator.num_cached_blocks(0) == [2, 3]
    assert coordinator.find_longest_cache_hit(unit_keys(8), 16).num_tokens == 4
    assert len(coordinator.managers[0].pool.cached_blocks()) == 5


@pytest.mark.parametrize("counts", list(itertools.product((1, 3, 40), repeat=2)))
def test_new_tokens_take_no_more_blocks_than_the_bound(counts):
    coordinator = make([full(2), window(4, 5)])
    bound = coordinator.most_new_blocks(np.array(counts, np.int32))
    # Each at the last place of a block, where new ones begin at once.
    needed = sum(coordinator.num_blocks_needed(7 + count) - coordinator.num_blocks_needed(7) for count in counts)
    assert needed <= bound
