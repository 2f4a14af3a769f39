"""A step that is planned while the one before it runs leads to the same tokens."""

import random
from contextlib import suppress

import numpy as np
import pytest
from hashing_engines import chunk, full, mla, window

from octavo.core.engine_core import EngineCore
from octavo.core.sampling_params import SamplingParams
from octavo.core.scheduler import Scheduler
from octavo.core.step_plan import AWAITED, StepResult
from octavo.errors import InvalidRequestError, StepError
from octavo.hash_functions import Sha256
from octavo.request_queues import FCFSQueue, PriorityQueue
from octavo.testing.engines import (
    assert_nothing_leaks,
    assert_pool_is_sound,
    collect,
    make_hashing_runner,
    make_hybrid_kv_cache_manager,
    run_to_end,
)
from octavo.testing.hashing_runner import expected_tokens

VOCAB_SIZE = 40


def greedy(max_tokens=8, **options):
    return SamplingParams(max_tokens=max_tokens, temperature=0, **options)


def make_engine(
    num_usable_blocks=64,
    block_size=4,
    *,
    groups=(),
    queue=None,
    async_scheduling=True,
    caching=True,
    reuse=True,
    **options,
):
    options = {"max_num_seqs": 8, "max_num_batched_tokens": 64} | options
    kv = make_hybrid_kv_cache_manager(
        groups or [full(block_size)],
        Sha256() if caching else None,
        num_usable_blocks=num_usable_blocks,
        max_tokens_in_flight=options["max_num_batched_tokens"],
        reuses_blocks_within_a_step=reuse,
    )
    scheduler = Scheduler(kv, FCFSQueue() if queue is None else queue, **options)
    runner = make_hashing_runner(scheduler, VOCAB_SIZE)
    engine = EngineCore(
        scheduler,
        runner,
        vocab_size=VOCAB_SIZE,
        max_model_len=90,
        eos_token_ids=frozenset({7}),
        async_scheduling=async_scheduling,
    )
    return engine, runner


# -- random loads -----------------------------------------------------------------------------------------------


def run_random(seed, async_scheduling, groups=()):
    """Run a random load with aborts, failing steps and resets; return each request's prompt and what came of it."""
    rng = random.Random(seed)
    queue = rng.choice([FCFSQueue, PriorityQueue])()
    engine, runner = make_engine(
        rng.choice([6, 12, 30, 200]),
        rng.choice([1, 2, 4, 16]),
        groups=groups,
        queue=queue,
        async_scheduling=async_scheduling,
        caching=seed % 4 != 0,
        reuse=rng.random() < 0.7,
        max_num_seqs=rng.choice([2, 5, 8]),
        max_num_batched_tokens=rng.choice([3, 8, 64]),
        watermark=rng.choice([0, 0.1]),
        long_prefill_token_threshold=rng.choice([0, 0, 3]),
        enable_chunked_prefill=rng.random() < 0.8,
    )
    prompts, finished = {}, {}
    for step in range(60):
        for number in range(rng.choice([0, 0, 1, 3])):
            prompt = [*range(rng.choice([0, 0, 4, 9])), *(rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 20)))]
            params = greedy(
                rng.randint(1, 30), ignore_eos=rng.random() < 0.7, stop_token_ids=rng.choice([None, [11], [3, 12]])
            )
            priority = rng.choice([0, 1, 2]) if queue.heeds_priority else 0
            try:
                engine.add_request(f"{step}.{number}", prompt, params, priority=priority)
            except InvalidRequestError:
                continue
            prompts[f"{step}.{number}"] = prompt
        if rng.random() < 0.1:
            engine.abort_request(f"{step - rng.randint(0, 5)}.0")
        if rng.random() < 0.05:
            runner.fail_next = RuntimeError("the device is gone")
        if rng.random() < 0.03:
            engine.reset_prefix_cache(reset_running_requests=rng.random() < 0.5)
        try:
            collect(finished, engine.step())
        except StepError as error:
            # What the runner finds wrong is an error of another kind.
            if not isinstance(error.__cause__, RuntimeError):
                raise
        runner.fail_next = None
        assert_pool_is_sound(engine.scheduler.kv_cache_manager.pool)
    while engine.has_unfinished_requests():
        collect(finished, engine.step())
    assert_nothing_leaks(engine)
    engine.shutdown()
    return prompts, finished, runner.plans


