"""GGUF models: names, config, permuted rows, and the same logits as from safetensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from dense_models import load, logits_of
from gguf_builder import GGUFBuilder

from octavo.core.interfaces.model import Checkpoint
from octavo.errors import CheckpointError, UnsupportedModelError
from octavo.models.checkpoint import open_checkpoint
from octavo.models.rope import Rope, read_rope
from octavo.testing import tiny_models

PROMPT = [(37 * i + 11) % 509 for i in range(24)]


@pytest.fixture(scope="module")
def llama(tiny_folders: dict[str, Path]) -> Checkpoint:
    return open_checkpoint(str(tiny_folders["llama"]))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_model_written_as_gguf_computes_the_same(tiny_folders: dict[str, Path], family: str, tmp_path: Path) -> None:
    source = open_checkpoint(str(tiny_folders[family]))
    path = GGUFBuilder(source, family).write(tmp_path / "model.gguf")
    torch.testing.assert_close(logits_of(load(path), PROMPT), logits_of(load(source), PROMPT), atol=1e-5, rtol=0)


def test_a_llama_with_biases_written_as_gguf_computes_the_same(tmp_path: Path) -> None:
    folder = tiny_models.tiny_llama(tmp_path / "folder", attention_bias=True, mlp_bias=True, tie_word_embeddings=True)
    path = GGUFBuilder(open_checkpoint(str(folder))).write(tmp_path / "model.gguf")
    assert open_checkpoint(str(path)).config["tie_word_embeddings"] is True
    torch.testing.assert_close(logits_of(load(path), PROMPT), logits_of(load(folder), PROMPT), atol=1e-5, rtol=0)


def test_a_sliding_window_makes_it_a_mistral(tiny_folders: dict[str, Path], tmp_path: Path) -> None:
    source = open_checkpoint(str(tiny_folders["mistral"]))
    builder = GGUFBuilder(source)
    builder.metadata["attention.sliding_window"] = 16
    path = builder.write(tmp_path / "model.gguf")
    torch.testing.assert_close(logits_of(load(path), PROMPT), logits_of(load(source), PROMPT), atol=1e-5, rtol=0)


@pytest.mark.parametrize("type_name", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_quantised_weights_compute_what_their_dequantised_values_compute(
    llama: Checkpoint, type_name: str, tmp_path: Path
) -> None:
    quantised = GGUFBuilder(llama)
    quantised.store_matrices_as(type_name)
    plain = GGUFBuilder(llama)
    kind = gguf.GGMLQuantizationType[type_name]
    for name, (values, stored_as) in quantised.tensors.items():
        if stored_as != "F32":
            plain.tensors[name] = (gguf.quants.dequantize(gguf.quants.quantize(values, kind), kind), "F32")
    paths = quantised.write(tmp_path / "quantised.gguf"), plain.write(tmp_path / "plain.gguf")
    actual, expected = (logits_of(load(path), PROMPT) for path in paths)
    assert torch.equal(actual, expected)


@pytest.mark.parametrize(
    ("stored_as", "dtype"), [("F32", "float32"), ("F16", "float16"), ("BF16", "bfloat16"), ("Q8_0", "float32")]
)
def test_the_dtype_is_that_of_the_matrices_and_float32_when_they_are_quantised(
    llama: Checkpoint, stored_as: str, dtype: str, tmp_path: Path
) -> None:
    builder = GGUFBuilder(llama)
    builder.store_matrices_as(stored_as)
    builder.tensors["token_embd.weight"] = (builder.tensors["token_embd.weight"][0], stored_as)
    assert open_checkpoint(str(builder.write(tmp_path / "model.gguf"))).dtype == dtype


@pytest.mark.parametrize(
    ("metadata", "parameters"),
    [
        ({"rope.scaling.type": "none"}, {"rope_type": "default"}),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 128},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        ),
    ],
)
def test_rope_scaling_is_that_of_the_same_config_in_a_folder(
    llama: Checkpoint, metadata: dict[str, Any], parameters: dict[str, Any], tmp_path: Path
) -> None:
    builder = GGUFBuilder(llama)
    builder.metadata |= metadata
    config = open_checkpoint(str(builder.write(tmp_path / "model.gguf"))).config
    actual, expected = (
        Rope.from_spec(read_rope({"rope_parameters": rope}, head_dim=16, max_position_embeddings=512), device="cpu")
        for rope in (config["rope_parameters"], parameters)
    )
    assert torch.equal(actual.frequencies, expected.frequencies)
    assert actual.factor == expected.factor


def test_rope_factors_stored_as_a_tensor_divide_the_frequencies(tmp_path: Path) -> None:
    # What llama.cpp's converter makes of the llama3 rope type.
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    folder = tiny_models.tiny_llama(tmp_path / "folder", rope_parameters=scaling)
    factors = []
    for index in range(8):
        wavelength = 2 * np.pi * 10000.0 ** (index / 8)
        if wavelength < 64 / 4.0:
            factors.append(1.0)
        elif wavelength > 64 / 1.0:
            factors.append(8.0)
        else:
            smooth = (64 / wavelength - 1.0) / (4.0 - 1.0)
            factors.append(1 / ((1 - smooth) / 8.0 + smooth))
    builder = GGUFBuilder(open_checkpoint(str(folder)))
    builder.tensors["rope_freqs.weight"] = (np.array(factors, dtype=np.float32), "F32")
    path = builder.write(tmp_path / "model.gguf")
    torch.testing.assert_close(logits_of(load(path), PROMPT), logits_of(load(folder), PROMPT), atol=1e-4, rtol=0)


def test_both_tokens_that_end_an_answer_are_known(llama: Checkpoint, tmp_path: Path) -> None:
    builder = GGUFBuilder(llama)
    builder.general |= {"tokenizer.ggml.eos_token_id": 5, "tokenizer.ggml.eot_token_id": 9}
    assert open_checkpoint(str(builder.write(tmp_path / "model.gguf"))).eos_token_ids == {5, 9}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a mixture of experts": ({"expert_count": 8}, "sets llama.expert_count to 8"),
    "an unknown key": ({"attention.clamp_kqv": 8.0}, r"sets llama\.attention\.clamp_kqv to 8\.0"),
    "rope on part of a head": ({"rope.dimension_count": 8}, r"heads of 16 numbers and 8 as rope\.dimension_count"),
    "an unknown rope scaling": ({"rope.scaling.type": "longrope"}, "asks for the rope scaling 'longrope'"),
    "layers that differ": ({"attention.head_count_kv": [2, 4]}, r"different numbers to its layers as llama\.attention"),
    "a yarn multiplier": (
        {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0, "rope.scaling.yarn_log_multiplier": 0.1},
        r"as rope\.scaling\.yarn_log_multiplier; only 0\.0",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_metadata_that_ask_for_other_arithmetic_are_refused(llama: Checkpoint, case: str, tmp_path: Path) -> None:
    metadata, message = REFUSED[case]
    builder = GGUFBuilder(llama)
    builder.metadata |= metadata
    with pytest.raises(UnsupportedModelError, match=message):
        open_checkpoint(str(builder.write(tmp_path / "model.gguf")))


def test_an_unknown_architecture_is_refused_with_those_known(llama: Checkpoint, tmp_path: Path) -> None:
    path = GGUFBuilder(llama, "phi3").write(tmp_path / "model.gguf")
    with pytest.raises(UnsupportedModelError, match=r"the architecture 'phi3'.*llama, qwen2, qwen3"):
        open_checkpoint(str(path))


def test_tensors_without_a_place_are_refused(llama: Checkpoint, tmp_path: Path) -> None:
    builder = GGUFBuilder(llama)
    builder.tensors["blk.0.ffn_gate_exps.weight"] = (np.zeros((2, 2), dtype=np.float32), "F32")
    with pytest.raises(UnsupportedModelError, match=r"holds 1 tensors .*'blk\.0\.ffn_gate_exps\.weight'"):
        open_checkpoint(str(builder.write(tmp_path / "model.gguf")))


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"block_count": "two"}, r"gives 'two' as llama\.block_count; it has to be a whole number"),
        ({"attention.layer_norm_rms_epsilon": float("nan")}, "has to be a finite number"),
        ({"rope.scaling.type": 3}, "has to be text"),
    ],
)
def test_metadata_of_the_wrong_kind_are_named(
    llama: Checkpoint, metadata: dict[str, Any], message: str, tmp_path: Path
) -> None:
    builder = GGUFBuilder(llama)
    builder.metadata |= metadata
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(str(builder.write(tmp_path / "model.gguf")))


def test_missing_metadata_are_named(llama: Checkpoint, tmp_path: Path) -> None:
    builder = GGUFBuilder(llama)
    del builder.metadata["context_length"]
    with pytest.raises(CheckpointError, match=r"lacks the metadata llama\.context_length"):
        open_checkpoint(str(builder.write(tmp_path / "model.gguf")))


def test_a_missing_tensor_is_named(llama: Checkpoint, tmp_path: Path) -> None:
    builder = GGUFBuilder(llama)
    del builder.tensors["blk.1.ffn_up.weight"]
    with pytest.raises(CheckpointError, match=r"has no tensor for 'model\.layers\.1\.mlp\.up_proj\.weight'"):
        load(builder.write(tmp_path / "model.gguf"))


def test_a_part_of_a_split_model_says_how_to_merge_it(llama: Checkpoint, tmp_path: Path) -> None:
    builder = GGUFBuilder(llama)
    builder.general["split.count"] = 3
    with pytest.raises(CheckpointError, match=r"one of 3 parts.*llama-gguf-split --merge"):
        open_checkpoint(str(builder.write(tmp_path / "model.gguf")))
