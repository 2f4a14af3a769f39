"""What requests are given, what they find, and what happens to it when they leave."""

import random

import pytest

from octavo.core.block_pool import BlockPool
from octavo.core.interfaces import FullAttentionSpec
from octavo.core.kv_cache_manager import KVCacheManager
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.core.verdict import Fit
from octavo.kv_managers.full_attention import FullAttentionManager
from octavo.testing.engines import assert_pool_is_sound


class Holder:
    """Plays the scheduler for a KV cache: gives rows out and keeps count of what is computed."""

    def __init__(self, kv) -> None:
        self.kv = kv
        self.computed: dict[Request, int] = {}

    def start(self, token_ids, *, params=None, salt=None, num_new=None) -> Request:
        request = Request("r", token_ids, params or SamplingParams(), max_model_len=10_000, cache_salt=salt)
        hit = self.kv.get_computed_blocks(request)
        request.row = next(row for row in range(64) if row not in {r.row for r in self.computed})
        self.computed[request] = hit.num_tokens
        request.num_cached_tokens = hit.num_tokens
        self.grow(request, num_new or request.num_tokens - hit.num_tokens, hit)
        return request

    def grow(self, request, num_new, hit=None) -> None:
        assert self.kv.allocate_slots(request, self.computed[request], num_new, hit)
        self.computed[request] += num_new

    def decode(self, request, token_id) -> None:
        request.append_token(token_id)
        self.grow(request, 1)

    def end(self, request) -> None:
        self.kv.commit_step()
        self.kv.free(request)
        del self.computed[request]

    def table(self, request) -> list[int]:
        return self.kv.coordinator.managers[0].block_table(request.row).tolist()


@pytest.fixture
def cache(make_kv):
    return lambda *args, **options: Holder(make_kv(*args, **options))


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(2050, 129), (2350, 147), (100, 7), (50, 4), (200, 13)])
def test_a_request_takes_as_many_blocks_of_16_as_its_tokens_begin(cache, num_tokens, num_blocks):
    holder = cache(200, 16)
    assert len(holder.table(holder.start(range(num_tokens)))) == num_blocks


