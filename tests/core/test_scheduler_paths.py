"""Steps in columns and steps one request at a time are the same steps."""

import random
from collections import Counter

import numpy as np
import pytest

from octavo.core.engine_core import EngineCore
from octavo.core.intake import Intake
from octavo.core.running_pass import RunningPass
from octavo.core.sampling_params import SamplingParams
from octavo.core.scheduler import Scheduler
from octavo.hash_functions import Sha256
from octavo.kv_managers.full_attention import FullAttentionManager
from octavo.request_queues import FCFSQueue
from octavo.testing.engines import Finished, assert_nothing_leaks, assert_pool_is_sound, collect, make_kv_cache_manager
from octavo.testing.hashing_runner import HashingRunner, expected_tokens

VOCAB_SIZE = 40


@pytest.fixture
def one_by_one(monkeypatch):
    """Makes engines plan and take in every step one request at a time."""

    def switch():
        monkeypatch.setattr(RunningPass, "schedule_all_generating", lambda self, entries, budget: None)
        monkeypatch.setattr(Intake, "take_in_all", lambda self, plan, entries, result, output: False)

    return switch


@pytest.fixture
def count(monkeypatch):
    """Counts the steps that are planned, and taken in, in columns."""
    counts = Counter()
    schedule_all, take_in_all = RunningPass.schedule_all_generating, Intake.take_in_all

    def schedule(self, entries, budget):
        scheduled = schedule_all(self, entries, budget)
        counts["planned"] += scheduled is not None and len(scheduled.entries) > 0
        return scheduled

    def take_in(self, plan, entries, result, output):
        is_done = take_in_all(self, plan, entries, result, output)
        counts["taken in"] += is_done and len(entries) > 0
        return is_done

    monkeypatch.setattr(RunningPass, "schedule_all_generating", schedule)
    monkeypatch.setattr(Intake, "take_in_all", take_in)
    return counts


def make_engine(rng, caching):
    num_blocks, block_size = rng.choice([6, 12, 30, 200]), rng.choice([1, 2, 4, 16])
    hash_function = Sha256() if caching else None
    kv = make_kv_cache_manager(
        FullAttentionManager, hash_function, num_usable_blocks=num_blocks, block_size=block_size, num_rows=8
    )
    scheduler = Scheduler(
        kv, FCFSQueue(), max_num_seqs=rng.choice([2, 5, 8]), max_num_batched_tokens=rng.choice([3, 8, 64])
    )
    runner = HashingRunner(num_blocks + 1, block_size, VOCAB_SIZE)
    engine = EngineCore(scheduler, runner, vocab_size=VOCAB_SIZE, max_model_len=90, eos_token_ids=frozenset({7}))
    return engine, runner


def run(seed, num_steps=60):
    """Run a random trace; return the engine, its plans and outputs, and the free queue after each step."""
    rng = random.Random(seed)
    engine, runner = make_engine(rng, caching=seed % 4 != 0)
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
def test_both_ways_make_the_same_plans_outputs_and_pools(seed, count, one_by_one):
    _, plans, records, _ = run(seed)
    assert count["planned"] > 5
    assert count["taken in"] > 5
    one_by_one()
    _, plans_one_by_one, records_one_by_one, _ = run(seed)
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
    engine, runner = make_engine(rng, caching=True)
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
    _, _, _, finished = run(3)
    assert any(isinstance(record, Finished) and record.finish_reason == "stop" for record in finished.values())
    rng = random.Random(0)
    engine, _ = make_engine(rng, caching=True)
    engine.add_request("one", [1, 2, 3], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    results = {}
    while engine.has_unfinished_requests():
        collect(results, engine.step())
    assert results["one"].token_ids == expected_tokens([1, 2, 3], 8, VOCAB_SIZE)
