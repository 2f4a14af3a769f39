"""Models without a class of their own: what transformers generates, or a refusal that says why not."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dense_models
import odd_models
import pytest
import torch
from adapted_models import change_config, change_weights, load, spec_of

from octavo import SamplingParams
from octavo.core.interfaces import ChunkedLocalSpec, FullAttentionSpec, SlidingWindowSpec
from octavo.errors import CheckpointError, UnsupportedModelError
from octavo.models.checkpoint import open_checkpoint
from octavo.models.hugging_face.adapter import TransformersModel
from octavo.testing import hugging_face, tiny_models

NUM_TOKENS = 20
LENGTHS = [1, 2, 3, 5, 16, 17, 33, 64, 100, 200, 300]

# Seeds with few near ties.
FAMILIES: dict[str, tuple[Callable[..., Path], int]] = {
    "gpt2": (tiny_models.tiny_gpt2, 4),
    "opt": (tiny_models.tiny_opt, 7),
    "phi": (tiny_models.tiny_phi, 0),
    "gpt_neox": (tiny_models.tiny_gpt_neox, 5),
    "gemma2": (tiny_models.tiny_gemma2, 4),
    "gpt_oss": (tiny_models.tiny_gpt_oss, 7),
    "mixtral": (tiny_models.tiny_mixtral, 7),
    "olmoe": (tiny_models.tiny_olmoe, 3),
    "cohere": (tiny_models.tiny_cohere, 3),
    "granite": (tiny_models.tiny_granite, 6),
    "deepseek_v3": (tiny_models.tiny_deepseek_v3, 5),
    "llama": (tiny_models.tiny_llama, 3),
    "qwen3": (tiny_models.tiny_qwen3, 5),
    "mistral": (tiny_models.tiny_mistral, 5),
}
WITHOUT_NATIVE_CLASS = [name for name in FAMILIES if name not in ("llama", "qwen3", "mistral")]
THOROUGHLY = ["gpt2", "opt", "phi"]
SETTINGS: dict[str, dict[str, Any]] = {
    "one step a prompt": {},
    "budget of 7": {"max_num_batched_tokens": 7},
    "blocks of 1": {"block_size": 1, "num_kv_blocks": 5000},
    "three at a time": {"max_num_seqs": 3},
    "no prefix cache": {"enable_prefix_caching": False},
}


def prompts() -> list[list[int]]:
    """Prompts of 1 to 300 tokens, several with a common beginning."""
    rng = random.Random(0)
    shared = [rng.randrange(3, 512) for _ in range(200)]
    made = []
    for number, length in enumerate(LENGTHS):
        common = shared[:length] if number % 3 == 0 else []
        made.append(common + [rng.randrange(3, 512) for _ in range(length - len(common))])
    return made


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def folder_of(family: str) -> Path:
        if family not in made:
            make, seed = FAMILIES[family]
            made[family] = make(tmp_path_factory.mktemp(family), seed=seed)
        return made[family]

    return folder_of


@pytest.fixture(scope="session")
def expected_of(folders: Callable[[str], Path]) -> Callable[[str], list[hugging_face.Expected]]:
    """What transformers generates by itself for `prompts`."""
    made: dict[str, list[hugging_face.Expected]] = {}

    def expected(family: str) -> list[hugging_face.Expected]:
        if family not in made:
            made[family] = hugging_face.greedy(hugging_face.load(folders(family)), prompts(), NUM_TOKENS, [2])
        return made[family]

    return expected


@pytest.fixture
def make_adapted(make_llm: Callable[..., Any]) -> Callable[..., Any]:
    """Makes engines that run a folder's model through transformers."""

    def make(folder: Path | None, **settings: Any) -> Any:
        # The tiny models have no tokenizer; the engine says so, and it is of no interest here.
        return make_llm(folder, model_impl="transformers", **{"num_kv_blocks": 400} | settings)

    return make


def answers(llm: Any, **params: Any) -> list[Any]:
    greedy = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, detokenize=False, **params)
    return [output.outputs[0] for output in llm.generate(prompts(), greedy, use_tqdm=False)]


def token_ids(llm: Any) -> list[list[int]]:
    return [answer.token_ids for answer in answers(llm)]


# -- what is generated ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("family", THOROUGHLY)
def test_it_generates_what_transformers_does_cold_and_warm(family, setting, folders, expected_of, make_adapted):
    llm = make_adapted(folders(family), **SETTINGS[setting])
    hugging_face.assert_equal_where_clear(expected_of(family), token_ids(llm))
    hugging_face.assert_equal_where_clear(expected_of(family), token_ids(llm))


