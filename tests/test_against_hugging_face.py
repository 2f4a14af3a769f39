"""Octavo's answers are Hugging Face's, whatever the batch, the budget, the blocks, the cache and the memory.

Each engine below runs the same prompts; the oracle ran each of them alone.
"""

import random

import pytest

from octavo import SamplingParams
from octavo.testing import hugging_face, tiny_models

LENGTHS = [1, 2, 3, 5, 8, 13, 15, 16, 17, 31, 32, 33, 48, 64, 100, 127, 200, 333, 512, 700]
NUM_TOKENS = 16
NUM_TINY_TOKENS = 32

TEXT = """
The river ran past the mill and under the old stone bridge, and every spring it carried a little more of the bank away.
def binary_search(values, wanted):
    low, high = 0, len(values)
    while low < high:
        middle = (low + high) // 2
1. Mix 250 g of flour with 2 eggs. 2. Add 300 ml of milk; stir until smooth. 3. Wait 30 minutes.
Der Zug nach Basel fährt um 14:05 Uhr von Gleis 7 ab. Le train pour Lyon part à midi. 北京是中国的首都。
Q: What is the boiling point of water at sea level? A: It is 100 degrees Celsius, or 212 degrees Fahrenheit.
| name | age | city |
|------|-----|------|
| Ada | 36 | London |
"""


def demo_prompts(tokenizer) -> list[list[int]]:
    """Twenty prompts of 1 to 700 tokens: text of many kinds, several with a common beginning."""
    text = tokenizer.encode(TEXT * 6)
    rng = random.Random(0)
    prompts = []
    for number, length in enumerate(LENGTHS):
        start = 0 if number % 3 == 0 else rng.randrange(len(text) - length)
        prompts.append(text[start : start + length])
    return prompts


def tiny_prompts() -> list[list[int]]:
    rng = random.Random(0)
    shared = [rng.randrange(3, 512) for _ in range(300)]
    lengths = [min(length, 400) for length in LENGTHS]
    prompts = []
    for number, length in enumerate(lengths):
        common = shared[: min(length, 300)] if number % 3 == 0 else []
        prompts.append(common + [rng.randrange(3, 512) for _ in range(length - len(common))])
    return prompts


@pytest.fixture(scope="session")
def demo(demo_gguf):
    from octavo.models.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(None)
    model = hugging_face.load(demo_gguf)
    return hugging_face.greedy(model, demo_prompts(checkpoint.tokenizer()), NUM_TOKENS, checkpoint.eos_token_ids)


@pytest.fixture(scope="session", params=["llama", "qwen3"])
def tiny(request, tmp_path_factory):
    """A tiny model's folder, and what it generates."""
    # Seeds with few near ties; some answers of the first end early.
    make, seed = {"llama": (tiny_models.tiny_llama, 4), "qwen3": (tiny_models.tiny_qwen3, 3)}[request.param]
    folder = make(tmp_path_factory.mktemp(f"truth-{request.param}"), seed=seed)
    return folder, hugging_face.greedy(hugging_face.load(folder), tiny_prompts(), NUM_TINY_TOKENS, [2])


def answers(llm, expected, *, order=None, num_tokens=NUM_TINY_TOKENS):
    """Run all prompts in one call; return the answers in the oracle's order."""
    order = list(range(len(expected))) if order is None else order
    # Text is the business of other tests; the tiny models have no tokenizer to make it with.
    params = SamplingParams(temperature=0, max_tokens=num_tokens, detokenize=False)
    outputs = llm.generate([expected[i].prompt for i in order], params, use_tqdm=False)
    by_prompt = dict(zip(order, outputs, strict=True))
    return [by_prompt[i].outputs[0].token_ids for i in range(len(expected))]


def shuffled(count):
    order = list(range(count))
    random.Random(1).shuffle(order)
    return order


# What each engine changes; together, everything that must not change an answer.
SETTINGS = {
    "budget of 7": {"max_num_batched_tokens": 7},
    "budget of 64": {"max_num_batched_tokens": 64},
    "budget of 2048": {"max_num_batched_tokens": 2048},
    "blocks of 1": {"block_size": 1, "num_kv_blocks": 4000},
    "blocks of 32": {"block_size": 32},
    "no prefix cache": {"enable_prefix_caching": False},
    "whole prompts": {"enable_chunked_prefill": False},
    "three at a time": {"max_num_seqs": 3},
    "steps planned ahead": {"async_scheduling": True},
}


def settings_of(name):
    return {"num_kv_blocks": 400} | SETTINGS[name]


# -- the packaged model -----------------------------------------------------------------------------------------


def test_the_prompts_of_the_packaged_model_are_as_long_and_as_varied_as_they_should_be(demo):
    assert sorted(len(expected.prompt) for expected in demo) == LENGTHS
    assert len({tuple(expected.token_ids) for expected in demo}) >= 18


