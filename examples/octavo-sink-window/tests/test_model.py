"""What the model generates with paged blocks is what it generates without a cache, however the steps fall."""

import random

import pytest
from dense_oracle import DenseOracle
from octavo_sink_window import SinkWindowManager
from octavo_sink_window.checkpoint import write_tiny_checkpoint

from octavo import LLM, EngineConfig, SamplingParams
from octavo.testing.engines import assert_llm_is_idle

BLOCK_SIZE = 4
# In blocks of 4: the first two and the last three; and first tokens and windows that end inside a block.
KEPT = [{"keep_first": 8, "window": 9}, {"keep_first": 6, "window": 11}]
NAMES = ["octavo-sink-window:sink_window", "sink_window"]


@pytest.fixture(scope="module", params=KEPT, ids=lambda kept: f"{kept['keep_first']}+{kept['window']}")
def folder(request, tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("sink_window"), **request.param)


@pytest.fixture(scope="module")
def oracle(folder):
    oracle = DenseOracle(folder)
    yield oracle
    # Else two right answers could differ.
    assert oracle.smallest_margin > 1e-3


@pytest.fixture
def make_llm(folder):
    llms = []

    def make(*, name=NAMES[0], **settings):
        llms.append(LLM(str(folder), model_impl=name, block_size=BLOCK_SIZE, **({"num_kv_blocks": 400} | settings)))
        return llms[-1]

    yield make
    for llm in llms:
        assert_llm_is_idle(llm)
        llm.shutdown()


def prompt_of(num_tokens, seed=0):
    rng = random.Random(seed)
    return [rng.randrange(128) for _ in range(num_tokens)]


def generate(llm, prompts, num_tokens):
    return llm.generate(prompts, SamplingParams(temperature=0, max_tokens=num_tokens, detokenize=False), use_tqdm=False)


def tokens_of(outputs):
    return [list(output.outputs[0].token_ids) for output in outputs]


# From within the first blocks to a dozen windows.
PROMPTS = [prompt_of(length, seed=length) for length in (1, 7, 8, 9, 16, 17, 18, 30, 61, 120)]
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def expected(oracle):
    return [oracle.generate(prompt, NUM_TOKENS) for prompt in PROMPTS]


@pytest.mark.parametrize("name", NAMES)
def test_a_cold_cache_gives_the_definitions_tokens(make_llm, expected, name):
    assert tokens_of(generate(make_llm(name=name), PROMPTS, NUM_TOKENS)) == expected


@pytest.mark.parametrize("num_tokens_a_step", [1, 5, 32])
def test_chunks_of_any_size_give_the_same(make_llm, expected, num_tokens_a_step):
    llm = make_llm(max_num_batched_tokens=num_tokens_a_step)
    assert tokens_of(generate(llm, PROMPTS, NUM_TOKENS)) == expected