def assert_equal_to_cold(prompts, finished):
    assert finished.keys() == prompts.keys()
    for request_id, record in finished.items():
        assert record.token_ids == expected_tokens(prompts[request_id], len(record.token_ids), VOCAB_SIZE)
        if record.finish_reason == "abort":
            continue
        assert record.finish_reason in ("stop", "length")


@pytest.mark.parametrize("seed", range(16))
def test_every_request_of_a_random_load_equals_cold(seed):
    prompts, finished, _ = run_random(seed, async_scheduling=True)
    assert len(prompts) > 5
    assert_equal_to_cold(prompts, finished)


@pytest.mark.parametrize("seed", range(8))
def test_the_same_load_ends_the_same_without_planning_ahead(seed):
    _, ahead, _ = run_random(seed, async_scheduling=True)
    prompts, in_turn, _ = run_random(seed, async_scheduling=False)
    assert_equal_to_cold(prompts, in_turn)
    for request_id, record in in_turn.items():
        other = ahead[request_id]
        # What an abort, or a cache that is full, meets depends on how far the request has come.
        if {"abort"} & {record.finish_reason, other.finish_reason} or record.stop_reason == "kv_cache_full":
            continue
        assert (record.token_ids, record.finish_reason, record.stop_reason) == (
            other.token_ids,
            other.finish_reason,
            other.stop_reason,
        )


LAYOUTS = [
    (full(4), window(4, 6)),
    (full(4), window(4, 3), window(4, 9)),
    (window(2, 4), chunk(2, 6)),
    (full(4), window(6, 7)),
    (chunk(4, 8), mla(2)),
    (window(2, 2),),
    (chunk(4, 6),),
]


@pytest.mark.parametrize("groups", LAYOUTS)
@pytest.mark.parametrize("seed", range(3, 6))
def test_every_request_of_a_random_load_equals_cold_where_blocks_are_given_back(seed, groups):
    prompts, finished, _ = run_random(seed, async_scheduling=True, groups=groups)
    assert_equal_to_cold(prompts, finished)


@pytest.mark.slow
@pytest.mark.parametrize("first_seed", range(100, 300, 20))
def test_every_request_of_many_random_loads_equals_cold(first_seed):
    for seed in range(first_seed, first_seed + 20):
        prompts, finished, _ = run_random(seed, async_scheduling=True)
        assert_equal_to_cold(prompts, finished)


@pytest.mark.slow
@pytest.mark.parametrize("groups", LAYOUTS)
def test_every_request_of_many_random_loads_equals_cold_where_blocks_are_given_back(groups):
    for seed in range(400, 420):
        prompts, finished, _ = run_random(seed, async_scheduling=True, groups=groups)
        assert_equal_to_cold(prompts, finished)


# -- what a plan ahead looks like -------------------------------------------------------------------------------


def test_a_plan_ahead_leaves_places_for_the_tokens_that_it_awaits():
    engine, runner = make_engine()
    scheduler = engine.scheduler
    engine.add_request("a", range(5), greedy(4, ignore_eos=True))
    first = scheduler.schedule()
    second = scheduler.schedule()
    assert first.token_ids.tolist() == [0, 1, 2, 3, 4]
    assert (second.token_ids.tolist(), second.first_positions.tolist()) == ([AWAITED], [5])
    expected = expected_tokens(range(5), 4, VOCAB_SIZE)
    assert scheduler.update_from_output(first, runner.run(first)).new_token_ids == expected[:1]
    third = scheduler.schedule()
    assert scheduler.update_from_output(second, runner.run(second)).new_token_ids == expected[1:2]
    assert second.token_ids.tolist() == expected[:1]
    scheduler.roll_back(third)
    assert run_to_end(engine)["a"].token_ids == expected[2:]
    assert_nothing_leaks(engine)


