"""gpt-oss in the engine: sinks in every layer, and windows whose blocks are given back in every other one."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch

from octavo import LLM
from octavo.testing import model_trials
from octavo.testing.model_trials import TRIALS, TrialModel
from octavo.testing.tiny_models import tiny_gpt_oss

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 32}


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> TrialModel:
    rope = YARN | {"truncate": False}
    folder = tiny_gpt_oss(tmp_path_factory.mktemp("gpt_oss"), seed=1, rope_parameters=rope, swiglu_limit=1.0)
    return TrialModel(folder, span=16)


QUICK = ("budget of 7", "warm", "memory runs out")
SLOW = ("warm with blocks of 1", "memory runs out under steps planned ahead")


@pytest.mark.parametrize(
    "trial",
    [trial if trial in QUICK else pytest.param(trial, marks=pytest.mark.slow) for trial in (*TRIALS, *SLOW)],
)
def test_gpt_oss_answers_as_in_transformers(trial: str, gpt_oss: TrialModel) -> None:
    model_trials.run(trial, gpt_oss, LLM)


@pytest.mark.parametrize("window", [15, 17])
def test_another_window_gives_other_answers(window: int, gpt_oss: TrialModel, tmp_path: Path) -> None:
    changed = model_trials.perturbed(gpt_oss.folder, tmp_path / "changed", sliding_window=window)
    model_trials.assert_answers_differ(gpt_oss, changed, LLM)


def test_another_limit_of_the_gates_gives_other_answers(gpt_oss: TrialModel, tmp_path: Path) -> None:
    changed = model_trials.perturbed(gpt_oss.folder, tmp_path / "changed", swiglu_limit=7.0)
    model_trials.assert_answers_differ(gpt_oss, changed, LLM)


def test_no_sinks_give_other_answers(gpt_oss: TrialModel, tmp_path: Path) -> None:
    weights = safetensors.torch.load_file(gpt_oss.folder / "model.safetensors")
    for name, tensor in weights.items():
        if name.endswith(".sinks"):
            weights[name] = torch.full_like(tensor, -torch.inf)
    safetensors.torch.save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((gpt_oss.folder / "config.json").read_bytes())
    model_trials.assert_answers_differ(gpt_oss, tmp_path, LLM)
