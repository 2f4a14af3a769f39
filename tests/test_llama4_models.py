"""Llama 4 in the engine: layers that give back finished chunks beside one that keeps everything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octavo import LLM
from octavo.testing import model_trials
from octavo.testing.model_trials import TRIALS, TrialModel
from octavo.testing.tiny_models import tiny_llama4


@pytest.fixture(scope="module")
def llama4(tmp_path_factory: pytest.TempPathFactory) -> TrialModel:
    return TrialModel(tiny_llama4(tmp_path_factory.mktemp("llama4")), span=16)


@pytest.fixture(scope="module")
def llama4_of_odd_chunks(tmp_path_factory: pytest.TempPathFactory) -> TrialModel:
    """Chunks begin in the middle of a block, whatever its size."""
    folder = tmp_path_factory.mktemp("odd chunks")
    return TrialModel(tiny_llama4(folder, seed=4, attention_chunk_size=11, moe_layers=[2]), span=11)


QUICK = ("blocks of 1", "warm with blocks of 16", "memory runs out")
SLOW = ("holes in the cache with blocks of 1", "memory runs out with blocks of 4")


@pytest.mark.parametrize(
    "trial",
    [trial if trial in QUICK else pytest.param(trial, marks=pytest.mark.slow) for trial in (*TRIALS, *SLOW)],
)
def test_llama4_answers_as_in_transformers(trial: str, llama4: TrialModel) -> None:
    model_trials.run(trial, llama4, LLM)


@pytest.mark.parametrize(
    "trial",
    [
        "partly evicted",
        *(
            pytest.param(trial, marks=pytest.mark.slow)
            for trial in ("memory runs out", "partly evicted with blocks of 16", "warm with a budget of 7")
        ),
    ],
)
def test_chunks_need_not_be_whole_blocks(trial: str, llama4_of_odd_chunks: TrialModel) -> None:
    model_trials.run(trial, llama4_of_odd_chunks, LLM)


CHANGES: dict[str, dict[str, Any]] = {
    "a smaller chunk": {"attention_chunk_size": 15},
    "a larger chunk": {"attention_chunk_size": 17},
    "no temperature": {"attn_temperature_tuning": False},
    "a temperature that rises later": {"floor_scale": 9},
    "rope without its stretching": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
}


SLOW_CHANGES = ("a temperature that rises later", "rope without its stretching")


@pytest.mark.parametrize(
    "change",
    [pytest.param(name, marks=pytest.mark.slow) if name in SLOW_CHANGES else name for name in CHANGES],
)
def test_the_trials_tell_a_model_from_a_slightly_different_one(change: str, llama4: TrialModel, tmp_path: Path) -> None:
    changed = model_trials.perturbed(llama4.folder, tmp_path / "changed", **CHANGES[change])
    model_trials.assert_answers_differ(llama4, changed, LLM)
