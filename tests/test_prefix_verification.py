"""`verify_prefix_cache` with a model: what a changed weight or a stray write leaves in the cache is not used."""

import logging

import pytest
import torch

from octavo import EngineConfig, SamplingParams
from octavo.assembly import build_engine
from octavo.core.engine_core import EngineCore
from octavo.errors import ConfigError
from octavo.models.llama import LlamaModel
from octavo.testing import installed
from octavo.testing.engines import Finished, assert_nothing_leaks, run_to_end

GREEDY = SamplingParams(temperature=0, max_tokens=12)
PROMPT = [7 * i % 251 + 3 for i in range(60)]


class OpenLlama(LlamaModel):
    """A Llama that lets its embedding be changed."""

    contract_version = 1

    def __init__(self, config, *, embedding, **weights) -> None:
        super().__init__(config, embedding=embedding, **weights)
        self.embedding = embedding


@pytest.fixture
def make_engine(tiny_folder):
    engines = []

    def make(**settings) -> EngineCore:
        settings = {"model": str(tiny_folder), "num_kv_blocks": 64, "model_impl": "open_llama", **settings}
        with installed({"octavo.models": {"open_llama": OpenLlama}}):
            engines.append(build_engine(EngineConfig.from_flat(**settings)).engine)
        return engines[-1]

    yield make
    for engine in engines:
        assert_nothing_leaks(engine)
        engine.shutdown()


def answer(engine: EngineCore, prompt: list[int] = PROMPT, request_id: str = "r") -> Finished:
    engine.add_request(request_id, prompt, GREEDY)
    return run_to_end(engine)[request_id]


def change_a_weight(engine: EngineCore) -> None:
    """Change a number of the embedding of one of the prompt's tokens, in place, and tell nobody."""
    engine.runner.model.embedding[PROMPT[20], 3] += 4


def pages_of_block(engine: EngineCore, number: int) -> list[torch.Tensor]:
    """Return, by layer, the bytes of the block that holds block `number` of PROMPT, the first request of all."""
    cached = engine.scheduler.kv_cache_manager.pool.cached_blocks()
    # In order of registration.
    block_id = list(cached.values())[number][0]
    return [buffer[block_id] for buffer in engine.runner.kv_cache_buffers]


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("budget", [7, 2048])
def test_after_a_change_of_weights_the_answer_is_that_of_the_new_ones(make_engine, caplog, budget, async_scheduling):
    settings = {"max_num_batched_tokens": budget, "async_scheduling": async_scheduling}
    fresh = make_engine(**settings)
    change_a_weight(fresh)
    expected = answer(fresh).token_ids

    engine = make_engine(verify_prefix_cache=True, **settings)
    before = [answer(engine), answer(engine)]
    assert [result.num_cached_tokens for result in before] == [0, 48]
    assert before[0].token_ids == before[1].token_ids != expected
    assert (engine.stats().verified_tokens, engine.stats().verification_failures) == (48, 0)
    change_a_weight(engine)
    with caplog.at_level(logging.ERROR, "octavo.core.prefix_verifier"):
        result = answer(engine, request_id="again")
    assert result.token_ids == expected
    # The token that changed is in the second block.
    assert result.num_cached_tokens == 16
    assert engine.stats().verification_failures == 1
    (message,) = caplog.messages
    beginning = (
        "prefix cache: the request 'again' found keys and values that differ from what its tokens give now, from its "
        "block 1 on (block 2 of the pool, KV-cache group 0). Difference by layer: 0: "
    )
    assert message.startswith(beginning)
    assert answer(engine).token_ids == expected
    assert engine.stats().verification_failures == 1


def test_without_the_mode_the_answer_is_stale(make_engine):
    engine = make_engine()
    before = answer(engine).token_ids
    change_a_weight(engine)
    assert answer(engine).token_ids == before
    assert engine.reset_prefix_cache()
    assert answer(engine).token_ids != before
    assert engine.stats().verified_tokens == engine.stats().verification_failures == 0


@pytest.mark.parametrize(
    "settings",
    [
        {"dtype": "float32"},
        {"dtype": "float16"},
        {"dtype": "bfloat16"},
        {"kv_cache_dtype": "fp8_e4m3", "kv_cache_scales": "per_tensor"},
        {"kv_cache_dtype": "fp8_e4m3", "kv_cache_scales": "per_token_head"},
        {"kv_cache_dtype": "int8", "kv_cache_scales": "per_token_head"},
        {"kv_cache_dtype": "int8", "kv_cache_scales": "per_token_head", "dtype": "bfloat16"},
    ],
    ids=lambda settings: "-".join(settings.values()),
)
def test_a_block_that_holds_something_else_is_found_in_every_type(make_engine, settings):
    engine = make_engine(verify_prefix_cache=True, **settings)
    expected = answer(engine).token_ids
    # In another batch, and with a part that was generated: computed otherwise, and still the same.
    for request_id, prompt in (("a", PROMPT[:50]), ("b", PROMPT + expected), ("c", [9, 9])):
        engine.add_request(request_id, prompt, GREEDY)
    finished = run_to_end(engine)
    assert [finished[request_id].num_cached_tokens for request_id in "abc"] == [48, 64, 0]
    assert (engine.stats().verified_tokens, engine.stats().verification_failures) == (112, 0)
    for page, other in zip(pages_of_block(engine, 1), pages_of_block(engine, 2), strict=True):
        page.copy_(other)
    result = answer(engine)
    assert result.num_cached_tokens == 16
    assert result.token_ids == expected
    assert engine.stats().verification_failures == 1


@pytest.mark.parametrize(
    ("kv_cache_dtype", "change"),
    [
        ("fp8_e4m3", lambda page: page[5:6].fill_(0x7F)),
        ("int8", lambda page: page[5:6].fill_(0x80)),
        ("int8", lambda page: page.view(torch.float32)[-1].fill_(torch.nan)),
        ("int8", lambda page: page.view(torch.float32)[-1].mul_(100)),
    ],
    ids=["a code of NaN", "a code of NaN", "a scale of NaN", "another scale"],
)
def test_one_wrong_code_or_scale_is_found(make_engine, kv_cache_dtype, change):
    engine = make_engine(verify_prefix_cache=True, kv_cache_dtype=kv_cache_dtype, kv_cache_scales="per_token_head")
    expected = answer(engine).token_ids
    change(pages_of_block(engine, 1)[1])
    assert answer(engine).token_ids == expected
    assert engine.stats().verification_failures == 1


@pytest.mark.parametrize("wrong", [0.5, torch.nan, torch.inf])
@pytest.mark.parametrize("layer", [0, 1])
def test_one_wrong_number_in_one_layer_is_found_and_named(make_engine, caplog, layer, wrong):
    engine = make_engine(verify_prefix_cache=True)
    expected = answer(engine).token_ids
    pages_of_block(engine, 1)[layer].view(torch.float32)[5] += wrong
    with caplog.at_level(logging.ERROR, "octavo.core.prefix_verifier"):
        assert answer(engine).token_ids == expected
    assert f"from its block 1 on (block 2 of the pool, KV-cache group 0). Difference by layer: {layer}: " in caplog.text
    assert engine.stats().verification_failures == 1


def test_the_mode_is_refused_where_the_cache_is_off(make_engine):
    with pytest.raises(ConfigError) as caught:
        make_engine(verify_prefix_cache=True, enable_prefix_caching=False)
    assert str(caught.value) == (
        "verify_prefix_cache checks what is found in the prefix cache, and enable_prefix_caching=False switches it "
        "off; leave one of the two out."
    )
