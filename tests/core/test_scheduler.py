"""Which tokens are computed when, for whom, and what happens when memory runs out."""

import pytest

from octavo.core.sampling_params import SamplingParams
from octavo.core.verdict import Fit
from octavo.errors import InvalidRequestError, PluginBroken, PluginContractError, StepError
from octavo.request_queues import FCFSQueue
from octavo.testing.engines import Finished, assert_nothing_leaks, collect, make_hashing_engine, run_to_end
from octavo.testing.hashing_runner import UNWRITTEN, expected_tokens


def greedy(max_tokens=8, **options):
    return SamplingParams(max_tokens=max_tokens, temperature=0, **options)


def scheduled(runner):
    """Return each step's {request id: new tokens}."""
    return [dict(zip(plan.request_ids, plan.num_new_tokens.tolist(), strict=True)) for plan in runner.plans]


def assert_cold(record: Finished, prompt, num_tokens):
    assert record.token_ids == expected_tokens(prompt, num_tokens, 1000)


# -- chunked prefill --------------------------------------------------------------------------------------------


def test_a_long_prompt_is_cut_to_what_decoding_requests_leave_of_the_budget(make_engine):
    engine, runner = make_engine(400, 16, max_num_batched_tokens=256, max_model_len=2000)
    engine.add_request("a", [1, 2, 3], greedy(20))
    engine.add_request("b", [4, 5, 6], greedy(20))
    engine.step()
    engine.add_request("long", range(1000), greedy(2))
    records: dict[str, Finished] = {}
    for step in range(4):
        output = engine.step()
        collect(records, output)
        # The decoding requests get a token in every step; the prompt samples in its last one.
        assert {"a", "b"} <= set(output.request_ids)
        assert ("long" in output.request_ids) == (step == 3)
    assert [step.get("long") for step in scheduled(runner)] == [None, 254, 254, 254, 238]
    for request_id, record in run_to_end(engine).items():
        records[request_id].token_ids += record.token_ids
    assert_cold(records["long"], range(1000), 2)


def test_a_packed_step_lists_rows_with_one_new_token_first(make_engine):
    engine, runner = make_engine(100, 16, max_num_batched_tokens=64)
    engine.add_request("old", range(40), greedy(4))
    engine.step()
    engine.add_request("new", range(100, 120), greedy(4))
    engine.step()
    plan = runner.plans[-1]
    assert plan.request_ids == ["old", "new"]
    assert plan.num_decode_entries == 1
    assert plan.num_new_tokens.tolist() == [1, 20]
    assert plan.first_positions.tolist() == [40, 0]
    assert plan.samples.tolist() == [True, True]
    run_to_end(engine)


@pytest.mark.parametrize("budget", [1, 3, 4, 5, 16, 37])
def test_tokens_do_not_depend_on_how_a_prompt_is_cut(make_engine, budget):
    engine, runner = make_engine(max_num_batched_tokens=budget)
    engine.add_request("r", range(37), greedy())
    assert_cold(run_to_end(engine)["r"], range(37), 8)
    assert all(sum(step.values()) <= budget for step in scheduled(runner))


def test_a_last_chunk_of_one_token_samples_exactly_once(make_engine):
    engine, runner = make_engine(max_num_batched_tokens=4)
    engine.add_request("r", range(9), greedy(1))
    record = run_to_end(engine)["r"]
    assert_cold(record, range(9), 1)
    assert record.finish_reason == "length"
    assert [step["r"] for step in scheduled(runner)] == [4, 4, 1]


def test_without_chunked_prefill_a_prompt_runs_whole_or_waits(make_engine):
    engine, runner = make_engine(max_num_batched_tokens=16, enable_chunked_prefill=False)
    engine.add_request("a", range(10), greedy(3))
    engine.add_request("b", range(100, 110), greedy(3))
    records = run_to_end(engine)
    assert [step.get("b") for step in scheduled(runner)][:2] == [None, 10]
    assert_cold(records["b"], range(100, 110), 3)


