"""Whole models on the triton backend: the reference's greedy tokens, a few each, since the interpreter is slow."""

from __future__ import annotations

import pytest

from octavo import SamplingParams
from octavo.attention_backends.triton.launch import launches
from octavo.testing import tiny_models

PROMPTS = ["The capital of France is", "One, two, three, four"]
SPLIT = {"name": "triton", "options": {"splits": 3, "tile_keys": 16}}
# Blocks for three prompts and not for what is generated; prompts are cut.
TIGHT = {"block_size": 8, "num_kv_blocks": 12, "max_num_batched_tokens": 16, "max_num_seqs": 3, "watermark": 0.0}


def cold_tokens(make_llm, model, max_tokens, **settings):
    """What the reference backend says to each prompt alone, without a prefix cache."""
    llm = make_llm(model, attention_backend="torch_sdpa", num_kv_blocks=256, enable_prefix_caching=False, **settings)
    return [llm.generate(prompt, greedy(max_tokens), use_tqdm=False)[0].outputs[0].token_ids for prompt in PROMPTS]


def greedy(max_tokens):
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def tokens_twice(make_llm, model, max_tokens, backend="triton", **settings):
    """The prompts together, and once more, when their beginnings are found in the prefix cache."""
    llm = make_llm(model, attention_backend=backend, **{"num_kv_blocks": 256, **settings})
    rounds = [llm.generate(PROMPTS, greedy(max_tokens), use_tqdm=False) for _ in range(2)]
    assert any(output.num_cached_tokens for output in rounds[1])
    return [[output.outputs[0].token_ids for output in outputs] for outputs in rounds]


def assert_launched(before, *kernels):
    for kernel in kernels:
        assert launches[kernel] > before[kernel], f"{kernel} was never launched"


def test_the_demo_model_generates_the_references_tokens(make_llm, demo_gguf):
    wanted, before = cold_tokens(make_llm, demo_gguf, 3), launches.copy()
    # Blocks of four tokens, so that prompts as short as these are found again.
    assert tokens_twice(make_llm, demo_gguf, 3, block_size=4) == [wanted, wanted]
    assert_launched(before, "write_kernel", "attention_kernel")


@pytest.mark.slow
def test_gemma_3_generates_the_references_tokens(make_llm, gemma3_gguf):
    wanted, before = cold_tokens(make_llm, gemma3_gguf, 2, max_model_len=64), launches.copy()
    assert tokens_twice(make_llm, gemma3_gguf, 2, block_size=4, max_model_len=64) == [wanted, wanted]
    assert_launched(before, "write_kernel", "attention_kernel")


@pytest.mark.parametrize("backend", ["triton", pytest.param(SPLIT, marks=pytest.mark.slow)], ids=["one_pass", "split"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3", "deepseek_v2", "gpt_oss", "llama4"])
def test_a_tiny_model_generates_the_references_tokens(make_llm, tmp_path, family, backend):
    """Soft caps, windows, chunks, sinks and latents; prompts in pieces, prefix hits, and preemption in between."""
    folder = tiny_models.add_byte_tokenizer(getattr(tiny_models, f"tiny_{family}")(tmp_path / family))
    wanted, before = cold_tokens(make_llm, folder, 4, max_model_len=64), launches.copy()
    settings = {"block_size": 4, "max_num_batched_tokens": 12, "max_num_seqs": 2, "max_model_len": 64}
    assert tokens_twice(make_llm, folder, 4, backend, **settings) == [wanted, wanted]
    assert_launched(before, "write_kernel", "attention_kernel")
    if backend is SPLIT:
        assert_launched(before, "join_splits_kernel")
    if family == "deepseek_v2":
        assert_launched(before, "gather_kernel")


def test_a_preempted_request_gets_the_references_tokens(make_llm, tmp_path):
    folder = tiny_models.add_byte_tokenizer(tiny_models.tiny_llama(tmp_path / "llama"))
    prompts = [*PROMPTS, "five six seven eight"]
    reference = make_llm(folder, attention_backend="torch_sdpa", num_kv_blocks=256, enable_prefix_caching=False)
    wanted = [reference.generate(each, greedy(12), use_tqdm=False)[0].outputs[0].token_ids for each in prompts]
    llm = make_llm(folder, attention_backend="triton", **TIGHT)
    outputs = llm.generate(prompts, greedy(12), use_tqdm=False)
    assert llm.stats().preemptions
    assert [output.outputs[0].token_ids for output in outputs] == wanted


@pytest.mark.parametrize("family", ["llama", "deepseek_v2"])
@pytest.mark.parametrize("kv_cache_dtype", ["fp8_e4m3", "int8"])
def test_a_quantised_cache_gives_the_tokens_that_the_reference_gets_from_it(make_llm, tmp_path, family, kv_cache_dtype):
    folder = tiny_models.add_byte_tokenizer(getattr(tiny_models, f"tiny_{family}")(tmp_path / family))
    settings = {"kv_cache_dtype": kv_cache_dtype, "kv_cache_scales": "per_token_head", "max_model_len": 64}
    wanted, before = cold_tokens(make_llm, folder, 4, **settings), launches.copy()
    assert tokens_twice(make_llm, folder, 4, block_size=4, **settings) == [wanted, wanted]
    assert_launched(before, "write_kernel", "attention_kernel")