class KeepsTwoBlocks(FullAttentionManager):
    """As a window would: a query reads its own block and the one before it."""

    def skipped_blocks(self, num_computed_tokens):
        return range(max(num_computed_tokens // self.block_size - 1, 0))

    @classmethod
    def max_blocks_per_request(cls, spec, max_model_len, max_tokens_in_flight):
        in_flight = -(-(spec.block_size - 1 + max_tokens_in_flight) // spec.block_size)
        return min(2 + in_flight, -(-max_model_len // spec.block_size))


def test_what_a_request_holds_at_a_time_decides_where_blocks_are_recycled():
    spec = FullAttentionSpec(4, num_kv_heads=1, head_dim=1, dtype="float32")
    pool = BlockPool(6)
    kv = KVCacheManager(pool, [KeepsTwoBlocks(spec, pool, 0, 4)], None, max_tokens_in_flight=8)
    # Two blocks behind, and a step of 8 tokens that begins anywhere in a block: five.
    assert kv.could_ever_hold(1000)
    request = Request("r", list(range(100)), SamplingParams(), max_model_len=10_000)
    assert kv.can_admit(request, kv.get_computed_blocks(request))
    pool.get_new_blocks(1)
    verdict = kv.can_admit(request, kv.get_computed_blocks(request))
    assert (verdict.fit, verdict.reason) == (Fit.WAIT_MEMORY, "5 blocks are needed, 4 are free")
    # With larger steps more is held at a time.
    roomier = KVCacheManager(BlockPool(6), [KeepsTwoBlocks(spec, pool, 0, 4)], None, max_tokens_in_flight=16)
    assert roomier.could_ever_hold(1000).fit is Fit.NEVER


def test_three_prompts_at_once_take_seven_four_and_thirteen_blocks(cache):
    holder = cache(24, 16)
    requests = [holder.start(range(start, start + length)) for start, length in ((0, 100), (1000, 50), (2000, 200))]
    assert [len(holder.table(request)) for request in requests] == [7, 4, 13]
    assert holder.kv.pool.num_free_blocks == 0


@pytest.mark.parametrize(("num_shared", "num_blocks"), [(2000, 125), (2050, 128)])
def test_a_shared_system_prompt_is_shared_up_to_its_last_full_block(cache, num_shared, num_blocks):
    holder = cache(400, 16)
    first = holder.start([*range(num_shared), 9000, 9001])
    second = holder.start([*range(num_shared), 9002])
    assert second.num_cached_tokens == num_blocks * 16
    assert holder.table(second)[:num_blocks] == holder.table(first)[:num_blocks]
    assert holder.table(second)[num_blocks] not in holder.table(first)


def test_a_whole_life(cache):
    """The worked example: block 4, ten usable blocks, three requests that share prefixes."""
    holder = cache(10, 4)
    queue = holder.kv.pool.free_queue
    shared = list(range(100, 112))

    r0 = holder.start([*shared, 1, 2, 3])
    assert holder.table(r0) == [1, 2, 3, 4]
    assert holder.kv.pool.num_cached_blocks == 3
    holder.decode(r0, 4)
    assert holder.kv.pool.num_cached_blocks == 4
    holder.decode(r0, 5)
    # 17 tokens computed, 18 known: the one sampled last has no keys and values yet.
    r0.append_token(6)
    assert (r0.num_tokens, holder.computed[r0]) == (18, 17)
    assert holder.table(r0) == [1, 2, 3, 4, 5]
    assert holder.kv.pool.num_cached_blocks == 4

    r1 = holder.start([*shared[:10], 21, 22, 23, 24])
    assert r1.num_cached_tokens == 8
    assert holder.table(r1) == [1, 2, 6, 7]
    assert queue() == [8, 9, 10]

    holder.end(r0)
    assert queue() == [5, 8, 9, 10, 4, 3]
    holder.end(r1)
    assert queue() == [7, 5, 8, 9, 10, 4, 3, 6, 2, 1]

    r2 = holder.start([*shared, *range(40, 57)])
    assert r2.num_cached_tokens == 12
    assert holder.table(r2) == [1, 2, 3, 7, 5, 8, 9, 10]
    assert queue() == [4, 6]
    holder.end(r2)
    assert holder.start([*shared, 1, 2, 3, 4, 5]).num_cached_tokens == 16
    assert_pool_is_sound(holder.kv.pool)


@pytest.mark.parametrize(("num_tokens", "num_hit"), [(1, 0), (3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8)])
def test_a_repeated_prompt_hits_whole_blocks_and_leaves_at_least_one_token_to_compute(cache, num_tokens, num_hit):
    holder = cache(20, 4)
    holder.end(holder.start(range(num_tokens)))
    assert holder.start(range(num_tokens)).num_cached_tokens == num_hit


def test_the_token_sampled_last_is_never_sealed(cache):
    holder = cache(20, 4)
    request = holder.start(range(7))
    request.append_token(7)
    # Eight tokens are known and seven computed, so the second block is not full of keys and values.
    assert holder.kv.pool.num_cached_blocks == 1
    holder.end(request)
    assert holder.start([*range(8), 50]).num_cached_tokens == 4


def test_another_first_block_makes_an_equal_second_one_useless(cache):
    holder = cache(20, 4)
    holder.end(holder.start([1, 2, 3, 4, 5, 6, 7, 8, 9]))
    assert holder.start([0, 2, 3, 4, 5, 6, 7, 8, 9]).num_cached_tokens == 0


def test_salts_share_among_themselves_and_with_nobody_else(cache):
    holder = cache(40, 4)
    hits = []
    for salt in ("a", "a", "b", None, None):
        request = holder.start(range(9), salt=salt)
        hits.append(request.num_cached_tokens)
        holder.end(request)
    assert hits == [0, 8, 0, 0, 8]


def test_skipping_the_cache_reads_nothing_and_writes_all(cache):
    holder = cache(40, 4)
    skipping = SamplingParams(skip_reading_prefix_cache=True)
    holder.end(holder.start(range(9)))
    assert holder.start(range(9), params=skipping).num_cached_tokens == 0
    holder.end(holder.start(range(50, 59), params=skipping))
    assert holder.start(range(50, 59)).num_cached_tokens == 8


def test_without_a_hash_function_nothing_is_registered_or_found(cache):
    holder = cache(40, 4, caching=False)
    holder.end(holder.start(range(9)))
    assert holder.start(range(9)).num_cached_tokens == 0
    assert holder.kv.pool.num_cached_blocks == 0


def test_of_a_finished_request_the_tail_is_evicted_first(cache):
    holder = cache(3, 4)
    holder.end(holder.start(range(12)))
    holder.end(holder.start([50]))
    assert holder.start(range(12)).num_cached_tokens == 8


def test_hits_that_are_free_count_against_the_free_blocks(cache):
    holder = cache(4, 4)
    holder.end(holder.start(range(16)))
    request = Request("r", [*range(12), 90, 91, 92, 93, 94], SamplingParams(), max_model_len=100)
    hit = holder.kv.get_computed_blocks(request)
    assert hit.num_tokens == 12
    # Three hits that stand in the queue and two new blocks: five, of four.
    assert holder.kv.can_admit(request, hit).fit is Fit.NEVER
    short = Request("r", [*range(12), 90], SamplingParams(), max_model_len=100)
    assert holder.kv.can_admit(short, hit).fit is Fit.FITS
    holder.start([77])
    assert holder.kv.can_admit(short, holder.kv.get_computed_blocks(short)).fit is Fit.WAIT_MEMORY


def test_growing_takes_a_block_only_at_a_block_edge(cache):
    holder = cache(1, 4)
    request = holder.start(range(3))
    holder.decode(request, 3)
    assert holder.kv.pool.num_free_blocks == 0
    request.append_token(4)
    verdict = holder.kv.allocate_slots(request, 4, 1)
    assert verdict.fit is Fit.WAIT_MEMORY
    assert verdict.reason == "1 blocks are needed, 0 are free"
    assert holder.table(request) == [1]


def test_asking_for_no_token_is_a_mistake(cache):
    holder = cache(4, 4)
    request = holder.start(range(3))
    with pytest.raises(ValueError, match="num_new_tokens is 0"):
        holder.kv.allocate_slots(request, 3, 0)


def test_the_answer_of_a_look_up_is_kept_until_something_changes(cache):
    holder = cache(20, 4)
    holder.end(holder.start(range(9)))
    request = Request("r", range(9), SamplingParams(), max_model_len=100)
    hit = holder.kv.get_computed_blocks(request)
    assert holder.kv.get_computed_blocks(request) is hit
    holder.start(range(70, 79))
    assert holder.kv.get_computed_blocks(request) is not hit


def test_a_kept_answer_does_not_outlive_its_blocks(cache):
    holder = cache(4, 4)
    holder.end(holder.start(range(9)))
    request = Request("r", range(9), SamplingParams(), max_model_len=100)
    assert holder.kv.get_computed_blocks(request).num_tokens == 8
    holder.end(holder.start(range(70, 85)))
    assert holder.kv.get_computed_blocks(request).num_tokens == 0


def test_keys_taken_back_before_the_step_is_over_are_not_found(cache):
    holder = cache(20, 4)
    request = holder.start(range(12), num_new=8)
    holder.kv.commit_step()
    holder.grow(request, 4)
    assert holder.kv.pool.num_cached_blocks == 3
    holder.kv.drop_provisional_keys(request)
    assert holder.kv.pool.num_cached_blocks == 2
    holder.end(request)
    # The third block went to the head of the queue: it holds nothing of use.
    assert holder.kv.pool.free_queue()[0] == 3
    assert holder.start([*range(12), 99]).num_cached_tokens == 8


def test_keys_of_a_finished_step_are_not_taken_back(cache):
    holder = cache(20, 4)
    request = holder.start(range(8))
    holder.kv.commit_step()
    holder.kv.drop_provisional_keys(request)
    assert holder.kv.pool.num_cached_blocks == 2


def test_without_writes_before_reads_a_request_waits_a_step_for_blocks_that_are_being_filled(cache):
    holder = cache(20, 4, reuses_blocks_within_a_step=False)
    holder.start(range(9))
    request = Request("r", [*range(8), 70], SamplingParams(), max_model_len=100)
    hit = holder.kv.get_computed_blocks(request)
    assert holder.kv.can_admit(request, hit).fit is Fit.WAIT_STEP
    holder.kv.commit_step()
    assert holder.kv.can_admit(request, hit).fit is Fit.FITS


def test_forgotten_blocks_are_not_found_again(cache):
    holder = cache(20, 4)
    request = holder.start(range(12))
    holder.kv.commit_step()
    holder.kv.forget_blocks(request)
    holder.end(request)
    assert holder.kv.pool.num_cached_blocks == 0


def test_a_reset_says_what_it_did(cache):
    holder = cache(20, 4)
    request = holder.start(range(9))
    refused = holder.kv.reset_prefix_cache()
    assert not refused
    assert "3 blocks are held by requests that are under way" in refused.reason
    holder.end(request)
    assert holder.kv.reset_prefix_cache()
    assert holder.start(range(9)).num_cached_tokens == 0


@pytest.mark.parametrize("seed", range(6))
def test_a_hit_is_always_the_longest_prefix_of_blocks_that_somebody_computed(cache, seed):
    """Against a brute force that remembers, for each block, the whole prefix that it was filled with."""
    rng = random.Random(seed)
    holder = cache(16, 4)
    contents: dict[int, tuple[int, ...]] = {}
    running: list[Request] = []
    for _ in range(300):
        tokens = [rng.choice((0, 1)) for _ in range(rng.randint(1, 22))]
        probe = Request("p", tokens, SamplingParams(), max_model_len=100)
        hit = holder.kv.get_computed_blocks(probe)
        findable = {b for blocks in holder.kv.pool.cached_blocks().values() for b in blocks}
        prefixes = {contents[block] for block in findable}
        expected = 0
        while expected + 4 < len(tokens) and tuple(tokens[: expected + 4]) in prefixes:
            expected += 4
        assert hit.num_tokens == expected
        for index, block in enumerate(hit.blocks[0]):
            assert contents[block] == tuple(tokens[: 4 * index + 4])
        if holder.kv.can_admit(probe, hit) and len(running) < 4:
            request = holder.start(tokens)
            for index, block in enumerate(holder.table(request)):
                contents[block] = tuple(tokens[: 4 * index + 4])
            holder.kv.commit_step()
            running.append(request)
        elif running:
            holder.end(running.pop(rng.randrange(len(running))))
        assert_pool_is_sound(holder.kv.pool)
