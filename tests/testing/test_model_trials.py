"""The trials find a model that answers otherwise, and refuse a model that could not show a difference."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM
from octavo.testing import model_trials, tiny_models
from octavo.testing.model_trials import SLOW_TRIALS, TRIALS, TrialModel


@pytest.fixture(scope="module")
def mistral(tmp_path_factory: pytest.TempPathFactory) -> TrialModel:
    return TrialModel(tiny_models.tiny_mistral(tmp_path_factory.mktemp("mistral")), span=16)


@pytest.fixture
def wrong_llm(mistral: TrialModel, tmp_path: Path) -> Callable[..., LLM]:
    """Makes engines of a model whose window is one token too short, whatever model they are asked for."""
    folder = model_trials.perturbed(mistral.folder, tmp_path / "wrong", sliding_window=15)

    def make(asked_for: str, **settings: Any) -> LLM:
        assert asked_for == str(mistral.folder)
        return LLM(str(folder), **settings)

    return make


@pytest.mark.parametrize(
    "trial",
    [name if name in TRIALS[:1] else pytest.param(name, marks=pytest.mark.slow) for name in TRIALS + SLOW_TRIALS],
)
def test_each_trial_finds_a_model_that_answers_otherwise(trial, mistral, wrong_llm):
    with pytest.raises(AssertionError, match=r"prompt \d of \d+ tokens"):
        model_trials.run(trial, mistral, wrong_llm)


@pytest.mark.parametrize(
    ("trial", "settings", "message"),
    [
        ("warm", {"enable_prefix_caching": False}, "nothing was found for prompt 0"),
        ("branches", {"enable_prefix_caching": False}, "no beginning in common was found"),
        ("holes in the cache", {"enable_prefix_caching": False}, "nothing was found"),
        ("memory runs out", {"max_num_seqs": 1}, "blocks were enough for all"),
    ],
)
def test_a_trial_that_brought_nothing_about_fails(trial, settings, message, mistral):
    def make(folder: str, **others: Any) -> LLM:
        return LLM(folder, **others | settings)

    with pytest.raises(AssertionError, match=message):
        model_trials.run(trial, mistral, make)


def test_most_prompts_are_several_spans_long_and_some_have_a_beginning_in_common(mistral):
    prompts = [answer.prompt for answer in mistral.answers.expected]
    assert [len(prompt) for prompt in prompts] == [43, 1, 73, 15, 50, 17, 43, 58]
    assert mistral.long_prompts == [0, 2, 4, 6, 7]
    common = prompts[2]
    assert [prompt[:42] == common[:42] for prompt in prompts] == [n in (0, 2, 4, 7) for n in range(8)]
    assert [answer.prompt[:-3] for answer in mistral.follow_ups.expected] == prompts


def test_a_model_with_the_same_answers_does_not_differ(mistral, tmp_path):
    same = model_trials.perturbed(mistral.folder, tmp_path / "same", attention_dropout=0.5)
    with pytest.raises(AssertionError) as caught:
        model_trials.assert_answers_differ(mistral, same, LLM)
    assert str(caught.value) == (
        f"{same} answers like {mistral.folder}, so the trials would not tell one from the other"
    )


def test_a_perturbed_model_has_the_same_weights_and_another_config(mistral, tmp_path):
    changed = model_trials.perturbed(mistral.folder, tmp_path / "changed", sliding_window=17)
    assert (changed / "model.safetensors").resolve() == (mistral.folder / "model.safetensors").resolve()
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (mistral.folder, changed))
    assert after == before | {"sliding_window": 17}


def test_a_value_that_changes_nothing_is_refused(mistral, tmp_path):
    with pytest.raises(AssertionError, match="the config says so already: sliding_window"):
        model_trials.perturbed(mistral.folder, tmp_path / "changed", sliding_window=16)


def test_a_model_with_many_near_ties_is_refused(tmp_path):
    folder = tiny_models.tiny_mistral(tmp_path, seed=5)
    with pytest.raises(AssertionError, match="tokens can be compared; change the seed"):
        TrialModel(folder, span=16, longest=400).answers  # noqa: B018


@pytest.mark.parametrize(("span", "longest"), [(1, None), (16, 47)])
def test_prompts_have_to_cross_a_span_several_times(span, longest, mistral):
    with pytest.raises(ValueError, match="they have to be at least 2, and three spans"):
        TrialModel(mistral.folder, span=span, longest=longest).answers  # noqa: B018