def test_without_chunked_prefill_a_prompt_longer_than_the_budget_is_refused(make_engine):
    engine, _ = make_engine(max_num_batched_tokens=16, enable_chunked_prefill=False)
    with pytest.raises(InvalidRequestError, match=r"17 tokens, .* one step of 16.*raise max_num_batched_tokens"):
        engine.add_request("r", range(17), greedy())


def test_without_chunked_prefill_a_request_that_outgrew_the_budget_still_resumes(make_engine):
    engine, _runner = make_engine(6, 4, max_num_batched_tokens=12, enable_chunked_prefill=False)
    engine.add_request("a", range(8), greedy(14))
    engine.add_request("b", range(100, 108), greedy(14))
    records = run_to_end(engine)
    assert records["b"].num_preemptions > 0
    assert_cold(records["a"], range(8), 14)
    assert_cold(records["b"], range(100, 108), 14)


# -- admission --------------------------------------------------------------------------------------------------


def test_no_more_requests_run_than_there_are_slots(make_engine):
    engine, runner = make_engine(max_num_seqs=2)
    for number in range(5):
        engine.add_request(f"r{number}", [number], greedy(3))
    records = run_to_end(engine)
    assert max(len(step) for step in scheduled(runner)) == 2
    assert all(len(record.token_ids) == 3 for record in records.values())


def test_a_prompt_that_the_whole_cache_cannot_hold_is_refused_with_both_numbers(make_engine):
    engine, _ = make_engine(7, 4, max_model_len=64)
    with pytest.raises(
        InvalidRequestError,
        match=r"prompt of 40 tokens does not fit.*10 blocks.* has 7 \(requests of up to 28 tokens\)",
    ):
        engine.add_request("big", range(40), greedy())
    engine.add_request("small", range(5), greedy())
    assert_cold(run_to_end(engine)["small"], range(5), 8)


def test_a_prompt_is_admitted_only_when_all_of_it_fits(make_engine):
    engine, _runner = make_engine(8, 4, max_num_batched_tokens=8)
    engine.add_request("a", range(16), greedy(8))
    engine.add_request("b", range(100, 120), greedy(1))
    records = run_to_end(engine)
    # Five blocks for b are free only once a has ended; it was never begun and thrown away.
    assert records["b"].num_preemptions == records["a"].num_preemptions == 0
    assert_cold(records["b"], range(100, 120), 1)


def test_while_a_prompt_is_under_way_no_later_one_takes_the_blocks_that_it_needs(make_engine):
    engine, runner = make_engine(8, 4, max_num_batched_tokens=8)
    engine.add_request("a", range(24), greedy(1))
    engine.add_request("b", range(100, 112), greedy(1))
    records = run_to_end(engine)
    assert [set(step) for step in scheduled(runner)[:4]] == [{"a"}, {"a"}, {"a"}, {"b"}]
    assert records["a"].num_preemptions == 0
    assert_cold(records["a"], range(24), 1)


def test_a_short_prompt_does_not_overtake_the_head_of_the_line(make_engine):
    engine, runner = make_engine(8, 4)
    engine.add_request("a", range(16), greedy(8))
    engine.step()
    engine.add_request("big", range(100, 120), greedy(1))
    engine.add_request("small", [7], greedy(1))
    run_to_end(engine)
    first_seen = {}
    for number, step in enumerate(scheduled(runner)):
        for request_id in step:
            first_seen.setdefault(request_id, number)
    assert first_seen["big"] <= first_seen["small"]


def test_two_requests_of_one_step_share_the_blocks_that_the_first_fills(make_engine):
    engine, runner = make_engine()
    engine.add_request("a", range(9), greedy())
    engine.add_request("b", [*range(8), 70], greedy())
    records = run_to_end(engine)
    assert scheduled(runner)[0] == {"a": 9, "b": 1}
    assert records["b"].num_cached_tokens == 8
    assert_cold(records["b"], [*range(8), 70], 8)


def test_where_a_layer_does_not_write_before_it_reads_sharing_waits_for_the_next_step(make_engine):
    engine, runner = make_engine(reuse=False)
    engine.add_request("a", range(9), greedy())
    engine.add_request("b", [*range(8), 70], greedy())
    records = run_to_end(engine)
    assert scheduled(runner)[0] == {"a": 9}
    assert scheduled(runner)[1] == {"a": 1, "b": 1}
    assert_cold(records["b"], [*range(8), 70], 8)