def test_a_request_that_its_length_ends_is_not_planned_once_more():
    engine, runner = make_engine()
    engine.add_request("a", range(5), greedy(3, ignore_eos=True))
    engine.add_request("b", range(5, 10), greedy(6, ignore_eos=True))
    run_to_end(engine)
    assert sum("a" in plan.request_ids for plan in runner.plans) == 3
    assert sum("b" in plan.request_ids for plan in runner.plans) == 6


def test_what_a_request_computes_after_its_stop_token_is_dropped():
    expected = expected_tokens(range(5), 8, VOCAB_SIZE)
    end = next(number for number, token in enumerate(expected) if number and token not in expected[:number])
    engine, runner = make_engine()
    engine.add_request("a", range(5), greedy(8, ignore_eos=True, stop_token_ids=[expected[end]]))
    engine.add_request("b", range(5, 10), greedy(12, ignore_eos=True))
    records = run_to_end(engine)
    assert records["a"].token_ids == expected[: end + 1]
    # It stood in one more plan than it has tokens.
    assert sum("a" in plan.request_ids for plan in runner.plans) == end + 2
    assert records["b"].token_ids == expected_tokens(range(5, 10), 12, VOCAB_SIZE)
    assert_nothing_leaks(engine)
    stats = engine.stats()
    assert stats.computed_tokens == stats.prompt_tokens - stats.hit_tokens + stats.generated_tokens - 2