@pytest.mark.parametrize("family", THOROUGHLY)
def test_warm_requests_reuse_blocks(family, folders, expected_of, make_adapted):
    llm = make_adapted(folders(family))
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, detokenize=False)
    longest = expected_of(family)[-1]
    cold, warm = (llm.generate(longest.prompt, params, use_tqdm=False)[0] for _ in range(2))
    assert warm.num_cached_tokens >= 288
    assert warm.outputs[0].token_ids == cold.outputs[0].token_ids
    hugging_face.assert_equal_where_clear([longest], [warm.outputs[0].token_ids])


@pytest.mark.parametrize("family", THOROUGHLY)
def test_preempted_requests_end_as_in_transformers(family, folders, expected_of, make_adapted):
    llm = make_adapted(folders(family), num_kv_blocks=25, max_model_len=330, max_num_batched_tokens=64)
    hugging_face.assert_equal_where_clear(expected_of(family), token_ids(llm))
    assert llm.stats().preemptions > 0


@pytest.mark.parametrize("family", [name for name in WITHOUT_NATIVE_CLASS if name not in THOROUGHLY])
def test_windows_caps_sinks_experts_and_scales_are_those_of_transformers(family, folders, expected_of, make_adapted):
    llm = make_adapted(folders(family), max_num_batched_tokens=50)
    hugging_face.assert_equal_where_clear(expected_of(family), token_ids(llm))


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in THOROUGHLY])
def test_every_family_generates_what_transformers_does(family, setting, folders, expected_of, make_adapted):
    llm = make_adapted(folders(family), **SETTINGS[setting])
    hugging_face.assert_equal_where_clear(expected_of(family), token_ids(llm))
    hugging_face.assert_equal_where_clear(expected_of(family), token_ids(llm))


@pytest.mark.parametrize("family", ["gemma2", "cohere", "granite", "phi"])
def test_log_probabilities_have_what_the_model_does_to_logits(family, folders, expected_of, make_adapted):
    llm = make_adapted(folders(family))
    for wanted, answer in zip(expected_of(family), answers(llm, logprobs=5), strict=True):
        for step in range(wanted.num_clear_tokens):
            for token_id, logprob in answer.logprobs[step].top:
                assert logprob == pytest.approx(float(wanted.logprobs[step, token_id]), abs=1e-4)


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
def test_a_native_model_generates_the_same_through_transformers(family, folders, expected_of, make_adapted, make_llm):
    adapted = token_ids(make_adapted(folders(family), max_num_batched_tokens=50))
    assert adapted == token_ids(make_llm(folders(family), num_kv_blocks=400, max_num_batched_tokens=50))
    hugging_face.assert_equal_where_clear(expected_of(family), adapted)


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
def test_a_native_model_needs_the_same_through_transformers(family, folders):
    assert spec_of(folders(family)) == dense_models.spec_of(folders(family))


def test_a_class_that_was_registered_with_transformers_is_served(tmp_path, make_adapted):
    with odd_models.known_to_transformers():
        folder = odd_models.save(tmp_path, "none")
        wanted = hugging_face.greedy(hugging_face.load(folder), prompts(), NUM_TOKENS, [2])
        hugging_face.assert_equal_where_clear(wanted, token_ids(make_adapted(folder)))


def test_a_gguf_file_generates_the_same_through_transformers(make_adapted, make_llm, demo_checkpoint):
    params = SamplingParams(temperature=0, max_tokens=6)
    texts = ["The capital of France is", "1, 2, 3, 4,"]
    through, native = (
        [output.outputs[0].text for output in llm.generate(texts, params, use_tqdm=False)]
        for llm in (make_adapted(None, num_kv_blocks=20), make_llm(num_kv_blocks=20))
    )
    assert through == native


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", ["gpt2", "mixtral", "gemma2"])
def test_half_precision_passes_the_check_and_stays_half(family, dtype, folders):
    model = load(folders(family), dtype)
    with torch.inference_mode():
        hidden = model.forward(dense_models.DenseBatch(torch.tensor([5, 6, 7]), (None, None)))
    assert hidden.dtype == getattr(torch, dtype)


# -- what it needs ----------------------------------------------------------------------------------------------


def test_windows_caps_and_sinks_are_found_without_weights(folders):
    windows = [spec.window for spec in spec_of(folders("gemma2")).attention_specs]
    assert windows == [16, None]
    assert {spec.soft_cap for spec in spec_of(folders("gemma2")).attention_specs} == {2.0}
    assert {spec.scale for spec in spec_of(folders("gemma2")).attention_specs} == {0.25}
    assert [(spec.sinks, spec.window) for spec in spec_of(folders("gpt_oss")).attention_specs] == [
        (True, 16),
        (True, None),
    ]