def test_prefix_hits_give_the_same(make_llm, oracle, expected):
    llm = make_llm()
    generate(llm, PROMPTS, NUM_TOKENS)
    warm = generate(llm, PROMPTS, NUM_TOKENS)
    assert tokens_of(warm) == expected
    # All but the last token of a prompt, in whole blocks.
    assert [output.num_cached_tokens for output in warm] == [(len(p) - 1) // BLOCK_SIZE * BLOCK_SIZE for p in PROMPTS]
    # A follow-up turn goes on where the text ended, though the middle of it was dropped while it ran.
    turns = [prompt + tokens + prompt_of(5) for prompt, tokens in zip(PROMPTS, expected, strict=True)]
    followed = generate(llm, turns, 6)
    assert tokens_of(followed) == [oracle.generate(turn, 6) for turn in turns]
    for output, prompt in zip(followed, PROMPTS, strict=True):
        # The token sampled last was never computed.
        assert output.num_cached_tokens == (len(prompt) + NUM_TOKENS - 1) // BLOCK_SIZE * BLOCK_SIZE


def test_prompts_that_share_a_beginning_share_its_blocks(make_llm, oracle):
    llm = make_llm()
    shared = prompt_of(50, seed=1)
    prompts = [shared + prompt_of(length, seed=2) for length in (3, 20, 40)]
    for prompt in prompts:
        (output,) = generate(llm, [prompt], 8)
        assert list(output.outputs[0].token_ids) == oracle.generate(prompt, 8)
        assert output.num_cached_tokens >= (48 if prompt is not prompts[0] else 0)


def test_what_an_eviction_leaves_gives_the_same(make_llm, oracle):
    llm = make_llm(num_kv_blocks=30)
    prompt = prompt_of(90, seed=3)
    wanted = oracle.generate(prompt, 10)
    generate(llm, [prompt], 10)
    hits = []
    for length in range(44, 112, 4):
        other = prompt_of(length, seed=length)
        assert tokens_of(generate(llm, [other], 4)) == [oracle.generate(other, 4)]
        (output,) = generate(llm, [prompt], 10)
        assert list(output.outputs[0].token_ids) == wanted
        hits.append(output.num_cached_tokens)
    # All of it while no more than the middle is gone; then the first blocks, which are evicted last; then nothing.
    assert 88 in hits
    assert 8 in hits


def test_a_prompt_of_more_blocks_than_there_are_is_served_piece_by_piece(make_llm, oracle):
    llm = make_llm(num_kv_blocks=12, max_num_batched_tokens=16)
    prompts = [prompt_of(length, seed=length) for length in (60, 120, 200)]
    assert tokens_of(generate(llm, prompts, 12)) == [oracle.generate(prompt, 12) for prompt in prompts]
    assert llm.stats().preemptions == 0


@pytest.mark.parametrize("num_kv_blocks", [20, 30])
def test_preempted_requests_give_the_same(make_llm, oracle, num_kv_blocks):
    llm = make_llm(num_kv_blocks=num_kv_blocks, max_num_batched_tokens=16)
    # A block or two each, and five when they have grown.
    prompts = [prompt_of(length, seed=length) for length in (3, 3, 4, 5, 6, 7, 8, 8)]
    outputs = generate(llm, prompts, 50)
    assert tokens_of(outputs) == [oracle.generate(prompt, 50) for prompt in prompts]
    assert llm.stats().preemptions == sum(output.num_preemptions for output in outputs) > 0


def test_without_a_prefix_cache_and_without_chunks_it_is_the_same(make_llm, expected):
    llm = make_llm(enable_prefix_caching=False, enable_chunked_prefill=False)
    assert tokens_of(generate(llm, PROMPTS, NUM_TOKENS)) == expected


def test_a_manager_that_drops_nothing_serves_the_spec_too(make_llm, expected):
    llm = make_llm(kv_managers={"sink_window": "full_attention"})
    assert tokens_of(generate(llm, PROMPTS, NUM_TOKENS)) == expected


def test_the_switch_lets_all_layers_keep_everything(make_llm, expected):
    llm = make_llm(disable_hybrid_kv_cache_manager=True)
    assert tokens_of(generate(llm, PROMPTS, NUM_TOKENS)) == expected
    assert [selected.group.spec.kind for selected in llm.selection.groups] == ["full_attention"]


def test_a_text_grows_while_the_blocks_that_it_holds_do_not(folder, oracle):
    from octavo.assembly import build_engine

    config = EngineConfig.from_flat(
        model=str(folder), model_impl="sink_window", block_size=BLOCK_SIZE, num_kv_blocks=12, max_model_len=300
    )
    assembly = build_engine(config)
    engine, groups = assembly.engine, assembly.kv_cache_config.groups
    prompt = prompt_of(20, seed=5)
    engine.add_request("r", prompt, SamplingParams(temperature=0, max_tokens=200))
    token_ids, held = [], []
    while engine.has_unfinished_requests():
        output = engine.step()
        for entry in range(len(output.request_ids)):
            token_ids += output.token_ids_of(entry)
        held.append(engine.stats().used_blocks)
    assert token_ids == oracle.generate(prompt, 200)
    # 220 tokens are 55 blocks; the pool has 11. After the prompt there is a new token a step.
    assert max(held[1:]) == SinkWindowManager.max_blocks_per_request(groups[0].spec, 300, 1) <= 6
    assert held[-1] == 0
