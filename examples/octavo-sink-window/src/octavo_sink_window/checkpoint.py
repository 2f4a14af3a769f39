"""Writes a tiny random model in the layout that Octavo reads: config.json and model.safetensors."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

# Sizes in numbers, except for keep_first and window, which count tokens.
TINY_CONFIG: dict[str, Any] = {
    "model_type": "sink_window",
    "vocab_size": 128,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_layers": 2,
    "num_query_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 512,
    "keep_first": 8,
    "window": 9,
}


def write_tiny_checkpoint(folder: Path, *, seed: int = 0, **config: Any) -> Path:
    """Write a model into a folder, and return the folder.

    The weights are large for a random model, so that the best next token stands clear of the second.

    Args:
        config: Values in place of those of `TINY_CONFIG`.
    """
    values = TINY_CONFIG | config
    hidden_size, intermediate_size, head_dim = values["hidden_size"], values["intermediate_size"], values["head_dim"]
    query_size, kv_size = values["num_query_heads"] * head_dim, values["num_kv_heads"] * head_dim
    generator = torch.Generator().manual_seed(seed)

    def matrix(num_rows: int, num_columns: int, scale: float = 1.5) -> Tensor:
        return torch.randn(num_rows, num_columns, generator=generator) * (scale / math.sqrt(num_columns))

    def norm() -> Tensor:
        return torch.rand(hidden_size, generator=generator) * 0.6 + 0.7

    tensors = {
        "embedding": matrix(values["vocab_size"], hidden_size, math.sqrt(hidden_size)),
        "positions": matrix(values["max_position_embeddings"], hidden_size, 0.5 * math.sqrt(hidden_size)),
        "final_norm": norm(),
        "lm_head": matrix(values["vocab_size"], hidden_size, 6.0),
    }
    for layer in range(values["num_layers"]):
        tensors |= {
            f"{layer}.attention_norm": norm(),
            f"{layer}.query": matrix(query_size, hidden_size),
            f"{layer}.key": matrix(kv_size, hidden_size),
            f"{layer}.value": matrix(kv_size, hidden_size),
            f"{layer}.output": matrix(hidden_size, query_size),
            f"{layer}.mlp_norm": norm(),
            f"{layer}.up": matrix(intermediate_size, hidden_size),
            f"{layer}.down": matrix(hidden_size, intermediate_size),
        }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(values, indent=2))
    return folder
