"""Gemma 2 and Gemma 3 against transformers, in float32."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from dense_models import reference_logits
from spec_models import ChangedCheckpoint, SpecBatch, logits_of, spec_of

from octavo.core.interfaces.kv_cache_spec import FullAttentionSpec, SlidingWindowSpec
from octavo.core.interfaces.model import Checkpoint
from octavo.errors import CheckpointError, UnsupportedModelError
from octavo.models.checkpoint import open_checkpoint
from octavo.models.gemma import GemmaModel
from octavo.models.gemma_config import read_config
from octavo.testing.model_trials import perturbed
from octavo.testing.tiny_models import tiny_gemma2, tiny_gemma3

# Three windows of the tiny models.
PROMPT = [(37 * i + 11) % 509 for i in range(48)]
FULL, SLIDING = "full_attention", "sliding_attention"


@pytest.fixture(scope="module")
def gemma2(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(str(tiny_gemma2(tmp_path_factory.mktemp("gemma2"))))


@pytest.fixture(scope="module")
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(str(tiny_gemma3(tmp_path_factory.mktemp("gemma3"))))


LINEAR = {"rope_type": "linear", "rope_theta": 1_000_000.0, "factor": 8.0}
VARIANTS: dict[str, tuple[Callable[..., Path], dict[str, Any]]] = {
    "gemma2": (tiny_gemma2, {}),
    "gemma2 of five layers": (tiny_gemma2, {"num_hidden_layers": 5}),
    "gemma2 without caps": (tiny_gemma2, {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma2 with a cap on scores alone": (tiny_gemma2, {"final_logit_softcapping": None}),
    "gemma2 with the first layer full": (tiny_gemma2, {"layer_types": [FULL, SLIDING]}),
    "gemma2 with tied embeddings": (tiny_gemma2, {"tie_word_embeddings": True}),
    "gemma2 with rope stretched": (tiny_gemma2, {"rope_parameters": LINEAR}),
    "gemma2 with another activation": (tiny_gemma2, {"hidden_activation": "gelu"}),
    "gemma3": (tiny_gemma3, {}),
    "gemma3 with tied embeddings": (tiny_gemma3, {"tie_word_embeddings": True}),
    "gemma3 with every third layer full": (tiny_gemma3, {"sliding_window_pattern": 3}),
    "gemma3 with layer types": (tiny_gemma3, {"num_hidden_layers": 3, "layer_types": [FULL, SLIDING, FULL]}),
    "gemma3 with windows alone": (tiny_gemma3, {"num_hidden_layers": 2}),
    "gemma3 without windows": (tiny_gemma3, {"num_hidden_layers": 2, "layer_types": [FULL] * 2}),
    "gemma3 with a cap on logits": (tiny_gemma3, {"final_logit_softcapping": 3.0}),
    "gemma3 with one KV head": (tiny_gemma3, {"num_key_value_heads": 1}),
    "gemma3 with an embedding scale that no square is": (tiny_gemma3, {"hidden_size": 96}),
    "gemma3 with full layers stretched": (tiny_gemma3, {"rope_parameters": {FULL: LINEAR, SLIDING: None}}),
    "gemma3 with another local base": (
        tiny_gemma3,
        {"rope_parameters": {SLIDING: {"rope_type": "default", "rope_theta": 500.0}}},
    ),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_tiny_model_computes_what_transformers_computes(variant: str, tmp_path: Path) -> None:
    make, config = VARIANTS[variant]
    folder = make(tmp_path, **config)
    expected = reference_logits(folder, PROMPT)
    # With tied embeddings logits go beyond 100, where 1e-4 is less than ten units in the last place.
    torch.testing.assert_close(logits_of(GemmaModel, folder, PROMPT), expected, atol=1e-4, rtol=2e-6)


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        ({"rope_theta": 20000.0}, {FULL: {"rope_theta": 20000.0}}),
        ({"rope_local_base_freq": 500.0}, {SLIDING: {"rope_theta": 500.0}}),
        # Only the full layers are stretched.
        ({"rope_scaling": {"rope_type": "linear", "factor": 8.0}}, {FULL: LINEAR}),
    ],
)
def test_the_older_spelling_of_rope_means_the_same(
    gemma3: Any, older: dict[str, Any], newer: dict[str, Any], tmp_path: Path
) -> None:
    silent = {kind: {"rope_type": "default"} for kind in (FULL, SLIDING)}
    folder = perturbed(gemma3.path, tmp_path, rope_parameters=None, **older)
    ours = logits_of(GemmaModel, folder, PROMPT)
    changed = ChangedCheckpoint(gemma3, {"rope_parameters": silent | newer})
    assert torch.equal(ours, logits_of(GemmaModel, changed, PROMPT))
    assert not torch.equal(ours, logits_of(GemmaModel, gemma3, PROMPT))
    torch.testing.assert_close(ours, reference_logits(folder, PROMPT), atol=1e-4, rtol=0)


def test_the_oldest_spelling_of_a_rope_type_means_the_same(gemma3: Any) -> None:
    # transformers 5 overlooks it in a Gemma 3; versions before it did not.
    silent = {"rope_parameters": None}
    ours, expected = (
        logits_of(
            GemmaModel, ChangedCheckpoint(gemma3, silent | {"rope_scaling": {key: "linear", "factor": 8.0}}), PROMPT
        )
        for key in ("type", "rope_type")
    )
    assert torch.equal(ours, expected)


@pytest.mark.parametrize(
    ("model_type", "config_class"), [("gemma2", "Gemma2Config"), ("gemma3_text", "Gemma3TextConfig")]
)
def test_a_config_that_is_silent_means_what_it_means_in_transformers(model_type: str, config_class: str) -> None:
    import transformers

    # Written out there; the hub's configs leave out most of it.
    written_out = getattr(transformers, config_class)().to_dict()
    assert read_config({"model_type": model_type}) == read_config(written_out)


def test_a_silent_gemma3_has_five_local_layers_for_each_full_one() -> None:
    read = read_config({"model_type": "gemma3_text", "num_hidden_layers": 14, "sliding_window": 512})
    assert read.windows == ((512,) * 5 + (None,)) * 2 + (512, 512)
    thetas = [read.ropes[rope].parameters["rope_theta"] for rope in read.rope_of_layer]
    assert thetas == ([10_000.0] * 5 + [1_000_000.0]) * 2 + [10_000.0] * 2
    assert (read.scale, read.attention_soft_cap, read.final_soft_cap) == (1 / 16, None, None)


def test_a_silent_gemma2_alternates_and_caps_scores_and_logits() -> None:
    read = read_config({"model_type": "gemma2", "num_hidden_layers": 5})
    assert read.windows == (4096, None, 4096, None, 4096)
    assert [rope.parameters["rope_theta"] for rope in read.ropes] == [10_000.0]
    assert (read.scale, read.attention_soft_cap, read.final_soft_cap) == (1 / 16, 50.0, 30.0)


def test_layers_keep_their_window_or_everything(gemma2: Checkpoint, gemma3: Checkpoint) -> None:
    shape = {"block_size": 16, "num_kv_heads": 2, "head_dim": 32, "dtype": "float16"}
    window, everything = SlidingWindowSpec(**shape, window=16), FullAttentionSpec(**shape)
    for checkpoint, layers, cap in ((gemma2, [16, None], 2.0), (gemma3, [16] * 5 + [None, 16], None)):
        spec = spec_of(GemmaModel, checkpoint.config, kv_dtype="float16")
        assert [attention.window for attention in spec.attention_specs] == layers
        assert {(attention.scale, attention.soft_cap) for attention in spec.attention_specs} == {(0.25, cap)}
        assert spec.kv_cache_specs == tuple(window if layer else everything for layer in layers)
        assert (spec.vocab_size, spec.max_position) == (512, 512)


def test_requests_are_as_long_as_the_shortest_rope_allows() -> None:
    longrope = {"rope_type": "longrope", "short_factor": [1.0] * 128, "long_factor": [2.0] * 128}
    full = longrope | {"original_max_position_embeddings": 64}
    config = {"model_type": "gemma3_text", "rope_parameters": {FULL: full}}
    assert spec_of(GemmaModel, config).max_position == 64
    assert spec_of(GemmaModel, config | {"num_hidden_layers": 5}).max_position == 131_072


def test_weights_are_loaded_in_the_dtype_asked_for(gemma3: Checkpoint) -> None:
    model = GemmaModel.from_checkpoint(gemma3, dtype="bfloat16", device="cpu")
    specs = spec_of(GemmaModel, gemma3.config).attention_specs
    with torch.inference_mode():
        logits = model.logits(model.forward(SpecBatch(torch.tensor(PROMPT), specs)))
    assert logits.dtype == torch.bfloat16
    exact = logits_of(GemmaModel, gemma3, PROMPT)
    assert (logits.float() - exact).abs().mean() < 0.1 * exact.abs().mean()


def test_the_embedding_is_scaled_by_what_the_dtype_makes_of_the_root(tmp_path: Path) -> None:
    import transformers

    # With this epsilon the last norm does not undo the scale: sqrt(96) = 9.798, in bfloat16 9.8125.
    folder = tiny_gemma3(tmp_path, num_hidden_layers=1, hidden_size=96, rms_norm_eps=1e6)
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model = GemmaModel.from_checkpoint(open_checkpoint(str(folder)), dtype="bfloat16", device="cpu")
    with torch.inference_mode():
        ours = model.forward(SpecBatch(torch.tensor(PROMPT), spec_of(GemmaModel, folder).attention_specs))
        expected = reference.model(torch.tensor([PROMPT])).last_hidden_state[0]
    # Any other scale, or a norm that rounds on the way, changes every third number.
    assert (ours == expected).float().mean() > 0.99


def tiny_gemma3_with_images(folder: Path, text_folder: Path) -> Path:
    """Save a tiny Gemma 3 that also sees images, with the language model of another folder."""
    import transformers

    vision = transformers.SiglipVisionConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
    )
    text = transformers.Gemma3TextConfig.from_pretrained(text_folder)
    config = transformers.Gemma3Config(
        vision_config=vision.to_dict(), text_config=text.to_dict(), mm_tokens_per_image=4, tie_word_embeddings=True
    )
    with torch.random.fork_rng(devices=[]):
        model = transformers.Gemma3ForConditionalGeneration(config)
    language_model = transformers.Gemma3ForCausalLM.from_pretrained(text_folder)
    model.model.language_model.load_state_dict(language_model.model.state_dict())
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tied_gemma3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gemma3(tmp_path_factory.mktemp("tied"), num_hidden_layers=6, tie_word_embeddings=True)


@pytest.fixture(scope="module")
def with_images(tied_gemma3: Path, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(str(tiny_gemma3_with_images(tmp_path_factory.mktemp("images"), tied_gemma3)))


def test_a_model_with_images_answers_to_text_as_its_language_model_does(with_images: Any, tied_gemma3: Path) -> None:
    assert any(name.startswith("vision_tower.") for name in with_images.tensor_names())
    ours = logits_of(GemmaModel, with_images, PROMPT)
    torch.testing.assert_close(ours, reference_logits(with_images.path, PROMPT), atol=1e-4, rtol=2e-6)
    assert torch.equal(ours, logits_of(GemmaModel, tied_gemma3, PROMPT))


@pytest.mark.parametrize(("stated", "is_tied"), [({}, True), ({"tie_word_embeddings": False}, False)])
def test_whether_embeddings_are_tied_is_said_of_the_whole(stated: dict[str, Any], is_tied: bool) -> None:
    config = {"model_type": "gemma3", "text_config": {"tie_word_embeddings": not is_tied}, **stated}
    assert read_config(config).tie_word_embeddings is is_tied


class RenamedCheckpoint(ChangedCheckpoint):
    """A checkpoint whose tensors' names begin otherwise."""

    def __init__(self, source: Checkpoint, before: str, after: str) -> None:
        super().__init__(source)
        self._before, self._after = before, after

    def tensor_names(self) -> list[str]:
        return [name.replace(self._before, self._after) for name in super().tensor_names()]

    def tensor(self, name: str) -> torch.Tensor:
        return super().tensor(name.replace(self._after, self._before))


