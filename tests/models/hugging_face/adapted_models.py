"""Runs models through transformers, and changes their folders."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from octavo.core.interfaces.model import ModelSpec
from octavo.models.checkpoint import open_checkpoint
from octavo.models.hugging_face.adapter import TransformersModel


def load(folder: Path, dtype: str = "float32") -> TransformersModel:
    return TransformersModel.from_checkpoint(open_checkpoint(str(folder)), dtype=dtype, device="cpu")


def spec_of(config: dict[str, Any] | Path) -> ModelSpec:
    mapping = open_checkpoint(str(config)).config if isinstance(config, Path) else config
    return TransformersModel.spec_from_config(mapping, dtype="float32", device="cpu", block_size=16, kv_dtype="float32")


def change_config(folder: Path, **changes: Any) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return folder


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    file = folder / "model.safetensors"
    weights = safetensors.torch.load_file(file)
    change(weights)
    safetensors.torch.save_file(weights, file)
    return folder
