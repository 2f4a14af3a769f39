"""Models whose layers read windows or chunks, alone or beside layers that read everything: Hugging Face's answers.

What nothing reads any more is given back as a text grows, found again in the cache, evicted and computed anew; see
`octavo.testing.model_trials`. Families with a class of their own are tried in tests/models.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM
from octavo.testing import model_trials, tiny_models
from octavo.testing.model_trials import SLOW_TRIALS, TRIALS, TrialModel

# Of windows and of chunks.
SPAN = 16
QWEN_WINDOWS = {"use_sliding_window": True, "sliding_window": SPAN, "num_hidden_layers": 3, "max_window_layers": 1}
THROUGH_TRANSFORMERS = {"settings": {"model_impl": "transformers"}}
# What makes a folder, and what the trials are told. Seeds with few near ties.
MODELS: dict[str, tuple[Callable[..., Path], dict[str, Any], dict[str, Any]]] = {
    # All layers have a window.
    "mistral": (tiny_models.tiny_mistral, {"seed": 0}, {"longest": 400}),
    # The upper two of three have one.
    "qwen2": (tiny_models.tiny_qwen2, QWEN_WINDOWS | {"seed": 4}, {}),
    # Three of four have one, which is found in masks.
    "cohere2": (tiny_models.tiny_cohere2, {"seed": 4}, THROUGH_TRANSFORMERS),
    # Three of four have chunks, found in masks too. When Llama 4 tunes temperatures, transformers takes a token's place
    # in its row for its position, and the adapter refuses the model.
    "llama4": (tiny_models.tiny_llama4, {"seed": 11, "attn_temperature_tuning": False}, THROUGH_TRANSFORMERS),
}
WITH_WINDOWS = ["mistral", "qwen2", "cohere2"]
# Through transformers a step costs more, so only those in which most can go wrong are quick.
QUICK_TRIALS = {
    "mistral": TRIALS,
    "qwen2": TRIALS,
    "cohere2": ("in a batch", "budget of 7", "warm", "partly evicted", "holes in the cache", "memory runs out"),
    "llama4": ("warm", "holes in the cache"),
}


CASES = [
    pytest.param(name, trial, marks=() if trial in quick_trials else pytest.mark.slow)
    for name, quick_trials in QUICK_TRIALS.items()
    for trial in (*TRIALS, *(SLOW_TRIALS if quick_trials == TRIALS else ()))
]


@pytest.fixture(scope="session")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TrialModel]:
    @cache
    def model_of(name: str) -> TrialModel:
        make, config, arguments = MODELS[name]
        return TrialModel(make(tmp_path_factory.mktemp(name), **config), span=SPAN, **arguments)

    return model_of


@pytest.mark.parametrize(("name", "trial"), CASES)
def test_a_model_answers_as_in_transformers(name, trial, model_of):
    model_trials.run(trial, model_of(name), LLM)


@pytest.mark.parametrize("span", [SPAN - 1, SPAN + 1])
@pytest.mark.parametrize(
    ("name", "key"), [*((name, "sliding_window") for name in WITH_WINDOWS), ("llama4", "attention_chunk_size")]
)
def test_a_window_or_chunk_that_is_off_by_one_gives_other_answers(name, key, span, model_of, tmp_path):
    changed = model_trials.perturbed(model_of(name).folder, tmp_path / "changed", **{key: span})
    model_trials.assert_answers_differ(model_of(name), changed, LLM)


@pytest.mark.parametrize(
    ("name", "groups"),
    [
        ("mistral", [("sliding_window", (0, 1))]),
        ("qwen2", [("full_attention", (0,)), ("sliding_window", (1,)), ("sliding_window", (2,))]),
        ("cohere2", [*(("sliding_window", (layer,)) for layer in range(3)), ("full_attention", (3,))]),
        # The second layer is the one without chunks.
        (
            "llama4",
            [*(("chunked_local", (layer,)) for layer in (0, 2, 3)), ("full_attention", (1,))],
        ),
    ],
)
def test_the_layers_of_a_model_keep_what_they_read(name, groups, model_of, make_llm):
    model = model_of(name)
    llm = make_llm(str(model.folder), num_kv_blocks=20, **model.settings)
    found = [(selected.group.spec.kind, selected.group.layers) for selected in llm.selection.groups]
    assert found == groups
