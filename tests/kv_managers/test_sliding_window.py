"""The sliding window's questions beside what a window of tokens means, and the numbers worked out by hand."""

import itertools
import random

import pytest

from octavo.core.block_pool import BlockPool
from octavo.core.interfaces import FullAttentionSpec, SlidingWindowSpec
from octavo.kv_managers.sliding_window import SlidingWindowManager
from octavo.testing import KVCacheManagerSuite


def window_spec(block_size, window):
    return SlidingWindowSpec(block_size, num_kv_heads=1, head_dim=2, dtype="float32", window=window)


class WindowSuite(KVCacheManagerSuite):
    manager = "sliding_window"

    def reads(self, spec, query_position, key_position):
        # A window of one token keeps the token before it as well, though nothing reads that: see the manager.
        return key_position > query_position - max(spec.window, 2)


class TestSlidingWindow(WindowSuite):
    specs = (window_spec(4, 8), window_spec(2, 5))
    num_traces = 5


@pytest.mark.slow
class TestManySlidingWindows(WindowSuite):
    specs = tuple(itertools.starmap(window_spec, [(1, 1), (1, 5), (2, 2), (2, 8), (4, 1), (4, 5), (16, 2), (16, 8)]))
    num_traces = 4


@pytest.mark.slow
class TestALongWindow(WindowSuite):
    specs = (window_spec(16, 512),)
    max_model_len = 1200
    num_traces = 2


WINDOWS = (1, 2, 5, 8, 512)
BLOCK_SIZES = (1, 2, 4, 16)
SIZES = list(itertools.product(BLOCK_SIZES, WINDOWS))


def make_manager(block_size, window, *, num_usable_blocks=40, num_rows=2):
    return SlidingWindowManager(window_spec(block_size, window), BlockPool(num_usable_blocks + 1), 0, num_rows)


# -- who reads what -----------------------------------------------------------------------------------------------


def first_token_read(window, position):
    """Return the first token that a query at `position` or any later one reads; with a window of 1, as if of 2."""
    return max(position - max(window, 2) + 1, 0)


