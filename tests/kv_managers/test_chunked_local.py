"""Chunked local attention's questions beside what a chunk means, and the numbers worked out by hand."""

import itertools
import random

import pytest

from octavo.core.block_pool import BlockPool
from octavo.core.interfaces import ChunkedLocalSpec, FullAttentionSpec
from octavo.kv_managers.chunked_local import ChunkedLocalManager
from octavo.testing import KVCacheManagerSuite


def chunk_spec(block_size, chunk):
    return ChunkedLocalSpec(block_size, num_kv_heads=1, head_dim=2, dtype="float32", chunk=chunk)


class ChunkSuite(KVCacheManagerSuite):
    manager = "chunked_local"

    def reads(self, spec, query_position, key_position):
        return key_position // spec.chunk == query_position // spec.chunk


class TestChunkedLocal(ChunkSuite):
    specs = (chunk_spec(4, 8), chunk_spec(4, 6))
    num_traces = 5


# (block, chunk): chunks of whole blocks first, then others, at last blocks that are larger than a chunk.
SIZES = [(1, 1), (1, 3), (2, 6), (4, 8), (16, 16), (16, 64), (4, 6), (4, 5), (3, 7), (16, 20), (16, 24), (8, 4), (8, 5)]


@pytest.mark.slow
class TestManyChunks(ChunkSuite):
    specs = tuple(chunk_spec(block_size, chunk) for block_size, chunk in SIZES)
    num_traces = 4


def make_manager(block_size, chunk, *, num_usable_blocks=40, num_rows=2):
    return ChunkedLocalManager(chunk_spec(block_size, chunk), BlockPool(num_usable_blocks + 1), 0, num_rows)


# -- who reads what -----------------------------------------------------------------------------------------------