# -- preemption -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [3, 4, 5, 9])
def test_a_preempted_request_resumes_exactly(make_engine, length):
    engine, _runner = make_engine(6, 4)
    prompts = {"a": range(length), "b": range(100, 100 + length)}
    for request_id, prompt in prompts.items():
        engine.add_request(request_id, prompt, greedy(14))
    records = run_to_end(engine)
    assert records["b"].num_preemptions >= 1
    assert records["a"].num_preemptions == 0
    for request_id, prompt in prompts.items():
        assert_cold(records[request_id], prompt, 14)
    assert engine.stats().preemptions == records["b"].num_preemptions


def test_a_resumed_request_computes_what_the_cache_no_longer_has_and_samples_once(make_engine):
    engine, runner = make_engine(8, 4, max_num_batched_tokens=8)
    engine.add_request("a", [1, 2, 3], greedy(29))
    engine.add_request("b", [101, 102, 103], greedy(20))
    records = run_to_end(engine)
    assert records["b"].num_preemptions >= 1
    assert_cold(records["a"], [1, 2, 3], 29)
    assert_cold(records["b"], [101, 102, 103], 20)
    num_known = {"a": 3, "b": 3}
    for plan in runner.plans:
        for entry, request_id in enumerate(plan.request_ids):
            num_computed = int(plan.first_positions[entry] + plan.num_new_tokens[entry])
            assert plan.samples[entry] == (num_computed == num_known[request_id])
            num_known[request_id] += int(plan.samples[entry])
    assert num_known == {"a": 32, "b": 23}


def test_a_step_with_only_a_resumed_request_is_a_prefill_of_all_its_tokens(make_engine):
    engine, runner = make_engine(8, 4, caching=False, max_num_batched_tokens=8)
    engine.add_request("a", range(50, 55), greedy(27))
    engine.add_request("r", [1, 2, 3], greedy(24))
    records = run_to_end(engine)
    assert records["r"].num_preemptions == 1
    assert_cold(records["r"], [1, 2, 3], 24)
    resumed = next(
        number
        for number, plan in enumerate(runner.plans)
        if number and plan.request_ids == ["r"] and plan.first_positions[0] == 0
    )
    chunks = []
    for plan in runner.plans[resumed:]:
        chunks.append(int(plan.num_new_tokens[0]))
        if plan.samples[0]:
            break
    assert all(chunk == 8 for chunk in chunks[:-1])
    assert len(chunks) >= 2
    assert sum(chunks) > 8


def test_the_latest_arrival_is_given_up_first_and_keeps_its_place_in_line(make_engine):
    engine, runner = make_engine(9, 4)
    for number, request_id in enumerate("abc"):
        engine.add_request(request_id, range(100 * number, 100 * number + 8), greedy(16))
    engine.step()
    engine.add_request("later", range(900, 908), greedy(16))
    records = run_to_end(engine)
    steps = scheduled(runner)
    assert records["a"].num_preemptions == 0
    assert records["c"].num_preemptions >= 1
    # The later one needs fewer blocks than c, and still c comes back first.
    preempted = next(number for number, step in enumerate(steps) if "c" not in step)
    resumed = next(number for number, step in enumerate(steps) if number > preempted and "c" in step)
    assert not any("later" in step for step in steps[:resumed])


def test_a_victim_that_was_already_planned_in_this_step_leaves_no_keys_behind(make_engine):
    """Its block is sealed by the plan, then it is displaced: nothing will ever fill that block."""
    engine, runner = make_engine(6, 4, max_num_seqs=2)
    scheduler, pool = engine.scheduler, engine.scheduler.kv_cache_manager.pool
    engine.add_request("a", range(4), greedy(20))
    engine.add_request("b", range(100, 104), greedy(20))
    engine.step()
    # Now a returns to the end of the running list, behind b, which arrived later.
    a = next(request for request in scheduler.running if request.request_id == "a")
    scheduler.running.remove(a)
    scheduler.running.append(a)
    records: dict[str, Finished] = {"a": Finished(), "b": Finished()}
    while engine.stats().preemptions == 0:
        collect(records, engine.step())
        for blocks in pool.cached_blocks().values():
            for block in blocks:
                assert UNWRITTEN not in runner.tokens_in(block), f"block {block} can be found, and nobody filled it"
    run_to_end(engine)
    for prompt in (range(4), range(100, 104)):
        longer = [*prompt, *expected_tokens(prompt, 16, 1000)]
        engine.add_request("again", longer, greedy(3))
        assert_cold(run_to_end(engine)["again"], longer, 3)


