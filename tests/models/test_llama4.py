"""Llama 4 against transformers, in float32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from dense_models import reference_logits
from spec_models import ChangedCheckpoint, SpecBatch, logits_of, spec_of

from octavo.core.interfaces.kv_cache_spec import ChunkedLocalSpec, FullAttentionSpec
from octavo.core.interfaces.model import Checkpoint
from octavo.errors import CheckpointError, UnsupportedModelError
from octavo.models.checkpoint import open_checkpoint
from octavo.models.llama4 import Llama4Model
from octavo.testing.tiny_models import tiny_llama4

# Nearly four chunks of the tiny model.
PROMPT = [(37 * i + 11) % 509 for i in range(60)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(str(tiny_llama4(tmp_path_factory.mktemp("llama4"))))


ROPE = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 16.0, "original_max_position_embeddings": 32}
VARIANTS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "two experts a token": {"num_experts_per_tok": 2},
    "one expert": {"num_local_experts": 1},
    "experts in every layer": {"interleave_moe_layer_step": 1},
    "experts in stated layers": {"moe_layers": [0, 2]},
    "no experts": {"moe_layers": []},
    "no norm of queries and keys": {"use_qk_norm": False},
    "no temperature tuning": {"attn_temperature_tuning": False},
    "a temperature that grows with every position": {"floor_scale": 1, "attn_scale": 0.3},
    "chunks that no block divides": {"attention_chunk_size": 11},
    "no chunks": {"attention_chunk_size": None},
    "rope in every layer": {"no_rope_layers": [1, 1, 1, 1]},
    "no rope in every other layer": {"no_rope_layers": None, "no_rope_layer_interval": 2},
    "more entries than layers": {
        "no_rope_layers": [0, 1, 1, 0, 1, 0],
        "layer_types": ["full_attention", "chunked_attention", "chunked_attention", "full_attention"],
    },
    "chunks apart from rope": {"layer_types": ["full_attention", "chunked_attention"] * 2},
    "biases": {"attention_bias": True},
    "tied embeddings": {"tie_word_embeddings": True},
    "wide heads": {"head_dim": 24},
    "one KV head a query head": {"num_key_value_heads": 4},
    "another activation": {"hidden_act": "gelu_pytorch_tanh"},
    "plain rope": {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
    # As Scout has it: no frequency lies between those that stay and those that are stretched.
    "one frequency factor for both ends": {"rope_parameters": ROPE | {"low_freq_factor": 1.0, "high_freq_factor": 1.0}},
}


SLOW_VARIANTS = (
    "one expert", "experts in every layer", "rope in every layer", "no rope in every other layer", "no chunks",
    "more entries than layers", "tied embeddings", "wide heads", "one KV head a query head", "another activation",
)  # fmt: skip


@pytest.mark.parametrize(
    "variant",
    [pytest.param(name, marks=pytest.mark.slow) if name in SLOW_VARIANTS else name for name in VARIANTS],
)
def test_a_tiny_model_computes_what_transformers_computes(variant: str, tmp_path: Path) -> None:
    folder = tiny_llama4(tmp_path, **VARIANTS[variant])
    expected = reference_logits(folder, PROMPT)
    torch.testing.assert_close(logits_of(Llama4Model, folder, PROMPT), expected, atol=1e-4, rtol=0)


def tiny_llama4_with_images(folder: Path, text_folder: Path) -> Path:
    """Save a tiny Llama 4 that also sees images, with the decoder of another folder."""
    import transformers

    vision = transformers.Llama4VisionConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=128, vision_output_dim=32,
        image_size=28, patch_size=14, projector_input_dim=32, projector_output_dim=32,
    )  # fmt: skip
    text = transformers.Llama4TextConfig.from_pretrained(text_folder)
    config = transformers.Llama4Config(vision_config=vision.to_dict(), text_config=text.to_dict())
    with torch.random.fork_rng(devices=[]):
        model = transformers.Llama4ForConditionalGeneration(config)
    decoder = transformers.Llama4ForCausalLM.from_pretrained(text_folder)
    model.language_model.load_state_dict(decoder.state_dict())
    model.save_pretrained(folder)
    return folder


def test_a_model_with_images_answers_to_text_as_its_decoder_does(checkpoint: Any, tmp_path: Path) -> None:
    folder = tiny_llama4_with_images(tmp_path, checkpoint.path)
    names = open_checkpoint(str(folder)).tensor_names()
    assert any(name.startswith("vision_model.") for name in names)
    ours = logits_of(Llama4Model, folder, PROMPT)
    torch.testing.assert_close(ours, reference_logits(folder, PROMPT), atol=1e-4, rtol=0)
    assert torch.equal(ours, logits_of(Llama4Model, checkpoint, PROMPT))


def test_the_end_of_a_text_is_found_in_a_nested_config(checkpoint: Any, tmp_path: Path) -> None:
    folder = tiny_llama4_with_images(tmp_path, checkpoint.path)
    (folder / "generation_config.json").unlink(missing_ok=True)
    assert "eos_token_id" not in json.loads((folder / "config.json").read_text())
    assert open_checkpoint(str(folder)).eos_token_ids == {2}


def test_layers_keep_their_chunk_or_everything(checkpoint: Checkpoint) -> None:
    spec = spec_of(Llama4Model, checkpoint.config, kv_dtype="float16")
    assert [attention.chunk for attention in spec.attention_specs] == [16, None, 16, 16]
    assert {(attention.scale, attention.kv_dtype) for attention in spec.attention_specs} == {(0.25, "float16")}
    shape = {"block_size": 16, "num_kv_heads": 2, "head_dim": 16, "dtype": "float16"}
    chunked, everything = ChunkedLocalSpec(**shape, chunk=16), FullAttentionSpec(**shape)
    assert spec.kv_cache_specs == (chunked, everything, chunked, chunked)
    assert (spec.vocab_size, spec.max_position) == (512, 512)


def test_keys_that_are_missing_mean_what_they_mean_in_transformers() -> None:
    config = {"model_type": "llama4_text", "vocab_size": 64, "num_hidden_layers": 4, "intermediate_size": 8}
    spec = spec_of(Llama4Model, config | {"hidden_size": 5120, "num_attention_heads": 40})
    assert [attention.chunk for attention in spec.attention_specs] == [8192, 8192, 8192, None]
    assert {(attention.num_kv_heads, attention.head_dim) for attention in spec.attention_specs} == {(8, 128)}
    assert spec.max_position == 131072


def test_weights_are_loaded_in_the_dtype_asked_for(checkpoint: Checkpoint) -> None:
    model = Llama4Model.from_checkpoint(checkpoint, dtype="bfloat16", device="cpu")
    specs = spec_of(Llama4Model, checkpoint.config).attention_specs
    with torch.inference_mode():
        logits = model.logits(model.forward(SpecBatch(torch.tensor(PROMPT), specs)))
    assert logits.dtype == torch.bfloat16
    exact = logits_of(Llama4Model, checkpoint, PROMPT)
    assert (logits.float() - exact).abs().mean() < 0.1 * exact.abs().mean()


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another model_type": (
        {"model_type": "llama"},
        "The config's model_type is 'llama'; this class runs llama4_text, llama4.",
    ),
    "a quantised model": (
        {"quantization_config": {"quant_method": "compressed-tensors"}},
        "The config sets quantization_config to {'quant_method': 'compressed-tensors'}, which changes what the model "
        "computes and is not supported. Use a copy of the model that is not quantised, or a GGUF file.",
    ),
    "a sliding window": (
        {"sliding_window": 4096},
        "The config sets sliding_window to 4096, which changes what the model computes and is not supported. "
        "A model class that computes it can be added as a plugin.",
    ),
    "layers of another kind": (
        {"layer_types": ["sliding_attention"] * 4},
        "The config's layer_types are ['sliding_attention', 'sliding_attention', 'sliding_attention', "
        "'sliding_attention']; a Llama 4 of 4 layers with the attention_chunk_size 16 is run with "
        "'full_attention' or 'chunked_attention' for each.",
    ),
    "chunked layers without a chunk": (
        {"attention_chunk_size": None, "layer_types": ["chunked_attention"] * 4},
        "The config's layer_types are ['chunked_attention', 'chunked_attention', 'chunked_attention', "
        "'chunked_attention']; a Llama 4 of 4 layers with the attention_chunk_size None is run with "
        "'full_attention' for each.",
    ),
    "an unknown activation": (
        {"hidden_act": "xielu"},
        "The config asks for the activation 'xielu' (hidden_act). Known: silu, swish, gelu, gelu_new, "
        "gelu_pytorch_tanh, relu, relu6, mish, tanh, sigmoid.",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_computed_is_refused(checkpoint: Checkpoint, case: str) -> None:
    config, sentence = REFUSED[case]
    with pytest.raises(UnsupportedModelError) as refusal:
        spec_of(Llama4Model, dict(checkpoint.config) | config)
    assert str(refusal.value) == sentence


def test_a_quantised_model_with_images_is_refused(checkpoint: Checkpoint) -> None:
    config = {"model_type": "llama4", "text_config": checkpoint.config, "quantization_config": {"bits": 4}}
    with pytest.raises(UnsupportedModelError, match=r"sets quantization_config to \{'bits': 4\}"):
        spec_of(Llama4Model, config)


WRONG_VALUES: dict[str, tuple[dict[str, Any], str]] = {
    "no decoder beside the images": (
        {"model_type": "llama4", "text_config": None},
        "The config gives None as text_config; a model of the model_type 'llama4' describes its decoder there, as an "
        "object.",
    ),
    "heads that do not divide": (
        {"num_key_value_heads": 3},
        "The config gives 4 query heads, 3 KV heads and a head_dim of 16; query heads have to be a multiple of KV "
        "heads, and head_dim even.",
    ),
    "more experts a token than there are": (
        {"num_experts_per_tok": 5},
        "The config sends each token to 5 experts (num_experts_per_tok) of 4 (num_local_experts).",
    ),
    "a list of rope that is too short": (
        {"no_rope_layers": [1, 0]},
        "The config gives [1, 0] as no_rope_layers; it has to be a list with 1 (rope) or 0 (none) for each of the 4 "
        "layers.",
    ),
    "a list of rope of layer numbers": (
        {"no_rope_layers": [3, 7, 11, 15]},
        "The config gives [3, 7, 11, 15] as no_rope_layers; it has to be a list with 1 (rope) or 0 (none) for each of "
        "the 4 layers.",
    ),
    "layers with experts that are text": (
        {"moe_layers": "all"},
        "The config gives 'all' as moe_layers; it has to be a list of the numbers of layers.",
    ),
    "a chunk of nothing": (
        {"attention_chunk_size": 0},
        "The config gives 0 as attention_chunk_size; it has to be positive.",
    ),
    "a temperature that is text": (
        {"attn_temperature_tuning": "yes"},
        "The config gives 'yes' as attn_temperature_tuning; it has to be true or false.",
    ),
    "a temperature without end": (
        {"attn_scale": float("inf")},
        "The config gives inf as attn_scale; it has to be a number.",
    ),
}


@pytest.mark.parametrize("case", WRONG_VALUES)
def test_a_config_that_makes_no_sense_is_refused_with_the_key(checkpoint: Checkpoint, case: str) -> None:
    config, sentence = WRONG_VALUES[case]
    with pytest.raises(CheckpointError) as refusal:
        spec_of(Llama4Model, dict(checkpoint.config) | config)
    assert str(refusal.value) == sentence


def test_a_number_as_temperature_tuning_means_what_its_truth_means(checkpoint: Checkpoint) -> None:
    # Published configs of Scout say 4.
    changed = ChangedCheckpoint(checkpoint, {"attn_temperature_tuning": 4})
    assert torch.equal(logits_of(Llama4Model, changed, PROMPT), logits_of(Llama4Model, checkpoint, PROMPT))


def test_weights_without_a_place_are_refused(checkpoint: Checkpoint) -> None:
    # Not even an image's where the config speaks of text alone.
    changed = ChangedCheckpoint(checkpoint, tensors={"vision_model.class_embedding": torch.ones(32)})
    with pytest.raises(UnsupportedModelError) as refusal:
        logits_of(Llama4Model, changed, PROMPT)
    assert str(refusal.value) == (
        "The checkpoint holds 1 tensor that the model of its config has no place for, 'vision_model.class_embedding' "
        "the first. The model is a variant that is not computed here, or the config is wrong."
    )


def test_experts_that_are_missing_are_named(checkpoint: Checkpoint) -> None:
    name = "model.layers.0.feed_forward.shared_expert.gate_proj.weight"
    with pytest.raises(CheckpointError, match=f"has no tensor {name!r}"):
        logits_of(Llama4Model, ChangedCheckpoint(checkpoint, {"moe_layers": [0, 1, 3]}), PROMPT)
