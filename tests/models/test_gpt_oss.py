"""gpt-oss against transformers, in float32."""

from __future__ import annotations

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
from octavo.models.gpt_oss import GptOssModel
from octavo.testing.tiny_models import tiny_gpt_oss

# Nearly four windows of the tiny model.
PROMPT = [(37 * i + 11) % 509 for i in range(60)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(str(tiny_gpt_oss(tmp_path_factory.mktemp("gpt_oss"))))


YARN = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0}
VARIANTS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "yarn without truncation": {
        "rope_parameters": YARN | {"original_max_position_embeddings": 16, "truncate": False},
    },
    "the yarn of a config that says nothing": {"rope_parameters": None},
    "gates at the limit": {"swiglu_limit": 0.5},
    "another alpha": {"swiglu_alpha": 0.7},
    "one expert a token": {"num_experts_per_tok": 1},
    "all experts for all tokens": {"num_experts_per_tok": 4},
    "no biases in attention": {"attention_bias": False},
    "layer types of three layers": {
        "num_hidden_layers": 3,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    },
    "no window": {"layer_types": ["full_attention"] * 2},
    "tied embeddings": {"tie_word_embeddings": True},
    "one KV head a query head": {"num_key_value_heads": 4},
}


SLOW_VARIANTS = ("another alpha", "one expert a token", "no window", "tied embeddings", "one KV head a query head")


@pytest.mark.parametrize(
    "variant",
    [pytest.param(name, marks=pytest.mark.slow) if name in SLOW_VARIANTS else name for name in VARIANTS],
)
def test_a_tiny_model_computes_what_transformers_computes(variant: str, tmp_path: Path) -> None:
    folder = tiny_gpt_oss(tmp_path, **VARIANTS[variant])
    expected = reference_logits(folder, PROMPT)
    torch.testing.assert_close(logits_of(GptOssModel, folder, PROMPT), expected, atol=1e-4, rtol=0)


def test_rope_is_read_as_published_configs_spell_it(checkpoint: Checkpoint) -> None:
    scaling = YARN | {"original_max_position_embeddings": 4096, "truncate": False}
    theta = scaling.pop("rope_theta")
    published = {"rope_parameters": None, "rope_scaling": scaling, "rope_theta": theta}
    logits, expected = (
        logits_of(GptOssModel, ChangedCheckpoint(checkpoint, config), PROMPT)
        for config in (published, {"rope_parameters": None})
    )
    assert torch.equal(logits, expected)


def test_a_limit_that_is_reached_bites(checkpoint: Checkpoint) -> None:
    limited = ChangedCheckpoint(checkpoint, {"swiglu_limit": 0.5})
    difference = logits_of(GptOssModel, limited, PROMPT) - logits_of(GptOssModel, checkpoint, PROMPT)
    assert difference.abs().max() > 0.1


def test_layers_have_sinks_and_keep_their_window_or_everything(checkpoint: Checkpoint) -> None:
    spec = spec_of(GptOssModel, checkpoint.config, kv_dtype="float16")
    assert [(attention.sinks, attention.window) for attention in spec.attention_specs] == [(True, 16), (True, None)]
    assert {(attention.scale, attention.kv_dtype) for attention in spec.attention_specs} == {(0.25, "float16")}
    shape = {"block_size": 16, "num_kv_heads": 2, "head_dim": 16, "dtype": "float16"}
    assert spec.kv_cache_specs == (SlidingWindowSpec(**shape, window=16), FullAttentionSpec(**shape))
    assert (spec.vocab_size, spec.max_position) == (512, 512)


def test_keys_that_are_missing_mean_what_they_mean_in_transformers() -> None:
    config = {"model_type": "gpt_oss", "vocab_size": 64, "num_hidden_layers": 4, "intermediate_size": 8}
    spec = spec_of(GptOssModel, config | {"hidden_size": 2880, "num_attention_heads": 64})
    assert [attention.window for attention in spec.attention_specs] == [128, None, 128, None]
    assert {(attention.num_kv_heads, attention.head_dim) for attention in spec.attention_specs} == {(8, 64)}
    assert spec.max_position == 131072