def test_a_lone_request_that_fills_the_cache_ends_with_length_and_the_reason(make_engine):
    engine, _ = make_engine(7, 4, max_model_len=64)
    engine.add_request("r", range(20), greedy(40))
    record = run_to_end(engine)["r"]
    assert (record.finish_reason, record.stop_reason) == ("length", "kv_cache_full")
    # 28 tokens have keys and values; the 29th was sampled from them.
    assert_cold(record, range(20), 9)
    assert record.num_preemptions == 0


def test_a_preempted_request_that_outgrew_the_cache_ends_instead_of_waiting_for_ever(make_engine):
    engine, _ = make_engine(7, 4, max_model_len=64)
    engine.add_request("a", range(6), greedy(40))
    engine.add_request("b", range(100, 106), greedy(40))
    records = run_to_end(engine)
    for request_id, prompt in (("a", range(6)), ("b", range(100, 106))):
        assert (records[request_id].finish_reason, records[request_id].stop_reason) == ("length", "kv_cache_full")
        assert_cold(records[request_id], prompt, len(records[request_id].token_ids))
        assert len(records[request_id].token_ids) == 23


def test_eight_requests_in_a_cache_for_three_all_finish_as_if_alone(make_engine):
    engine, _ = make_engine(24, 4)
    for number in range(8):
        engine.add_request(f"r{number}", [number, 1, 2], greedy(32, ignore_eos=True))
    records = run_to_end(engine)
    for number in range(8):
        assert_cold(records[f"r{number}"], [number, 1, 2], 32)


# -- endings ----------------------------------------------------------------------------------------------------


def test_end_of_sequence_goes_before_stop_ids_and_both_before_length(make_engine):
    first = expected_tokens([1, 2], 3, 1000)
    engine, _ = make_engine(eos_token_ids=frozenset({first[1]}))
    engine.add_request("eos", [1, 2], greedy(2, stop_token_ids=[first[1]]))
    engine.add_request("ignored", [1, 2], greedy(3, ignore_eos=True))
    engine.add_request("stop", [1, 2], greedy(3, ignore_eos=True, stop_token_ids=[first[1]]))
    engine.add_request("length", [1, 2], greedy(1))
    records = run_to_end(engine)
    assert [(records[r].finish_reason, records[r].stop_reason) for r in ("eos", "ignored", "stop", "length")] == [
        ("stop", None),
        ("length", None),
        ("stop", first[1]),
        ("length", None),
    ]
    assert records["eos"].token_ids == first[:2]
    assert records["ignored"].token_ids == first


def test_a_request_ends_at_max_model_len_when_it_asks_for_more(make_engine):
    engine, _ = make_engine(max_model_len=10)
    engine.add_request("r", range(9), greedy(50))
    engine.add_request("open", range(4), SamplingParams(max_tokens=None, temperature=0))
    records = run_to_end(engine)
    assert (len(records["r"].token_ids), records["r"].finish_reason) == (1, "length")
    assert len(records["open"].token_ids) == 6


def test_an_aborted_request_leaves_at_once_and_is_reported_once(make_engine):
    engine, _ = make_engine()
    engine.add_request("running", range(9), greedy(50))
    engine.add_request("other", range(5), greedy(4))
    engine.step()
    engine.add_request("waiting", range(7), greedy(50))
    free = engine.stats().free_blocks
    assert engine.abort_request("waiting")
    assert engine.stats().free_blocks == free
    assert engine.abort_request("running")
    assert engine.stats().running == 1
    assert not engine.abort_request("running")
    assert not engine.abort_request("nobody")
    output = engine.step()
    assert sorted(
        r for r, reason in zip(output.request_ids, output.finish_reasons, strict=True) if reason == "abort"
    ) == [
        "running",
        "waiting",
    ]
    run_to_end(engine)