def test_the_other_names_of_a_model_with_images_are_known(with_images: Checkpoint, tied_gemma3: Path) -> None:
    renamed = RenamedCheckpoint(with_images, "language_model.model.", "model.language_model.")
    assert torch.equal(logits_of(GemmaModel, renamed, PROMPT), logits_of(GemmaModel, tied_gemma3, PROMPT))
    elsewhere = RenamedCheckpoint(with_images, "language_model.model.", "decoder.")
    with pytest.raises(CheckpointError) as error:
        logits_of(GemmaModel, elsewhere, PROMPT)
    assert str(error.value) == (
        "The checkpoint of a Gemma 3 with vision has no language model where it is looked for: neither "
        "'language_model.model.embed_tokens.weight' nor 'model.language_model.embed_tokens.weight' is there. Fetch its "
        "files again, or save it with a current transformers."
    )


def not_supported(key: str, value: Any) -> str:
    return (
        f"The config sets {key} to {value!r}, which changes what the model computes and is not supported. A model "
        "class that computes it can be added as a plugin."
    )


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another model_type": (
        {"model_type": "gemma"},
        "The config's model_type is 'gemma'; this class runs gemma2, gemma3_text, gemma3.",
    ),
    "a quantised model": (
        {"quantization_config": {"quant_method": "gptq"}},
        "The config sets quantization_config to {'quant_method': 'gptq'}, which changes what the model computes and is "
        "not supported. Use a copy of the model that is not quantised, or a GGUF file.",
    ),
    "attention to later tokens": (
        {"use_bidirectional_attention": True},
        not_supported("use_bidirectional_attention", True),
    ),
    "biases": ({"attention_bias": True}, not_supported("attention_bias", True)),
    # transformers takes it and computes without.
    "capped scores in a Gemma 3": ({"attn_logit_softcapping": 50.0}, not_supported("attn_logit_softcapping", 50.0)),
    "another pattern in a Gemma 2": (
        {"model_type": "gemma2", "sliding_window_pattern": 6},
        not_supported("sliding_window_pattern", 6),
    ),
    "layers of another kind": (
        {"layer_types": ["chunked_attention"] * 7},
        "The config's layer_types are ['chunked_attention', 'chunked_attention', 'chunked_attention', "
        "'chunked_attention', 'chunked_attention', 'chunked_at...; a gemma3_text of 7 layers is run with one of "
        "'full_attention' and 'sliding_attention' a layer.",
    ),
    "too few layer types": (
        {"layer_types": [FULL]},
        "The config's layer_types are ['full_attention']; a gemma3_text of 7 layers is run with one of "
        "'full_attention' and 'sliding_attention' a layer.",
    ),
    "an unknown activation": (
        {"hidden_activation": "xielu"},
        "The config asks for the activation 'xielu' (hidden_activation). Known: silu, swish, gelu, gelu_new, "
        "gelu_pytorch_tanh, relu, relu6, mish, tanh, sigmoid.",
    ),
    "an unknown rope type": (
        {"rope_parameters": {SLIDING: {"rope_type": "spiral"}}},
        "The config asks for the rope type 'spiral'. Known types: default, linear, dynamic, yarn, longrope, llama3, "
        "frequency_factors.",
    ),
    "images without a language model": (
        {"model_type": "gemma3", "text_config": {"model_type": "llama"}},
        "The config's model_type is 'gemma3' and its text_config {'model_type': 'llama'}; the language model of a "
        "Gemma 3 is run, whose text_config has the model_type 'gemma3_text'.",
    ),
    "a quantised model with images": (
        {"model_type": "gemma3", "text_config": {}, "quantization_config": {"bits": 4}},
        "The config sets quantization_config to {'bits': 4}, which changes what the model computes and is not "
        "supported. Use a copy of the model that is not quantised, or a GGUF file.",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_computed_is_refused(gemma3: Checkpoint, case: str) -> None:
    config, sentence = REFUSED[case]
    with pytest.raises(UnsupportedModelError) as refusal:
        spec_of(GemmaModel, dict(gemma3.config) | config)
    assert str(refusal.value) == sentence


def wrong_rope(value: Any) -> str:
    return (
        f"The config gives {value!r} as its rope parameters; a Gemma 3 has an object 'full_attention' and one "
        "'sliding_attention' in rope_parameters, or a flat rope_scaling for the layers with full attention."
    )


WRONG_VALUES: dict[str, tuple[dict[str, Any], str]] = {
    "heads that do not divide": (
        {"num_key_value_heads": 3},
        "The config gives 4 query heads, 3 KV heads and a head_dim of 32; query heads have to be a multiple of KV "
        "heads, and head_dim even.",
    ),
    "a size of nothing": ({"vocab_size": 0}, "The config gives 0 as vocab_size; it has to be positive."),
    "a pattern of nothing": (
        {"layer_types": None, "sliding_window_pattern": 0},
        "The config gives 0 as sliding_window_pattern; it has to be positive.",
    ),
    "no window for layers that see one": (
        {"sliding_window": None},
        "The config gives no sliding_window, and 6 of its 7 layers see one. Give their number of keys, or make all "
        "layer_types 'full_attention'.",
    ),
    "a cap of nothing": (
        {"final_logit_softcapping": 0.0},
        "The config gives 0.0 as final_logit_softcapping; it has to be a number above 0.",
    ),
    "a scale of nothing": (
        {"query_pre_attn_scalar": 0},
        "The config gives 0 as query_pre_attn_scalar; it has to be a number above 0.",
    ),
    "a scale that is text": (
        {"query_pre_attn_scalar": "256"},
        "The config gives '256' as query_pre_attn_scalar; it has to be a number above 0.",
    ),
    "an epsilon that is no number": (
        {"rms_norm_eps": "small"},
        "The config gives 'small' as rms_norm_eps; it has to be a number that is not negative.",
    ),
    "a flag that is a number": (
        {"tie_word_embeddings": 1},
        "The config gives 1 as tie_word_embeddings; it has to be true or false.",
    ),
    "one rope for all layers": ({"rope_parameters": {"rope_theta": 1.0}}, wrong_rope({"rope_theta": 1.0})),
    "rope parameters that are text": ({"rope_parameters": "linear"}, wrong_rope("linear")),
    "rope scaling that is text": ({"rope_scaling": "linear"}, wrong_rope("linear")),
    "a missing rope factor": (
        {"rope_parameters": {FULL: {"rope_type": "linear"}}},
        "The config gives None as factor of the rope type 'linear'; it has to be a number.",
    ),
}


@pytest.mark.parametrize("case", WRONG_VALUES)
def test_a_config_that_makes_no_sense_is_refused_with_the_key(gemma3: Checkpoint, case: str) -> None:
    config, sentence = WRONG_VALUES[case]
    with pytest.raises(CheckpointError) as error:
        spec_of(GemmaModel, dict(gemma3.config) | config)
    assert str(error.value) == sentence


def test_weights_without_a_place_are_refused(gemma3: Checkpoint, with_images: Checkpoint) -> None:
    # Of a text model also what a model with images may have.
    for checkpoint, name in ((gemma3, "vision_tower.embeddings.weight"), (with_images, "audio_tower.weight")):
        changed = ChangedCheckpoint(checkpoint, tensors={name: torch.ones(2)})
        with pytest.raises(UnsupportedModelError) as refusal:
            logits_of(GemmaModel, changed, PROMPT)
        assert str(refusal.value) == (
            f"The checkpoint holds 1 tensor that the model of its config has no place for, {name!r} the first. The "
            "model is a variant that is not computed here, or the config is wrong."
        )


def test_an_embedding_that_is_repeated_as_the_head_is_ignored(tied_gemma3: Path) -> None:
    checkpoint = open_checkpoint(str(tied_gemma3))
    repeated = ChangedCheckpoint(checkpoint, tensors={"lm_head.weight": torch.zeros(512, 64)})
    assert torch.equal(logits_of(GemmaModel, repeated, PROMPT), logits_of(GemmaModel, checkpoint, PROMPT))


def test_a_missing_tensor_is_named(gemma3: Checkpoint) -> None:
    with pytest.raises(CheckpointError, match=r"has no tensor 'model\.layers\.7\.self_attn\.q_proj\.weight'"):
        logits_of(GemmaModel, ChangedCheckpoint(gemma3, {"num_hidden_layers": 8, "layer_types": None}), PROMPT)


def test_the_tiny_models_configs_are_those_of_the_families(gemma2: Any, gemma3: Any) -> None:
    configs = [json.loads((checkpoint.path / "config.json").read_text()) for checkpoint in (gemma2, gemma3)]
    assert [config["model_type"] for config in configs] == ["gemma2", "gemma3_text"]
    assert configs[1]["rope_parameters"][FULL]["rope_theta"] != configs[1]["rope_parameters"][SLIDING]["rope_theta"]
