"""Hugging Face transformers as the oracle: what a model generates there, and how sure it was."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

# Below this distance between the two best logits, two correct implementations may choose differently.
CLEAR_GAP = 1e-3


@dataclass(frozen=True)
class Expected:
    """A prompt and its greedy continuation.

    Attributes:
        prompt: Token ids.
        token_ids: What `generate` returned after the prompt.
        logprobs: Log-probabilities of all tokens at each step. [num_steps, vocab_size]
        gaps: Distance of the two best logits at each step.
    """

    prompt: list[int]
    token_ids: list[int]
    logprobs: torch.Tensor
    gaps: list[float]

    @property
    def num_clear_tokens(self) -> int:
        """Tokens before the first one that was nearly a tie."""
        for step, gap in enumerate(self.gaps):
            if gap < CLEAR_GAP:
                return step
        return len(self.gaps)


def load(path: Path) -> Any:
    """Return the model of a folder or a .gguf file in float32, ready to generate."""
    import transformers

    folder, extra = (path.parent, {"gguf_file": path.name}) if path.suffix == ".gguf" else (path, {})
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **extra).eval()


def greedy(
    model: Any, prompts: Iterable[Sequence[int]], max_tokens: int, eos_token_ids: Iterable[int]
) -> list[Expected]:
    """Generate for each prompt alone, always taking the most likely token."""
    answers = []
    for prompt in prompts:
        ids = torch.tensor([list(prompt)])
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=max_tokens,
                eos_token_id=sorted(eos_token_ids),
                pad_token_id=min(eos_token_ids),
                return_dict_in_generate=True,
                output_logits=True,
            )
        logits = torch.cat(out.logits).float()
        best = logits.topk(2, dim=1).values
        answers.append(
            Expected(
                prompt=list(prompt),
                token_ids=out.sequences[0, len(prompt) :].tolist(),
                logprobs=torch.log_softmax(logits, dim=1),
                gaps=(best[:, 0] - best[:, 1]).tolist(),
            )
        )
    return answers


def assert_equal_where_clear(expected: Sequence[Expected], token_ids: Sequence[Sequence[int]]) -> None:
    """Compare each answer up to its first near tie; fail also when that leaves too little compared."""
    num_compared = 0
    for number, (wanted, got) in enumerate(zip(expected, token_ids, strict=True)):
        clear = wanted.num_clear_tokens
        num_compared += clear
        assert list(got[:clear]) == wanted.token_ids[:clear], f"prompt {number} of {len(wanted.prompt)} tokens"
        if clear == len(wanted.token_ids):
            assert len(got) == len(wanted.token_ids), f"prompt {number} goes on after its end"
    total = sum(len(wanted.token_ids) for wanted in expected)
    assert num_compared >= 0.95 * total, f"only {num_compared} of {total} tokens could be compared"
