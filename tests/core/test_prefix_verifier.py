"""With `verify_prefix_cache`, what is found in the prefix cache is what the request would compute itself."""

import gc
import logging
import random
from array import array

import numpy as np
import pytest
from hashing_engines import chunk, full, window

from octavo.core.block_pool import BlockPool
from octavo.core.content_keys import ContentHasher, ContentKey
from octavo.core.engine_core import EngineCore
from octavo.core.interfaces import HashFunction
from octavo.core.interfaces.kv_format import KV_FORMATS
from octavo.core.kv_cache_coordinator import PrefixHit, hash_unit_of
from octavo.core.kv_cache_manager import KVCacheManager
from octavo.core.prefix_hash import PrefixHasher
from octavo.core.prefix_verifier import TOLERANCES, PrefixVerifier, VerifyingKVCacheManager, tolerance
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.core.scheduler import Scheduler
from octavo.core.stats import EngineStats
from octavo.core.step_plan import StepPlan
from octavo.errors import StepError
from octavo.hash_functions import Sha256, Sha256Cbor
from octavo.request_queues import FCFSQueue, PriorityQueue
from octavo.testing.engines import Finished, assert_nothing_leaks, collect, run_to_end
from octavo.testing.hashing_runner import HashingRunner, expected_tokens

BLOCK_SIZE = 4
VOCAB_SIZE = 1000
GREEDY = SamplingParams(temperature=0, max_tokens=4)
ONE_GROUP = (full(BLOCK_SIZE),)


class FourBits(Sha256):
    """A hash function of sixteen different digests."""

    def digest(self, data: bytes) -> bytes:
        return bytes([super().digest(data)[0] & 15]) * 16


class NoBits(Sha256):
    """A hash function of one digest."""

    def digest(self, data: bytes) -> bytes:
        return bytes(16)


@pytest.fixture
def make_engine():
    """Makes engines that verify; whatever the test does to them, in the end nothing may leak."""
    engines = []

    def make(
        hash_function: HashFunction | None = None,
        *,
        groups=ONE_GROUP,
        num_usable_blocks: int = 64,
        max_num_batched_tokens: int = 64,
        max_num_seqs: int = 8,
        runner_class: type[HashingRunner] = HashingRunner,
        is_verifying: bool = True,
        enable_chunked_prefill: bool = True,
        queue=None,
        **options,
    ) -> tuple[EngineCore, HashingRunner]:
        pool = BlockPool(num_usable_blocks + 1)
        managers = [
            manager_class(spec, pool, group_id, max_num_seqs) for group_id, (manager_class, spec) in enumerate(groups)
        ]
        hasher_class, kv_class = (
            (ContentHasher, VerifyingKVCacheManager) if is_verifying else (PrefixHasher, KVCacheManager)
        )
        hasher = hasher_class(hash_function or Sha256(), hash_unit_of(managers), b"root of the tests")
        kv = kv_class(pool, managers, hasher, max_tokens_in_flight=max_num_batched_tokens)
        runner = runner_class(pool.num_blocks, [spec for _, spec in groups], VOCAB_SIZE)
        scheduler = Scheduler(
            kv,
            FCFSQueue() if queue is None else queue,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            enable_chunked_prefill=enable_chunked_prefill,
        )
        verifier = None
        if is_verifying:
            verifier = PrefixVerifier(
                kv, runner, max_num_batched_tokens=max_num_batched_tokens, unused_row=max_num_seqs, tolerance=1e-3
            )
        engine = EngineCore(
            scheduler, runner, vocab_size=VOCAB_SIZE, max_model_len=200, prefix_verifier=verifier, **options
        )
        engines.append(engine)
        return engine, runner

    yield make
    for engine in engines:
        assert_nothing_leaks(engine)
        engine.shutdown()


def answer(engine: EngineCore, prompt, request_id: str = "r", params: SamplingParams = GREEDY, **keywords) -> Finished:
    engine.add_request(request_id, prompt, params, **keywords)
    return run_to_end(engine)[request_id]


