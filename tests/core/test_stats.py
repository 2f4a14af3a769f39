"""What is counted, and what is said of requests that wait: small examples with exact numbers."""

import importlib
import random

import pytest
from hashing_engines import VOCAB_SIZE, assert_cold, finish, greedy, make_engine, scheduled, step

from octavo import SamplingParams
from octavo.core.stats import EngineStats
from octavo.errors import InvalidRequestError
from octavo.request_queues import FCFSQueue, PriorityQueue
from octavo.testing.engines import Finished


def counted(engine, *names):
    stats = engine.stats()
    return tuple(getattr(stats, name) for name in names)


CACHE_COUNTERS = ("prompt_tokens", "queried_tokens", "hit_tokens")
AFTER_PREEMPTION = ("preemptions", "recomputed_tokens", "found_tokens")


def assert_sum_of_computed_tokens(stats: EngineStats) -> None:
    """Whenever no request is under way, and none was aborted or failed."""
    assert (stats.running, stats.waiting) == (0, 0)
    assert stats.computed_tokens == (
        stats.prompt_tokens
        - stats.hit_tokens
        + stats.generated_tokens
        - stats.ended_requests
        + stats.recomputed_tokens
        - stats.found_tokens
    )


# -- the prefix cache ---------------------------------------------------------------------------------------------


def test_of_a_prompt_of_twelve_tokens_whose_first_eight_are_cached_twelve_were_queried_and_eight_hit():
    engine, _ = make_engine()
    engine.add_request("first", range(9), greedy(1))
    finish(engine)
    assert counted(engine, *CACHE_COUNTERS, "computed_tokens") == (9, 9, 0, 9)
    engine.add_request("second", [*range(8), 70, 71, 72, 73], greedy(3))
    assert counted(engine, "added_requests", "ended_requests", *CACHE_COUNTERS) == (2, 1, 9, 9, 0)
    finish(engine)
    assert counted(engine, *CACHE_COUNTERS) == (21, 21, 8)
    # Four of the prompt, and two of the three that were generated.
    assert counted(engine, "computed_tokens", "generated_tokens", "steps") == (15, 4, 4)
    assert counted(engine, "added_requests", "ended_requests") == (2, 2)
    assert counted(engine, *AFTER_PREEMPTION) == (0, 0, 0)
    assert_sum_of_computed_tokens(engine.stats())


def test_a_prompt_that_skips_the_cache_is_a_prompt_and_no_query():
    engine, _ = make_engine()
    for name in ("first", "again"):
        engine.add_request(name, range(9), greedy(1, skip_reading_prefix_cache=True))
        finish(engine)
    assert counted(engine, *CACHE_COUNTERS, "computed_tokens") == (18, 0, 0, 18)
    # It wrote what others find.
    engine.add_request("other", range(9), greedy(1))
    finish(engine)
    assert counted(engine, *CACHE_COUNTERS, "computed_tokens") == (27, 9, 8, 19)
    assert_sum_of_computed_tokens(engine.stats())


def test_where_the_cache_is_off_nothing_is_queried_registered_or_evicted():
    engine, _ = make_engine(4, caching=False)
    for _ in range(3):
        engine.add_request("r", range(9), greedy(1))
        finish(engine)
    assert counted(engine, *CACHE_COUNTERS, "computed_tokens") == (27, 0, 0, 27)
    assert counted(engine, "cached_blocks", "evicted_blocks") == (0, 0)
    assert_sum_of_computed_tokens(engine.stats())


def test_blocks_are_cached_while_they_are_held_and_free_and_evicted_when_another_takes_them():
    engine, _ = make_engine(4)
    engine.add_request("a", range(9), greedy(2))
    engine.step()
    assert counted(engine, "used_blocks", "free_blocks", "cached_blocks", "evicted_blocks") == (3, 1, 2, 0)
    finish(engine)
    assert counted(engine, "used_blocks", "free_blocks", "cached_blocks", "evicted_blocks") == (0, 4, 2, 0)
    # Two blocks have no key; the third that is needed is the tail of what can be found.
    engine.add_request("b", range(100, 109), greedy(1))
    finish(engine)
    assert counted(engine, "cached_blocks", "evicted_blocks") == (3, 1)


