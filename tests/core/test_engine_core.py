"""Requests are checked before they enter; under random traces every answer is the cold one."""

import contextlib
import random

import numpy as np
import pytest

from octavo.core.sampling_params import SamplingParams
from octavo.errors import EngineClosedError, InvalidRequestError, StepError
from octavo.testing.engines import Finished, assert_pool_is_sound, collect, run_to_end
from octavo.testing.hashing_runner import expected_tokens

GREEDY = SamplingParams(temperature=0, max_tokens=4)


@pytest.mark.parametrize(
    ("prompt", "sentence"),
    [
        ([], "The prompt is empty"),
        ([-1], "Token id -1 at position 0 of the prompt is not in the vocabulary; ids are whole numbers from 0 to 999"),
        ([5, 1000], "Token id 1000 at position 1"),
        ([2**63], "Token id 9223372036854775808 at position 0"),
        ([1, "a"], "Token id 'a' at position 1"),
        ([1, None], "Token id None at position 1"),
        ([1.0], "Token id 1.0 at position 0"),
        ([True], "Token id True at position 0"),
        ([[1]], r"Token id \[1\] at position 0"),
        ("text", "prompt_token_ids must be a list of token ids, not 'text'"),
        (7, "prompt_token_ids must be a list of token ids, not 7"),
        (range(64), "The prompt has 64 tokens, and max_model_len=64 leaves room for prompts of at most 63"),
        (range(65), "The prompt has 65 tokens"),
    ],
)
def test_a_wrong_prompt_is_named_and_leaves_nothing_behind(make_engine, prompt, sentence):
    engine, _ = make_engine(max_model_len=64)
    engine.add_request("other", range(5), GREEDY)
    with pytest.raises(InvalidRequestError, match=sentence):
        engine.add_request("wrong", prompt, GREEDY)
    assert run_to_end(engine)["other"].token_ids == expected_tokens(range(5), 4, 1000)


