"""Who gets which part of a step's budget."""

import pytest

from octavo.core.sampling_params import SamplingParams
from octavo.testing.engines import run_to_end
from octavo.testing.hashing_runner import expected_tokens


def greedy(max_tokens=2):
    return SamplingParams(max_tokens=max_tokens, temperature=0)


def scheduled(runner):
    """Return each step's {request id: new tokens}."""
    return [dict(zip(plan.request_ids, plan.num_new_tokens.tolist(), strict=True)) for plan in runner.plans]


def first_tokens(engine):
    """Run to the end; return in which step each request had its first token, counted from 1."""
    first: dict[str, int] = {}
    step = 0
    while engine.has_unfinished_requests():
        step += 1
        for request_id in engine.step().request_ids:
            first.setdefault(request_id, step)
    return first


def distinct(number, length):
    """Return a prompt that begins like no other."""
    return range(number * 10_000, number * 10_000 + length)


# -- prompts that come together ---------------------------------------------------------------------------------


def test_a_short_prompt_behind_a_long_one_has_its_first_token_in_the_step_in_which_it_is_admitted(make_engine):
    engine, runner = make_engine(600, 16, max_num_batched_tokens=2048, max_model_len=8192)
    engine.vocab_size = 10**6
    engine.add_request("long", distinct(0, 4000), greedy())
    engine.step()
    engine.add_request("short", distinct(1, 5), greedy())
    assert first_tokens(engine)["short"] == 1
    # Half of 2048 is kept for whoever comes behind, and what is left of it is not wasted.
    assert scheduled(runner)[:2] == [{"long": 2048}, {"long": 1952, "short": 5}]


def test_of_several_prompts_each_gets_half_of_what_is_left_and_at_least_an_eighth_of_the_budget(make_engine):
    engine, runner = make_engine(900, 4, max_num_batched_tokens=64, max_model_len=1024)
    engine.vocab_size = 10**6
    for number in range(6):
        engine.add_request(f"r{number}", distinct(number, 300), greedy())
    engine.step()
    # 64 / 2, 32 / 2, then 64 / 8 until nothing is left.
    assert scheduled(runner)[0] == {"r0": 32, "r1": 16, "r2": 8, "r3": 8}
    run_to_end(engine)


def test_prompts_under_way_keep_their_order_and_the_first_is_done_first(make_engine):
    engine, _ = make_engine(900, 4, max_num_batched_tokens=64, max_model_len=1024)
    engine.vocab_size = 10**6
    for number in range(4):
        engine.add_request(f"r{number}", distinct(number, 200), greedy())
    first = first_tokens(engine)
    assert sorted(first, key=first.get) == ["r0", "r1", "r2", "r3"]
    # 800 tokens of prompts, at 64 a step less one for each that generates.
    assert max(first.values()) <= 14


def test_what_others_do_not_need_goes_to_the_prompt_that_made_room_for_them(make_engine):
    engine, runner = make_engine(64, 4, max_num_batched_tokens=16)
    engine.add_request("a", distinct(0, 40), greedy())
    engine.vocab_size = 10**6
    engine.add_request("b", distinct(1, 3), greedy())
    engine.step()
    assert scheduled(runner)[0] == {"a": 13, "b": 3}
    run_to_end(engine)


def test_generating_requests_get_their_token_before_prompts_get_theirs(make_engine):
    engine, runner = make_engine(max_num_batched_tokens=6)
    engine.add_request("a", range(3), greedy(20))
    engine.add_request("b", range(100, 103), greedy(20))
    engine.step()
    engine.step()
    engine.add_request("c", range(200, 230), greedy(2))
    for _ in range(8):
        engine.step()
    assert all(step == {"a": 1, "b": 1, "c": 4} for step in scheduled(runner)[2:9])
    run_to_end(engine)


def test_a_prompt_goes_on_where_generating_requests_could_use_all_of_the_budget(make_engine):
    engine, runner = make_engine(max_num_batched_tokens=4)
    for number in range(4):
        engine.add_request(f"r{number}", [number], greedy(12))
    engine.step()
    # Admitted in place of nobody: a slot is free, and no budget is.
    engine.add_request("long", range(50, 60), greedy(2))
    run_to_end(engine)
    steps = scheduled(runner)
    assert steps[1] == {"r0": 1, "r1": 1, "r2": 1, "r3": 1}
    assert "long" in steps[12]


# -- the threshold ----------------------------------------------------------------------------------------------


def test_with_a_threshold_no_prompt_gets_more_in_a_step_even_alone(make_engine):
    engine, runner = make_engine(128, 4, max_num_batched_tokens=64, long_prefill_token_threshold=32)
    engine.add_request("a", range(100), greedy(1))
    records = run_to_end(engine)
    assert [step["a"] for step in scheduled(runner)] == [32, 32, 32, 4]
    assert records["a"].token_ids == expected_tokens(range(100), 1, 1000)


