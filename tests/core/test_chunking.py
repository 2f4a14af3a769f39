"""How prompts are cut: short ones are not kept waiting by long ones, and cuts change no answer."""

import pytest
from hashing_engines import VOCAB_SIZE, assert_cold, finish, greedy, make_engine, scheduled, step

from octavo import SamplingParams
from octavo.core.chunking import Chunking
from octavo.core.request import Request
from octavo.testing.engines import Finished
from octavo.testing.hashing_runner import expected_tokens

# -- the rule -----------------------------------------------------------------------------------------------------


def share(num_behind, rest, num_others_behind, *, num_tokens=None, **options):
    chunking = Chunking(64, **options)
    request = Request("r", range(num_tokens or num_behind), SamplingParams(), max_model_len=10_000)
    return chunking.share(request, num_behind, rest, num_others_behind)


@pytest.mark.parametrize(
    ("num_behind", "rest", "num_others_behind", "num_new"),
    [
        # Alone it gets all that is left, and no more than it lacks.
        (400, 64, 0, 64),
        (400, 30, 0, 30),
        (5, 64, 0, 5),
        # With others behind it, half, rounded up.
        (400, 64, 1, 32),
        (400, 33, 3, 17),
        (5, 64, 1, 5),
        # An eighth of the whole budget at least, but no more than there is.
        (400, 14, 1, 8),
        (400, 6, 1, 6),
        (400, 1, 9, 1),
        (400, 0, 1, 0),
    ],
)
def test_a_prompt_gets_half_of_what_is_left_while_others_come_behind_and_all_of_it_else(
    num_behind, rest, num_others_behind, num_new
):
    assert share(num_behind, rest, num_others_behind) == num_new


@pytest.mark.parametrize(("rest", "num_others_behind", "num_new"), [(64, 0, 20), (64, 1, 20), (30, 1, 15), (9, 0, 9)])
def test_a_threshold_limits_a_prompt_alone_or_not(rest, num_others_behind, num_new):
    assert share(400, rest, num_others_behind, long_prefill_token_threshold=20) == num_new


@pytest.mark.parametrize(("num_behind", "rest", "num_new"), [(40, 64, 40), (40, 40, 40), (40, 39, 0)])
def test_without_chunks_a_prompt_gets_all_or_nothing_whoever_comes_behind(num_behind, rest, num_new):
    assert share(num_behind, rest, 3, is_enabled=False, long_prefill_token_threshold=8) == num_new


def test_without_chunks_one_that_has_outgrown_the_budget_is_cut_all_the_same():
    assert share(65, 50, 3, is_enabled=False, num_tokens=65) == 50


# -- a short prompt among long ones -------------------------------------------------------------------------------


def run_short_among_long(long_prompts, **settings):
    """Let a prompt of five tokens arrive when the long ones have had a step; return all steps."""
    engine, runner = make_engine(1000, 16, max_model_len=5000, **settings)
    records: dict[str, Finished] = {}
    for number, prompt in enumerate(long_prompts):
        engine.add_request(f"long{number}", prompt, greedy(2))
    step(engine, records)
    engine.add_request("short", range(3, 8), greedy(3))
    finish(engine, records)
    for number, prompt in enumerate(long_prompts):
        assert_cold(records[f"long{number}"], prompt, 2)
        assert records[f"long{number}"].num_preemptions == 0
    assert_cold(records["short"], range(3, 8), 3)
    return scheduled(runner)


def test_a_short_prompt_has_its_first_token_in_the_next_step_beside_a_long_one_that_still_ends():
    steps = run_short_among_long([range(400)], max_num_batched_tokens=64, long_prefill_token_threshold=32)
    assert steps[:4] == [{"long0": 32}, {"long0": 32, "short": 5}, {"short": 1, "long0": 32}, {"short": 1, "long0": 32}]
    # 400 tokens at 32 a step, and a step for its second token.
    assert len(steps) == 13 + 1


