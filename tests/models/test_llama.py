"""The Llama family against transformers, in float32."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from dense_models import load, logits_of, reference_logits, spec_of

from octavo.core.interfaces.kv_cache_spec import FullAttentionSpec, SlidingWindowSpec
from octavo.core.interfaces.model import Checkpoint
from octavo.errors import CheckpointError, UnsupportedModelError
from octavo.models.checkpoint import open_checkpoint
from octavo.models.llama import LlamaModel
from octavo.testing import tiny_models

PROMPT = [(37 * i + 11) % 509 for i in range(40)]
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


class ChangedCheckpoint:
    """A checkpoint with some of its config and tensors replaced; None removes one."""

    def __init__(
        self, source: Checkpoint, config: dict[str, Any] | None = None, tensors: dict[str, Any] | None = None
    ) -> None:
        self._source = source
        self._tensors = tensors or {}
        self.config = dict(source.config) | (config or {})
        self.dtype = source.dtype
        self.eos_token_ids = source.eos_token_ids

    def tensor_names(self) -> list[str]:
        return [*self._source.tensor_names(), *self._tensors]

    def tensor(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._tensors[name] if name in self._tensors else self._source.tensor(name)
        return tensor

    def tokenizer(self) -> Any:
        return self._source.tokenizer()


@pytest.fixture(scope="module")
def llama_checkpoint(tiny_folders: dict[str, Path]) -> Checkpoint:
    return open_checkpoint(str(tiny_folders["llama"]))


@pytest.mark.slow
def test_the_demo_model_computes_what_transformers_computes(demo_checkpoint: Checkpoint) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    # `AutoModelForCausalLM.from_pretrained(gguf_file=...)` would do the same, and asks for accelerate.
    config = LlamaConfig(**demo_checkpoint.config)
    with torch.device("meta"):
        reference = LlamaForCausalLM(config)
    read = load_gguf_checkpoint(str(demo_checkpoint.path), return_tensors=True, model_to_load=reference)  # type: ignore[attr-defined]
    differing = {key for key, value in read["config"].items() if demo_checkpoint.config.get(key, value) != value}
    assert not differing
    weights = read["tensors"] | {"lm_head.weight": read["tensors"]["model.embed_tokens.weight"]}
    reference.load_state_dict(weights, assign=True)
    reference.model.rotary_emb = LlamaRotaryEmbedding(config)
    token_ids = demo_checkpoint.tokenizer().encode("The octopus has eight arms, and an octavo has eight leaves.")
    with torch.inference_mode():
        expected = reference.eval()(torch.tensor([token_ids])).logits[0]
    # The largest logits are near 30: an error of 1e-4 is a few units in the last place.
    torch.testing.assert_close(logits_of(load(demo_checkpoint), token_ids), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tiny_model_computes_what_transformers_computes(tiny_folders: dict[str, Path], family: str) -> None:
    ours = logits_of(load(tiny_folders[family]), PROMPT)
    torch.testing.assert_close(ours, reference_logits(tiny_folders[family], PROMPT), atol=1e-4, rtol=0)


ROPES: dict[str, dict[str, Any]] = {
    "another theta": {"rope_type": "default", "rope_theta": 500000.0},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    "yarn without truncation": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "truncate": False,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
    },
    "yarn with mscale": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "mscale": 0.707,
        "mscale_all_dim": 1.2,
    },
    "yarn with a stated attention factor": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "attention_factor": 1.5,
    },
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "longrope": {
        "rope_type": "longrope",
        "short_factor": [1.0 + 0.1 * i for i in range(8)],
        "long_factor": [2.0 + 0.1 * i for i in range(8)],
        "original_max_position_embeddings": 64,
    },
}
VARIANTS: dict[str, tuple[Callable[..., Path], dict[str, Any]]] = {
    f"rope: {name}": (tiny_models.tiny_llama, {"rope_parameters": {"rope_theta": 10000.0} | rope})
    for name, rope in ROPES.items()
} | {
    "llama with all biases": (tiny_models.tiny_llama, {"attention_bias": True, "mlp_bias": True}),
    "llama with tied embeddings": (tiny_models.tiny_llama, {"tie_word_embeddings": True}),
    "llama with wide heads": (tiny_models.tiny_llama, {"head_dim": 24}),
    "llama with one KV head a query head": (tiny_models.tiny_llama, {"num_key_value_heads": 4}),
    "llama with gelu": (tiny_models.tiny_llama, {"hidden_act": "gelu_pytorch_tanh"}),
    "llama with three layers": (tiny_models.tiny_llama, {"num_hidden_layers": 3}),
    "mistral without a window": (tiny_models.tiny_mistral, {"sliding_window": None}),
    "qwen2 with a window from a layer on": (
        tiny_models.tiny_qwen2,
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
    "qwen3 with layer types": (
        tiny_models.tiny_qwen3,
        {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "qwen3 with biases": (tiny_models.tiny_qwen3, {"attention_bias": True}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_computes_what_transformers_computes(variant: str, tmp_path: Path) -> None:
    make, config = VARIANTS[variant]
    folder = make(tmp_path, **config)
    torch.testing.assert_close(logits_of(load(folder), PROMPT), reference_logits(folder, PROMPT), atol=1e-4, rtol=0)


@pytest.mark.parametrize("rope_key", ["rope_type", "type"])
def test_the_older_spelling_of_rope_scaling_means_the_same(
    llama_checkpoint: Checkpoint, tmp_path: Path, rope_key: str
) -> None:
    new = {"rope_parameters": {"rope_theta": 20000.0} | ROPES["llama3"]}
    scaling = ROPES["llama3"] | {"rope_type": None}
    scaling.pop("rope_type")
    old = {"rope_parameters": None, "rope_theta": 20000.0, "rope_scaling": scaling | {rope_key: "llama3"}}
    expected, actual = (logits_of(load(ChangedCheckpoint(llama_checkpoint, config)), PROMPT) for config in (new, old))
    assert torch.equal(actual, expected)


def test_logits_are_computed_for_the_rows_passed(llama_checkpoint: Checkpoint) -> None:
    model = load(llama_checkpoint)
    hidden = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    assert model.logits(hidden[1:2]).shape == (1, model.config.vocab_size)
    torch.testing.assert_close(model.logits(hidden)[1:2], model.logits(hidden[1:2]))


def test_weights_are_loaded_in_the_dtype_asked_for(llama_checkpoint: Checkpoint) -> None:
    model = LlamaModel.from_checkpoint(llama_checkpoint, dtype="bfloat16", device="cpu")
    logits = logits_of(model, PROMPT)
    assert logits.dtype == torch.bfloat16
    exact = logits_of(load(llama_checkpoint), PROMPT)
    assert (logits.float() - exact).abs().mean() < 0.05 * exact.abs().mean()


def test_a_layer_keeps_the_window_that_its_attention_reads(tiny_folders: dict[str, Path]) -> None:
    spec = spec_of(tiny_folders["mistral"], kv_dtype="float16")
    assert [attention.window for attention in spec.attention_specs] == [16, 16]
    kept = SlidingWindowSpec(block_size=16, num_kv_heads=2, head_dim=16, dtype="float16", window=16)
    assert spec.kv_cache_specs == (kept, kept)
    assert {attention.kv_dtype for attention in spec.attention_specs} == {"float16"}


def test_layers_without_a_window_keep_everything(tmp_path: Path) -> None:
    config = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    spec = spec_of(tiny_models.tiny_qwen2(tmp_path, **config))
    assert [attention.window for attention in spec.attention_specs] == [None, 8]
    assert spec.kv_cache_specs == (
        FullAttentionSpec(block_size=16, num_kv_heads=2, head_dim=16, dtype="float32"),
        SlidingWindowSpec(block_size=16, num_kv_heads=2, head_dim=16, dtype="float32", window=8),
    )


def test_longrope_is_served_up_to_the_length_where_its_factors_change(tmp_path: Path) -> None:
    folder = tiny_models.tiny_llama(tmp_path, rope_parameters={"rope_theta": 10000.0} | ROPES["longrope"])
    assert spec_of(folder).max_position == 64


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a quantised model": ({"quantization_config": {"quant_method": "gptq"}}, "sets quantization_config to"),
    "a mixture of experts": ({"num_local_experts": 8}, "sets num_local_experts to 8"),
    "soft-capped scores": ({"attn_logit_softcapping": 50.0}, "sets attn_logit_softcapping to 50.0"),
    "an unknown activation": ({"hidden_act": "xielu"}, "asks for the activation 'xielu'.*Known: silu"),
    "an unknown rope type": (
        {"rope_parameters": {"rope_type": "spiral"}},
        "asks for the rope type 'spiral'. Known types: default, linear, dynamic, yarn, longrope, llama3",
    ),
    "rope that differs between layers": (
        {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}},
        "rope parameters to each kind of layer",
    ),
    "rope that is stated twice": (
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0}, "rope_scaling": {"type": "linear", "factor": 4.0}},
        "has both rope_parameters and rope_scaling, and they differ",
    ),
    "partial rope": ({"partial_rotary_factor": 0.5}, "rope on 0.5 of each head"),
    "a window in a Llama": ({"sliding_window": 4096}, "sets sliding_window to 4096.*'mistral'"),
    "layer types that do not hold": ({"layer_types": ["full_attention"] * 3}, "layer_types are"),
    "chunked attention": ({"layer_types": ["chunked_attention"] * 2}, "layer_types are"),
    "another model_type": ({"model_type": "gpt2"}, "model_type is 'gpt2'; this class runs llama, mistral"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_computed_is_refused(llama_checkpoint: Checkpoint, case: str) -> None:
    config, message = REFUSED[case]
    with pytest.raises(UnsupportedModelError, match=message):
        load(ChangedCheckpoint(llama_checkpoint, config))


WRONG_VALUES: dict[str, tuple[dict[str, Any], str]] = {
    "a missing size": ({"hidden_size": None}, "lacks 'hidden_size'"),
    "a size that is text": ({"num_hidden_layers": "2"}, "'2' as num_hidden_layers; it has to be a whole number"),
    "a size of nothing": ({"vocab_size": 0}, "0 as vocab_size; it has to be positive"),
    "heads that do not divide": ({"num_key_value_heads": 3}, "4 query heads, 3 KV heads"),
    "an epsilon that is no number": ({"rms_norm_eps": float("nan")}, "nan as rms_norm_eps"),
    "a flag that is a number": ({"attention_bias": 1}, "1 as attention_bias; it has to be true or false"),
    "a missing rope factor": ({"rope_parameters": {"rope_type": "linear"}}, "None as factor of the rope type 'linear'"),
    "rope factors that are too few": (
        {"rope_parameters": ROPES["longrope"] | {"short_factor": [1.0]}},
        "8 numbers above 0 as short_factor",
    ),
    "a rope base of 1": ({"rope_parameters": {"rope_theta": 1.0}}, "1.0 as rope_theta of the rope type 'default'; it"),
    "a negative rope factor": (
        {"rope_parameters": {"rope_type": "linear", "factor": -1.0}},
        "-1.0 as factor of the rope type 'linear'; it has to be above 0.",
    ),
    "a rope number of no model": (
        {"rope_parameters": ROPES["yarn"] | {"attention_factor": 10**30}},
        "as attention_factor of the rope type 'yarn'; it has to be a number.",
    ),
    "a beta of 0": ({"rope_parameters": ROPES["yarn"] | {"beta_slow": 0}}, "0 as beta_slow of the rope type 'yarn'"),
    "a rope factor of 0 for a pair": (
        {"rope_parameters": ROPES["longrope"] | {"short_factor": [0.0] * 8}},
        "8 numbers above 0 as short_factor",
    ),
    "rope parameters that are text": ({"rope_parameters": "linear"}, "'linear' as its rope parameters"),
}


@pytest.mark.parametrize("case", WRONG_VALUES)
def test_a_config_that_makes_no_sense_is_refused_with_the_key(llama_checkpoint: Checkpoint, case: str) -> None:
    config, message = WRONG_VALUES[case]
    with pytest.raises(CheckpointError, match=message):
        load(ChangedCheckpoint(llama_checkpoint, config))


def test_a_tensor_of_the_wrong_shape_is_named_with_both_shapes(llama_checkpoint: Checkpoint) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    changed = ChangedCheckpoint(llama_checkpoint, tensors={name: torch.zeros(64, 100)})
    with pytest.raises(CheckpointError, match=rf"'{name}' is torch.float32 of shape \[64, 100\].*\[64, 128\]"):
        load(changed)


def test_a_tensor_of_whole_numbers_is_refused(llama_checkpoint: Checkpoint) -> None:
    name = "model.norm.weight"
    changed = ChangedCheckpoint(llama_checkpoint, tensors={name: torch.zeros(64, dtype=torch.int8)})
    with pytest.raises(CheckpointError, match=f"'{name}' is torch.int8"):
        load(changed)


def test_a_missing_tensor_is_named(llama_checkpoint: Checkpoint) -> None:
    with pytest.raises(CheckpointError, match=r"has no tensor 'model\.layers\.2\.self_attn\.q_proj\.weight'"):
        load(ChangedCheckpoint(llama_checkpoint, {"num_hidden_layers": 3}))


def test_weights_without_a_place_are_refused(llama_checkpoint: Checkpoint) -> None:
    extra = {"model.layers.0.self_attn.q_norm.weight": torch.ones(16)}
    with pytest.raises(UnsupportedModelError, match=r"holds 1 tensor that.*layers\.0\.self_attn\.q_norm"):
        load(ChangedCheckpoint(llama_checkpoint, tensors=extra))


def test_tables_that_old_files_carry_are_ignored(llama_checkpoint: Checkpoint) -> None:
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    ours = logits_of(load(ChangedCheckpoint(llama_checkpoint, tensors=extra)), PROMPT)
    assert torch.equal(ours, logits_of(load(llama_checkpoint), PROMPT))


def test_code_in_a_models_folder_is_not_run(tiny_folders: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_folders["llama"], folder)
    witness = tmp_path / "witness"
    (folder / "modeling_evil.py").write_text(f"open({str(witness)!r}, 'w').close()\nclass Evil: pass\n")
    auto_map = dict.fromkeys(("AutoConfig", "AutoModelForCausalLM"), "modeling_evil.Evil")
    config = json.loads((folder / "config.json").read_text()) | {"auto_map": auto_map}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"auto_map": {"AutoTokenizer": ["modeling_evil.Evil", None]}, "tokenizer_class": "Evil"})
    )
    load(folder)
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json"):
        open_checkpoint(str(folder)).tokenizer()
    assert not witness.exists()