# -- preemption ---------------------------------------------------------------------------------------------------


def displaced(engine, prompt, num_tokens, by):
    """Run a request until it has so many tokens, let another displace it, and run both to their ends."""
    records = {"low": Finished()}
    engine.add_request("low", prompt, greedy(num_tokens - len(prompt) + 2), priority=1)
    while len(prompt) + len(records["low"].token_ids) < num_tokens:
        step(engine, records)
    engine.add_request("high", by, greedy(1))
    finish(engine, records)
    assert records["low"].num_preemptions == 1
    assert_cold(records["low"], prompt, num_tokens - len(prompt) + 2)
    assert_sum_of_computed_tokens(engine.stats())


def test_of_nine_tokens_that_were_computed_a_resumed_request_finds_four_and_recomputes_five():
    engine, _ = make_engine(3, queue=PriorityQueue(), max_num_seqs=1)
    # Of its three blocks the other one takes the two that go first: the one that is not full, and the second.
    displaced(engine, range(7), 10, by=range(100, 105))
    assert counted(engine, *AFTER_PREEMPTION) == (1, 5, 0)
    # What it finds again is no hit of a prompt.
    assert counted(engine, *CACHE_COUNTERS) == (12, 12, 0)
    # 11 of its 12 tokens, those again, and the other's prompt.
    assert counted(engine, "computed_tokens", "generated_tokens") == (11 + 5 + 5, 6)


def test_without_a_cache_a_resumed_request_recomputes_all_nine():
    engine, _ = make_engine(3, queue=PriorityQueue(), max_num_seqs=1, caching=False)
    displaced(engine, range(7), 10, by=range(100, 105))
    assert counted(engine, *AFTER_PREEMPTION) == (1, 9, 0)
    assert counted(engine, *CACHE_COUNTERS) == (12, 0, 0)


def test_tokens_that_another_computed_meanwhile_are_found_and_not_recomputed():
    engine, runner = make_engine(queue=PriorityQueue(), max_num_seqs=1, max_num_batched_tokens=4)
    engine.add_request("low", range(13), greedy(2), priority=1)
    records: dict[str, Finished] = {}
    step(engine, records)
    engine.add_request("high", [*range(12), 99], greedy(1))
    finish(engine, records)
    # It had four of its tokens when it gave way, and finds twelve: eight more.
    assert counted(engine, *AFTER_PREEMPTION) == (1, 0, 8)
    # The other one found the first four.
    assert counted(engine, *CACHE_COUNTERS) == (26, 26, 4)
    assert [step_ for step_ in scheduled(runner) if "low" in step_] == [{"low": 4}, {"low": 1}, {"low": 1}]
    assert_sum_of_computed_tokens(engine.stats())


@pytest.mark.parametrize("seed", range(6))
def test_resuming_is_never_a_hit_when_all_prompts_are_different(seed):
    rng = random.Random(seed)
    engine, _ = make_engine(8)
    prompts = {f"r{number}": [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(4, 9))] for number in range(6)}
    for request_id, prompt in prompts.items():
        engine.add_request(request_id, prompt, greedy(14))
    records = finish(engine)
    stats = engine.stats()
    assert stats.preemptions >= 3
    assert stats.hit_tokens == 0
    assert stats.recomputed_tokens > 0
    assert stats.queried_tokens == sum(map(len, prompts.values()))
    assert all(record.num_cached_tokens == 0 for record in records.values())
    assert sum(record.num_preemptions for record in records.values()) == stats.preemptions
    assert_sum_of_computed_tokens(stats)