def test_weights_are_loaded_in_the_dtype_asked_for(checkpoint: Checkpoint) -> None:
    model = GptOssModel.from_checkpoint(checkpoint, dtype="bfloat16", device="cpu")
    specs = spec_of(GptOssModel, checkpoint.config).attention_specs
    with torch.inference_mode():
        logits = model.logits(model.forward(SpecBatch(torch.tensor(PROMPT), specs)))
    assert logits.dtype == torch.bfloat16
    exact = logits_of(GptOssModel, checkpoint, PROMPT)
    assert (logits.float() - exact).abs().mean() < 0.1 * exact.abs().mean()


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another model_type": (
        {"model_type": "mixtral"},
        "The config's model_type is 'mixtral'; this class runs gpt_oss.",
    ),
    "experts of four bits": (
        {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}},
        "The config says that the weights are quantised ('mxfp4', in quantization_config), which is not supported. Use "
        "a copy whose experts are bfloat16, such as one that transformers saved after loading the model with "
        "Mxfp4Config(dequantize=True).",
    ),
    "soft-capped scores": (
        {"attn_logit_softcapping": 50.0},
        "The config sets attn_logit_softcapping to 50.0, which changes what the model computes and is not supported. "
        "A model class that computes it can be added as a plugin.",
    ),
    "layers of another kind": (
        {"layer_types": ["chunked_attention", "full_attention"]},
        "The config's layer_types are ['chunked_attention', 'full_attention']; a gpt-oss of 2 layers with the "
        "sliding_window 16 is run with 'full_attention' or 'sliding_attention' for each.",
    ),
    "layers with a window where there is none": (
        {"sliding_window": None},
        "The config's layer_types are ['sliding_attention', 'full_attention']; a gpt-oss of 2 layers with the "
        "sliding_window None is run with 'full_attention' for each.",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_computed_is_refused(checkpoint: Checkpoint, case: str) -> None:
    config, sentence = REFUSED[case]
    with pytest.raises(UnsupportedModelError) as refusal:
        spec_of(GptOssModel, dict(checkpoint.config) | config)
    assert str(refusal.value) == sentence


WRONG_VALUES: dict[str, tuple[dict[str, Any], str]] = {
    "heads that do not divide": (
        {"num_key_value_heads": 3},
        "The config gives 4 query heads, 3 KV heads and a head_dim of 16; query heads have to be a multiple of KV "
        "heads, and head_dim even.",
    ),
    "more experts a token than there are": (
        {"num_experts_per_tok": 5},
        "The config sends each token to 5 experts (num_experts_per_tok) of 4 (num_local_experts).",
    ),
    "a window of nothing": (
        {"sliding_window": 0},
        "The config gives 0 as sliding_window; it has to be positive.",
    ),
    "a limit below zero": (
        {"swiglu_limit": -7.0},
        "The config gives -7.0 as swiglu_limit; it has to be a number that is not negative.",
    ),
    "a flag that is a number": (
        {"attention_bias": 1},
        "The config gives 1 as attention_bias; it has to be true or false.",
    ),
}


@pytest.mark.parametrize("case", WRONG_VALUES)
def test_a_config_that_makes_no_sense_is_refused_with_the_key(checkpoint: Checkpoint, case: str) -> None:
    config, sentence = WRONG_VALUES[case]
    with pytest.raises(CheckpointError) as refusal:
        spec_of(GptOssModel, dict(checkpoint.config) | config)
    assert str(refusal.value) == sentence


def test_weights_without_a_place_are_refused(checkpoint: Checkpoint) -> None:
    extra = {"model.layers.0.mlp.experts.gate_up_proj_blocks": torch.ones(2)}
    with pytest.raises(UnsupportedModelError) as refusal:
        logits_of(GptOssModel, ChangedCheckpoint(checkpoint, tensors=extra), PROMPT)
    assert str(refusal.value) == (
        "The checkpoint holds 1 tensor that the model of its config has no place for, "
        "'model.layers.0.mlp.experts.gate_up_proj_blocks' the first. The model is a variant that is not computed here, "
        "or the config is wrong."
    )
