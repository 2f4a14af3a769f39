"""A reset of the prefix cache drops everything or says that it did not, whoever runs meanwhile."""

import pytest
from hashing_engines import assert_cold, finish, greedy, make_engine, step

from octavo import EngineConfig, SamplingParams
from octavo.assembly import build_engine
from octavo.request_queues import PriorityQueue
from octavo.testing.engines import Finished, assert_nothing_leaks, run_to_end


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_reset_while_another_request_generates_is_refused_and_drops_nothing(async_scheduling):
    engine, _ = make_engine(async_scheduling=async_scheduling)
    engine.add_request("p", range(9), greedy(2))
    records = finish(engine)
    engine.add_request("q", range(50, 59), greedy(12))
    step(engine, records)
    before = engine.stats()
    refused = engine.reset_prefix_cache()
    assert not refused
    assert not refused.done
    assert refused.num_preempted == 0
    assert refused.reason == (
        "3 blocks are held by requests that are under way; wait for them to finish, abort them, or pass "
        "reset_running_requests=True, and call again."
    )
    assert engine.stats() == before
    engine.add_request("p again", range(9), greedy(2))
    finish(engine, records)
    assert records["p again"].num_cached_tokens == 8
    assert_cold(records["q"], range(50, 59), 12)
    assert records["q"].num_preemptions == 0
    assert engine.reset_prefix_cache()
    assert engine.stats().cached_blocks == 0
    engine.add_request("p", range(9), greedy(2))
    assert finish(engine)["p"].num_cached_tokens == 0
    engine.shutdown()


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_reset_that_preempts_who_runs_drops_everything_and_all_equal_cold(async_scheduling):
    engine, runner = make_engine(async_scheduling=async_scheduling)
    engine.add_request("p", range(9), greedy(2))
    records = finish(engine)
    for name, first in (("q", 50), ("r", 70)):
        engine.add_request(name, range(first, first + 9), greedy(12))
    for _ in range(3):
        step(engine, records)
    num_plans = len(runner.plans)
    done = engine.reset_prefix_cache(reset_running_requests=True)
    assert done
    assert (done.done, done.reason, done.num_preempted) == (True, "", 2)
    stats = engine.stats()
    assert (stats.cached_blocks, stats.used_blocks, stats.running, stats.waiting) == (0, 0, 0, 2)
    engine.add_request("p", range(9), greedy(2))
    records.pop("p")
    finish(engine, records)
    assert records["p"].num_cached_tokens == 0
    assert_cold(records["p"], range(9), 2)
    for name, first in (("q", 50), ("r", 70)):
        assert_cold(records[name], range(first, first + 9), 12)
        assert records[name].num_preemptions == 1
    # They begin anew, in their order.
    assert runner.plans[num_plans].request_ids[:2] == ["q", "r"]
    assert runner.plans[num_plans].first_positions.tolist()[:2] == [0, 0]
    engine.shutdown()


@pytest.mark.parametrize("resets", [False, True])
def test_a_reset_that_preempted_who_ran_changes_nothing_about_later_preemptions(resets):
    engine, _ = make_engine(queue=PriorityQueue(), max_num_seqs=1)
    if resets:
        engine.add_request("before", range(900, 905), greedy(3))
        engine.step()
        assert engine.reset_prefix_cache(reset_running_requests=True)
        finish(engine)
    before = engine.stats()
    records = {"low": Finished()}
    engine.add_request("low", [1, 2], greedy(14), priority=1)
    while len(records["low"].token_ids) < 7:
        step(engine, records)
    # Eight tokens are computed, the last of them in the latest step: two full blocks.
    engine.add_request("high", [7], greedy(1))
    finish(engine, records)
    assert records["low"].num_preemptions == 1
    assert_cold(records["low"], [1, 2], 14)
    assert engine.stats().recomputed_tokens == before.recomputed_tokens


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_reset_undoes_a_plan_in_which_one_request_adopts_what_another_is_to_fill(async_scheduling):
    engine, _ = make_engine(async_scheduling=async_scheduling)
    prompts = {"before": [900], "fills": range(9), "adopts": [*range(8), 70]}
    records: dict[str, Finished] = {}
    engine.add_request("before", prompts["before"], greedy(12))
    step(engine, records)
    for name in ("fills", "adopts"):
        engine.add_request(name, prompts[name], greedy(8))
    # Planning ahead, the plan that both are in has not run yet.
    step(engine, records)
    done = engine.reset_prefix_cache(reset_running_requests=True)
    assert (done.done, done.num_preempted) == (True, 3)
    assert engine.stats().cached_blocks == 0
    finish(engine, records)
    for name, prompt in prompts.items():
        assert_cold(records[name], prompt, 12 if name == "before" else 8)
    engine.shutdown()