# -- sums that always hold ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(24))
def test_after_a_random_load_the_counters_add_up(seed):
    rng = random.Random(seed)
    block_size, caching = rng.choice([1, 3, 4, 16]), rng.random() < 0.8
    queue = rng.choice([FCFSQueue, PriorityQueue])()
    engine, runner = make_engine(
        -(-rng.choice([84, 120]) // block_size),
        block_size,
        queue=queue,
        caching=caching,
        reuse=rng.random() < 0.6,
        max_num_seqs=rng.choice([1, 3, 8]),
        max_num_batched_tokens=rng.choice([3, 16, 64]),
        long_prefill_token_threshold=rng.choice([0, 0, 5]),
        watermark=rng.choice([0.0, 0.1]),
        async_scheduling=rng.random() < 0.5,
    )
    shared = [rng.randrange(VOCAB_SIZE) for _ in range(30)]
    prompt_tokens = queried_tokens = generated_tokens = 0
    records: dict[str, Finished] = {}
    num_added = 0
    while num_added < 40 or engine.has_unfinished_requests():
        if num_added < 40 and rng.random() < 0.5:
            prompt = [*shared[: rng.randint(0, 30)], *(rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 10)))]
            params = greedy(rng.randint(1, 30), skip_reading_prefix_cache=rng.random() < 0.2)
            engine.add_request(
                f"r{num_added}", prompt, params, priority=rng.randrange(3) if queue.heeds_priority else 0
            )
            prompt_tokens += len(prompt)
            queried_tokens += len(prompt) * (caching and not params.skip_reading_prefix_cache)
            generated_tokens += params.max_tokens
            num_added += 1
            continue
        if rng.random() < 0.03:
            engine.reset_prefix_cache(reset_running_requests=True)
        step(engine, records)
        stats = engine.stats()
        assert stats.hit_tokens <= stats.queried_tokens <= stats.prompt_tokens
        assert stats.free_blocks + stats.used_blocks == engine.scheduler.kv_cache_manager.pool.num_usable_blocks
        assert stats.added_requests == stats.running + stats.waiting + stats.ended_requests
    finish(engine, records)
    stats = engine.stats()
    assert_sum_of_computed_tokens(stats)
    assert (stats.added_requests, stats.ended_requests) == (40, 40)
    assert (stats.prompt_tokens, stats.queried_tokens) == (prompt_tokens, queried_tokens)
    assert stats.generated_tokens == generated_tokens == sum(len(record.token_ids) for record in records.values())
    assert stats.hit_tokens == sum(record.num_cached_tokens for record in records.values())
    assert stats.preemptions == sum(record.num_preemptions for record in records.values())
    # A plan whose request has ended since computes something for nobody.
    num_run = sum(plan.num_tokens for plan in runner.plans)
    assert stats.computed_tokens <= num_run
    assert stats.steps == sum(plan.num_tokens > 0 for plan in runner.plans)
    engine.shutdown()


def test_what_was_aborted_is_counted_as_ended_once_and_aborting_it_again_counts_nothing():
    engine, _ = make_engine()
    engine.add_request("a", range(5), greedy(8))
    engine.add_request("done", range(5), greedy(1))
    engine.step()
    assert engine.abort_request("a")
    before = engine.stats()
    assert before.ended_requests == 2
    for request_id in ("a", "done", "nobody", "a"):
        assert not engine.abort_request(request_id)
    assert engine.stats() == before
    assert engine.step().request_ids == ["a"]
    assert engine.stats().steps == before.steps


# -- why one waits ------------------------------------------------------------------------------------------------


def test_nobody_waits_and_nothing_is_said():
    engine, _ = make_engine()
    assert engine.stats().waiting_because is None
    engine.add_request("a", range(5), greedy(3))
    # Nobody has looked at it yet.
    assert counted(engine, "waiting", "waiting_because") == (1, None)
    engine.step()
    assert counted(engine, "waiting", "waiting_because") == (0, None)
    finish(engine)