def cold(prompt, num_tokens: int = 4) -> list[int]:
    return expected_tokens(prompt, num_tokens, VOCAB_SIZE)


def cached_blocks(engine: EngineCore) -> list[int]:
    """Return the findable blocks that nobody holds."""
    pool = engine.scheduler.kv_cache_manager.pool
    return [b for blocks in pool.cached_blocks().values() for b in blocks if pool.is_free(b)]


# -- the same tokens --------------------------------------------------------------------------------------------


def random_prompts(count: int) -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(VOCAB_SIZE) for _ in range(12)] for _ in range(count)]


def test_with_a_hash_of_four_bits_nothing_is_reused_wrongly_and_equal_prompts_still_hit(make_engine):
    engine, _ = make_engine(FourBits(), num_usable_blocks=900)
    prompts = random_prompts(200)
    first = [answer(engine, prompt) for prompt in prompts]
    assert [result.token_ids for result in first] == [cold(prompt) for prompt in prompts]
    assert {result.num_cached_tokens for result in first} == {0}
    # All but the first few find a digest of theirs taken.
    assert engine.stats().verification_failures > 150
    again = [answer(engine, prompt) for prompt in prompts]
    assert [result.token_ids for result in again] == [cold(prompt) for prompt in prompts]
    assert {result.num_cached_tokens for result in again} == {8}


def test_without_the_mode_a_hash_of_four_bits_gives_wrong_answers(make_engine):
    engine, _ = make_engine(FourBits(), num_usable_blocks=900, is_verifying=False)
    prompts = random_prompts(200)
    results = [answer(engine, prompt) for prompt in prompts]
    assert sum(result.token_ids != cold(prompt) for result, prompt in zip(results, prompts, strict=True)) > 50
    assert engine.stats().verification_failures == engine.stats().verified_tokens == 0


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ([1, 2, 3, 4, 5, 6, 7, 8, 9], [0, 2, 3, 4, 5, 6, 7, 8, 9]),
        ([1, 23, 0, 0, 9], [12, 3, 0, 0, 9]),
    ],
    ids=["only the second block is equal", "equal digits"],
)
def test_blocks_that_differ_anywhere_before_are_not_the_same(make_engine, first, second):
    engine, _ = make_engine(NoBits())
    answer(engine, first)
    result = answer(engine, second)
    assert result.num_cached_tokens == 0
    assert result.token_ids == cold(second)
    assert answer(engine, second).num_cached_tokens == (len(second) - 1) // BLOCK_SIZE * BLOCK_SIZE


def test_a_hit_ends_before_the_block_whose_key_collides_and_that_is_logged(make_engine, caplog):
    engine, _ = make_engine(NoBits())
    answer(engine, [*range(8), 9])
    with caplog.at_level(logging.ERROR, "octavo.core.prefix_verifier"):
        result = answer(engine, [0, 1, 2, 3, 14, 15, 16, 17, 9], request_id="second")
    assert result.num_cached_tokens == 4
    assert caplog.messages == [
        "prefix cache: the key of block 1 of request 'second' is also that of a cached block with other content, which "
        "is not used: two prefixes have the same digest"
    ]
    assert engine.stats().verification_failures == 1


def test_a_request_that_waits_reports_a_collision_once(make_engine, caplog):
    engine, _ = make_engine(NoBits(), num_usable_blocks=8)
    engine.add_request("first", range(9), SamplingParams(temperature=0, max_tokens=20))
    engine.add_request("waits", range(50, 75), GREEDY)
    with caplog.at_level(logging.ERROR, "octavo.core.prefix_verifier"):
        run_to_end(engine)
    assert engine.stats().waits_for_memory > 5
    assert sum("block 0 of request 'waits'" in message for message in caplog.messages) == 1


def test_salts_and_adapters_are_compared_too(make_engine):
    engine, _ = make_engine(NoBits())
    calls = [{"cache_salt": "a"}, {"cache_salt": "b"}, {"adapter": ("a", 1)}, {"adapter": ("a", 2)}, {}]
    assert [answer(engine, range(9), **call).num_cached_tokens for call in calls] == [0, 0, 0, 0, 0]
    assert [answer(engine, range(9), **call).num_cached_tokens for call in calls] == [8, 8, 8, 8, 8]