def test_with_the_default_settings_a_prompt_of_4000_does_not_keep_one_of_5_waiting():
    steps = run_short_among_long([[7] * 4000], max_num_batched_tokens=2048)
    # Half the budget, and of the other half what the short one leaves.
    assert steps[:3] == [{"long0": 2048}, {"long0": 1952, "short": 5}, {"long0": 1, "short": 1}]


def test_behind_three_long_prompts_the_short_one_still_has_its_first_token_in_the_next_step():
    prompts = [[number] * 4000 for number in (11, 12, 13)]
    steps = run_short_among_long(prompts, max_num_batched_tokens=2048)
    assert steps[0] == {"long0": 1024, "long1": 512, "long2": 512}
    # 1024, 512 and 256, then the short one; what it leaves goes to the first.
    assert steps[1] == {"long0": 1024 + 251, "long1": 512, "long2": 256, "short": 5}
    assert steps[2]["short"] == 1


def test_a_generating_request_keeps_its_token_a_step_beside_a_long_prompt():
    engine, runner = make_engine(200, max_num_batched_tokens=16)
    records: dict[str, Finished] = {}
    engine.add_request("old", [1, 2, 3], greedy(12))
    step(engine, records)
    engine.add_request("long", range(100), greedy(2))
    finish(engine, records)
    assert [step_.get("old") for step_ in scheduled(runner)] == [3, *[1] * 11]
    assert [step_.get("long") for step_ in scheduled(runner)] == [None, *[15] * 6, 10, 1, None, None, None]


# -- cuts change no answer ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [1, 3, 4, 5, 16, 37])
def test_of_a_prompt_that_is_cut_only_the_last_part_samples(budget):
    engine, runner = make_engine(max_num_batched_tokens=budget)
    engine.add_request("r", range(37), greedy(3))
    assert_cold(finish(engine)["r"], range(37), 3)
    num_parts = -(-37 // budget)
    assert [plan.samples.tolist() for plan in runner.plans] == [[False]] * (num_parts - 1) + [[True]] * 3
    assert [sum(step_.values()) for step_ in scheduled(runner)[:num_parts]] == [
        *[budget] * (num_parts - 1),
        37 - budget * (num_parts - 1),
    ]


@pytest.mark.parametrize("ends_by", ["max_tokens", "a stop id", "end of sequence"])
def test_a_request_that_ends_with_its_first_token_after_a_last_part_of_one_token_has_that_token_only(ends_by):
    (token,) = expected_tokens(range(9), 1, VOCAB_SIZE)
    engine, runner = make_engine(max_num_batched_tokens=4)
    options = {}
    if ends_by == "a stop id":
        options["stop_token_ids"] = [token]
    if ends_by == "end of sequence":
        engine.eos_token_ids = frozenset({token})
    engine.add_request("r", range(9), greedy(1 if ends_by == "max_tokens" else 8, **options))
    record = finish(engine)["r"]
    assert record.token_ids == [token]
    assert (record.finish_reason, record.stop_reason) == {
        "max_tokens": ("length", None),
        "a stop id": ("stop", token),
        "end of sequence": ("stop", None),
    }[ends_by]
    assert scheduled(runner) == [{"r": 4}, {"r": 4}, {"r": 1}]
    assert engine.stats().generated_tokens == 1


@pytest.mark.parametrize("num_steps", [1, 2])
def test_a_request_that_is_aborted_between_the_parts_of_its_prompt_has_no_token(num_steps):
    engine, runner = make_engine(max_num_batched_tokens=4)
    records: dict[str, Finished] = {}
    engine.add_request("r", range(9), greedy(8))
    for _ in range(num_steps):
        step(engine, records)
    engine.abort_request("r")
    record = finish(engine, records)["r"]
    assert (record.token_ids, record.finish_reason) == ([], "abort")
    assert not any(plan.samples.any() for plan in runner.plans)
    assert engine.stats().generated_tokens == 0


# -- with a model -------------------------------------------------------------------------------------------------


def logprobs_of(output):
    """Return {token id: log-probability} of each step of an answer."""
    (choice,) = output.outputs
    return [dict([*entry.top, (entry.token_id, entry.logprob)]) for entry in choice.logprobs]


def assert_same_answer(output, expected):
    """See that ids are equal and that log-probabilities are at most 1e-4 apart."""
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids
    for got, wanted in zip(logprobs_of(output), logprobs_of(expected), strict=True):
        common = got.keys() & wanted.keys()
        # Two tokens that are next to equally likely may change places at the end of the list.
        assert len(common) >= 19
        assert all(got[token] == pytest.approx(wanted[token], abs=1e-4) for token in common)


WITH_LOGPROBS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=20, detokenize=False)


