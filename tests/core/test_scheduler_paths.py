"""Steps in columns and steps one request at a time are the same steps."""

import random

import numpy as np
import pytest

from octavo.core.engine_core import EngineCore
from octavo.core.sampling_params import SamplingParams
from octavo.core.scheduler import Scheduler
from octavo.hash_functions import Sha256
from octavo.kv_managers.full_attention import FullAttentionManager
from octavo.request_queues import FCFSQueue
from octavo.testing.engines import Finished, assert_nothing_leaks, assert_pool_is_sound, collect, make_kv_cache_manager
from octavo.testing.hashing_runner import HashingRunner, expected_tokens

VOCAB_SIZE = 40


class OneByOne(Scheduler):
    """Never plans or takes in a step in columns."""

    def schedule_all_running(self):
        return None

    def entries_of(self, plan):
        return None


class Counting(Scheduler):
    """Counts the steps that are planned, and taken in, in columns."""

    num_planned = num_taken_in = 0

    def schedule_all_running(self):
        scheduled = super().schedule_all_running()
        self.num_planned += scheduled is not None and len(scheduled.entries) > 0
        return scheduled

    def entries_of(self, plan):
        entries = super().entries_of(plan)
        self.num_taken_in += entries is not None and len(entries) > 0
        return entries


def make_engine(scheduler_class, rng, caching):
    num_blocks, block_size = rng.choice([6, 12, 30, 200]), rng.choice([1, 2, 4, 16])
    hash_function = Sha256() if caching else None
    kv = make_kv_cache_manager(
        FullAttentionManager, hash_function, num_usable_blocks=num_blocks, block_size=block_size, num_rows=8
    )
    scheduler = scheduler_class(
        kv, FCFSQueue(), max_num_seqs=rng.choice([2, 5, 8]), max_num_batched_tokens=rng.choice([3, 8, 64])
    )
    runner = HashingRunner(num_blocks + 1, block_size, VOCAB_SIZE)
    engine = EngineCore(scheduler, runner, vocab_size=VOCAB_SIZE, max_model_len=90, eos_token_ids=frozenset({7}))
    return engine, runner


def run(scheduler_class, seed, num_steps=60):
    """Run a random trace; return the engine, its plans and outputs, and the free queue after each step."""
    rng = random.Random(seed)
    engine, runner = make_engine(scheduler_class, rng, caching=seed % 4 != 0)
    pool = engine.scheduler.kv_cache_manager.pool
    records, finished = [], {}
    for number in range(num_steps):
        for extra in range(rng.choice([0, 0, 1, 3])):
            shared, length = rng.choice([0, 0, 4, 9]), rng.randint(1, 20)
            prompt = [*range(shared), *(rng.randrange(VOCAB_SIZE) for _ in range(length))]
            params = SamplingParams(
                temperature=0,
                max_tokens=rng.randint(1, 30),
                ignore_eos=rng.random() < 0.7,
                stop_token_ids=rng.choice([None, [11], [3, 12]]),
            )
            if engine.scheduler.kv_cache_manager.could_ever_hold(len(prompt)):
                engine.add_request(f"{number}.{extra}", prompt, params)
        if rng.random() < 0.1 and engine.scheduler.running:
            engine.abort_request(rng.choice(engine.scheduler.running).request_id)
        if rng.random() < 0.05 and engine.scheduler.running:
            runner.failing_request_ids = {rng.choice(engine.scheduler.running).request_id}
        output = engine.step()
        runner.failing_request_ids = set()
        collect(finished, output)
        assert_pool_is_sound(pool)
        records.append((output, pool.free_queue(), pool.cached_blocks(), engine.stats()))
    while engine.has_unfinished_requests():
        collect(finished, engine.step())
    assert_nothing_leaks(engine)
    return engine, runner.plans, records, finished


@pytest.mark.parametrize("seed", range(40))
def test_both_ways_make_the_same_plans_outputs_and_pools(seed):
    engine, plans, records, _ = run(Counting, seed)
    _, plans_one_by_one, records_one_by_one, _ = run(OneByOne, seed)
    assert engine.scheduler.num_planned > 5
    assert engine.scheduler.num_taken_in > 5
    assert len(plans) == len(plans_one_by_one)
    for plan, other in zip(plans, plans_one_by_one, strict=True):
        assert vars(plan).keys() == vars(other).keys()
        for name, value in vars(plan).items():
            if name == "block_tables":
                assert all(map(np.array_equal, value, other.block_tables)), name
            elif isinstance(value, np.ndarray):
                assert np.array_equal(value, getattr(other, name)), name
                assert value.dtype == getattr(other, name).dtype, name
            else:
                assert value == getattr(other, name), name
    assert records == records_one_by_one


def test_a_plan_keeps_what_it_says_while_the_engine_goes_on():
    rng = random.Random(1)
    engine, runner = make_engine(Counting, rng, caching=True)
    for number in range(4):
        engine.add_request(str(number), [number] * 3, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
    copies = []
    while engine.has_unfinished_requests():
        engine.step()
        plan = runner.plans[-1]
        copies.append((list(plan.request_ids), plan.rows.copy(), plan.num_new_tokens.copy(), plan.token_ids.copy()))
    for plan, (request_ids, rows, num_new_tokens, token_ids) in zip(runner.plans, copies, strict=True):
        assert plan.request_ids == request_ids
        assert np.array_equal(plan.rows, rows)
        assert np.array_equal(plan.num_new_tokens, num_new_tokens)
        assert np.array_equal(plan.token_ids, token_ids)


def test_what_was_taken_in_in_columns_is_what_the_runner_said():
    _, _, _, finished = run(Counting, 3)
    assert any(isinstance(record, Finished) and record.finish_reason == "stop" for record in finished.values())
    rng = random.Random(0)
    engine, _ = make_engine(Counting, rng, caching=True)
    engine.add_request("one", [1, 2, 3], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    results = {}
    while engine.has_unfinished_requests():
        collect(results, engine.step())
    assert results["one"].token_ids == expected_tokens([1, 2, 3], 8, VOCAB_SIZE)