def test_a_request_aborted_while_its_step_runs_is_dropped_when_the_output_comes(make_engine):
    engine, runner = make_engine()
    engine.add_request("gone", range(9), greedy())
    engine.add_request("stays", range(50, 55), greedy())
    plan = engine.scheduler.schedule()
    engine.abort_request("gone")
    # Its id is in use again before the output arrives.
    engine.add_request("gone", range(70, 73), greedy(2))
    output = engine.scheduler.update_from_output(plan, runner.run(plan))
    assert sorted(output.request_ids) == ["gone", "stays"]
    assert output.finish_reasons[output.request_ids.index("gone")] == "abort"
    records = run_to_end(engine)
    assert_cold(records["gone"], range(70, 73), 2)


def test_blocks_of_a_request_aborted_before_its_step_ran_are_not_found_by_the_next(make_engine):
    engine, _ = make_engine()
    engine.add_request("gone", range(13), greedy())
    plan = engine.scheduler.schedule()
    engine.abort_request("gone")
    engine.take_ended()
    assert engine.scheduler.roll_back(plan) == []
    engine.add_request("next", range(13), greedy())
    record = run_to_end(engine)["next"]
    assert record.num_cached_tokens == 0
    assert_cold(record, range(13), 8)


def test_an_ended_id_can_be_used_again_and_one_under_way_cannot(make_engine):
    engine, _ = make_engine()
    engine.add_request("r", range(5), greedy(2))
    with pytest.raises(InvalidRequestError, match="id 'r' is under way"):
        engine.add_request("r", range(6), greedy(2))
    assert_cold(run_to_end(engine)["r"], range(5), 2)
    engine.add_request("r", range(6), greedy(2))
    assert_cold(run_to_end(engine)["r"], range(6), 2)


# -- failures ---------------------------------------------------------------------------------------------------


def test_when_a_step_fails_half_way_nothing_of_it_is_reused(make_engine):
    engine, runner = make_engine()
    engine.add_request("a", range(13), greedy())
    engine.add_request("b", [*range(12), 70, 71], greedy())
    runner.fail_next = RuntimeError("the device is gone")
    with pytest.raises(StepError, match="RuntimeError: the device is gone") as caught:
        engine.step()
    assert caught.value.request_ids == ["a", "b"]
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert engine.stats().running == 0
    assert engine.stats().waiting == 2
    assert engine.scheduler.kv_cache_manager.pool.num_cached_blocks == 0
    records = run_to_end(engine)
    assert_cold(records["a"], range(13), 8)
    assert_cold(records["b"], [*range(12), 70, 71], 8)


def test_a_step_that_fails_in_the_middle_of_an_answer_doubles_and_loses_no_token(make_engine):
    engine, runner = make_engine(max_num_batched_tokens=6)
    prompts = {"a": range(9), "b": range(50, 58)}
    for request_id, prompt in prompts.items():
        engine.add_request(request_id, prompt, greedy(9))
    records: dict[str, Finished] = {}
    for step in range(200):
        if not engine.has_unfinished_requests():
            break
        if step % 3 == 2:
            runner.fail_next = RuntimeError("now and then")
            with pytest.raises(StepError, match="now and then"):
                engine.step()
        else:
            collect(records, engine.step())
    for request_id, prompt in prompts.items():
        assert_cold(records[request_id], prompt, 9)
    assert engine.stats().preemptions == 0


def test_a_request_whose_logits_are_not_finite_ends_alone_and_its_blocks_are_forgotten(make_engine):
    engine, runner = make_engine()
    runner.failing_request_ids = {"bad"}
    engine.add_request("bad", range(9), greedy())
    engine.add_request("good", range(50, 59), greedy())
    records = run_to_end(engine)
    assert (records["bad"].finish_reason, records["bad"].stop_reason) == ("error", "non_finite_logits")
    assert records["bad"].token_ids == []
    assert_cold(records["good"], range(50, 59), 8)
    runner.failing_request_ids = set()
    engine.add_request("bad", range(9), greedy())
    assert run_to_end(engine)["bad"].num_cached_tokens == 0