def test_the_packaged_model_answers_alone_as_in_transformers_cold_and_warm(demo, make_llm):
    llm = make_llm(num_kv_blocks=400)
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, logprobs=5, detokenize=False)
    cold = [llm.generate(expected.prompt, params, use_tqdm=False)[0] for expected in demo]
    hugging_face.assert_equal_where_clear(demo, [output.outputs[0].token_ids for output in cold])
    for expected, output in zip(demo, cold, strict=True):
        for step in range(expected.num_clear_tokens):
            entry = output.outputs[0].logprobs[step]
            for token_id, logprob in (*entry.top, (entry.token_id, entry.logprob)):
                assert logprob == pytest.approx(float(expected.logprobs[step, token_id]), abs=1e-4)
    warm = [llm.generate(expected.prompt, params, use_tqdm=False)[0] for expected in demo]
    hugging_face.assert_equal_where_clear(demo, [output.outputs[0].token_ids for output in warm])
    assert [output.num_cached_tokens for output in warm[-3:]] == [320, 496, 688]


# Tiny models show the same below, in less time.
@pytest.mark.slow
@pytest.mark.parametrize("name", [*SETTINGS, "shuffled", "warm"])
def test_the_packaged_model_answers_in_a_batch_as_in_transformers_with(name, demo, make_llm):
    if name in SETTINGS:
        llm = make_llm(**settings_of(name))
        hugging_face.assert_equal_where_clear(demo, answers(llm, demo, num_tokens=NUM_TOKENS))
        return
    llm = make_llm(num_kv_blocks=400)
    order = shuffled(len(demo))
    hugging_face.assert_equal_where_clear(demo, answers(llm, demo, num_tokens=NUM_TOKENS, order=order))
    if name == "warm":
        before = llm.stats()
        hugging_face.assert_equal_where_clear(demo, answers(llm, demo, num_tokens=NUM_TOKENS))
        assert llm.stats().hit_tokens - before.hit_tokens > 1500


def test_the_packaged_model_answers_as_in_transformers_while_memory_runs_out(demo, make_llm):
    llm = make_llm(num_kv_blocks=48, max_model_len=760)
    hugging_face.assert_equal_where_clear(demo, answers(llm, demo, num_tokens=NUM_TOKENS, order=shuffled(len(demo))))
    assert llm.stats().preemptions >= 3


@pytest.mark.slow
def test_the_packaged_model_answers_as_in_transformers_one_token_a_step(demo, make_llm):
    llm = make_llm(num_kv_blocks=400, max_num_batched_tokens=1)
    hugging_face.assert_equal_where_clear(demo, answers(llm, demo, num_tokens=NUM_TOKENS))


# -- tiny models: the same, and what would take too long above --------------------------------------------------


def test_the_best_two_logits_of_the_tiny_models_are_far_apart(tiny):
    _, expected = tiny
    gaps = sorted(gap for answer in expected for gap in answer.gaps)
    assert gaps[len(gaps) // 2] > 0.1


@pytest.mark.parametrize("block_size", [1, 16, pytest.param(32, marks=pytest.mark.slow)])
@pytest.mark.parametrize("budget", [7, 2048, *(pytest.param(budget, marks=pytest.mark.slow) for budget in (1, 64))])
def test_a_tiny_model_answers_as_in_transformers_cold_warm_and_shuffled(tiny, budget, block_size, make_llm):
    folder, expected = tiny
    llm = make_llm(folder, block_size=block_size, max_num_batched_tokens=budget, num_kv_blocks=8000 // block_size)
    hugging_face.assert_equal_where_clear(expected, answers(llm, expected, order=shuffled(len(expected))))
    hugging_face.assert_equal_where_clear(expected, answers(llm, expected))
    assert llm.stats().hit_tokens > 1000


@pytest.mark.parametrize("name", SETTINGS)
def test_a_tiny_model_answers_as_in_transformers_with(name, tiny, make_llm):
    folder, expected = tiny
    hugging_face.assert_equal_where_clear(expected, answers(make_llm(folder, **settings_of(name)), expected))


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize(("budget", "block_size"), [(7, 16), (64, 1), (64, 16), (2048, 32)])
def test_a_tiny_model_answers_as_in_transformers_while_memory_runs_out(tiny, budget, block_size, caching, make_llm):
    folder, expected = tiny
    llm = make_llm(
        folder,
        block_size=block_size,
        num_kv_blocks=1 + 448 // block_size,
        max_model_len=440,
        max_num_batched_tokens=budget,
        enable_prefix_caching=caching,
    )
    hugging_face.assert_equal_where_clear(expected, answers(llm, expected))
    hugging_face.assert_equal_where_clear(expected, answers(llm, expected, order=shuffled(len(expected))))
    assert llm.stats().preemptions >= 1


def test_a_tiny_models_log_probabilities_are_those_of_transformers(tiny, make_llm):
    folder, expected = tiny
    llm = make_llm(folder, num_kv_blocks=400)
    params = SamplingParams(temperature=0, max_tokens=NUM_TINY_TOKENS, logprobs=5, detokenize=False)
    outputs = llm.generate([answer.prompt for answer in expected], params, use_tqdm=False)
    for answer, output in zip(expected, outputs, strict=True):
        for step in range(answer.num_clear_tokens):
            for token_id, logprob in output.outputs[0].logprobs[step].top:
                assert logprob == pytest.approx(float(answer.logprobs[step, token_id]), abs=1e-4)