@pytest.mark.parametrize("hash_function", [Sha256(), Sha256Cbor()], ids=["framed", "cbor"])
def test_the_digests_are_the_same_as_without_the_mode(hash_function):
    token_ids, extra = array("i", range(40)), (("salt", "a"),)
    plain: list[bytes] = []
    PrefixHasher(hash_function, BLOCK_SIZE, b"root").extend(plain, token_ids, extra)
    keys: list[bytes] = []
    hasher = ContentHasher(hash_function, BLOCK_SIZE, b"root")
    for end in (3, 5, 23, 24, 40):
        hasher.extend(keys, token_ids[:end], extra)
    assert list(map(bytes, keys)) == plain
    assert all(isinstance(key, ContentKey) for key in keys)


def test_keys_are_equal_when_what_they_stand_for_is():
    hasher = ContentHasher(NoBits(), 2, b"root")

    def keys(*token_ids: int) -> list[bytes]:
        made: list[bytes] = []
        hasher.extend(made, array("i", token_ids))
        return made

    one, same, other = keys(1, 2, 3, 4), keys(1, 2, 3, 4), keys(0, 2, 3, 4)
    assert one == same
    # And then one chain takes the place of the other.
    assert one[1].parent is same[1].parent
    assert one[1] != other[1]
    # Of plain bytes nothing is known but the digest.
    assert one[1] == bytes(16) == other[1]
    assert one[0] != one[1]
    assert one[1] != "text"


def test_what_evicted_keys_stood_for_is_forgotten(make_engine):
    engine, _ = make_engine(num_usable_blocks=8)
    for prompt in random_prompts(60):
        answer(engine, prompt)
    gc.collect()
    engine_keys = [key for key in gc.get_objects() if type(key) is ContentKey]
    assert 0 < len(engine_keys) <= 8 * 3


# -- the same keys and values -----------------------------------------------------------------------------------


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("budget", [1, 3, 4, 64])
def test_what_was_found_is_verified_and_used(make_engine, budget, async_scheduling):
    engine, _ = make_engine(max_num_batched_tokens=budget, async_scheduling=async_scheduling)
    for num_cached in (0, 12, 12):
        result = answer(engine, range(14))
        assert (result.token_ids, result.num_cached_tokens) == (cold(range(14)), num_cached)
    stats = engine.stats()
    assert (stats.verified_tokens, stats.unverified_tokens, stats.verification_failures) == (24, 0, 0)


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("budget", [1, 3, 4, 64])
def test_a_corrupt_block_is_found_logged_counted_and_computed_anew(make_engine, caplog, budget, async_scheduling):
    engine, runner = make_engine(max_num_batched_tokens=budget, async_scheduling=async_scheduling)
    answer(engine, range(14))
    (block_id,) = [b for b in cached_blocks(engine) if runner.tokens_in(b) == [4, 5, 6, 7]]
    runner.corrupt(block_id)
    with caplog.at_level(logging.ERROR, "octavo.core.prefix_verifier"):
        result = answer(engine, range(14), request_id="second")
    assert result.token_ids == cold(range(14))
    # The first block was as it should be.
    assert result.num_cached_tokens == 4
    assert caplog.messages == [
        "prefix cache: the request 'second' found keys and values that differ from what its tokens give now, from its "
        f"block 1 on (block {block_id} of the pool, KV-cache group 0). Difference by layer: 0: 1; up to 0.001 is "
        "rounding. They are dropped and computed anew."
    ]
    stats = engine.stats()
    assert stats.verification_failures == 1
    assert stats.recomputed_tokens == 8
    assert answer(engine, range(14)).num_cached_tokens == 12
    assert engine.stats().verification_failures == 1


def test_without_the_mode_a_corrupt_block_gives_a_wrong_answer(make_engine):
    engine, runner = make_engine(is_verifying=False)
    answer(engine, range(14))
    runner.corrupt(cached_blocks(engine)[0])
    assert answer(engine, range(14)).token_ids != cold(range(14))