def test_who_waits_for_memory_says_what_it_needs_what_is_free_and_what_is_kept():
    # A tenth of twenty blocks is kept while others run.
    engine, _ = make_engine(20, watermark=0.1)
    engine.add_request("a", range(40), greedy(4))
    engine.step()
    engine.add_request("b", range(100, 133), greedy(1))
    engine.step()
    assert engine.stats().waiting_because == ("WAIT_MEMORY: 9 blocks are needed, 9 are free, 2 of them kept for others")
    assert counted(engine, "waits_for_memory", "waits_for_step", "never_fitted") == (1, 0, 0)
    engine.step()
    assert engine.stats().waits_for_memory == 2
    finish(engine)
    # It was asked once more, in the last step of `a`.
    assert engine.stats().waits_for_memory == 3
    assert engine.stats().waiting_because is None


def test_blocks_that_a_prompt_under_way_will_take_are_kept_for_it():
    engine, _ = make_engine(10, max_num_batched_tokens=8)
    engine.add_request("a", range(24), greedy(1))
    engine.step()
    engine.add_request("b", range(100, 120), greedy(1))
    engine.step()
    # Six blocks for `a`, of which it has three when `b` is looked at.
    assert engine.stats().waiting_because == ("WAIT_MEMORY: 5 blocks are needed, 7 are free, 3 of them kept for others")
    finish(engine)


def test_where_nothing_is_kept_nothing_is_said_of_it():
    engine, _ = make_engine(4)
    engine.add_request("a", range(9), greedy(2))
    engine.step()
    engine.add_request("b", range(100, 107), greedy(1))
    engine.step()
    assert engine.stats().waiting_because == "WAIT_MEMORY: 2 blocks are needed, 1 are free"
    finish(engine)


def test_who_waits_for_a_prefix_that_is_being_computed_says_so_for_one_step():
    engine, _ = make_engine(reuse=False)
    engine.add_request("a", range(9), greedy(3))
    engine.add_request("b", [*range(8), 70], greedy(3))
    engine.step()
    assert engine.stats().waiting_because == "WAIT_STEP: its prefix is being computed in this step"
    assert counted(engine, "waits_for_step", "waits_for_memory", "never_fitted") == (1, 0, 0)
    engine.step()
    assert counted(engine, "waiting", "waiting_because", "waits_for_step") == (0, None, 1)
    finish(engine)


def test_who_waits_for_a_slot_or_for_a_part_of_the_budget_names_the_setting():
    engine, _ = make_engine(max_num_seqs=2, max_num_batched_tokens=8)
    engine.add_request("a", range(20), greedy(2))
    engine.step()
    for number in range(7):
        engine.add_request(f"r{number}", range(100 + number, 108 + number), greedy(3))
    engine.step()
    assert engine.stats().waiting_because == "no slot is free (max_num_seqs is 2)"
    finish(engine)
    engine, _ = make_engine(max_num_seqs=8, max_num_batched_tokens=2)
    for number in range(3):
        engine.add_request(f"r{number}", [number], greedy(3))
    engine.step()
    assert engine.stats().waiting_because == "the step's budget is spent (max_num_batched_tokens)"
    assert counted(engine, "waits_for_step", "waits_for_memory", "never_fitted") == (0, 0, 0)
    finish(engine)


def test_who_must_run_whole_and_does_not_fit_into_the_rest_of_a_step_says_how_much_is_left():
    engine, _ = make_engine(max_num_batched_tokens=16, enable_chunked_prefill=False)
    engine.add_request("a", range(10), greedy(2))
    engine.add_request("b", range(100, 110), greedy(2))
    engine.step()
    assert engine.stats().waiting_because == (
        "10 tokens must run in one step (enable_chunked_prefill=False), and this one has room for 6 more"
    )
    finish(engine)