def test_sizes_are_found_without_weights(folders):
    spec = spec_of(folders("gpt2"))
    assert (spec.vocab_size, spec.max_position, len(spec.kv_cache_specs)) == (512, 512, 2)
    first = spec.attention_specs[0]
    assert (first.num_query_heads, first.num_kv_heads, first.head_dim, first.window) == (4, 4, 16, None)


def test_a_large_model_takes_no_memory_before_its_weights():
    spec = spec_of({"model_type": "mixtral", "num_hidden_layers": 56, "hidden_size": 6144, "intermediate_size": 16384})
    assert len(spec.attention_specs) == 56


def test_values_that_are_smaller_than_keys_are_stored_at_the_size_of_keys(folders):
    assert {(spec.head_dim, spec.head_dim_v) for spec in spec_of(folders("deepseek_v3")).attention_specs} == {(24, 24)}


def test_aligned_chunks_are_found_in_the_mask_and_kept():
    config = {"model_type": "llama4_text", "num_hidden_layers": 4, "attention_chunk_size": 64}
    config |= {"layer_types": ["chunked_attention"] * 3 + ["full_attention"], "max_position_embeddings": 1024}
    spec = spec_of(config)
    assert [attention.chunk for attention in spec.attention_specs] == [64, 64, 64, None]
    shape = (16, spec.attention_specs[0].num_kv_heads, spec.attention_specs[0].head_dim, "float32")
    assert spec.kv_cache_specs == (*[ChunkedLocalSpec(*shape, chunk=64)] * 3, FullAttentionSpec(*shape))


def test_a_layer_keeps_the_window_that_was_found_in_its_mask(folders):
    window, everything = spec_of(folders("gemma2")).kv_cache_specs
    assert window == SlidingWindowSpec(block_size=16, num_kv_heads=2, head_dim=32, dtype="float32", window=16)
    assert everything == FullAttentionSpec(block_size=16, num_kv_heads=2, head_dim=32, dtype="float32")


def test_longrope_serves_the_length_up_to_which_its_frequencies_are_constant():
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    rope |= {"factor": 4.0, "original_max_position_embeddings": 128}
    config = {"model_type": "phi3", "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4}
    config |= {"num_hidden_layers": 1, "max_position_embeddings": 512, "vocab_size": 512, "pad_token_id": 0}
    assert spec_of(config | {"rope_parameters": rope, "original_max_position_embeddings": 128}).max_position == 128


# -- what is left alone -----------------------------------------------------------------------------------------


def test_the_callers_random_numbers_go_on_as_if_nothing_was_loaded(folders):
    torch.manual_seed(7)
    wanted = torch.rand(4)
    torch.manual_seed(7)
    spec_of(folders("gpt2"))
    load(folders("gpt2"))
    assert torch.equal(torch.rand(4), wanted)


def test_loading_says_nothing(folders, capfd):
    load(folders("gpt2"))
    assert capfd.readouterr() == ("", "")


def test_the_hosts_log_level_and_progress_bars_stay_as_they_were(folders):
    from transformers.utils import logging as host_logging

    before = host_logging.get_verbosity(), host_logging.is_progress_bar_enabled()
    load(folders("gpt2"))
    assert (host_logging.get_verbosity(), host_logging.is_progress_bar_enabled()) == before


@pytest.mark.parametrize("model_type", ["gpt2", "my_model"])
def test_code_in_a_models_folder_is_never_run(model_type, tmp_path):
    folder = tiny_models.tiny_gpt2(tmp_path)
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'was_run')!r}, 'w')\nclass Model: ...\nclass Config: ...\n")
    auto_map = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    change_config(folder, model_type=model_type, auto_map=auto_map, attn_implementation="somebody/kernel")
    if model_type == "gpt2":
        load(folder)
    else:
        with pytest.raises(UnsupportedModelError, match="The code in its folder is not run"):
            load(folder)
    assert not (tmp_path / "was_run").exists()


def test_two_engines_in_two_threads_keep_apart(folders, expected_of, make_adapted):
    engines = {family: make_adapted(folders(family), max_num_batched_tokens=40) for family in ("gpt2", "gemma2")}
    got: dict[str, list[list[int]]] = {}

    def run(family: str) -> None:
        got[family] = token_ids(engines[family])

    threads = [threading.Thread(target=run, args=(family,)) for family in engines]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for family in engines:
        hugging_face.assert_equal_where_clear(expected_of(family), got[family])