def tokens_read_after(chunk, num_tokens):
    """Return those of the first tokens that a query at position `num_tokens` or later reads: its own chunk's."""
    return [token for token in range(num_tokens) if token // chunk == num_tokens // chunk]


def blocks_kept(block_size, chunk, num_tokens):
    return sorted({token // block_size for token in tokens_read_after(chunk, num_tokens)})


@pytest.mark.parametrize(("block_size", "chunk"), SIZES)
def test_what_is_skipped_is_what_nothing_later_reads(block_size, chunk):
    manager = make_manager(block_size, chunk)
    for num_computed_tokens in range(3 * chunk + 2 * block_size):
        skipped = manager.skipped_blocks(num_computed_tokens)
        entries = range(-(-num_computed_tokens // block_size))
        kept = blocks_kept(block_size, chunk, num_computed_tokens)
        # A block in which a chunk ends and the next one is to begin stays, although none of its tokens is read again.
        begun = num_computed_tokens // block_size if num_computed_tokens % block_size else None
        assert [block for block in entries if block not in skipped] == sorted({*kept, begun} - {None})


@pytest.mark.parametrize(("block_size", "chunk"), SIZES)
def test_a_hit_is_the_longest_that_a_pattern_of_cached_blocks_supports(block_size, chunk):
    manager = make_manager(block_size, chunk)
    for num_blocks in range(8):
        needed = [blocks_kept(block_size, chunk, length * block_size) for length in range(num_blocks + 1)]
        for pattern in itertools.product((False, True), repeat=num_blocks):
            for alignment in (1, 2, 3):
                lengths = range(num_blocks - num_blocks % alignment, 0, -alignment)
                longest = next((n for n in lengths if all(pattern[block] for block in needed[n])), 0)
                assert manager.longest_prefix(pattern.__getitem__, num_blocks, alignment) == longest, pattern


@pytest.mark.slow
@pytest.mark.parametrize(("block_size", "chunk"), SIZES)
def test_a_hit_is_the_longest_for_all_patterns_and_limits(block_size, chunk):
    manager = make_manager(block_size, chunk)
    needed = [blocks_kept(block_size, chunk, length * block_size) for length in range(11)]
    for pattern in itertools.product((False, True), repeat=10):
        supported = [all(pattern[block] for block in needed[length]) for length in range(11)]
        for max_blocks, alignment in itertools.product(range(11), (1, 2, 3, 4)):
            lengths = range(max_blocks - max_blocks % alignment, 0, -alignment)
            longest = next((n for n in lengths if supported[n]), 0)
            assert manager.longest_prefix(pattern.__getitem__, max_blocks, alignment) == longest, pattern


# -- what a request holds -----------------------------------------------------------------------------------------


def most_held(block_size, chunk, max_model_len, in_flight):
    """Return the most blocks that a request holds, whatever the numbers of tokens its steps compute."""
    most = 0
    for computed in range(max_model_len):
        first = (computed - computed % chunk) // block_size
        most = max(most, -(-min(computed + in_flight, max_model_len) // block_size) - first)
    return most


@pytest.mark.parametrize(("block_size", "chunk"), SIZES)
def test_the_cap_is_reached_by_some_schedule_and_exceeded_by_none(block_size, chunk):
    spec = chunk_spec(block_size, chunk)
    for in_flight in (1, 2, 3, block_size, block_size + 1, 20):
        # So long that a chunk has begun at each place in a block at which one can.
        longest = (block_size + 2) * chunk + in_flight
        cap = ChunkedLocalManager.max_blocks_per_request(spec, longest, in_flight)
        assert cap == most_held(block_size, chunk, longest, in_flight)
        for max_model_len in range(2, 2 * chunk, max(chunk // 3, 1)):
            cap = ChunkedLocalManager.max_blocks_per_request(spec, max_model_len, in_flight)
            assert cap >= most_held(block_size, chunk, max_model_len, in_flight)


@pytest.mark.parametrize(
    ("block_size", "chunk", "in_flight", "num_blocks"),
    # ceil((chunk - 1 + F) / B) where chunks begin with a block: all but one of a chunk, and the tokens of a step.
    [(16, 64, 1, 4), (16, 64, 2, 5), (16, 64, 128, 12), (4, 6, 1, 2), (4, 6, 2, 3), (4, 5, 1, 2), (4, 5, 2, 3)],
)
def test_worked_caps(block_size, chunk, in_flight, num_blocks):
    assert ChunkedLocalManager.max_blocks_per_request(chunk_spec(block_size, chunk), 10_000, in_flight) == num_blocks


@pytest.mark.parametrize(("block_size", "chunk"), [(1, 3), (4, 8), (4, 6), (16, 20), (8, 5)])
def test_what_is_predicted_is_what_is_taken_and_the_cap_holds_in_random_schedules(block_size, chunk):
    rng = random.Random(chunk)
    for _ in range(10):
        manager, in_flight = make_manager(block_size, chunk, num_usable_blocks=80), rng.randint(1, 3 * block_size)
        cap = ChunkedLocalManager.max_blocks_per_request(manager.spec, 200, in_flight)
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


def test_with_a_chunk_its_blocks_are_given_back():
    manager = make_manager(2, 6)
    tables = []
    for num_computed_tokens in range(14):
        manager.remove_skipped_blocks(0, num_computed_tokens)
        manager.allocate_new_blocks(0, num_computed_tokens + 1)
        if num_computed_tokens in (5, 6, 11, 12):
            tables.append(manager.block_table(0).tolist())
    assert tables == [[1, 2, 3], [0, 0, 0, 3], [0, 0, 0, 3, 2, 1], [0, 0, 0, 0, 0, 0, 1]]


def test_a_block_that_two_chunks_share_stays_until_the_second_one_ends():
    manager = make_manager(4, 6)
    for num_computed_tokens, table in ((5, [1, 2]), (6, [0, 2]), (11, [0, 2, 1]), (12, [0, 0, 0])):
        manager.allocate_new_blocks(0, num_computed_tokens)
        manager.remove_skipped_blocks(0, num_computed_tokens)
        assert manager.block_table(0).tolist() == table


@pytest.mark.parametrize(
    ("pattern", "hit"),
    [
        # Chunks of three blocks. Where one begins, a hit needs nothing at all.
        ("NNNNN", [0, 0, 0]),
        ("NNNYN", [0, 0, 0, 4]),
        ("NNNYY", [0, 0, 0, 4, 5]),
        ("NNNNY", [0, 0, 0]),
        ("YYNNY", [0, 0, 0]),
    ],
)
def test_a_hit_needs_only_its_own_chunk(pattern, hit):
    manager = make_manager(2, 6)
    blocks = manager.pool.get_new_blocks(5)
    for block, key, state in zip(blocks, keys(5), pattern, strict=True):
        if state == "Y":
            manager.pool.cache_full_blocks([block], [key], 0)
    manager.pool.free_blocks(blocks)
    assert manager.find_longest_cache_hit(keys(5), 10, 2) == hit


def test_within_the_first_chunk_a_hit_needs_all_before_it():
    manager = make_manager(2, 6)
    for pattern, hit in (("NY", 0), ("YN", 1), ("YY", 2)):
        assert manager.longest_prefix(lambda block, p=pattern: p[block] == "Y", 2, 1) == hit


# -- the spec -----------------------------------------------------------------------------------------------------


def test_a_page_is_as_large_as_without_chunks_and_without_recycling_the_chunks_are_gone():
    spec = ChunkedLocalSpec(16, num_kv_heads=2, head_dim=64, dtype="bfloat16", chunk=8192)
    full = FullAttentionSpec(16, num_kv_heads=2, head_dim=64, dtype="bfloat16")
    assert spec.page_bytes == full.page_bytes == 8192
    assert spec.without_recycling() == full
    assert type(spec.without_recycling()) is FullAttentionSpec


def test_another_block_size_leaves_the_chunk_as_it_is():
    larger = ChunkedLocalSpec(16, num_kv_heads=2, head_dim=64, dtype="bfloat16", chunk=8192).with_block_size(48)
    assert (type(larger), larger.block_size, larger.chunk, larger.page_bytes) == (ChunkedLocalSpec, 48, 8192, 24576)