def test_of_several_blocks_with_the_same_content_each_is_verified(make_engine):
    engine, runner = make_engine()
    # The last of these blocks is computed by each request, since one token must be.
    engine.add_request("a", range(8), GREEDY)
    engine.add_request("b", range(8), GREEDY)
    run_to_end(engine)
    twins = [b for b in cached_blocks(engine) if runner.tokens_in(b) == [4, 5, 6, 7]]
    assert len(twins) == 2
    for block_id in twins:
        runner.corrupt(block_id)
    result = answer(engine, range(9))
    assert result.token_ids == cold(range(9))
    assert result.num_cached_tokens == 4
    assert engine.stats().verification_failures == 2


def test_blocks_that_the_same_step_fills_are_left_out(make_engine):
    engine, _ = make_engine()
    engine.add_request("a", range(9), GREEDY)
    engine.add_request("b", range(9), GREEDY)
    finished = run_to_end(engine)
    assert finished["b"].num_cached_tokens == 8
    assert finished["a"].token_ids == finished["b"].token_ids == cold(range(9))
    stats = engine.stats()
    assert (stats.verified_tokens, stats.unverified_tokens, stats.verification_failures) == (0, 8, 0)


def test_with_too_few_free_blocks_as_many_whole_blocks_as_fit_are_verified(make_engine):
    engine, runner = make_engine(num_usable_blocks=10)
    answer(engine, range(25))
    corrupt = [b for b in cached_blocks(engine) if runner.tokens_in(b) == [20, 21, 22, 23]]
    # 7 of 10 blocks are the request's, which leaves 3 for the comparison.
    engine.add_request("r", range(25), SamplingParams(temperature=0, max_tokens=1))
    runner.corrupt(*corrupt)
    wrong = run_to_end(engine)["r"]
    stats = engine.stats()
    assert (stats.verified_tokens, stats.unverified_tokens, stats.verification_failures) == (12, 12, 0)
    assert wrong.token_ids != cold(range(25), 1)


def test_a_fault_puts_the_whole_step_back_and_nobody_notices(make_engine):
    engine, runner = make_engine()
    answer(engine, range(13))
    engine.add_request("other", range(100, 120), SamplingParams(temperature=0, max_tokens=12))
    finished: dict[str, Finished] = {}
    for _ in range(4):
        collect(finished, engine.step())
    runner.corrupt(next(b for b in cached_blocks(engine) if runner.tokens_in(b) == [0, 1, 2, 3]))
    engine.add_request("r", range(13), GREEDY)
    while engine.has_unfinished_requests():
        collect(finished, engine.step())
    assert finished["other"].token_ids == cold(range(100, 120), 12)
    assert finished["other"].num_preemptions == 0
    assert (finished["r"].token_ids, finished["r"].num_cached_tokens) == (cold(range(13)), 0)
    assert engine.stats().verification_failures == 1


class FailingOnce(HashingRunner):
    """Fails when it is to compute something for a comparison, the first time."""

    has_failed = False

    def fill_kv_cache(self, plan: StepPlan) -> None:
        if not self.has_failed:
            self.has_failed = True
            raise RuntimeError("out of memory")
        super().fill_kv_cache(plan)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_comparison_that_fails_is_a_step_that_failed(make_engine, async_scheduling):
    engine, _ = make_engine(runner_class=FailingOnce, async_scheduling=async_scheduling)
    answer(engine, range(13))
    engine.add_request("r", range(13), GREEDY)
    with pytest.raises(
        StepError, match="A step of 1 tokens failed and was undone: RuntimeError: out of memory"
    ) as caught:
        engine.step()
    assert caught.value.request_ids == ["r"]
    result = run_to_end(engine)["r"]
    assert result.token_ids == cold(range(13))
    assert engine.stats().verified_tokens == 24


