"""Gemma 2 and Gemma 3 as GGUF: what the file says, what it leaves to llama.cpp's code, and a real one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_builder import GGUFBuilder
from spec_models import logits_of

from octavo.core.interfaces.model import Checkpoint, Tokenizer
from octavo.errors import CheckpointError, UnsupportedModelError
from octavo.models.checkpoint import open_checkpoint
from octavo.models.gemma import GemmaModel
from octavo.models.gemma_config import read_config
from octavo.testing.tiny_models import tiny_gemma2, tiny_gemma3

PROMPT = [(37 * i + 11) % 509 for i in range(48)]
FULL, SLIDING = "full_attention", "sliding_attention"


def gemma2_builder(folder: Path) -> GGUFBuilder:
    # llama.cpp's code knows one scale, that of head_dim.
    source = open_checkpoint(str(tiny_gemma2(folder, query_pre_attn_scalar=32)))
    builder = GGUFBuilder(source, "gemma2")
    builder.metadata |= {"attention.sliding_window": 16}
    return builder


def gemma3_builder(folder: Path, **config: Any) -> GGUFBuilder:
    source = open_checkpoint(str(tiny_gemma3(folder, query_pre_attn_scalar=32, **config)))
    builder = GGUFBuilder(source, "gemma3")
    builder.metadata |= {"attention.sliding_window": 16, "rope.freq_base": 1_000_000.0}
    return builder


def config_of(builder: GGUFBuilder, path: Path) -> Any:
    return open_checkpoint(str(builder.write(path / "model.gguf"))).config


def assert_computes_the_same(builder: GGUFBuilder, folder: Path) -> None:
    path = builder.write(folder / "model.gguf")
    ours, expected = (logits_of(GemmaModel, source, PROMPT) for source in (path, folder / "source"))
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=0)


def test_a_gemma2_written_as_gguf_computes_the_same(tmp_path: Path) -> None:
    builder = gemma2_builder(tmp_path / "source")
    builder.metadata |= {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0}
    assert_computes_the_same(builder, tmp_path)


GEMMA3_FILES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # The tiny model's config, and what the file says beside the usual.
    "as most files": ({}, {}),
    "tied embeddings": ({"tie_word_embeddings": True}, {}),
    "full layers stretched": (
        {"rope_parameters": {FULL: {"rope_type": "linear", "rope_theta": 1_000_000.0, "factor": 8.0}}},
        {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
    ),
    "a local base": (
        {"rope_parameters": {SLIDING: {"rope_type": "default", "rope_theta": 500.0}}},
        {"rope.freq_base_swa": 500.0},
    ),
    "another pattern": ({"sliding_window_pattern": 3}, {"attention.sliding_window_pattern": 3}),
    "layer by layer": (
        {"num_hidden_layers": 3, "layer_types": [FULL, SLIDING, FULL]},
        {"attention.sliding_window_pattern": [False, True, False]},
    ),
    "no windows": ({"num_hidden_layers": 2, "layer_types": [FULL] * 2}, {"attention.sliding_window": 0}),
    "a cap on logits": ({"final_logit_softcapping": 3.0}, {"final_logit_softcapping": 3.0}),
}


@pytest.mark.parametrize("case", GEMMA3_FILES)
def test_a_gemma3_written_as_gguf_computes_the_same(case: str, tmp_path: Path) -> None:
    config, metadata = GEMMA3_FILES[case]
    builder = gemma3_builder(tmp_path / "source", **config)
    builder.metadata |= metadata
    assert_computes_the_same(builder, tmp_path)


def test_caps_that_a_gemma2_does_not_state_are_the_familys(tmp_path: Path) -> None:
    read = read_config(config_of(gemma2_builder(tmp_path / "source"), tmp_path))
    assert (read.attention_soft_cap, read.final_soft_cap) == (50.0, 30.0)


@pytest.mark.parametrize(
    ("make", "num_layers", "scalar"),
    [(gemma2_builder, 46, 16), (gemma2_builder, 42, 32), (gemma3_builder, 62, 16), (gemma3_builder, 48, 32)],
)
def test_the_largest_models_scale_scores_by_the_width_of_a_head_in_the_hidden_rows(
    make: Callable[[Path], GGUFBuilder], num_layers: int, scalar: int, tmp_path: Path
) -> None:
    # Hidden rows of 64, 4 heads of 32. The weights are not looked at.
    builder = make(tmp_path / "source")
    builder.metadata["block_count"] = num_layers
    assert config_of(builder, tmp_path)["query_pre_attn_scalar"] == scalar


REFUSED: dict[str, tuple[type[Exception], dict[str, Any], str]] = {
    "a pattern for fewer layers": (
        CheckpointError,
        {"attention.sliding_window_pattern": [True, False]},
        "as gemma3.attention.sliding_window_pattern; it has to be true or false for each of its 7 layers.",
    ),
    "a pattern that is text": (
        CheckpointError,
        {"attention.sliding_window_pattern": "alternating"},
        "gives 'alternating' as gemma3.attention.sliding_window_pattern; it has to be a whole number.",
    ),
    "a key of another family": (
        UnsupportedModelError,
        {"attention.shared_kv_layers": 2},
        "sets gemma3.attention.shared_kv_layers to 2, which would change what the model computes in a way that is not "
        "supported.",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_file_cannot_mean_is_refused(case: str, tmp_path: Path) -> None:
    error, metadata, sentence = REFUSED[case]
    builder = gemma3_builder(tmp_path / "source")
    builder.metadata |= metadata
    with pytest.raises(error) as refusal:
        config_of(builder, tmp_path)
    assert str(refusal.value).endswith(sentence)


def test_the_keys_of_a_gemma_are_refused_of_others(tiny_folders: dict[str, Path], tmp_path: Path) -> None:
    builder = GGUFBuilder(open_checkpoint(str(tiny_folders["llama"])))
    builder.metadata["final_logit_softcapping"] = 30.0
    with pytest.raises(UnsupportedModelError, match=r"sets llama\.final_logit_softcapping to 30\.0"):
        config_of(builder, tmp_path)


def test_a_gemma2_without_a_window_lacks_something(tmp_path: Path) -> None:
    builder = gemma2_builder(tmp_path / "source")
    del builder.metadata["attention.sliding_window"]
    with pytest.raises(CheckpointError, match=r"lacks the metadata gemma2\.attention\.sliding_window"):
        config_of(builder, tmp_path)


# -- Gemma 3 270M ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gemma3_270m(gemma3_gguf: Path) -> Checkpoint:
    return open_checkpoint(str(gemma3_gguf))


@pytest.fixture(scope="module")
def tokenizer(gemma3_270m: Checkpoint) -> Tokenizer:
    return gemma3_270m.tokenizer()


def test_the_real_files_config_is_that_of_the_model_on_the_hub(gemma3_270m: Checkpoint) -> None:
    read = read_config(gemma3_270m.config)
    assert read.windows == ((512,) * 5 + (None,)) * 3
    thetas = [rope.parameters["rope_theta"] for rope in read.ropes]
    assert [thetas[rope] for rope in read.rope_of_layer] == ([10_000.0] * 5 + [1_000_000.0]) * 3
    assert (read.num_query_heads, read.num_kv_heads, read.head_dim, read.scale) == (4, 1, 256, 1 / 16)
    assert (read.vocab_size, read.hidden_size, read.intermediate_size) == (262_144, 640, 2048)
    assert (read.max_position, read.rms_norm_eps) == (32_768, pytest.approx(1e-6))
    assert (read.activation, read.tie_word_embeddings) == ("gelu_pytorch_tanh", True)
    assert gemma3_270m.eos_token_ids == {1}


def test_the_real_files_tensors_are_those_of_the_model(gemma3_270m: Checkpoint) -> None:
    import transformers

    config = transformers.Gemma3TextConfig(**gemma3_270m.config)
    with torch.device("meta"):
        expected = {name: tensor.shape for name, tensor in transformers.Gemma3ForCausalLM(config).named_parameters()}
    assert set(gemma3_270m.tensor_names()) == set(expected)
    for name in (name for name in expected if "layers.17." in name):
        assert gemma3_270m.tensor(name).shape == expected[name]
    # Stored with 1 added; as on the hub, the smallest norms are below 0.
    assert gemma3_270m.tensor("model.norm.weight").min().item() == -0.8125


# What SentencePiece 0.2.3 makes of these texts with the vocabulary, scores and types in the file. transformers 5.24
# reads the same tokenizer out of it, but for runs of more than 31 spaces, which it cuts elsewhere.
TOKENIZED: dict[str, list[int]] = {
    "": [],
    "The capital of France is": [818, 5279, 529, 7001, 563],
    "  two  spaces   three": [138, 13498, 138, 35220, 139, 19891],
    "a\n\n\nb\n c": [236746, 109, 236763, 107, 505],
    "naïve café 🎉🎉 日本語": [1789, 238527, 560, 33443, 204906, 242061, 33375, 238582],
    "Привет, мир! नमस्ते": [116130, 236764, 58562, 236888, 173040],
    "f(x):\n    return x\n\tpass": [236760, 236769, 236781, 1473, 107, 140, 2060, 1123, 107, 255968, 4373],
    "<table><tr><td>1</td></tr></table>": [168, 173, 175, 236770, 183, 181, 176],
    "67,890.12": [236825, 236832, 236764, 236828, 236819, 236771, 236761, 236770, 236778],
    "\u200b\u00a0x \ufb01 \u212b": [237141, 432, 398, 236781, 97940, 236743, 464, 370, 409],
    " " * 40 + "x": [167, 145, 236781],
}


@pytest.mark.parametrize("text", TOKENIZED)
def test_the_real_files_tokenizer_is_sentencepiece(tokenizer: Tokenizer, text: str) -> None:
    bos = 2
    assert tokenizer.encode(text) == [bos, *TOKENIZED[text]]
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_real_files_special_tokens_are_one_id_each(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("<start_of_turn>user\n<end_of_turn>")
    assert token_ids == [2, 105, 2364, 107, 106]
    assert tokenizer.decode(token_ids) == "user\n"
    assert tokenizer.chat_template is None