@pytest.mark.parametrize("num_tokens", [4, 5, 8])
def test_a_finished_request_leaves_as_many_blocks_behind_as_without(num_tokens):
    found = []
    for async_scheduling in (False, True):
        engine, _ = make_engine(async_scheduling=async_scheduling)
        engine.add_request("a", range(5), greedy(num_tokens, ignore_eos=True))
        answer = run_to_end(engine)["a"].token_ids
        engine.add_request("again", [*range(5), *answer, 1], greedy(1))
        found.append(run_to_end(engine)["again"].num_cached_tokens)
    assert found == [(5 + num_tokens - 1) // 4 * 4] * 2


def test_a_new_request_joins_the_step_after_the_one_that_is_planned():
    engine, runner = make_engine()
    engine.add_request("a", range(5), greedy(12, ignore_eos=True))
    engine.step()
    engine.add_request("b", range(5, 10), greedy(3, ignore_eos=True))
    engine.step()
    engine.step()
    assert [plan.request_ids for plan in runner.plans] == [["a"], ["a"], ["a", "b"]]
    run_to_end(engine)


def test_a_plan_ahead_in_which_nobody_is_left_is_not_run():
    engine, runner = make_engine()
    engine.add_request("a", range(5), greedy(12, ignore_eos=True))
    engine.step()
    engine.abort_request("a")
    engine.take_ended()
    engine.add_request("b", range(5, 10), greedy(2, ignore_eos=True))
    assert run_to_end(engine)["b"].token_ids == expected_tokens(range(5, 10), 2, VOCAB_SIZE)
    assert [plan.request_ids for plan in runner.plans] == [["a"], ["b"], ["b"]]
    assert_nothing_leaks(engine)


# -- when things go wrong ---------------------------------------------------------------------------------------


def test_when_a_step_fails_the_one_planned_ahead_is_undone_too():
    engine, runner = make_engine()
    prompts = {"a": range(9), "b": range(20, 31)}
    for request_id, prompt in prompts.items():
        engine.add_request(request_id, prompt, greedy(9, ignore_eos=True))
    records = {}
    collect(records, engine.step())
    runner.fail_next = RuntimeError("the device is gone")
    with pytest.raises(StepError) as caught:
        engine.step()
    assert caught.value.request_ids == ["a", "b"]
    assert (engine.stats().running, engine.stats().waiting) == (0, 2)
    for _ in range(20):
        if engine.has_unfinished_requests():
            collect(records, engine.step())
    for request_id, prompt in prompts.items():
        assert records[request_id].token_ids == expected_tokens(prompt, 9, VOCAB_SIZE)
    assert_nothing_leaks(engine)


def test_a_request_whose_logits_are_not_finite_ends_alone():
    engine, runner = make_engine()
    engine.add_request("a", range(9), greedy(9, ignore_eos=True))
    engine.add_request("b", range(20, 31), greedy(9, ignore_eos=True))
    records = {}
    collect(records, engine.step())
    runner.failing_request_ids = {"a"}
    while engine.has_unfinished_requests():
        collect(records, engine.step())
    assert (records["a"].finish_reason, records["a"].stop_reason) == ("error", "non_finite_logits")
    assert records["b"].token_ids == expected_tokens(range(20, 31), 9, VOCAB_SIZE)
    assert_nothing_leaks(engine)


def test_a_lone_request_that_fills_the_cache_keeps_the_token_that_was_awaited():
    for async_scheduling in (False, True):
        engine, _ = make_engine(7, async_scheduling=async_scheduling)
        engine.add_request("a", range(20), greedy(40, ignore_eos=True))
        record = run_to_end(engine)["a"]
        assert (record.finish_reason, record.stop_reason) == ("length", "kv_cache_full")
        assert record.token_ids == expected_tokens(range(20), 9, VOCAB_SIZE)


def test_a_request_that_is_preempted_while_its_step_runs_keeps_the_token_of_that_step():
    engine, runner = make_engine(6, max_num_seqs=2)
    prompts = {"a": range(7), "b": range(20, 27)}
    for request_id, prompt in prompts.items():
        engine.add_request(request_id, prompt, greedy(12, ignore_eos=True))
    records = run_to_end(engine)
    assert records["b"].num_preemptions
    for request_id, prompt in prompts.items():
        assert records[request_id].token_ids == expected_tokens(prompt, 12, VOCAB_SIZE)
    positions = [
        (int(plan.first_positions[entry]), int(plan.num_new_tokens[entry]))
        for plan in runner.plans
        for entry, request_id in enumerate(plan.request_ids)
        if request_id == "b" and plan.samples[entry]
    ]
    # Each of its tokens was sampled once.
    assert [first + count for first, count in positions] == list(range(7, 19))


def test_a_reset_with_running_requests_undoes_the_plan_ahead():
    engine, runner = make_engine()
    engine.add_request("a", range(9), greedy(9, ignore_eos=True))
    records = {}
    collect(records, engine.step())
    refused = engine.reset_prefix_cache()
    assert not refused
    assert refused.num_preempted == 0
    done = engine.reset_prefix_cache(reset_running_requests=True)
    assert done
    assert done.num_preempted == 1
    assert engine.scheduler.kv_cache_manager.pool.num_cached_blocks == 0
    while engine.has_unfinished_requests():
        collect(records, engine.step())
    assert records["a"].token_ids == expected_tokens(range(9), 9, VOCAB_SIZE)
    # After the reset nothing of what was computed before was used.
    assert runner.plans[1].first_positions.tolist() == [0]
    assert np.array_equal(runner.plans[1].num_new_tokens, [10])
    assert_nothing_leaks(engine)


def test_what_planning_ahead_raises_comes_with_the_next_step():
    class Failing(FCFSQueue):
        fails = False

        def peek_request(self):
            if self.fails:
                raise RuntimeError("no more")
            return super().peek_request()

    queue = Failing()
    engine, _ = make_engine(queue=queue, max_num_seqs=2)
    engine.add_request("a", range(9), greedy(9, ignore_eos=True))
    engine.step()
    engine.add_request("b", range(9), greedy(9, ignore_eos=True))
    queue.fails = True
    assert engine.step().request_ids == ["a"]
    with pytest.raises(RuntimeError, match=r"^no more$"):
        engine.step()


@pytest.mark.parametrize("add_at", range(6))
@pytest.mark.parametrize("num_shared", [0, 4])
def test_a_request_that_was_admitted_without_a_token_is_admitted_anew_when_the_step_before_fails(num_shared, add_at):
    """Its row was told to nobody, and what it found may be what the failed step was to write."""
    engine, runner = make_engine(queue=PriorityQueue(), max_num_seqs=3, max_num_batched_tokens=3)
    begin = [9, 8, 6, 5][:num_shared]
    prompts = {"y": [1], "x0": [*begin, *range(10, 39)], "x1": range(12, 40), "c": [*begin, 4, 3, 2]}
    engine.add_request("y", prompts["y"], greedy(30, ignore_eos=True), priority=5)
    records = {}
    for _ in range(2):
        collect(records, engine.step())
    for request_id, priority in (("x0", -5), ("x1", -4)):
        engine.add_request(request_id, prompts[request_id], greedy(3, ignore_eos=True), priority=priority)
    for step in range(8):
        if step == add_at:
            # Planned in place of y while the step runs that is to fail. The two others leave it nothing of the budget.
            engine.add_request("c", prompts["c"], greedy(6, ignore_eos=True), priority=0)
            runner.fail_next = RuntimeError("the device is gone")
        with suppress(StepError):
            collect(records, engine.step())
    while engine.has_unfinished_requests():
        collect(records, engine.step())
    for request_id, record in records.items():
        assert record.token_ids == expected_tokens(prompts[request_id], len(record.token_ids), VOCAB_SIZE)
        assert record.finish_reason == "length"
    rows = {}
    for plan in runner.plans:
        rows |= {row.row: row for row in plan.new_rows}
        for entry in np.flatnonzero(plan.samples).tolist():
            known_as = rows[int(plan.rows[entry])]
            assert known_as.num_prompt_tokens == len(prompts[plan.request_ids[entry]])
    assert_nothing_leaks(engine)


# -- blocks that are given back early ---------------------------------------------------------------------------


class CountingRunner:
    """Computes nothing; its tokens are all 1, and not finite where `fails` says so."""

    def __init__(self):
        self.error = None
        self.fails = False

    def run(self, plan):
        if self.error is not None:
            raise self.error
        num_samples = int(plan.samples.sum())
        return StepResult([1] * num_samples, [self.fails] * num_samples, [None] * num_samples)


def make_recycling_engine(async_scheduling):
    """An engine whose requests read the token before the last one, in blocks of two."""
    kv = make_hybrid_kv_cache_manager([window(2, 2)], Sha256(), num_usable_blocks=64, max_tokens_in_flight=8)
    scheduler = Scheduler(kv, FCFSQueue(), max_num_seqs=4, max_num_batched_tokens=8)
    runner = CountingRunner()
    engine = EngineCore(scheduler, runner, vocab_size=VOCAB_SIZE, max_model_len=90, async_scheduling=async_scheduling)
    return engine, runner


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_what_a_failed_step_was_to_fill_is_not_findable_even_where_it_was_recycled_meanwhile(async_scheduling):
    engine, runner = make_recycling_engine(async_scheduling)
    pool = engine.scheduler.kv_cache_manager.pool
    engine.add_request("a", range(14), greedy(4))
    engine.step()
    runner.error = RuntimeError("the device is gone")
    with pytest.raises(StepError):
        engine.step()
    # Eight tokens were computed, in four blocks.
    assert pool.num_cached_blocks == 4
    assert_pool_is_sound(pool)
    runner.error = None
    run_to_end(engine)
    assert_nothing_leaks(engine)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_request_whose_logits_are_not_finite_leaves_nothing_findable_of_what_it_gave_back_early(async_scheduling):
    engine, runner = make_recycling_engine(async_scheduling)
    pool = engine.scheduler.kv_cache_manager.pool
    engine.add_request("good", range(20), greedy(2))
    run_to_end(engine)
    num_good = pool.num_cached_blocks
    engine.add_request("bad", range(30, 14, -1), greedy(12, ignore_eos=True))
    for _ in range(6):
        engine.step()
    assert pool.num_cached_blocks > num_good
    runner.fails = True
    assert run_to_end(engine)["bad"].stop_reason == "non_finite_logits"
    assert pool.num_cached_blocks == num_good
    assert_nothing_leaks(engine)