def test_a_prompt_that_no_pool_of_this_size_could_hold_is_refused_with_both_numbers_and_the_next_one_runs():
    engine, _ = make_engine(7, max_model_len=64)
    with pytest.raises(InvalidRequestError) as caught:
        engine.add_request("big", range(40), greedy())
    assert str(caught.value) == (
        "The prompt of 40 tokens does not fit: 40 tokens take 10 blocks, and the whole KV cache has 7 (requests of "
        "up to 28 tokens). Shorten it, or give the engine more num_kv_blocks or kv_cache_memory_bytes."
    )
    assert caught.value.parameter == "prompt"
    assert counted(engine, "never_fitted", "added_requests", "waiting") == (1, 0, 0)
    engine.add_request("small", range(5), greedy(3))
    assert_cold(finish(engine)["small"], range(5), 3)
    assert counted(engine, "never_fitted", "added_requests", "waits_for_memory") == (1, 1, 0)


def test_a_prompt_of_max_model_len_tokens_or_one_more_is_refused_and_the_next_one_runs():
    engine, _ = make_engine(max_model_len=64)
    for length in (64, 65):
        with pytest.raises(InvalidRequestError) as caught:
            engine.add_request("long", range(length), greedy())
        assert str(caught.value) == (
            f"The prompt has {length} tokens, and max_model_len=64 leaves room for prompts of at most 63 and one new "
            "token. Shorten it; a longer max_model_len takes a model and a KV cache that allow it."
        )
    engine.add_request("normal", range(5), greedy(3))
    assert_cold(finish(engine)["normal"], range(5), 3)


def test_one_that_has_grown_out_of_the_pool_while_it_waited_never_fits():
    # `b` gives way when it fills two of the three blocks, and has a token too many by the time it would come back.
    engine, _ = make_engine(3, max_model_len=64, queue=PriorityQueue(), max_num_seqs=1)
    records = {"b": Finished()}
    engine.add_request("b", range(11), greedy(9), priority=1)
    while len(records["b"].token_ids) < 2:
        step(engine, records)
    engine.add_request("a", [1], greedy(1))
    finish(engine, records)
    assert (records["b"].finish_reason, records["b"].stop_reason) == ("length", "kv_cache_full")
    assert len(records["b"].token_ids) == 2
    assert counted(engine, "never_fitted", "preemptions", "waits_for_memory") == (1, 1, 0)


# -- where they can be seen ---------------------------------------------------------------------------------------

WATCHER = (
    "import octavo\ncontract_version = 1\nsteps = []\n@octavo.hookimpl\ndef step_finished(step): steps.append(step)\n"
)


def test_the_llm_and_its_observers_say_why_one_waits_and_what_did_not_fit(site, make_llm, tiny_folder):
    from fake_packages import install

    install(site, "watch", "[octavo.hooks]\nwatch = watch_module\n", watch_module=WATCHER)
    llm = make_llm(tiny_folder, hooks="watch", num_kv_blocks=9, block_size=4, max_model_len=64, max_num_seqs=4)
    with pytest.raises(InvalidRequestError) as caught:
        llm.generate([7] * 33, use_tqdm=False)
    assert str(caught.value) == (
        "The prompt of 33 tokens does not fit: 33 tokens take 9 blocks, and the whole KV cache has 8 (requests of "
        "up to 32 tokens). Shorten it, or give the engine more num_kv_blocks or kv_cache_memory_bytes."
    )
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)
    llm.generate([[5] * 18, [6] * 14], params, use_tqdm=False)
    steps = importlib.import_module("watch_module").steps
    assert [step_.stats.waiting_because for step_ in steps] == [
        *["WAIT_MEMORY: 4 blocks are needed, 3 are free"] * 3,
        "WAIT_MEMORY: 4 blocks are needed, 2 are free",
        *[None] * 4,
    ]
    assert [step_.stats.waits_for_memory for step_ in steps] == [1, 2, 3, 4, 4, 4, 4, 4]
    stats = llm.stats()
    assert stats == steps[-1].stats
    assert (stats.never_fitted, stats.waits_for_memory, stats.added_requests, stats.ended_requests) == (1, 4, 2, 2)
    assert (stats.prompt_tokens, stats.generated_tokens, stats.computed_tokens) == (32, 8, 38)
