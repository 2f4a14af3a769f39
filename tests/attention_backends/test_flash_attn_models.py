"""Whole models over stand-ins of FlashAttention's functions: the reference's tokens."""

from __future__ import annotations

import flash_attention_stand_ins as stand_ins
import pytest
from flash_attention_on_cpu import OnCPU

from octavo import SamplingParams
from octavo.testing import installed, tiny_models

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPTS = ["The capital of France is", "One, two, three, four", "one two three four five six seven eight nine ten"]
IN_COPIES = {"name": "flash_on_cpu", "options": {"provider": "torch_gather"}}


def tokens_of(make_llm, model, backend, **settings):
    llm = make_llm(model, attention_backend=backend, **{"num_kv_blocks": 64, **settings})
    # Twice: the second time the prompts' beginnings are found in the prefix cache.
    return [output.outputs[0].token_ids for _ in range(2) for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


@pytest.mark.parametrize("backend", ["flash_on_cpu", IN_COPIES], ids=["paged", "copied"])
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_tiny_model_generates_the_references_tokens(make_llm, tmp_path, family, backend):
    """In pieces of prompts, with windows shorter than they are, and kernels that load whole tiles."""
    folder = tiny_models.add_byte_tokenizer(getattr(tiny_models, f"tiny_{family}")(tmp_path / family))
    settings = {"max_num_batched_tokens": 32, "max_num_seqs": 2}
    wanted = tokens_of(make_llm, folder, "torch_sdpa", **settings)
    with (
        installed({"octavo.attention_backends": {"flash_on_cpu": OnCPU}}),
        stand_ins.loading(tile=64, loads_behind=True),
    ):
        stand_ins.calls.clear()
        assert tokens_of(make_llm, folder, backend, **settings) == wanted
    assert set(stand_ins.calls) == {"torch, copied" if backend is IN_COPIES else "torch, paged"}


def test_the_demo_model_generates_the_references_tokens(make_llm, demo_gguf):
    wanted = tokens_of(make_llm, demo_gguf, "torch_sdpa")
    with installed({"octavo.attention_backends": {"flash_on_cpu": OnCPU}}):
        assert tokens_of(make_llm, demo_gguf, "flash_on_cpu") == wanted


@pytest.mark.slow
def test_gemma_3_generates_the_references_tokens(make_llm, gemma3_gguf):
    settings = {"max_model_len": 64, "num_kv_blocks": 128}
    wanted = tokens_of(make_llm, gemma3_gguf, "torch_sdpa", **settings)
    with installed({"octavo.attention_backends": {"flash_on_cpu": OnCPU}}):
        assert tokens_of(make_llm, gemma3_gguf, "flash_on_cpu", **settings) == wanted


@pytest.mark.parametrize("kind", ["sliding_window", "full_attention"])
def test_it_serves_one_kind_of_layers_of_a_model_and_another_backend_the_other(make_llm, tmp_path, kind):
    folder = tiny_models.add_byte_tokenizer(tiny_models.tiny_gemma3(tmp_path / "gemma"))
    settings = {"max_num_batched_tokens": 24, "max_num_seqs": 2, "max_model_len": 96}
    wanted = tokens_of(make_llm, folder, "torch_sdpa", **settings)
    registered = installed({"octavo.attention_backends": {"flash_on_cpu": OnCPU}})
    with registered, stand_ins.loading(tile=64, loads_behind=True):
        stand_ins.calls.clear()
        tokens = tokens_of(make_llm, folder, "torch_sdpa", attention_backends={kind: "flash_on_cpu"}, **settings)
    assert tokens == wanted
    assert set(stand_ins.calls) == {"torch, paged"}