def test_a_models_answer_does_not_depend_on_how_its_prompt_is_cut(make_llm, tiny_folder):
    prompt = [3 + 7 * number % 500 for number in range(37)]
    answers = [
        make_llm(
            tiny_folder, num_kv_blocks=40, block_size=4, max_num_batched_tokens=budget, enable_prefix_caching=False
        ).generate(prompt, WITH_LOGPROBS, use_tqdm=False)[0]
        for budget in (37, 1, 3, 4, 5, 16)
    ]
    for answer in answers[1:]:
        assert_same_answer(answer, answers[0])


def test_in_one_batch_a_full_hit_a_partial_one_a_miss_and_a_generating_request_equal_cold(make_llm, tiny_folder):
    known = [3 + 11 * number % 500 for number in range(16)]
    prompts = {"full": known, "partial": [*known[:9], 400, 401, 402], "miss": [300 + number for number in range(10)]}
    cold = make_llm(tiny_folder, num_kv_blocks=60, block_size=4, enable_prefix_caching=False)
    expected = {
        name: cold.generate(prompt, WITH_LOGPROBS, use_tqdm=False)[0]
        for name, prompt in {**prompts, "generating": [8, 9]}.items()
    }
    expected["text"] = "".join(cold.stream([8, 9], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)))
    llm = make_llm(tiny_folder, num_kv_blocks=60, block_size=4)
    llm.generate(known, WITH_LOGPROBS, use_tqdm=False)
    stream = llm.stream([8, 9], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    pieces = [next(stream)]
    outputs = llm.generate(list(prompts.values()), WITH_LOGPROBS, use_tqdm=False)
    # Of sixteen tokens that are all known, the last block is computed again.
    assert [output.num_cached_tokens for output in outputs] == [12, 8, 0]
    for name, output in zip(prompts, outputs, strict=True):
        assert_same_answer(output, expected[name])
    assert "".join([*pieces, *stream]) == expected["text"]


def test_in_one_step_a_full_hit_a_partial_one_a_miss_and_a_generating_request_equal_cold():
    engine, runner = make_engine()
    prompts = {"full": range(16), "partial": [*range(9), 400, 401, 402], "miss": range(300, 310)}
    engine.add_request("before", range(16), greedy(1))
    records = finish(engine)
    engine.add_request("generating", [8, 9], greedy(9))
    step(engine, records)
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, greedy(6))
    finish(engine, records)
    together = next(step_ for step_ in scheduled(runner) if "miss" in step_)
    assert together == {"generating": 1, "full": 4, "partial": 4, "miss": 10}
    for name, prompt in prompts.items():
        assert_cold(records[name], prompt, 6)
    assert_cold(records["generating"], [8, 9], 9)


def test_log_probabilities_of_two_prompts_in_one_step_go_to_the_one_that_asked(make_llm, tiny_folder):
    prompts = [[3 + 7 * number % 500 for number in range(length)] for length in (9, 14)]
    without = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, detokenize=False)
    llm = make_llm(tiny_folder, num_kv_blocks=60, enable_prefix_caching=False)
    expected = [llm.generate(prompt, WITH_LOGPROBS, use_tqdm=False)[0] for prompt in prompts]
    for asks in (0, 1):
        params = [WITH_LOGPROBS if number == asks else without for number in range(2)]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert outputs[1 - asks].outputs[0].logprobs is None
        assert outputs[1 - asks].outputs[0].token_ids == expected[1 - asks].outputs[0].token_ids
        assert_same_answer(outputs[asks], expected[asks])
