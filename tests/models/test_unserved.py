"""What Octavo has no KV-cache manager for is refused with what it is, by what it is known, and the way out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gguf_builder import GGUFBuilder

from octavo import LLM, EngineConfig
from octavo.errors import UnsupportedModelError
from octavo.models.checkpoint import open_checkpoint
from octavo.models.hugging_face.adapter import TransformersModel
from octavo.models.llama import LlamaModel
from octavo.models.unserved import SERVED, refuse_unserved
from octavo.plugins.families import KV_MANAGERS
from octavo.plugins.registry import scan
from octavo.selection.select import model_needs
from octavo.testing import installed, tiny_models

WAY_OUT = (
    "It has managers for full attention, sliding windows, aligned chunks and latents (MLA). Use a model that keeps no "
    "more than these, or install a package that registers a model and a manager for such layers, and name the model in "
    "model_impl; docs/plugins/kv_managers.md says how one is written."
)
RECURRENT = "keeps a recurrent state, which each token changes as a whole"
FROM_ENCODER = "keeps keys and values of an encoder's output beside those of the text"
LEARNED = "keeps blocks of learned keys and values in front of those of the text"


def refusal_of(config: dict[str, Any]) -> str:
    with pytest.raises(UnsupportedModelError) as refusal:
        refuse_unserved("It", config)
    return str(refusal.value)


@pytest.mark.parametrize(
    ("config", "keeps", "sign", "kind"),
    [
        ({"model_type": "mamba"}, RECURRENT, "as every mamba does", "mamba"),
        ({"model_type": "rwkv7"}, RECURRENT, "as every rwkv7 does", "mamba"),
        ({"model_type": "falcon-h1"}, RECURRENT, "as every falcon-h1 does", "mamba"),
        (
            {"model_type": "granitemoehybrid", "layer_types": ["attention", "mamba"]},
            RECURRENT,
            "its layer_types have 'mamba'",
            "mamba",
        ),
        (
            {"model_type": "new", "layers_block_type": ["attention", "recurrent"]},
            RECURRENT,
            "its layers_block_type have 'recurrent'",
            "mamba",
        ),
        (
            {"model_type": "new", "text_config": {"layer_types": ["linear_attention", "full_attention"]}},
            RECURRENT,
            "its layer_types have 'linear_attention'",
            "mamba",
        ),
        ({"model_type": "t5"}, FROM_ENCODER, "as every t5 does", "cross_attention"),
        (
            {"model_type": "new", "is_encoder_decoder": True},
            FROM_ENCODER,
            "is_encoder_decoder is true",
            "cross_attention",
        ),
        (
            {"model_type": "mllama", "text_config": {"cross_attention_layers": [3, 8]}},
            FROM_ENCODER,
            "cross_attention_layers is [3, 8]",
            "cross_attention",
        ),
        (
            {"model_type": "gpt2", "add_cross_attention": True},
            FROM_ENCODER,
            "add_cross_attention is True",
            "cross_attention",
        ),
        ({"model_type": "new", "param_sink_number": 128}, LEARNED, "param_sink_number is 128", "sink"),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else "",
)
def test_what_a_model_keeps_is_named_with_its_sign_and_its_kind(config, keeps, sign, kind):
    assert refusal_of(config) == (
        f"It {keeps} ({sign}), and Octavo has no KV-cache manager for the kind {kind!r}. {WAY_OUT}"
    )


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"model_type": "llama", "layer_types": ["full_attention", "sliding_attention", "chunked_attention"]},
        {"model_type": "granitemoehybrid", "layer_types": ["attention", "attention"]},
        # The decoder of such a model alone continues text.
        {"model_type": "bart", "is_encoder_decoder": False},
        {"model_type": "gpt2", "add_cross_attention": False, "cross_attention_layers": []},
        {"model_type": "new", "param_sink_number": 0},
        # Sink logits are no blocks.
        {"model_type": "gpt_oss", "layer_types": ["sliding_attention"]},
        {"model_type": None, "layer_types": "mamba", "text_config": "none"},
    ],
    ids=json.dumps,
)
def test_what_is_served_is_not_refused(config):
    refuse_unserved("It", config)


def test_the_managers_that_a_refusal_names_are_those_that_there_are():
    assert set(SERVED) == {plugin.name for plugin in scan().plugins(KV_MANAGERS) if plugin.is_built_in}


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        # Families whose configs do not say it: transformers knows.
        ({"model_type": "granitemoehybrid"}, f"model_type 'granitemoehybrid' {RECURRENT} (its layer_types have "),
        ({"model_type": "qwen3_5"}, f"model_type 'qwen3_5' {RECURRENT} (its layer_types have 'linear_attention')"),
        ({"model_type": "minimax"}, f"model_type 'minimax' {RECURRENT} (its layer_types have 'linear_attention')"),
        ({"model_type": "pegasus"}, f"model_type 'pegasus' {FROM_ENCODER} (is_encoder_decoder is true)"),
        ({"model_type": "mllama"}, f"model_type 'mllama' {FROM_ENCODER} (cross_attention_layers is [3, 8, 13, "),
        # Which transformers need not know.
        (
            {"model_type": "new", "architectures": ["NewForCausalLM"], "param_sink_number": 1},
            f"NewForCausalLM {LEARNED} (param_sink_number is 1)",
        ),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_a_model_that_would_run_through_transformers_is_refused_before_it_is_built(config, sentence, monkeypatch):
    def build(*arguments):
        raise AssertionError("too late")

    monkeypatch.setattr("octavo.models.hugging_face.host.build_without_weights", build)
    with pytest.raises(UnsupportedModelError) as refusal:
        TransformersModel.spec_from_config(config, dtype="float32", device="cpu", block_size=16, kv_dtype="float32")
    assert str(refusal.value).startswith(sentence)


def changed_llama(folder: Path, changes: dict[str, Any]) -> Path:
    """Save a tiny Llama whose config says something else, and return its folder."""
    path = tiny_models.tiny_llama(folder) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


def test_an_engine_refuses_it_and_says_whose_config_it_is(tmp_path: Path):
    folder = changed_llama(tmp_path, {"model_type": "jamba"})
    with pytest.raises(UnsupportedModelError) as refusal:
        LLM(str(folder), num_kv_blocks=20)
    assert str(refusal.value) == (
        f"In {str(folder)!r}: model_type 'jamba' {RECURRENT} (as every jamba does), and Octavo has no KV-cache manager "
        f"for the kind 'mamba'. {WAY_OUT}"
    )


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"param_sink_number": 4}, f"model_type 'llama' {LEARNED} (param_sink_number is 4)"),
        ({"is_encoder_decoder": True}, f"model_type 'llama' {FROM_ENCODER} (is_encoder_decoder is true)"),
    ],
    ids=str,
)
def test_octavos_own_classes_do_not_pass_over_it(tmp_path: Path, changes, sentence):
    config = EngineConfig.from_flat(model=str(changed_llama(tmp_path, changes)), num_kv_blocks=20)
    with pytest.raises(UnsupportedModelError) as refusal:
        model_needs(config, scan())
    assert str(refusal.value).startswith(f"In {str(tmp_path)!r}: {sentence}, and Octavo has no KV-cache manager")


def test_a_packages_own_model_may_keep_it(tmp_path: Path):
    class Theirs(LlamaModel):
        contract_version = 1

    folder = changed_llama(tmp_path, {"param_sink_number": 4})
    with installed({"octavo.models": {"theirs": Theirs}}):
        needs = model_needs(EngineConfig.from_flat(model=str(folder), model_impl="theirs"), scan())
    assert needs.model.part.loaded is Theirs


def test_a_gguf_file_of_such_a_model_is_refused_alike(tiny_folders: dict[str, Path], tmp_path: Path):
    path = GGUFBuilder(open_checkpoint(str(tiny_folders["llama"])), "rwkv6").write(tmp_path / "model.gguf")
    with pytest.raises(UnsupportedModelError) as refusal:
        open_checkpoint(str(path))
    assert str(refusal.value) == (
        f"{path} {RECURRENT} (as every rwkv6 does), and Octavo has no KV-cache manager for the kind 'mamba'. {WAY_OUT}"
    )
