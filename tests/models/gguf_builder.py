"""Writes GGUF files for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

from octavo.core.interfaces.model import Checkpoint

_GEMMAS = {"gemma2": gguf.MODEL_ARCH.GEMMA2, "gemma3": gguf.MODEL_ARCH.GEMMA3}


class GGUFBuilder:
    """Writes a tiny model as GGUF, the way llama.cpp's converter does; every part can be replaced."""

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
        map_arch = _GEMMAS.get(architecture, gguf.MODEL_ARCH.LLAMA)
        names = gguf.get_tensor_name_map(map_arch, config["num_hidden_layers"])
        extra = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, config["num_hidden_layers"])
        self.tensors: dict[str, tuple[np.ndarray[Any, Any], str]] = {}
        for name in source.tensor_names():
            values = source.tensor(name).float().numpy()
            module = name.split(".")[-2]
            if architecture == "llama" and module in heads:
                halves = values.reshape(heads[module], 2, -1, *values.shape[1:])
                values = halves.swapaxes(1, 2).reshape(values.shape)
            if architecture in _GEMMAS and module.endswith("norm"):
                values = values + 1
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
        metadata = {f"{self.architecture}.{key}": value for key, value in self.metadata.items()} | self.general
        for key, value in metadata.items():
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
