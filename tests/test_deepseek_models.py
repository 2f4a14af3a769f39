"""DeepSeek V2 and V3 in an engine: whatever becomes of their blocks, the answers are Hugging Face's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.testing import model_trials
from octavo.testing.model_trials import SLOW_TRIALS, TRIALS, TrialModel
from octavo.testing.tiny_models import tiny_deepseek_v2, tiny_deepseek_v3

MAKERS: dict[str, Callable[..., Path]] = {"v2": tiny_deepseek_v2, "v3": tiny_deepseek_v3}
# What the ordinary suite tries. V3 differs from V2 in how experts are chosen, not in what is kept.
ORDINARY = {
    "v2": ("in a batch", "budget of 7", "whole prompts", "steps planned ahead", "warm", "branches", "partly evicted"),
    "v3": ("budget of 7", "warm", "memory runs out"),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TrialModel]:
    # Prompts of up to 73 tokens: V2's rope is stretched from 32 on.
    return {
        name: TrialModel(make(tmp_path_factory.mktemp(name)), span=16, num_tokens=16) for name, make in MAKERS.items()
    }


def trials() -> list[Any]:
    ordinary = [(family, trial) for family, names in ORDINARY.items() for trial in names]
    slow = [(family, trial) for trial in (*TRIALS, *SLOW_TRIALS) for family in MAKERS if trial not in ORDINARY[family]]
    return [*ordinary, *(pytest.param(*each, marks=pytest.mark.slow) for each in slow)]


@pytest.mark.parametrize(("family", "trial"), trials())
def test_the_answers_are_those_of_transformers(trial: str, family: str, models: dict[str, TrialModel]) -> None:
    model_trials.run(trial, models[family], LLM)


@pytest.mark.parametrize("family", MAKERS)
def test_a_prompt_whose_beginning_is_known_is_answered_as_a_cold_one_without_chunking(
    family: str, models: dict[str, TrialModel]
) -> None:
    answers = models[family].answers
    # The two have 43 tokens in common.
    first, second = answers.expected[0], answers.expected[2]
    params = SamplingParams(temperature=0, max_tokens=answers.num_tokens, detokenize=False)
    with LLM(
        str(models[family].folder),
        dtype="float32",
        device="cpu",
        block_size=4,
        num_kv_blocks=100,
        enable_chunked_prefill=False,
        enable_prefix_caching=True,
    ) as llm:
        outputs = [llm.generate([each.prompt], params, use_tqdm=False)[0] for each in (first, second, second)]
    assert [output.num_cached_tokens for output in outputs] == [0, 40, 72]
    assert [output.outputs[0].token_ids for output in outputs] == [
        first.token_ids,
        second.token_ids,
        second.token_ids,
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("v2", {"routed_scaling_factor": 2.1}),
        ("v2", {"topk_method": "greedy"}),
        ("v2", {"num_experts_per_tok": 1}),
        ("v2", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
        ("v3", {"rope_interleave": False}),
        ("v3", {"norm_topk_prob": False}),
        ("v3", {"topk_group": 2}),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else value,
)
def test_another_config_gives_other_answers(
    family: str, changes: dict[str, Any], models: dict[str, TrialModel], tmp_path: Path
) -> None:
    changed = model_trials.perturbed(models[family].folder, tmp_path / "changed", **changes)
    model_trials.assert_answers_differ(models[family], changed, LLM)
