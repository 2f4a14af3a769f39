"""Scales for a quantised KV cache in a checkpoint: under which names they are found, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo import EngineConfig
from octavo.core.interfaces.attention import AttentionSpec
from octavo.core.interfaces.kv_scales import LayerScales
from octavo.errors import CheckpointError, UnsupportedModelError
from octavo.models.checkpoint import open_config
from octavo.models.config_values import quantises_weights
from octavo.models.gpt_oss import GptOssModel
from octavo.models.hugging_face.adapter import TransformersModel
from octavo.models.kv_scales import CheckpointScales, is_kv_cache_name
from octavo.models.llama import LlamaModel
from octavo.models.safetensors_checkpoint import SafetensorsCheckpoint
from octavo.plugins.registry import scan
from octavo.selection.select import model_needs, model_needs_elsewhere
from octavo.testing import tiny_models

WAY_OUT = "Set kv_cache_scales='per_token_head', which reads no scales of the checkpoint."
FP8_SCHEME = {"type": "float", "num_bits": 8, "strategy": "tensor", "dynamic": False, "symmetric": True}


class MadeUp:
    """A checkpoint of scales alone."""

    def __init__(self, tensors: dict[str, Any], config: dict[str, Any] | None = None) -> None:
        self.tensors = {name: torch.as_tensor(tensor) for name, tensor in tensors.items()}
        self.config = config or {}

    def tensor_names(self) -> list[str]:
        return list(self.tensors)

    def tensor(self, name: str) -> torch.Tensor:
        return self.tensors[name]


def attention(kv_dtype: str = "fp8_e4m3", num_kv_heads: int = 2, **fields: Any) -> AttentionSpec:
    plain: dict[str, Any] = {"num_query_heads": 4, "num_kv_heads": num_kv_heads, "head_dim": 8, "head_dim_v": 8}
    plain |= {"scale": 1.0, "block_size": 16, "dtype": "float32", "kv_dtype": kv_dtype, "device": "cpu"}
    return AttentionSpec(**plain | fields)


LATENT = attention(num_kv_heads=1, head_dim_v=6, value_is_key_prefix=True)


def read(tensors: dict[str, Any], *specs: AttentionSpec, config: dict[str, Any] | None = None) -> Any:
    return CheckpointScales(MadeUp(tensors, config)).read(specs or (attention(),))


def refusal(tensors: dict[str, Any], *specs: AttentionSpec, config: dict[str, Any] | None = None) -> str:
    with pytest.raises(CheckpointError) as caught:
        read(tensors, *specs, config=config)
    return str(caught.value)


# -- names ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model.layers.0.self_attn.k_scale", "model.layers.0.self_attn.v_scale"),
        ("model.layers.0.self_attn.attn.k_scale", "model.layers.0.self_attn.attn.v_scale"),
        ("model.layers.0.self_attn.k_proj.k_scale", "model.layers.0.self_attn.v_proj.v_scale"),
        ("model.layers.0.self_attn.qkv_proj.k_scale", "model.layers.0.self_attn.qkv_proj.v_scale"),
        ("model.layers.0.self_attn.k_proj.output_scale", "model.layers.0.self_attn.v_proj.output_scale"),
        ("language_model.model.layers.0.self_attn.k_scale", "language_model.model.layers.0.self_attn.v_scale"),
        ("transformer.h.0.attn.k_scale", "transformer.h.0.attn.v_scale"),
        ("backbone.layers.0.mixer.k_proj.k_scale", "backbone.layers.0.mixer.v_proj.v_scale"),
    ],
)
def test_scales_are_found_under_each_of_their_names(key, value):
    assert is_kv_cache_name(key)
    assert is_kv_cache_name(value)
    assert read({key: 0.25, value: [0.5]}) == (LayerScales((0.25,), (0.5,)),)


def test_one_scale_for_both_is_found_under_its_name():
    assert read({"model.layers.0.self_attn.kv_scale": 0.25}) == (LayerScales((0.25,), (0.25,)),)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.k_proj.weight",
        "model.layers.0.self_attn.k_proj.weight_scale",
        "model.layers.0.self_attn.k_proj.input_scale",
        "model.layers.0.self_attn.o_proj.output_scale",
        "model.layers.0.self_attn.q_norm.scale",
        "model.layers.0.mlp.down_proj.output_scale",
        "model.layers.0.self_attn.k_norm.weight",
        "vision_tower.encoder.layers.0.self_attn.k_proj.output_scale",
        "model.visual.layers.0.self_attn.k_scale",
        "model.layers.self_attn.k_scale",
        "k_scale",
    ],
)
def test_other_tensors_are_no_scales_of_the_kv_cache(name):
    assert not is_kv_cache_name(name)
    assert not CheckpointScales(MadeUp({name: 1.0}))


@pytest.mark.parametrize("name", ["q_scale", "attn.q_scale", "prob_scale", "prob_output_scale", "q_proj.output_scale"])
def test_scales_of_what_is_not_kept_are_neither_weights_nor_read(name):
    name = f"model.layers.0.self_attn.{name}"
    assert is_kv_cache_name(name)
    assert not CheckpointScales(MadeUp({name: 1.0}))
    assert read({"model.layers.0.self_attn.kv_scale": 0.5, name: math.nan}) == (LayerScales((0.5,), (0.5,)),)


@pytest.mark.parametrize(
    "name",
    [
        f"model.layers.{'9' * 5000}.self_attn.k_scale",
        f"model.layers.{'9' * 2**20}.self_attn.k_scale",
        # These may be cut in two in as many ways as they are long.
        f"model.layers.0.{'attn' * 2**18}",
        f"model.layers.0.{'attn' * 2**18}!.k_scale",
        "layers.0." * 2**17,
        "layers.0.attn." * 2**16,
        "layers.0.attn.a." * 2**16,
        "a." * 2**19,
        "model.layers.\u0663.self_attn.k_scale",
    ],
    ids=range(9),
)
def test_absurd_names_are_none(name):
    assert not is_kv_cache_name(name)
    assert not CheckpointScales(MadeUp({name: 1.0}))


@pytest.mark.parametrize("stack", ["mtp.layers", "model.mtp.layers", "encoder.layers", "model.encoder.layers"])
def test_layers_beside_the_decoders_are_left_alone(stack):
    others = {f"{stack}.{layer}.self_attn.{kind}": -1.0 for layer in range(3) for kind in ("k_scale", "v_zero_point")}
    assert all(map(is_kv_cache_name, others))
    assert not CheckpointScales(MadeUp(others))
    assert read(others | {"model.layers.0.self_attn.kv_scale": 0.5}) == (LayerScales((0.5,), (0.5,)),)


def test_the_decoder_is_what_has_scales_for_most_layers():
    tensors = {f"decoder.layers.{layer}.self_attn.kv_scale": 0.5 for layer in range(2)}
    drafts = {"drafts.layers.0.self_attn.k_scale": -1.0, "drafts.layers.0.self_attn.k_zero_point": 3.0}
    for found in (drafts | tensors, tensors | drafts):
        assert read(found, attention(), attention()) == (LayerScales((0.5,), (0.5,)),) * 2
    # Nobody knows which is meant.
    assert refusal(tensors | {f"drafts.layers.{layer}.self_attn.kv_scale": 0.5 for layer in range(2)}) == (
        "The checkpoint gives two KV-cache scales for one thing, 'decoder.layers.0.self_attn.kv_scale' and "
        f"'drafts.layers.0.self_attn.kv_scale'. {WAY_OUT}"
    )


def test_each_layer_has_its_own_wherever_it_stands():
    tensors = {
        "model.layers.10.self_attn.k_scale": 0.5,
        "model.layers.2.self_attn.v_scale": 4.0,
        "model.layers.10.self_attn.v_scale": 0.125,
        "model.layers.2.self_attn.k_scale": 2.0,
    }
    tensors |= {f"model.layers.{i}.self_attn.kv_scale": 1.0 for i in range(11) if i not in (2, 10)}
    scales = read(tensors, *[attention()] * 11)
    assert scales[2] == LayerScales((2.0,), (4.0,))
    assert scales[10] == LayerScales((0.5,), (0.125,))
    assert scales[0].changes_nothing


def test_layers_past_the_models_are_left_alone():
    tensors: dict[str, Any] = {f"model.layers.{layer}.self_attn.kv_scale": 0.5 for layer in range(2)}
    tensors |= {"model.layers.2.self_attn.kv_scale": math.nan, "model.layers.2.self_attn.k_zero_point": 3}
    assert len(read(tensors, attention(), attention())) == 2


def test_layers_that_are_not_stored_with_them_have_none():
    tensors = {"model.layers.0.self_attn.kv_scale": 0.5}
    assert read(tensors, attention(), attention("float32")) == (LayerScales((0.5,), (0.5,)), None)


# -- numbers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_scale_is_one_number_of_any_floating_point_type(dtype, shape):
    tensors = {
        "model.layers.0.self_attn.k_scale": torch.full(shape, 0.25, dtype=dtype),
        "model.layers.0.self_attn.v_scale": torch.full(shape, 8.0, dtype=dtype),
    }
    assert read(tensors) == (LayerScales((0.25,), (8.0,)),)


@pytest.mark.parametrize("shape", [(2,), (2, 1, 1), (1, 2, 1)])
def test_a_scale_is_one_number_a_kv_head(shape):
    tensors = {
        "model.layers.0.self_attn.k_scale": torch.tensor([0.25, 0.5]).view(shape),
        "model.layers.0.self_attn.v_scale": torch.tensor(2.0),
    }
    assert read(tensors) == (LayerScales((0.25, 0.5), (2.0,)),)


@pytest.mark.parametrize("names", [("k_scale",), ("kv_scale",), ("k_scale", "v_scale"), ("k_proj.k_scale",)])
def test_latents_have_one_scale(names):
    tensors = {f"model.layers.0.self_attn.{name}": 0.5 for name in names}
    assert read(tensors, LATENT) == (LayerScales((0.5,), (0.5,)),)


def test_latents_with_other_scales_as_values_than_as_keys_are_refused():
    tensors = {"model.layers.0.self_attn.k_scale": 0.5, "model.layers.0.self_attn.v_scale": 0.25}
    assert refusal(tensors, LATENT) == (
        "The KV-cache scales 'model.layers.0.self_attn.k_scale' and 'model.layers.0.self_attn.v_scale' differ, and are "
        f"for the same latents, which are keys and values at once. {WAY_OUT}"
    )
    tensors["model.layers.0.self_attn.v_scale"] = math.nan
    assert refusal(tensors, LATENT) == (
        "The KV-cache scale 'model.layers.0.self_attn.v_scale' is nan; it has to be a positive, finite number. "
        f"{WAY_OUT}"
    )


@pytest.mark.parametrize(
    ("scheme", "kv_dtype", "expected"),
    [
        ({"kv_cache_scheme": FP8_SCHEME}, "fp8_e4m3", 0.5),
        ({"kv_cache_scheme": FP8_SCHEME}, "int8", 0.5 * 448 / 127),
        ({"kv_cache_scheme": FP8_SCHEME | {"type": "int"}}, "fp8_e4m3", 0.5 * 127 / 448),
        ({"kv_cache_scheme": FP8_SCHEME | {"type": "int"}}, "int8", 0.5),
        ({"kv_cache_quant_algo": "FP8"}, "int8", 0.5 * 448 / 127),
        ({"kv_cache_quant_algo": "INT8"}, "int8", 0.5),
        # The names are those of FP8 checkpoints.
        ({}, "fp8_e4m3", 0.5),
        ({}, "int8", 0.5 * 448 / 127),
    ],
)
@pytest.mark.parametrize("place", ["quantization_config", "compression_config", "text_config"])
def test_scales_made_for_the_other_format_are_brought_to_the_same_largest_number(scheme, kv_dtype, expected, place):
    config = {"text_config": {"quantization_config": scheme}} if place == "text_config" else {place: scheme}
    ((scales,),) = [read({"model.layers.0.self_attn.kv_scale": 0.5}, attention(kv_dtype), config=config)]
    assert scales.key == scales.value == pytest.approx((expected,), rel=1e-12)


# -- what is refused --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "shown"),
    [(math.nan, "nan"), (0.0, "0"), (-0.5, "-0.5"), (math.inf, "inf"), (-math.inf, "-inf"), (1e-60, "0")],
)
@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
def test_a_scale_that_is_none_is_refused(number, shown, name):
    scales = {"k_scale": torch.tensor([1.0, 1.0]), "v_scale": torch.tensor([1.0, 1.0])}
    scales[name] = torch.tensor([1.0, number], dtype=torch.float64)
    message = refusal({f"model.layers.0.self_attn.{kind}": scale for kind, scale in scales.items()})
    assert message == (
        f"The KV-cache scale 'model.layers.0.self_attn.{name}' is {shown}; it has to be a positive, finite number. "
        f"{WAY_OUT}"
    )


@pytest.mark.parametrize("shape", [(3,), (0,), (4,), (2, 2), (8,)])
def test_a_scale_of_another_shape_is_refused(shape):
    message = refusal({"model.layers.0.self_attn.kv_scale": torch.ones(shape)})
    assert message == (
        f"The KV-cache scale 'model.layers.0.self_attn.kv_scale' is float32 of shape {list(shape)}; it has to be one "
        f"floating-point number or of shape [2], one a KV head. {WAY_OUT}"
    )


def test_a_scale_of_whole_numbers_is_refused():
    message = refusal({"model.layers.0.self_attn.kv_scale": torch.tensor(2)}, LATENT)
    assert message == (
        "The KV-cache scale 'model.layers.0.self_attn.kv_scale' is int64 of shape []; it has to be one floating-point "
        f"number. {WAY_OUT}"
    )


def test_a_layer_without_a_scale_is_refused_when_others_have_some():
    tensors = {"model.layers.0.self_attn.k_scale": 1.0, "model.layers.0.self_attn.v_scale": 1.0}
    assert refusal(tensors, attention(), attention()) == (
        "The checkpoint has KV-cache scales, such as 'model.layers.0.self_attn.k_scale', and no k_scale or kv_scale "
        f"for layer 1. {WAY_OUT}"
    )
    tensors |= {"model.layers.1.self_attn.k_scale": 1.0}
    assert refusal(tensors, attention(), attention()) == (
        "The checkpoint has KV-cache scales, such as 'model.layers.0.self_attn.k_scale', and no v_scale or kv_scale "
        f"for layer 1. {WAY_OUT}"
    )


def test_two_scales_for_one_thing_are_refused():
    tensors = {f"model.layers.0.self_attn.{name}": 1.0 for name in ("k_scale", "v_scale", "k_proj.output_scale")}
    assert refusal(tensors) == (
        "The checkpoint gives two KV-cache scales for one thing, 'model.layers.0.self_attn.k_scale' and "
        f"'model.layers.0.self_attn.k_proj.output_scale'. {WAY_OUT}"
    )


@pytest.mark.parametrize("spec", [attention(), LATENT])
@pytest.mark.parametrize("kind", ["k", "v"])
def test_one_scale_for_both_stands_beside_no_other(kind, spec):
    tensors = {f"model.layers.0.self_attn.{name}": 1.0 for name in ("kv_scale", f"{kind}_scale")}
    assert refusal(tensors, spec) == (
        f"The checkpoint gives two KV-cache scales for one thing, 'model.layers.0.self_attn.{kind}_scale' and "
        f"'model.layers.0.self_attn.kv_scale'. {WAY_OUT}"
    )


# torch counts no zeros in some of them.
@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32, torch.int8, torch.bfloat16]
)
def test_zero_points_are_of_any_type(dtype):
    tensors = {"model.layers.0.self_attn.kv_scale": 1.0, "model.layers.0.self_attn.k_zero_point": torch.zeros(2)}
    tensors["model.layers.0.self_attn.k_zero_point"] = torch.zeros(2).to(dtype)
    assert read(tensors) == (LayerScales((1.0,), (1.0,)),)
    tensors["model.layers.0.self_attn.k_zero_point"] = torch.tensor([0.0, 3.0]).to(dtype)
    assert "go with a zero point ('model.layers.0.self_attn.k_zero_point')" in refusal(tensors)


def test_a_zero_point_is_refused_unless_it_is_zero():
    tensors = {"model.layers.0.self_attn.kv_scale": 1.0, "model.layers.0.self_attn.k_zero_point": torch.tensor([0, 0])}
    assert read(tensors) == (LayerScales((1.0,), (1.0,)),)
    tensors["model.layers.0.self_attn.k_zero_point"] = torch.tensor([0, 3])
    assert refusal(tensors) == (
        "The checkpoint's KV-cache scales go with a zero point ('model.layers.0.self_attn.k_zero_point'), and codes "
        f"here are symmetric around 0. {WAY_OUT}"
    )


@pytest.mark.parametrize(
    ("said", "where", "shown"),
    [
        ({"kv_cache_quant_algo": "NVFP4"}, "kv_cache_quant_algo", "'NVFP4'"),
        ({"kv_cache_scheme": {"type": "float", "num_bits": 4}}, "kv_cache_scheme", "{'type': 'float', 'num_bits': 4}"),
        ({"kv_cache_scheme": {"type": [], "num_bits": 8}}, "kv_cache_scheme", "{'type': [], 'num_bits': 8}"),
    ],
)
def test_scales_for_another_kind_of_numbers_are_refused(said, where, shown):
    config = {"quantization_config": said}
    assert refusal({"model.layers.0.self_attn.kv_scale": 1.0}, config=config) == (
        "The checkpoint's KV-cache scales are for numbers of another kind than fp8_e4m3 and int8 "
        f"(quantization_config.{where} is {shown}). {WAY_OUT}"
    )


# -- models whose KV cache alone is quantised -------------------------------------------------------------------

# As llm-compressor and as ModelOpt write it, the weights being left as they are.
KV_CACHE_ALONE = [
    {
        "config_groups": {},
        "format": "dense",
        "global_compression_ratio": None,
        "ignore": [],
        "kv_cache_scheme": FP8_SCHEME,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "sparsity_config": {},
        "transform_config": {},
        "version": "0.12.2",
    },
    {
        "quant_method": "modelopt",
        "quant_algo": None,
        "kv_cache_quant_algo": "FP8",
        "exclude_modules": ["lm_head"],
        "producer": {"name": "modelopt", "version": "0.33"},
    },
]
WEIGHTS_TOO = [
    {"quant_method": "compressed-tensors", "config_groups": {"group_0": {}}, "kv_cache_scheme": FP8_SCHEME},
    {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": None},
    {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"},
    {"quant_method": "fp8", "kv_cache_scheme": FP8_SCHEME},
    {"quant_method": "compressed-tensors", "format": "pack-quantized", "kv_cache_scheme": FP8_SCHEME},
    {"quant_method": "compressed-tensors", "kv_cache_scheme": FP8_SCHEME, "bits": 4},
    {},
    "fp8",
]


@pytest.mark.parametrize("said", KV_CACHE_ALONE)
def test_what_is_said_of_the_kv_cache_alone_stops_no_model(said, tiny_folder):
    assert not quantises_weights(said)
    config = SafetensorsCheckpoint(tiny_folder).config | {"quantization_config": said}
    where = {"dtype": "float32", "device": "cpu", "block_size": 16, "kv_dtype": "fp8_e4m3"}
    assert LlamaModel.spec_from_config(config, **where) == LlamaModel.spec_from_config(
        SafetensorsCheckpoint(tiny_folder).config, **where
    )
    assert TransformersModel.spec_from_config(config, **where).attention_specs[0].kv_dtype == "fp8_e4m3"


@pytest.mark.parametrize("said", KV_CACHE_ALONE)
def test_what_is_said_of_the_kv_cache_alone_stops_no_gpt_oss(said, tmp_path):
    folder = tiny_models.tiny_gpt_oss(tmp_path / "gpt_oss")
    config = SafetensorsCheckpoint(folder).config | {"quantization_config": said}
    where = {"dtype": "float32", "device": "cpu", "block_size": 16, "kv_dtype": "int8"}
    assert GptOssModel.spec_from_config(config, **where).attention_specs[0].kv_dtype == "int8"


@pytest.mark.parametrize("said", WEIGHTS_TOO)
def test_quantised_weights_are_refused_whatever_is_said_of_the_kv_cache(said, tiny_folder):
    assert quantises_weights(said)
    config = SafetensorsCheckpoint(tiny_folder).config | {"quantization_config": said}
    where = {"dtype": "float32", "device": "cpu", "block_size": 16, "kv_dtype": "float32"}
    with pytest.raises(UnsupportedModelError, match="quantization_config"):
        LlamaModel.spec_from_config(config, **where)


# -- folders ----------------------------------------------------------------------------------------------------


@pytest.fixture
def scaled_folder(tiny_folder, tmp_path):
    """Makes a copy of the tiny Llama with more tensors and keys of its config, and returns its folder."""

    def make(tensors: dict[str, Any], **config: Any) -> Path:
        folder = tmp_path / "scaled"
        folder.mkdir()
        for file in tiny_folder.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        weights = load_file(folder / "model.safetensors")
        weights |= {name: torch.as_tensor(tensor) for name, tensor in tensors.items()}
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        changed = json.loads((folder / "config.json").read_text()) | config
        (folder / "config.json").write_text(json.dumps(changed))
        return folder

    return make


SCALES = {
    f"model.layers.{layer}.self_attn.{kind}_scale": (layer + 1) / (2 if kind == "k" else 4)
    for layer in range(2)
    for kind in "kv"
}


@pytest.mark.parametrize("model_class", [LlamaModel, TransformersModel])
def test_scales_beside_the_weights_stop_no_model_from_loading(model_class, scaled_folder):
    names = ("q_scale", "prob_scale", "q_proj.output_scale", "k_zero_point")
    beside = {f"model.layers.0.self_attn.{name}": 0.0 for name in names}
    folder = scaled_folder(SCALES | beside, quantization_config=KV_CACHE_ALONE[0])
    model = model_class.from_checkpoint(SafetensorsCheckpoint(folder), dtype="float32", device="cpu")
    assert isinstance(model, model_class)


def test_a_folder_says_which_scales_its_layers_have(scaled_folder):
    config = EngineConfig.from_flat(model=str(scaled_folder(SCALES)), kv_cache_dtype="fp8_e4m3")
    assert model_needs(config, scan()).kv_scales.layers == (
        LayerScales((0.5,), (0.25,)),
        LayerScales((1.0,), (0.5,)),
    )


def test_a_config_with_weights_beside_it_tells_their_tensors(scaled_folder, tmp_path):
    folder = scaled_folder(SCALES)
    checkpoint = open_config(str(folder))
    assert CheckpointScales(checkpoint).read([attention()] * 2) == (
        LayerScales((0.5,), (0.25,)),
        LayerScales((1.0,), (0.5,)),
    )
    # One of another name may be of another model.
    (folder / "other.json").write_text((folder / "config.json").read_text())
    with pytest.raises(CheckpointError, match="is a config alone"):
        CheckpointScales(open_config(str(folder / "other.json")))


def in_a_plan(path: Path) -> str:
    """Return what is said of scales by whoever needs no weights."""
    config = EngineConfig.from_flat(model=str(path), dtype="float32", kv_cache_dtype="fp8_e4m3")
    return model_needs_elsewhere(config, scan()).kv_scales.origin


def test_weights_that_cannot_be_read_are_not_taken_for_none(scaled_folder):
    folder = scaled_folder(SCALES)
    assert in_a_plan(folder) == "one for keys and one for values of each layer, from the checkpoint, by default"
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        in_a_plan(folder)
    weights.rename(folder / "model-00001-of-00002.safetensors")
    (folder / "model-00002-of-00002.safetensors").write_bytes(whole)
    with pytest.raises(CheckpointError, match=r"holds 2 \.safetensors files and neither"):
        in_a_plan(folder)
    # A config alone, beside weights that may be of another model.
    (folder / "config.json").rename(folder / "other.json")
    assert in_a_plan(folder / "other.json") == (
        "one for each token and head, kept in the page, by default; 'auto': whether the checkpoint has some is not "
        "known without its weights, and none are assumed"
    )