@pytest.mark.parametrize(
    ("arguments", "parameter"),
    [
        ({"request_id": ""}, "request_id"),
        ({"request_id": 5}, "request_id"),
        ({"request_id": "x" * 513}, "request_id"),
        ({"params": {"temperature": 0}}, "params"),
        ({"params": SamplingParams(stop_token_ids=[1000])}, "stop_token_ids"),
        ({"params": SamplingParams(stop_token_ids=[1007], min_tokens=2)}, "stop_token_ids"),
        ({"priority": 1}, "priority"),
        ({"priority": True}, "priority"),
        ({"priority": "high"}, "priority"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": 5}, "cache_salt"),
        ({"cache_salt": "\ud800"}, "cache_salt"),
        ({"cache_salt": "x" * 1025}, "cache_salt"),
    ],
)
def test_a_wrong_argument_is_named(make_engine, arguments, parameter):
    engine, _ = make_engine()
    call = {"request_id": "r", "prompt_token_ids": [1], "params": GREEDY} | arguments
    with pytest.raises(InvalidRequestError, match=parameter) as caught:
        engine.add_request(**call)
    assert caught.value.parameter == parameter


def test_ids_may_be_of_any_whole_number_type_and_what_only_looks_like_one_is_refused(make_engine):
    engine, _ = make_engine()
    engine.add_request("numpy", list(np.arange(3)), GREEDY)
    assert run_to_end(engine)["numpy"].token_ids == expected_tokens(range(3), 4, 1000)

    class Odd:
        def __index__(self) -> int:
            raise RuntimeError("not today")

    for odd in (np.array([1, 2]), Odd(), np.float32(1)):
        with pytest.raises(InvalidRequestError, match="at position 1 of the prompt is not in the vocabulary"):
            engine.add_request("odd", [1, odd], GREEDY)


def test_stops_that_leave_no_token_for_min_tokens_are_refused(make_engine):
    engine, _ = make_engine(eos_token_ids=frozenset({0}))
    with pytest.raises(InvalidRequestError, match="min_tokens is 1, and every token id would stop the request"):
        engine.add_request("r", [1], SamplingParams(min_tokens=1, stop_token_ids=range(1, 1000)))
    engine.add_request("r", [1], SamplingParams(min_tokens=1, stop_token_ids=range(2, 1000), max_tokens=1))
    assert len(run_to_end(engine)["r"].token_ids) == 1


def test_salts_are_refused_where_collisions_can_be_constructed(make_engine):
    engine, _ = make_engine()
    engine.accepts_cache_salts = False
    with pytest.raises(InvalidRequestError, match="choose hash_function='sha256'"):
        engine.add_request("r", [1], GREEDY, cache_salt="tenant")


def test_a_prompt_one_below_the_limit_gives_one_token(make_engine):
    engine, _ = make_engine(max_model_len=64)
    engine.add_request("r", range(63), GREEDY)
    record = run_to_end(engine)["r"]
    assert (len(record.token_ids), record.finish_reason) == (1, "length")


def test_requests_without_a_seed_differ_and_repeat_with_the_engine(make_engine):
    def seeds():
        engine, runner = make_engine()
        for number in range(3):
            engine.add_request(f"r{number}", [1], GREEDY)
        run_to_end(engine)
        return [row.seed for row in runner.plans[0].new_rows]

    assert seeds() == seeds()
    assert len(set(seeds())) == 3


def test_a_request_with_a_seed_keeps_it(make_engine):
    engine, runner = make_engine()
    engine.add_request("r", [1], SamplingParams(seed=7, max_tokens=1), choice=2)
    run_to_end(engine)
    (row,) = runner.plans[0].new_rows
    assert (row.seed, row.choice) == (7, 2)


def test_after_a_shutdown_the_engine_says_so(make_engine):
    engine, _ = make_engine()
    engine.shutdown()
    engine.shutdown()
    with pytest.raises(EngineClosedError, match="make a new one"):
        engine.step()
    with pytest.raises(EngineClosedError):
        engine.add_request("r", [1], GREEDY)


def test_a_reset_with_requests_under_way_is_refused_and_afterwards_complete(make_engine):
    engine, _ = make_engine()
    engine.add_request("p", range(9), GREEDY)
    run_to_end(engine)
    engine.add_request("q", range(50, 59), GREEDY)
    engine.step()
    refused = engine.reset_prefix_cache()
    assert not refused
    assert "under way" in refused.reason
    run_to_end(engine)
    assert engine.reset_prefix_cache()
    engine.add_request("p", range(9), GREEDY)
    assert run_to_end(engine)["p"].num_cached_tokens == 0


def random_trace(engine, runner, rng, num_requests):
    """Add, abort and step at random; return what each request asked for and what it got."""
    shared = [[rng.randrange(1000) for _ in range(rng.randint(1, 30))] for _ in range(4)]
    asked: dict[str, tuple[list[int], int]] = {}
    records: dict[str, Finished] = {}
    last_stats = engine.stats()
    while len(asked) < num_requests or engine.has_unfinished_requests():
        if len(asked) < num_requests and rng.random() < 0.5:
            request_id = f"r{len(asked)}"
            prompt = [*rng.choice(shared), *(rng.randrange(1000) for _ in range(rng.randint(0, 10)))]
            num_tokens = rng.randint(1, 40)
            salt = rng.choice([None, None, "a", "b"])
            skips = rng.random() < 0.1
            params = SamplingParams(temperature=0, max_tokens=num_tokens, skip_reading_prefix_cache=skips)
            engine.add_request(request_id, prompt, params, cache_salt=salt)
            asked[request_id] = (prompt, num_tokens)
        if asked and rng.random() < 0.06:
            engine.abort_request(rng.choice(list(asked)))
        if rng.random() < 0.04:
            runner.fail_next = RuntimeError("a step fails")
        with contextlib.suppress(StepError):
            collect(records, engine.step())
        runner.fail_next = None
        assert_pool_is_sound(engine.scheduler.kv_cache_manager.pool)
        assert_references_are_held(engine)
        assert not runner.plans or runner.plans[-1].num_tokens <= engine.scheduler.max_num_batched_tokens
        stats = engine.stats()
        for name in ("queried_tokens", "hit_tokens", "recomputed_tokens", "preemptions", "steps"):
            assert getattr(stats, name) >= getattr(last_stats, name)
        last_stats = stats
    return asked, records


def assert_references_are_held(engine):
    """Each block is referenced exactly as often as it stands in the tables of running requests."""
    pool = engine.scheduler.kv_cache_manager.pool
    counts = [0] * pool.num_blocks
    for request in engine.scheduler.running:
        for manager in engine.scheduler.kv_cache_manager.coordinator.managers:
            for block in manager.block_table(request.row).tolist():
                counts[block] += 1
    assert [pool.ref_count(block) for block in range(1, pool.num_blocks)] == counts[1:]


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("block_size", [1, 4, 7, 16])
@pytest.mark.parametrize("seed", range(6))
def test_every_answer_of_a_random_trace_is_the_cold_one(make_engine, seed, block_size, caching):
    rng = random.Random(1000 * seed + block_size)
    num_usable_blocks = -(-rng.choice([84, 100, 160]) // block_size)
    engine, runner = make_engine(
        num_usable_blocks,
        block_size,
        caching=caching,
        reuse=rng.random() < 0.7,
        max_num_seqs=rng.choice([1, 3, 8]),
        max_num_batched_tokens=rng.choice([1, 5, 17, 64]) if seed else 64,
        enable_chunked_prefill=bool(seed),
    )
    asked, records = random_trace(engine, runner, rng, 60)
    assert set(records) == set(asked)
    for request_id, (prompt, num_tokens) in asked.items():
        record = records[request_id]
        assert record.finish_reason in ("length", "abort")
        if record.finish_reason == "length":
            assert len(record.token_ids) == num_tokens
        assert record.token_ids == expected_tokens(prompt, len(record.token_ids), 1000)
        assert 0 <= record.num_cached_tokens < len(prompt)
    assert engine.stats().hit_tokens > 0 or not caching


def test_random_traces_do_preempt(make_engine):
    """The trace above proves nothing about preemption unless it happens."""
    engine, runner = make_engine(21, 4, max_num_seqs=8, max_num_batched_tokens=17)
    random_trace(engine, runner, random.Random(5), 60)
    assert engine.stats().preemptions > 10
    assert engine.stats().recomputed_tokens > 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(200))
def test_every_answer_of_many_more_random_traces_is_the_cold_one(make_engine, seed):
    rng = random.Random(seed)
    block_size = rng.choice([1, 2, 3, 4, 8, 16])
    engine, runner = make_engine(
        -(-rng.randint(84, 200) // block_size),
        block_size,
        caching=rng.random() < 0.8,
        reuse=rng.random() < 0.5,
        max_num_seqs=rng.randint(1, 12),
        max_num_batched_tokens=rng.randint(1, 80),
    )
    asked, records = random_trace(engine, runner, rng, 80)
    for request_id, (prompt, num_tokens) in asked.items():
        record = records[request_id]
        assert record.finish_reason == "abort" or len(record.token_ids) == num_tokens
        assert record.token_ids == expected_tokens(prompt, len(record.token_ids), 1000)