def test_one_model_can_be_run_by_two_threads_at_a_time(folders):
    model = load(folders("gpt2"))
    results: list[torch.Tensor] = []

    def run() -> None:
        for _ in range(20):
            batch = dense_models.DenseBatch(torch.arange(3, 40), (None, None))
            with torch.inference_mode():
                results.append(model.logits(model.forward(batch)[-1:]))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 40
    assert all(torch.allclose(result, results[0], atol=1e-4) for result in results)


# -- weights ----------------------------------------------------------------------------------------------------


def test_names_without_the_prefix_of_the_language_model_are_found(tmp_path, make_adapted, folders, expected_of):
    folder = tiny_models.tiny_gpt2(tmp_path, seed=4)

    def shorten(weights: dict[str, torch.Tensor]) -> None:
        for name in list(weights):
            weights[name.removeprefix("transformer.")] = weights.pop(name)
        # As GPT-2's own files have them.
        weights["h.0.attn.bias"] = torch.ones(1, 1, 8, 8)

    change_weights(folder, shorten)
    hugging_face.assert_equal_where_clear(expected_of("gpt2"), token_ids(make_adapted(folder)))


def test_tables_that_old_files_carry_along_are_left_out(tmp_path):
    folder = tiny_models.tiny_gpt_neox(tmp_path)
    attention = "gpt_neox.layers.0.attention"
    tables = {"bias": torch.ones(1, 1, 8, 8), "masked_bias": torch.tensor(-1e9), "rotary_emb.inv_freq": torch.ones(2)}
    change_weights(folder, lambda weights: weights.update({f"{attention}.{key}": t for key, t in tables.items()}))
    load(folder)
    folder = change_weights(
        tiny_models.tiny_phi(tmp_path),
        lambda weights: weights.update({"model.layers.0.attention.bias": tables["bias"]}),
    )
    load(folder)


def test_a_bias_that_is_no_mask_is_not_left_out(tmp_path):
    folder = tiny_models.tiny_phi(tmp_path)
    change_weights(folder, lambda weights: weights.update({"model.layers.0.attention.bias": torch.ones(64)}))
    with pytest.raises(UnsupportedModelError, match="has no place for"):
        load(folder)


def test_a_missing_tensor_is_named(tmp_path):
    folder = tiny_models.tiny_phi(tmp_path)
    change_weights(folder, lambda weights: weights.pop("model.layers.1.self_attn.k_proj.weight"))
    with pytest.raises(CheckpointError) as error:
        load(folder)
    assert str(error.value) == (
        "The checkpoint lacks 1 tensors that PhiForCausalLM needs, 'model.layers.1.self_attn.k_proj.weight' the first. "
        "The weights and the config do not belong together, or the checkpoint is of another head than a language "
        "model's."
    )


def test_a_missing_head_is_an_error_where_it_is_not_tied(tmp_path):
    folder = tiny_models.tiny_gpt_neox(tmp_path)
    change_weights(folder, lambda weights: weights.pop("lm_head.weight", None) or weights.pop("embed_out.weight"))
    with pytest.raises(CheckpointError, match="lacks 1 tensors"):
        load(folder)


def test_a_tensor_without_a_place_is_named(tmp_path):
    folder = tiny_models.tiny_phi(tmp_path)
    change_weights(folder, lambda weights: weights.update({"model.layers.0.adapter.weight": torch.ones(2, 2)}))
    with pytest.raises(UnsupportedModelError) as error:
        load(folder)
    assert "holds 1 tensors that PhiForCausalLM has no place for" in str(error.value)
    assert "'model.layers.0.adapter.weight' the first" in str(error.value)


def test_a_tensor_of_another_shape_is_named(tmp_path):
    folder = tiny_models.tiny_phi(tmp_path)
    change_weights(folder, lambda weights: weights.update({"model.final_layernorm.bias": torch.ones(3)}))
    with pytest.raises(CheckpointError) as error:
        load(folder)
    assert str(error.value) == (
        "Tensor 'model.final_layernorm.bias' is of shape [3]; the config of PhiForCausalLM asks for [64] (1 tensors in "
        "all). The weights and the config do not belong together."
    )


def test_an_unreadable_tensor_is_the_checkpoints_error(folders):
    class Broken:
        def __init__(self, checkpoint: Any) -> None:
            self._checkpoint = checkpoint

        def __getattr__(self, name: str) -> Any:
            return getattr(self._checkpoint, name)

        def tensor(self, name: str) -> torch.Tensor:
            raise CheckpointError(f"Tensor {name!r} cannot be read.")

    with pytest.raises(CheckpointError, match="cannot be read"):
        TransformersModel.from_checkpoint(Broken(open_checkpoint(str(folders("phi")))), dtype="float32", device="cpu")
