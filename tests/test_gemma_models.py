"""Gemma 2 and Gemma 3, whose layers read a window or everything: the answers are Hugging Face's.

Tiny ones go through the trials of `octavo.testing.model_trials`, a real one through a conversation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.core.interfaces.model import Checkpoint
from octavo.core.outputs import RequestOutput
from octavo.models.checkpoint import open_checkpoint
from octavo.testing import model_trials, tiny_models
from octavo.testing.hugging_face import CLEAR_GAP
from octavo.testing.model_trials import SLOW_TRIALS, TRIALS, TrialModel

WINDOW = 16
ORDINARY_TRIALS = ("in a batch", "warm", "memory runs out")
ALL_TRIALS = [
    name if name in ORDINARY_TRIALS else pytest.param(name, marks=pytest.mark.slow) for name in (*TRIALS, *SLOW_TRIALS)
]
# The rest of them asks nothing of a Gemma 2 that it did not ask of the other one.
GEMMA2_TRIALS = [
    *ORDINARY_TRIALS,
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("budget of 7", "branches")),
]


@pytest.fixture(scope="module")
def gemma2(tmp_path_factory: pytest.TempPathFactory) -> TrialModel:
    # The cap on scores bites. That on logits changes no order, and a low one would bring the best two together.
    config = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 10.0}
    return TrialModel(tiny_models.tiny_gemma2(tmp_path_factory.mktemp("gemma2"), seed=5, **config), span=WINDOW)


@pytest.fixture(scope="module")
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> TrialModel:
    # Two layers with a window, one without, and another one with it.
    config = {"num_hidden_layers": 4, "sliding_window_pattern": 3}
    return TrialModel(tiny_models.tiny_gemma3(tmp_path_factory.mktemp("gemma3"), seed=5, **config), span=WINDOW)


@pytest.mark.parametrize("trial", GEMMA2_TRIALS)
def test_a_tiny_gemma2_answers_as_in_transformers(trial: str, gemma2: TrialModel) -> None:
    model_trials.run(trial, gemma2, LLM)


@pytest.mark.parametrize("trial", ALL_TRIALS)
def test_a_tiny_gemma3_answers_as_in_transformers(trial: str, gemma3: TrialModel) -> None:
    model_trials.run(trial, gemma3, LLM)


@pytest.mark.parametrize("window", [WINDOW - 1, WINDOW + 1])
def test_a_window_that_is_off_by_one_gives_other_answers(
    window: int, gemma2: TrialModel, gemma3: TrialModel, tmp_path: Path
) -> None:
    for name, model in (("gemma2", gemma2), ("gemma3", gemma3)):
        changed = model_trials.perturbed(model.folder, tmp_path / name, sliding_window=window)
        model_trials.assert_answers_differ(model, changed, LLM)


@pytest.mark.parametrize("cap", [None, 3.0])
def test_another_cap_on_scores_gives_other_answers(cap: float | None, gemma2: TrialModel, tmp_path: Path) -> None:
    changed = model_trials.perturbed(gemma2.folder, tmp_path, attn_logit_softcapping=cap)
    model_trials.assert_answers_differ(gemma2, changed, LLM)


# -- Gemma 3 270M, 15 layers with a window of 512 and 3 without -----------------------------------------------------


def test_gemma3_270m_answers_as_in_transformers(gemma3_gguf: Path, make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(str(gemma3_gguf), dtype="float32", num_kv_blocks=32, max_model_len=64)
    (output,) = llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    assert output.prompt_token_ids == [2, 818, 5279, 529, 7001, 563]
    # What transformers 5.24 generates in float32; the two best logits are a quarter apart at least.
    assert output.outputs[0].text == " the capital of the country of France."


@pytest.mark.slow
def test_gemma3_270m_goes_on_with_a_text_of_three_windows(gemma3_gguf: Path, make_llm: Callable[..., LLM]) -> None:
    checkpoint = open_checkpoint(str(gemma3_gguf))
    text = checkpoint.tokenizer().encode((Path(__file__).parents[1] / "LICENSE").read_text())
    # In 111 blocks of 64, six groups of three layers. A text of 1356 tokens takes at most 22 blocks in the group that
    # keeps all, and while it is cut into chunks of 256 at most 13 in each of the five groups with a window.
    settings = {"block_size": 64, "num_kv_blocks": 112, "max_num_batched_tokens": 256, "max_model_len": 1408}
    llm = make_llm(str(gemma3_gguf), dtype="float32", **settings)

    def answers(*prompts: list[int]) -> list[RequestOutput]:
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
        return llm.generate(list(prompts), params, use_tqdm=False)

    (beginning,) = answers(text[:1300])
    answer = list(beginning.outputs[0].token_ids)
    assert len(answer) == 8

    # A follow-up finds all full blocks of the text and its answer.
    follow_up = [*text[:1300], *answer, *text[1400:1440]]
    (warm,) = answers(follow_up)
    assert warm.num_cached_tokens == 1280

    # Then others take memory. What another text kept at 576 tokens, in all six groups, is what is left of it.
    branch, other = text[:600] + text[1500:1520], text[:1] + text[1700:1900]
    outputs = answers(branch) + answers(other)
    assert llm.stats().evicted_blocks > 0
    (partly_evicted,) = answers(follow_up)
    assert 0 < partly_evicted.num_cached_tokens < 1280

    # Seven requests at once cross the end of a block, and there are not enough blocks for all of them.
    short = [text[:1] + text[100 * number : 100 * number + 61] for number in range(1, 7)]
    outputs += answers(follow_up, *short)
    assert llm.stats().preemptions > 0
    assert llm.stats().recomputed_tokens > 0

    reference = reference_model(checkpoint)
    # Those of the follow-up are the same, but for a near tie.
    for prompt, generated in {
        (tuple(output.prompt_token_ids), tuple(output.outputs[0].token_ids))
        for output in [warm, partly_evicted, *outputs]
    }:
        ids = [*prompt, *generated]
        first_answer = range(1300, 1308) if len(prompt) > 1308 else ()
        assert_greedy(reference, ids, at=[*first_answer, *range(len(prompt), len(ids))])


def reference_model(checkpoint: Checkpoint) -> Any:
    """Return the model as transformers has it, with the checkpoint's weights.

    It reads GGUF files itself, to the same numbers, and takes half a minute of a core for it.
    """
    import transformers

    config = transformers.Gemma3TextConfig(**checkpoint.config)
    weights = {name: checkpoint.tensor(name) for name in checkpoint.tensor_names()}
    return transformers.Gemma3ForCausalLM.from_pretrained(None, config=config, state_dict=weights).eval()


def assert_greedy(reference: Any, token_ids: list[int], *, at: Sequence[int]) -> None:
    """Check that the ids at some places were the reference's choice; near ties may fall either way."""
    ids = torch.tensor(token_ids)
    with torch.inference_mode():
        logits = reference(ids[None], logits_to_keep=torch.tensor(at) - 1).logits[0]
    shortfalls = logits.amax(1) - logits.gather(1, ids[list(at), None])[:, 0]
    assert shortfalls.max() < CLEAR_GAP, f"in a text of {len(token_ids)} ids: {shortfalls.tolist()}"