def blocks_kept(block_size, window, num_computed_tokens):
    """Return the blocks with a token that a query reads which follows the last full block."""
    last_boundary = num_computed_tokens // block_size * block_size
    first = first_token_read(window, last_boundary)
    return [block for block in range(-(-num_computed_tokens // block_size)) if (block + 1) * block_size > first]


def longest_hit(block_size, window, pattern, max_blocks, alignment):
    """Return the longest aligned prefix whose every token that a later query reads is cached."""
    for length in range(max_blocks - max_blocks % alignment, 0, -alignment):
        tokens_read = range(first_token_read(window, length * block_size), length * block_size)
        if all(pattern[token // block_size] for token in tokens_read):
            return length
    return 0


@pytest.mark.parametrize(("block_size", "window"), SIZES)
def test_what_is_skipped_is_what_nothing_behind_the_last_full_block_reads(block_size, window):
    manager = make_manager(block_size, window)
    for num_computed_tokens in range(window + 4 * block_size + 3):
        kept = blocks_kept(block_size, window, num_computed_tokens)
        entries = range(-(-num_computed_tokens // block_size))
        assert [b for b in entries if b not in manager.skipped_blocks(num_computed_tokens)] == kept


@pytest.mark.parametrize(("block_size", "window"), [(1, 1), (1, 2), (1, 5), (2, 5), (2, 8), (4, 8), (4, 5), (16, 8)])
def test_a_hit_is_the_longest_that_a_pattern_of_cached_blocks_supports(block_size, window):
    manager = make_manager(block_size, window)
    for num_blocks in range(9):
        for pattern in itertools.product((False, True), repeat=num_blocks):
            for alignment in (1, 2, 3):
                found = manager.longest_prefix(pattern.__getitem__, num_blocks, alignment)
                assert found == longest_hit(block_size, window, pattern, num_blocks, alignment), pattern


@pytest.mark.slow
@pytest.mark.parametrize(("block_size", "window"), [(b, w) for b, w in SIZES if w <= 8])
def test_a_hit_is_the_longest_for_all_patterns_and_limits(block_size, window):
    manager = make_manager(block_size, window)
    for pattern in itertools.product((False, True), repeat=10):
        for max_blocks, alignment in itertools.product(range(11), (1, 2, 3, 4)):
            found = manager.longest_prefix(pattern.__getitem__, max_blocks, alignment)
            assert found == longest_hit(block_size, window, pattern, max_blocks, alignment), pattern


@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
def test_a_long_window_finds_the_longest_hit_too(block_size):
    rng, manager = random.Random(block_size), make_manager(block_size, 512)
    needed = -(-511 // block_size)
    for _ in range(60):
        pattern = [rng.random() < rng.choice((0.9, 0.999, 1.0)) for _ in range(rng.randint(1, 2 * needed + 8))]
        alignment = rng.randint(1, 3)
        found = manager.longest_prefix(pattern.__getitem__, len(pattern), alignment)
        ends = range(len(pattern) - len(pattern) % alignment, 0, -alignment)
        assert found == next((end for end in ends if all(pattern[max(end - needed, 0) : end])), 0)


def test_where_nothing_is_cached_a_look_up_leaves_out_a_whole_run_at_a_time():
    asked = []
    assert make_manager(4, 33).longest_prefix(lambda block: asked.append(block), 800, 1) == 0
    assert len(asked) == 100


# -- what a request holds -----------------------------------------------------------------------------------------


def most_held(block_size, window, max_model_len, in_flight):
    """Return the most blocks that a request holds, whatever the numbers of tokens its steps compute."""
    return max(
        -(-end // block_size) - (-(-computed // block_size) - len(blocks_kept(block_size, window, computed)))
        for computed in range(max_model_len)
        for end in (min(computed + in_flight, max_model_len),)
    )


@pytest.mark.parametrize(("block_size", "window"), [(b, w) for b, w in SIZES if w < 512])
def test_the_cap_is_the_most_that_some_schedule_reaches(block_size, window):
    spec = window_spec(block_size, window)
    for in_flight in (1, 2, 3, block_size, block_size + 1, 20):
        for max_model_len in (2, block_size, window + block_size, window + 2 * block_size + in_flight + 1):
            cap = SlidingWindowManager.max_blocks_per_request(spec, max_model_len, in_flight)
            assert cap == most_held(block_size, window, max_model_len, in_flight)


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_the_cap_of_a_long_window_is_reached_and_never_exceeded(block_size):
    cap = SlidingWindowManager.max_blocks_per_request(window_spec(block_size, 512), 900, 37)
    assert cap == most_held(block_size, 512, 900, 37)


@pytest.mark.parametrize(
    ("block_size", "window", "in_flight", "num_blocks"),
    # ceil((W - 1) / B) blocks before the last full one's end, and ceil((B - 1 + F) / B) from there on.
    [(16, 128, 1, 9), (16, 128, 128, 17), (16, 64, 128, 13), (4, 8, 1, 3), (1, 4, 8, 11), (2, 5, 1, 3), (2, 5, 2, 4)],
)
def test_worked_caps(block_size, window, in_flight, num_blocks):
    spec = window_spec(block_size, window)
    assert SlidingWindowManager.max_blocks_per_request(spec, 10_000, in_flight) == num_blocks
    # A request that is shorter than that holds what its tokens take.
    assert SlidingWindowManager.max_blocks_per_request(spec, block_size + 1, in_flight) == 2


def test_a_decode_never_holds_more_than_three_blocks_of_four_for_a_window_of_eight():
    manager = make_manager(4, 8, num_usable_blocks=4)
    held = []
    for num_computed_tokens in range(100):
        manager.remove_skipped_blocks(0, num_computed_tokens)
        manager.allocate_new_blocks(0, num_computed_tokens + 1)
        held.append(4 - manager.pool.num_free_blocks)
    assert max(held) == 3
    assert len(manager.block_table(0)) == 25
    assert SlidingWindowManager.max_blocks_per_request(manager.spec, 100, 1) == 3


@pytest.mark.parametrize(("block_size", "window"), [(1, 2), (2, 5), (4, 8), (16, 5)])
def test_what_is_predicted_is_what_is_taken_and_the_cap_holds_in_random_schedules(block_size, window):
    rng = random.Random(window)
    for _ in range(10):
        manager, in_flight = make_manager(block_size, window, num_usable_blocks=80), rng.randint(1, 3 * block_size)
        cap = SlidingWindowManager.max_blocks_per_request(manager.spec, 200, in_flight)
        num_computed = 0
        while num_computed < 200:
            end = min(num_computed + rng.randint(1, in_flight), 200)
            manager.remove_skipped_blocks(0, num_computed)
            free = manager.pool.num_free_blocks
            predicted = manager.get_num_blocks_to_allocate(0, end)
            manager.allocate_new_blocks(0, end)
            assert free - manager.pool.num_free_blocks == predicted
            assert 80 - manager.pool.num_free_blocks <= cap
            num_computed = end


# -- recycling and hits, worked out by hand -----------------------------------------------------------------------


def keys(count):
    return [bytes([number]) for number in range(count)]


def cached_where(manager, pattern):
    """Let blocks be cached where a pattern has Y; they are 1, 2, 3... in the order of the prompt."""
    blocks = manager.pool.get_new_blocks(len(pattern))
    for block, key, state in zip(blocks, keys(len(pattern)), pattern, strict=True):
        if state == "Y":
            manager.pool.cache_full_blocks([block], [key], 0)
    manager.pool.free_blocks(blocks[::-1])


@pytest.mark.parametrize(
    ("pattern", "hit"),
    [
        # Window 5, block 2: two blocks that end at the hit, or any run that begins with the first block.
        ("NNYYY", [0, 0, 0, 4, 5]),
        ("YYNYY", [0, 0, 0, 4, 5]),
        ("YYNYN", [1, 2]),
        ("YNYNY", [1]),
        ("NYNYN", []),
        ("NYYNY", [0, 2, 3]),
        ("YYYYN", [0, 0, 3, 4]),
    ],
)
def test_a_window_of_five_needs_two_blocks_of_two(pattern, hit):
    manager = make_manager(2, 5)
    cached_where(manager, pattern)
    assert manager.find_longest_cache_hit(keys(5), 10, 2) == hit


@pytest.mark.parametrize(("pattern", "hit"), [("NNYYY", [0, 0, 0, 4, 5]), ("YYNYY", [0, 0, 0, 4, 5])])
def test_a_window_of_four_needs_two_blocks_of_two(pattern, hit):
    manager = make_manager(2, 4)
    cached_where(manager, pattern)
    assert manager.find_longest_cache_hit(keys(5), 10, 2) == hit


@pytest.mark.parametrize("window", [1, 2])
def test_a_window_of_one_needs_a_cached_block_all_the_same(window):
    manager = make_manager(4, window)
    cached_where(manager, "NYN")
    assert manager.find_longest_cache_hit(keys(3), 12, 4) == [0, 2]
    assert manager.find_longest_cache_hit(keys(1), 12, 4) == []


def test_between_two_chunks_the_blocks_of_five_tokens_are_given_back():
    """Block 1, window 4, chunks of 8: at position 8 a query reads 5, 6, 7 and itself."""
    manager = make_manager(1, 4)
    manager.remove_skipped_blocks(0, 0)
    assert manager.allocate_new_blocks(0, 8) == [1, 2, 3, 4, 5, 6, 7, 8]
    # Nothing is given back while the first chunk is computed: its first queries still read the first tokens.
    assert manager.pool.num_free_blocks == 32
    manager.remove_skipped_blocks(0, 8)
    assert manager.block_table(0).tolist() == [0, 0, 0, 0, 0, 6, 7, 8]
    assert manager.pool.num_free_blocks == 37
    manager.allocate_new_blocks(0, 16)
    assert manager.block_table(0).tolist()[5:8] == [6, 7, 8]


def test_a_row_with_five_null_entries_gives_back_what_it_holds_and_no_null_block():
    manager = make_manager(1, 4)
    manager.allocate_new_blocks(0, 8)
    manager.remove_skipped_blocks(0, 8)
    null_references = manager.pool.ref_count(0)
    manager.free(0)
    assert manager.pool.ref_count(0) == null_references
    assert sorted(manager.pool.free_queue()) == list(range(1, 41))
    assert manager.block_table(0).tolist() == []


def test_recycled_blocks_are_given_back_from_the_right_and_only_once():
    manager = make_manager(2, 5)
    manager.allocate_new_blocks(0, 12)
    manager.cache_blocks(0, keys(6), 12)
    for num_computed_tokens, tail in ((5, []), (6, [1]), (7, [1]), (11, [1, 3, 2]), (11, [1, 3, 2])):
        manager.remove_skipped_blocks(0, num_computed_tokens)
        assert manager.pool.free_queue()[34:] == tail
    assert manager.block_table(0).tolist() == [0, 0, 0, 4, 5, 6]


def test_a_follow_up_finds_its_window_whatever_was_given_back():
    for num_computed_tokens in range(2, 40):
        manager = make_manager(2, 5, num_usable_blocks=60)
        for num_tokens in range(num_computed_tokens):
            manager.remove_skipped_blocks(0, num_tokens)
            manager.allocate_new_blocks(0, num_tokens + 1)
        manager.cache_blocks(0, keys(num_computed_tokens // 2), num_computed_tokens)
        manager.remove_skipped_blocks(0, num_computed_tokens)
        manager.free(0)
        assert len(manager.find_longest_cache_hit(keys(20), 40, 2)) == num_computed_tokens // 2


# -- the spec -----------------------------------------------------------------------------------------------------


def test_a_page_is_as_large_as_without_a_window_and_without_recycling_the_window_is_gone():
    spec = SlidingWindowSpec(16, num_kv_heads=2, head_dim=64, dtype="bfloat16", window=128)
    full = FullAttentionSpec(16, num_kv_heads=2, head_dim=64, dtype="bfloat16")
    assert spec.page_bytes == full.page_bytes == 8192
    assert spec.without_recycling() == full
    assert type(spec.without_recycling()) is FullAttentionSpec
    assert spec.without_recycling() != spec


def test_another_block_size_leaves_the_window_as_it_is():
    spec = SlidingWindowSpec(16, num_kv_heads=2, head_dim=64, dtype="bfloat16", window=128)
    larger = spec.with_block_size(32)
    assert (type(larger), larger.block_size, larger.window) == (SlidingWindowSpec, 32, 128)
    assert larger.page_bytes == 2 * spec.page_bytes
    assert larger.bytes_per_token == spec.bytes_per_token == 512