def test_who_began_with_what_another_left_is_computed_anew_from_nothing_when_its_logits_are_not_finite(
    make_engine, caplog
):
    engine, runner = make_engine(40, 4)
    params = SamplingParams(temperature=0, max_tokens=3)
    engine.add_request("first", range(20), params)
    run_to_end(engine)
    engine.add_request("second", [*range(20), 50, 51], params)
    # What it found is to be at fault: with it the first token cannot be sampled.
    runner.failing_request_ids = {"second"}
    finished: dict[str, Finished] = {}
    collect(finished, engine.step())
    assert "second" not in finished
    assert caplog.messages == [
        "the logits of 'second' are not finite; it is computed anew without the prefix cache, where it had found "
        "20 tokens"
    ]
    runner.failing_request_ids = set()
    finished = run_to_end(engine)
    assert finished["second"].token_ids == expected_tokens([*range(20), 50, 51], 3, 1000)
    assert (finished["second"].finish_reason, finished["second"].num_preemptions) == ("length", 0)
    assert runner.plans[-3].num_tokens == 22


def test_who_fails_from_nothing_as_well_ends(make_engine):
    engine, runner = make_engine(40, 4)
    params = SamplingParams(temperature=0, max_tokens=3)
    engine.add_request("first", range(20), params)
    run_to_end(engine)
    runner.failing_request_ids = {"second"}
    engine.add_request("second", [*range(20), 50, 51], params)
    num_plans = len(runner.plans)
    second = run_to_end(engine)["second"]
    assert (second.finish_reason, second.stop_reason, second.token_ids) == ("error", "non_finite_logits", [])
    assert [plan.num_tokens for plan in runner.plans[num_plans:]] == [2, 22]


# -- counters ---------------------------------------------------------------------------------------------------


def test_queried_and_hit_tokens_count_each_request_once(make_engine):
    engine, _ = make_engine()
    engine.add_request("a", range(9), greedy(1))
    run_to_end(engine)
    engine.add_request("b", range(9), greedy(1))
    run_to_end(engine)
    stats = engine.stats()
    assert (stats.queried_tokens, stats.hit_tokens, stats.recomputed_tokens) == (18, 8, 0)


def test_resuming_counts_as_recomputation_and_not_as_a_hit(make_engine):
    engine, _ = make_engine(8, 4)
    for number in range(6):
        engine.add_request(f"r{number}", range(100 * number, 100 * number + 6), greedy(12))
    run_to_end(engine)
    stats = engine.stats()
    assert stats.preemptions >= 3
    assert stats.hit_tokens == 0
    assert stats.queried_tokens == 36
    assert stats.recomputed_tokens > 0


def test_without_a_cache_every_preempted_token_is_recomputed(make_engine):
    engine, runner = make_engine(6, 4, caching=False)
    engine.add_request("a", range(8), greedy(14))
    engine.add_request("b", range(100, 108), greedy(14))
    run_to_end(engine)
    total = sum(plan.num_tokens for plan in runner.plans)
    # Each request computes its prompt and all but its last token once; the rest was computed again.
    assert total == 2 * (8 + 13) + engine.stats().recomputed_tokens


def test_a_verdict_is_true_exactly_when_it_fits(make_kv):
    kv = make_kv(2, 4)
    assert kv.could_ever_hold(8)
    assert kv.could_ever_hold(9).fit is Fit.NEVER
    assert kv.could_ever_hold(9).reason == "9 tokens take 3 blocks, and the whole KV cache has 2"


# -- a queue of somebody else's -----------------------------------------------------------------------------------


class PickyQueue(FCFSQueue):
    """Does not like long prompts."""

    def add_request(self, request):
        if request.num_tokens > 5:
            raise RuntimeError("too long for me")
        super().add_request(request)