def test_a_reset_of_nothing_is_done():
    engine, _ = make_engine()
    for reset_running_requests in (False, True):
        done = engine.reset_prefix_cache(reset_running_requests=reset_running_requests)
        assert (done.done, done.reason, done.num_preempted) == (True, "", 0)
    assert_nothing_leaks(engine)


MODEL_PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
P, Q = [3 + 7 * number for number in range(20)], [400 - number for number in range(20)]


def make_model_engine(folder, **settings):
    return build_engine(EngineConfig.from_flat(model=str(folder), num_kv_blocks=60, block_size=4, **settings)).engine


def answer_of(engine, prompt):
    engine.add_request("probe", prompt, MODEL_PARAMS)
    return run_to_end(engine)["probe"]


def change_weights(engine):
    """Swap what stands for two tokens of the prompt P, in place."""
    import torch

    (embedding,) = (
        value
        for name, value in vars(engine.runner.model).items()
        if isinstance(value, torch.Tensor) and name.endswith("embedding") and "output" not in name
    )
    with torch.inference_mode():
        embedding[P[0]] = embedding[P[1]] * 2


def test_after_weights_were_changed_in_place_a_reset_that_says_it_is_done_lets_nothing_old_through(tiny_folder):
    cold = make_model_engine(tiny_folder, enable_prefix_caching=False)
    old = answer_of(cold, P).token_ids
    change_weights(cold)
    new = answer_of(cold, P).token_ids
    assert new != old

    engine = make_model_engine(tiny_folder)
    assert answer_of(engine, P).token_ids == old
    assert answer_of(engine, P).num_cached_tokens == 16
    engine.add_request("q", Q, MODEL_PARAMS)
    for _ in range(3):
        engine.step()
    change_weights(engine)
    # While Q holds blocks the reset is not done, and says so.
    assert not engine.reset_prefix_cache()
    done = engine.reset_prefix_cache(reset_running_requests=True)
    assert done
    assert done.num_preempted == 1
    engine.add_request("probe", P, MODEL_PARAMS)
    records = run_to_end(engine)
    assert records["probe"].num_cached_tokens == 0
    assert records["probe"].token_ids == new
    assert records["q"].finish_reason == "length"
    assert answer_of(engine, P).token_ids == new
    assert_nothing_leaks(engine)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_an_llm_whose_cache_is_reset_while_it_streams_goes_on_with_the_same_text(
    make_llm, tiny_folder, async_scheduling
):
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    llm = make_llm(tiny_folder, num_kv_blocks=60, async_scheduling=async_scheduling)
    expected = "".join(llm.stream("one", params))
    prompt = "a prompt of more than one block"
    llm.generate(prompt, MODEL_PARAMS, use_tqdm=False)
    stream = llm.stream("one", params)
    pieces = [next(stream)]
    assert not llm.reset_prefix_cache()
    done = llm.reset_prefix_cache(reset_running_requests=True)
    assert (done.done, done.reason, done.num_preempted) == (True, "", 1)
    (output,) = llm.generate(prompt, MODEL_PARAMS, use_tqdm=False)
    assert output.num_cached_tokens == 0
    assert "".join([*pieces, *stream]) == expected
    assert stream.output.num_preemptions == 1
