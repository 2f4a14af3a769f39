"""Prefix hits that several groups agree on, beside what each kind of attention reads."""

import math
import random

import pytest
from group_kinds import BLOCK_SIZES, cache_where, full, make, random_kind, unit_keys, window


def marks(text):
    """Turn "YYN" into [True, True, False]; blanks do not count."""
    return [mark == "Y" for mark in text if mark != " "]


# -- the longest hit ----------------------------------------------------------------------------------------------


def supports(kind, pattern, num_tokens):
    return all(block < len(pattern) and pattern[block] for block in kind.blocks_for_hit(num_tokens))


def longest_supported(kinds, patterns, max_num_tokens):
    alignment = math.lcm(*(kind.block_size for kind in kinds))
    lengths = range(max_num_tokens - max_num_tokens % alignment, 0, -alignment)
    groups = list(zip(kinds, patterns, strict=True))
    return next((n for n in lengths if all(supports(kind, pattern, n) for kind, pattern in groups)), 0)


def test_a_hit_is_the_longest_that_every_group_supports():
    rng, num_hits = random.Random(0), 0
    for _ in range(20_000):
        block_sizes, drafters = rng.choice(BLOCK_SIZES), rng.random() < 0.4
        kinds = [random_kind(rng, block_sizes, drafters) for _ in range(rng.randint(1, 5))]
        num_tokens = rng.randint(1, 4 * math.lcm(*(kind.block_size for kind in kinds)) + 5)
        patterns = []
        for kind in kinds:
            density = rng.choice((0.5, 0.8, 0.95, 1.0))
            # A gap at the front, as recycling leaves it, and some elsewhere, as eviction does.
            gap = rng.choice((0, 0, rng.randint(0, num_tokens // kind.block_size)))
            patterns.append([i >= gap and rng.random() < density for i in range(num_tokens // kind.block_size)])
        coordinator = make(kinds, num_usable_blocks=sum(map(len, patterns)) + 1)
        blocks = cache_where(coordinator, patterns)
        keys = unit_keys(num_tokens // coordinator.hash_unit)
        limit = rng.choice((num_tokens - 1, rng.randint(0, num_tokens + 3)))
        hit = coordinator.find_longest_cache_hit(keys, limit)
        case = (kinds, patterns, limit)
        wanted = longest_supported(kinds, patterns, min(limit, num_tokens))
        assert hit.num_tokens == wanted, case
        for kind, own_blocks, found in zip(kinds, blocks, hit.blocks, strict=True):
            entries, read = range(wanted // kind.block_size), kind.blocks_read(wanted)
            assert list(found) == [own_blocks[index] if index in read else 0 for index in entries], case
        num_hits += wanted > 0
    # In most cases something is missing; that many have a hit all the same.
    assert num_hits > 4000


def test_a_look_up_changes_nothing():
    coordinator = make([full(2), window(4, 6)])
    cache_where(coordinator, [[True] * 8, [True] * 4])
    pool = coordinator.managers[0].pool
    before = (pool.free_queue(), pool.cached_blocks(), pool.generation)
    assert coordinator.find_longest_cache_hit(unit_keys(8), 16).num_tokens == 16
    assert (pool.free_queue(), pool.cached_blocks(), pool.generation) == before


@pytest.mark.parametrize(("block_sizes", "hit"), [((4, 6), 24), ((4, 4), 28), ((6, 6), 30), ((4, 8), 24), ((3, 5), 30)])
def test_a_hit_consists_of_whole_blocks_of_all_groups(block_sizes, hit):
    kinds = [full(block_sizes[0]), window(block_sizes[1], 7)]
    coordinator = make(kinds)
    assert coordinator.alignment == math.lcm(*block_sizes)
    cache_where(coordinator, [[True] * (30 // size) for size in block_sizes])
    keys = unit_keys(30 // coordinator.hash_unit)
    found = coordinator.find_longest_cache_hit(keys, 30)
    assert found.num_tokens == hit
    assert [len(blocks) for blocks in found.blocks] == [hit // size for size in block_sizes]


@pytest.mark.parametrize("is_turned_round", [0, 1])
def test_two_groups_lower_the_length_in_turns(is_turned_round):
    # The long window supports six blocks and three, the short one five and three.
    kinds = [window(2, 5), window(2, 3)]
    patterns = [marks("NYYNYY"), marks("NNYNYN")]
    if is_turned_round:
        kinds, patterns = kinds[::-1], patterns[::-1]
    coordinator = make(kinds)
    cache_where(coordinator, patterns)
    assert coordinator.find_longest_cache_hit(unit_keys(6), 12).num_tokens == 6


# -- a drafter, which reads a position ahead ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "hit"),
    # Window 4, block 2: two blocks that end at the hit, and the one behind it; or a run from the first block on.
    [
        ("NNYYY", [0, 0, 3, 4]),
        ("YYNYY", [1]),
        ("YYYNN", [1, 2]),
        ("NNNYY", []),
        ("YNNNN", []),
        ("YYNYYY", [0, 0, 0, 4, 5]),
    ],
)
def test_for_a_drafter_the_block_behind_the_hit_counts(pattern, hit):
    coordinator = make([window(2, 4, is_of_drafter=True)])
    cache_where(coordinator, [marks(pattern)])
    found = coordinator.find_longest_cache_hit(unit_keys(len(pattern)), 2 * len(pattern))
    assert found.blocks == (tuple(hit),)
    assert found.num_tokens == 2 * len(hit)


def test_the_block_behind_a_drafters_hit_may_lie_past_the_limit_of_the_hit():
    coordinator = make([full(2), window(2, 4, is_of_drafter=True)])
    cache_where(coordinator, [[True] * 5, [True] * 5])
    assert coordinator.find_longest_cache_hit(unit_keys(5), 9).num_tokens == 8
    assert coordinator.find_longest_cache_hit(unit_keys(4), 9).num_tokens == 6


def test_a_drafters_proof_is_void_once_another_group_has_shortened_the_hit():
    # Alone the drafter's group supports four blocks, and two, but not three: the block behind three is there, of the
    # two before three one is missing.
    coordinator = make([full(2), window(2, 5, is_of_drafter=True)])
    cache_where(coordinator, [marks("YYYNN"), marks("YYNYY")])
    assert coordinator.find_longest_cache_hit(unit_keys(5), 10).num_tokens == 2


# -- where others turned off --------------------------------------------------------------------------------------


def test_the_junction_is_what_some_group_has_when_not_all_do():
    coordinator = make([full(2), window(2, 5)])
    cache_where(coordinator, [marks("YYYYN"), marks("YNNNY")])
    hit = coordinator.find_longest_cache_hit(unit_keys(5), 10)
    assert (hit.num_tokens, hit.junction) == (2, 8)
    assert hit.blocks == ((1,), (6,))


def test_without_a_hit_there_may_be_a_junction():
    coordinator = make([full(2), window(2, 5)])
    cache_where(coordinator, [marks("YYYNN"), marks("NNNNY")])
    hit = coordinator.find_longest_cache_hit(unit_keys(5), 10)
    assert (hit.num_tokens, hit.junction, hit.blocks) == (0, 6, ((), ()))


def test_where_all_groups_agree_the_junction_is_the_hit():
    coordinator = make([full(2), window(2, 5)])
    cache_where(coordinator, [marks("YYYYN"), marks("NNYYN")])
    hit = coordinator.find_longest_cache_hit(unit_keys(5), 10)
    assert (hit.num_tokens, hit.junction) == (8, 8)
    assert hit.block_ids() == {0, 1, 2, 3, 4, 8, 9}