@pytest.mark.parametrize("is_small", [False, True], ids=["large", "small"])
def test_under_random_traces_every_answer_is_the_cold_one(make_engine, is_small):
    """In a large pool blocks are corrupted while they are free. A small one has no room to verify all, so in none."""
    all_stats = [run_trace(make_engine, seed, is_small) for seed in range(14)]
    for name in (
        "verified_tokens",
        "verification_failures",
        *(("unverified_tokens", "preemptions") if is_small else ()),
    ):
        assert sum(getattr(stats, name) for stats in all_stats) > 20, name


GROUPS = [
    (full(4), window(4, 6)),
    (full(4), window(6, 9)),
    (window(4, 5), full(2), window(4, 9)),
    (chunk(4, 8), full(8)),
]


@pytest.mark.parametrize("groups", GROUPS)
def test_under_random_traces_of_several_groups_every_answer_is_the_cold_one(make_engine, groups):
    all_stats = [run_trace(make_engine, seed, False, groups=groups, num_usable_blocks=300) for seed in range(2)]
    assert sum(stats.verified_tokens for stats in all_stats) > 20
    assert sum(stats.verification_failures for stats in all_stats) > 2


def run_trace(make_engine, seed: int, is_small: bool, **options) -> EngineStats:
    rng = random.Random(seed)
    has_priorities = seed % 3 == 0
    engine, runner = make_engine(
        FourBits() if seed % 4 == 0 else None,
        **{
            "num_usable_blocks": rng.choice([12, 16]) if is_small else 150,
            "max_num_batched_tokens": rng.choice([5, 9, 64]),
            "max_num_seqs": rng.choice([2, 6]),
            "queue": PriorityQueue() if has_priorities else None,
            "async_scheduling": seed % 2 == 1,
        }
        | options,
    )
    prompts: dict[str, list[int]] = {}
    finished: dict[str, Finished] = {}
    while len(prompts) < 40 or engine.has_unfinished_requests():
        if len(prompts) < 40 and rng.random() < 0.5:
            request_id = f"r{len(prompts)}"
            prompt = [*range(rng.choice([0, 8, 8, 16])), *(rng.randrange(4) for _ in range(rng.randint(1, 14)))]
            prompts[request_id] = prompt
            priority = rng.randrange(3) if has_priorities else 0
            engine.add_request(request_id, prompt, SamplingParams(temperature=0, max_tokens=10), priority=priority)
        if not is_small and rng.random() < 0.3 and cached_blocks(engine):
            runner.corrupt(rng.choice(cached_blocks(engine)))
        if engine.has_unfinished_requests():
            collect(finished, engine.step())
    answers = {request_id: record.token_ids for request_id, record in finished.items()}
    assert answers == {request_id: cold(prompt, 10) for request_id, prompt in prompts.items()}, seed
    return engine.stats()


def test_a_hit_that_was_given_back_before_its_first_step_is_forgotten(make_engine):
    engine, runner = make_engine(async_scheduling=True)
    answer(engine, range(13))
    engine.add_request("other", range(100, 120), GREEDY)
    engine.step()
    engine.add_request("r", range(13), GREEDY)
    # The plan that was made ahead, with the hit, is undone together with the step that fails.
    runner.fail_next = RuntimeError("out of memory")
    with pytest.raises(StepError):
        engine.step()
    assert engine.reset_prefix_cache()
    result = run_to_end(engine)["r"]
    assert (result.token_ids, engine.stats().verified_tokens) == (cold(range(13)), 0)


# -- several groups ---------------------------------------------------------------------------------------------