def test_a_request_that_the_queue_refuses_leaves_nothing_behind(make_kv):
    engine, _ = make_hashing_engine(make_kv(20, 4), PickyQueue())
    with pytest.raises(PluginBroken) as caught:
        engine.add_request("long", range(10), SamplingParams(max_tokens=2))
    assert str(caught.value) == (
        "The request queue PickyQueue raised RuntimeError: too long for me when it was given the request 'long', which "
        "was not added."
    )
    assert not engine.has_unfinished_requests()
    engine.add_request("short", [1, 2, 3], SamplingParams(max_tokens=2))
    assert list(run_to_end(engine)) == ["short"]
    assert_nothing_leaks(engine)


def broken_rule(make_kv, queue, prompts=([1, 2, 3], [4, 5, 6]), num_steps=1, **options):
    """Return what the engine says of a queue that does not keep its contract, in its last step."""
    engine, _ = make_hashing_engine(make_kv(20, 4), queue, **options)
    for name, prompt in zip("abcd", prompts, strict=False):
        engine.add_request(name, prompt, greedy(2))
    for _ in range(num_steps - 1):
        engine.step()
    with pytest.raises(PluginContractError) as caught:
        engine.step()
    return str(caught.value)


class LastOutQueue(FCFSQueue):
    """Shows the first, and takes out the last."""

    def pop_request(self):
        last = list(self)[-1]
        self.remove_request(last)
        return last


class NothingOutQueue(FCFSQueue):
    """Takes out the right one, and returns nothing."""

    def pop_request(self):
        super().pop_request()


@pytest.mark.parametrize(("queue", "popped"), [(LastOutQueue, "b"), (NothingOutQueue, None)])
def test_a_queue_that_takes_out_another_request_than_it_shows_is_named(make_kv, queue, popped):
    assert broken_rule(make_kv, queue()) == (
        f"The request queue {queue.__name__} showed 'a' with peek_request, and pop_request took out {popped!r}; the "
        "two must be the same."
    )


class EmptyHandedQueue(FCFSQueue):
    """Shows nothing, although it has something."""

    def peek_request(self):
        return None


class ClingingQueue(FCFSQueue):
    """Keeps what is taken out of it."""

    def pop_request(self):
        return self.peek_request()


class ForgetfulOfRemovals(FCFSQueue):
    """Keeps what was aborted."""

    def remove_request(self, request):
        pass


@pytest.mark.parametrize(("queue", "shown"), [(EmptyHandedQueue, None), (ClingingQueue, "a")])
def test_a_queue_that_shows_what_does_not_wait_is_named(make_kv, queue, shown):
    assert broken_rule(make_kv, queue()) == (
        f"The request queue {queue.__name__} shows {shown!r} with peek_request, which is not waiting; it must be a "
        "request that was added and not taken out since."
    )


def test_a_queue_that_keeps_what_was_aborted_is_named(make_kv):
    engine, _ = make_hashing_engine(make_kv(20, 4), ForgetfulOfRemovals())
    engine.add_request("a", [1, 2, 3], greedy(2))
    engine.abort_request("a")
    # The id is in use again, by another request.
    engine.add_request("a", [1, 2, 3], greedy(2))
    with pytest.raises(PluginContractError) as caught:
        engine.step()
    assert str(caught.value) == (
        "The request queue ForgetfulOfRemovals shows 'a' with peek_request, which is not waiting; it must be a request "
        "that was added and not taken out since."
    )


# -- steps that schedule nothing, and are right --------------------------------------------------------------------


def test_where_all_that_ran_ended_for_want_of_memory_those_who_wait_go_on(make_engine):
    engine, runner = make_engine(2, 4, max_num_seqs=1, max_model_len=64)
    engine.add_request("a", range(7), greedy(30))
    engine.add_request("b", range(50, 57), greedy(30))
    records = run_to_end(engine)
    assert {record.stop_reason for record in records.values()} == {"kv_cache_full"}
    assert any(not step for step in scheduled(runner))


def test_between_aborts_a_step_may_have_nothing_but_what_ended(make_engine):
    engine, _ = make_engine()
    engine.add_request("a", range(9), greedy(4))
    engine.step()
    engine.add_request("b", range(9), greedy(4))
    assert engine.abort_request("a")
    assert engine.abort_request("b")
    assert engine.step().request_ids == ["a", "b"]
    assert not engine.has_unfinished_requests()
