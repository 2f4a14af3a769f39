"""Chooses the next token of each row.

The noise is a function of (seed, choice, position): it is looked up, not drawn from a generator that remembers. So a
request's tokens do not depend on what else is in the batch, on how its prompt was cut, or on preemptions.

    logits ─ mask ─► greedy rows: the largest
                 └─► others: / temperature ─ min_p ─ top_k ─ top_p ─► invert the cumulative distribution at the noise
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.core.outputs import TokenLogprobs
from octavo.core.step_plan import RowSampling, StepResult


def uniform_noise(seed: int, choice: int, position: int) -> float:
    """Return a number in [0, 1), the same for the same arguments in every process and on every machine."""
    digest = hashlib.blake2b(struct.pack("<qqq", seed, choice, position), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / 2.0**53


class Sampler:
    """Knows how each row samples, and nothing of what it sampled before."""

    def __init__(self) -> None:
        self._rows: dict[int, RowSampling] = {}

    def set_row(self, sampling: RowSampling) -> None:
        """Note that a row belongs to another request from now on."""
        self._rows[sampling.row] = sampling

    def sample(self, logits: Tensor, rows: Sequence[int], positions: Sequence[int]) -> StepResult:
        """Choose one token a row.

        Args:
            logits: Scores of the next token, changed in place. [num_rows, vocab_size]
            rows: Whose each is.
            positions: The position that each new token will have in its request.

        Returns:
            One entry a row. A row whose largest logit is not finite has failed; the others are not affected.
        """
        logits = logits.float()
        settings = [self._rows[row] for row in rows]
        is_hopeless = _have_no_finite_maximum(logits)
        logprobs = _logprobs(logits, settings)
        if _mask_stops(logits, settings, positions):
            # Where only stops were possible, nothing is left.
            is_hopeless |= _have_no_finite_maximum(logits)
        failed: list[bool] = is_hopeless.tolist()
        # For the largest of equals, argmax returns the lowest id.
        token_ids = logits.argmax(dim=1)
        is_random = [s.temperature > 0 and not bad for s, bad in zip(settings, failed, strict=True)]
        if any(is_random):
            chosen = torch.tensor([i for i, random in enumerate(is_random) if random], device=logits.device)
            noise = [
                uniform_noise(s.seed, s.choice, position)
                for s, position, random in zip(settings, positions, is_random, strict=True)
                if random
            ]
            random_settings = [s for s, random in zip(settings, is_random, strict=True) if random]
            token_ids[chosen] = _sample_random(logits[chosen], random_settings, noise)
        ids: list[int] = token_ids.tolist()
        return StepResult(
            token_ids=ids,
            failed=failed,
            logprobs=[
                None if row is None else _token_logprobs(row, token_id, s.num_logprobs or 0)
                for row, token_id, s in zip(logprobs, ids, settings, strict=True)
            ],
        )


def _have_no_finite_maximum(logits: Tensor) -> Tensor:
    """Say of each row whether nothing can be chosen from it. [num_rows, vocab_size] -> [num_rows]"""
    # A maximum carries NaN along, so one reduction finds NaN, +inf, and rows that are -inf throughout.
    return ~torch.isfinite(logits.amax(dim=1))


def _mask_stops(logits: Tensor, settings: Sequence[RowSampling], positions: Sequence[int]) -> bool:
    """Make ids that would stop a request impossible until it has its `min_tokens`; say whether there were any."""
    any_masked = False
    for i, (s, position) in enumerate(zip(settings, positions, strict=True)):
        if position - s.num_prompt_tokens < s.min_tokens and s.masked_before_min_tokens:
            logits[i, list(s.masked_before_min_tokens)] = float("-inf")
            any_masked = True
    return any_masked


def _sample_random(logits: Tensor, settings: Sequence[RowSampling], noise: Sequence[float]) -> Tensor:
    """Return a token for each row. [num_rows, vocab_size] -> [num_rows]"""
    device = logits.device

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=device).unsqueeze(1)

    # float64, so that the sums below do not depend on rounding that batching could change.
    probs = torch.softmax(logits.double() / column([s.temperature for s in settings]), dim=1)
    if any(s.min_p > 0 for s in settings):
        threshold = probs.amax(dim=1, keepdim=True) * column([s.min_p for s in settings])
        probs = probs.masked_fill(probs < threshold, 0)
    if any(s.top_k > 0 or s.top_p < 1 for s in settings):
        probs = _keep_top(
            probs, column([s.top_k or probs.shape[1] for s in settings]), column([s.top_p for s in settings])
        )
    cumulative = probs.cumsum(dim=1)
    total = cumulative[:, -1:]
    # Strictly below the total, so that a token with some probability is found whatever the rounding.
    target = torch.minimum(column(list(noise)) * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, target, right=True).squeeze(1)


def _keep_top(probs: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Zero what is neither among the `top_k` largest nor in the smallest set that reaches `top_p` of their sum."""
    # Stable: among equals the lowest id is kept first, as for greedy rows.
    ordered, ids = probs.sort(dim=1, descending=True, stable=True)
    rank = torch.arange(probs.shape[1], device=probs.device)
    ordered = ordered.masked_fill(rank >= top_k, 0)
    before = ordered.cumsum(dim=1) - ordered
    ordered = ordered.masked_fill((before >= top_p * ordered.sum(dim=1, keepdim=True)) & (rank > 0), 0)
    return torch.zeros_like(probs).scatter_(1, ids, ordered)


def _logprobs(logits: Tensor, settings: Sequence[RowSampling]) -> list[Tensor | None]:
    """Return each row's log-probabilities where its request asked for them. [vocab_size]"""
    if all(s.num_logprobs is None for s in settings):
        return [None] * len(settings)
    return [None if s.num_logprobs is None else torch.log_softmax(logits[i], dim=0) for i, s in enumerate(settings)]


def _token_logprobs(logprobs: Tensor, token_id: int, num_top: int) -> TokenLogprobs:
    # JSON knows no infinity; a token that was masked gets the smallest number there is.
    finite = logprobs.clamp(min=torch.finfo(torch.float32).min)
    values, ids = finite.sort(descending=True, stable=True)
    top = tuple(zip(ids[:num_top].tolist(), values[:num_top].tolist(), strict=True))
    return TokenLogprobs(token_id=token_id, logprob=float(finite[token_id]), top=top)