class TwoGroupRunner:
    """A cache of token ids for each group, which looks at the tables as attention would.

    Attributes:
        slots: What each group's layer holds, by block and offset.
    """

    def __init__(self, num_blocks: int) -> None:
        self.slots = [np.full((num_blocks, 2), -1.0), np.full((num_blocks, 4), -1.0)]
        self.num_plans = 0

    def fill_kv_cache(self, plan: StepPlan) -> None:
        self.num_plans += 1
        first = int(plan.first_positions[0])
        assert plan.num_decode_entries == (plan.num_tokens == 1)
        for slots, table in zip(self.slots, plan.block_tables, strict=True):
            size = slots.shape[1]
            for position, token_id in enumerate(plan.token_ids.tolist(), first):
                slots[table[0, position // size], position % size] = token_id
            context = [slots[table[0, p // size], p % size] for p in range(first + plan.num_tokens)]
            assert -1 not in context, "attention would read what nobody wrote"
            assert (table[0] > 0).all()

    def block_differences(self, group_id: int, block_ids, other_block_ids) -> dict[int, float]:
        slots = self.slots[group_id]
        return {group_id: float(np.abs(slots[block_ids] - slots[other_block_ids]).max())}


def two_groups(num_usable_blocks: int = 32):
    pool = BlockPool(num_usable_blocks + 1)
    # In the second group a hit needs no more than the four tokens before its end.
    managers = [
        manager_class(spec, pool, group_id, 2) for group_id, (manager_class, spec) in enumerate((full(2), window(4, 5)))
    ]
    kv = VerifyingKVCacheManager(pool, managers, ContentHasher(Sha256(), 2, b"root"))
    runner = TwoGroupRunner(pool.num_blocks)
    verifier = PrefixVerifier(kv, runner, max_num_batched_tokens=7, unused_row=2, tolerance=0.5)
    # What an earlier request left: 8 tokens in 4 blocks of the first group and, of the second, only the last of 2.
    blocks = pool.get_new_blocks(5)
    for index, block_id in enumerate(blocks[:4]):
        runner.slots[0][block_id] = [2 * index, 2 * index + 1]
    runner.slots[1][blocks[4]] = [4, 5, 6, 7]
    pool.cache_full_blocks(blocks[:4], [b"%d" % i for i in range(4)], 0)
    pool.cache_full_blocks(blocks[4:], [b"3"], 1)
    request = Request("r", range(10), GREEDY, max_model_len=20, arrival=7)
    request.row = 0
    kv.begin_step()
    assert kv.allocate_slots(request, 8, 2, PrefixHit((tuple(blocks[:4]), (0, blocks[4])), 8))
    return kv, runner, verifier, blocks


def plan_of(*arrivals: int) -> StepPlan:
    nothing = np.zeros(0, np.int32)
    return StepPlan(
        [""] * len(arrivals), list(arrivals), nothing, nothing, nothing, nothing, nothing.astype(bool), 0, (), []
    )


def test_each_group_is_compared_but_for_its_null_entries():
    kv, runner, verifier, _ = two_groups()
    num_free = kv.pool.num_free_blocks
    # Not while the request computes nothing.
    assert verifier.verify(plan_of(3))
    assert runner.num_plans == 0
    assert verifier.verify(plan_of(3, 7))
    assert runner.num_plans == 2
    assert vars(verifier.counters) == {"verified_tokens": 8, "unverified_tokens": 0, "verification_failures": 0}
    assert kv.pool.num_free_blocks == num_free
    # Once is enough.
    assert verifier.verify(plan_of(7))
    assert runner.num_plans == 2


@pytest.mark.parametrize(
    ("group_id", "index", "num_lost"),
    [(0, 0, 5), (0, 1, 4), (0, 2, 3), (0, 3, 2), (1, 1, 3)],
)
def test_a_fault_in_one_group_makes_all_groups_forget_what_follows(caplog, group_id, index, num_lost):
    kv, runner, verifier, blocks = two_groups()
    runner.slots[group_id][blocks[4] if group_id else blocks[index], 1] += 1
    assert not verifier.verify(plan_of(7))
    assert kv.pool.num_cached_blocks == 5 - num_lost
    assert f"from its block {index} on" in caplog.text
    assert f"KV-cache group {group_id}" in caplog.text


def test_of_faults_in_several_groups_the_first_counts():
    kv, runner, verifier, blocks = two_groups()
    runner.slots[0][blocks[3], 1] += 1
    runner.slots[1][blocks[4], 1] += 1
    assert not verifier.verify(plan_of(7))
    assert kv.pool.num_cached_blocks == 5 - 3
    assert verifier.counters.verification_failures == 1


def test_what_is_not_a_number_differs():
    _, runner, verifier, blocks = two_groups()
    runner.slots[0][blocks[2], 0] = np.nan
    assert not verifier.verify(plan_of(7))


def test_free_blocks_are_counted_in_whole_blocks_of_every_group():
    # The request takes 4 blocks that hold its hit, a null entry, and one more of each group. 8 tokens would take 6.
    kv, _, verifier, _ = two_groups(num_usable_blocks=12)
    assert kv.pool.num_free_blocks == 5
    assert verifier.verify(plan_of(7))
    assert vars(verifier.counters) == {"verified_tokens": 4, "unverified_tokens": 4, "verification_failures": 0}


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize(
    ("group_id", "token_ids", "num_cached"),
    [
        # Of 24 tokens that were found, in blocks of four and of six, a hit ends before the fault and with both.
        (0, [4, 5, 6, 7], 0),
        (0, [16, 17, 18, 19], 12),
        (1, [12, 13, 14, 15, 16, 17], 12),
        (1, [6, 7, 8, 9, 10, 11], 0),
    ],
)
def test_what_a_fault_leaves_of_a_hit_is_whole_blocks_of_every_group(
    make_engine, group_id, token_ids, num_cached, async_scheduling
):
    engine, runner = make_engine(groups=(full(4), full(6)), async_scheduling=async_scheduling)
    answer(engine, range(30))
    (block_id,) = [b for b in cached_blocks(engine) if runner.tokens_in(b) == token_ids]
    runner.corrupt(block_id)
    result = answer(engine, range(30), request_id="second")
    assert (result.token_ids, result.num_cached_tokens) == (cold(range(30)), num_cached)
    stats = engine.stats()
    assert (stats.verified_tokens, stats.verification_failures) == (24 + num_cached, 1)
    assert answer(engine, range(30)).num_cached_tokens == 24


def test_where_a_window_lacks_what_a_shorter_hit_needs_a_fault_leaves_nothing_of_it(make_engine):
    engine, runner = make_engine(groups=(full(4), window(4, 5)))
    answer(engine, range(30))
    pool = engine.scheduler.kv_cache_manager.pool
    of_window = [b for (group_id, _), blocks in pool.cached_blocks().items() for b in blocks if group_id == 1]
    # Of the window's group there is but the block before 28.
    pool.forget_blocks([b for b in of_window if runner.tokens_in(b) != [24, 25, 26, 27]])
    (block_id,) = [b for b in cached_blocks(engine) if runner.tokens_in(b) == [16, 17, 18, 19]]
    runner.corrupt(block_id)
    result = answer(engine, range(30), request_id="second")
    assert (result.token_ids, result.num_cached_tokens) == (cold(range(30)), 0)


def test_the_tolerance_is_that_of_the_coarsest_type():
    assert tolerance(["float32", "float32"]) == 1e-3
    assert tolerance(["float32", "bfloat16"]) == 1.0
    assert tolerance(["float16", "float32"]) == 0.125
    assert tolerance(["float32", "a type of next year"]) == 1.0
    assert tolerance(["bfloat16", "int8_per_token_head"]) == 3.0
    assert tolerance(["float32", "fp8_e4m3"]) == 3.0


def test_every_format_has_a_tolerance():
    assert {*TOLERANCES} == {*KV_FORMATS}


def test_where_the_one_that_fills_a_shared_block_is_aborted_before_its_step_runs_nothing_is_called_wrong(make_engine):
    engine, _ = make_engine(async_scheduling=True)
    finished: dict[str, Finished] = {}
    engine.add_request("z", [9], SamplingParams(temperature=0, max_tokens=10))
    collect(finished, engine.step())
    for request_id, prompt in (("a", range(9)), ("b", [*range(8), 70, 71])):
        engine.add_request(request_id, prompt, GREEDY)
    # Planned ahead: a fills two blocks, and b reads them in the same step.
    collect(finished, engine.step())
    engine.abort_request("a")
    while engine.has_unfinished_requests():
        collect(finished, engine.step())
    assert finished["b"].token_ids == cold([*range(8), 70, 71])
    assert engine.stats().verification_failures == 0