def test_with_a_threshold_a_short_prompt_is_served_beside_a_long_one(make_engine):
    engine, runner = make_engine(128, 4, max_num_batched_tokens=64, long_prefill_token_threshold=32)
    engine.add_request("long", range(400), greedy(2))
    engine.step()
    engine.add_request("short", range(500, 505), greedy(2))
    assert first_tokens(engine)["short"] <= 2
    assert scheduled(runner)[1] == {"long": 32, "short": 5}


# -- beginnings that prompts share ------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [8, 16, 64])
def test_a_beginning_that_prompts_share_is_computed_once(make_engine, budget):
    engine, _ = make_engine(128, 4, max_num_batched_tokens=budget)
    prompts = {f"r{number}": [*range(100), 500 + number] for number in range(4)}
    for request_id, prompt in prompts.items():
        engine.add_request(request_id, prompt, greedy())
    records = run_to_end(engine)
    assert [records[request_id].num_cached_tokens for request_id in prompts] == [0, 100, 100, 100]
    # Each has its own last token, and computes its first new one.
    assert engine.stats().computed_tokens == 100 + 4 * 2
    for request_id, prompt in prompts.items():
        assert records[request_id].token_ids == expected_tokens(prompt, 2, 1000)


def test_who_waits_for_a_shared_beginning_is_passed_by_others_and_told_why(make_engine):
    engine, runner = make_engine(128, 4, max_num_batched_tokens=16)
    engine.add_request("first", range(60), greedy())
    engine.add_request("same", [*range(60), 7], greedy())
    engine.add_request("other", range(500, 505), greedy())
    engine.step()
    assert scheduled(runner)[0] == {"first": 11, "other": 5}
    stats = engine.stats()
    assert stats.waiting_because == "WAIT_STEP: its prefix is being computed by 'first'"
    assert stats.waits_for_step == 1
    records = run_to_end(engine)
    assert records["same"].num_cached_tokens == 60
    assert records["same"].token_ids == expected_tokens([*range(60), 7], 2, 1000)


def test_who_passes_takes_no_slot_from_those_that_wait_for_a_shared_beginning(make_engine):
    engine, runner = make_engine(128, 4, max_num_batched_tokens=16, max_num_seqs=2)
    engine.add_request("first", range(60), greedy(20))
    engine.add_request("same", [*range(60), 7], greedy(2))
    engine.add_request("other", range(500, 505), greedy(20))
    records = run_to_end(engine)
    first_step = {}
    for number, step in enumerate(scheduled(runner)):
        for request_id in step:
            first_step.setdefault(request_id, number)
    assert first_step["same"] < first_step["other"]
    assert records["same"].num_cached_tokens == 60


@pytest.mark.parametrize(("num_usable_blocks", "passes"), [(18, True), (17, False)])
def test_who_passes_takes_no_memory_from_those_that_wait_for_a_shared_beginning(make_engine, num_usable_blocks, passes):
    engine, runner = make_engine(num_usable_blocks, 4, max_num_batched_tokens=16)
    engine.add_request("first", range(60), greedy(1))
    # Sixteen blocks, of which it shares fifteen. The other one takes two.
    engine.add_request("same", [*range(60), 7], greedy(1))
    engine.add_request("other", range(500, 505), greedy(1))
    engine.step()
    engine.step()
    assert ("other" in scheduled(runner)[0]) == passes
    run_to_end(engine)


@pytest.mark.parametrize("options", [{"skip_reading_prefix_cache": True}, {}])
def test_who_finds_nothing_in_the_cache_waits_for_nobody(make_engine, options):
    engine, runner = make_engine(128, 4, max_num_batched_tokens=16, caching=bool(options))
    for number in range(2):
        engine.add_request(f"r{number}", range(30), SamplingParams(max_tokens=2, temperature=0, **options))
    engine.step()
    assert scheduled(runner)[0] == {"r0": 8, "r1": 8}
    run_to_end(engine)


def test_salts_that_differ_share_no_beginning_to_wait_for(make_engine):
    engine, runner = make_engine(128, 4, max_num_batched_tokens=16)
    for salt in "ab":
        engine.add_request(salt, range(30), greedy(), cache_salt=salt)
    engine.step()
    assert scheduled(runner)[0] == {"a": 8, "b": 8}
    run_to_end(engine)


def test_where_the_one_that_computes_a_shared_beginning_is_aborted_the_next_computes_it(make_engine):
    engine, _ = make_engine(128, 4, max_num_batched_tokens=16)
    engine.add_request("first", range(60), greedy())
    engine.add_request("same", range(60), greedy())
    engine.step()
    engine.abort_request("first")
    records = run_to_end(engine)
    assert records["same"].num_cached_tokens == 16
    assert records["same"].token_ids == expected_tokens(range(60), 2, 1000)
