"""Holds a transformers model, its attention replaced, to what transformers computes itself.

Not every difference shows in how a model calls attention: layers may keep a state of their own, or requests of one step
may influence each other. So a few tokens are computed in both ways, with the weights in place, and compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from octavo.core.interfaces.model import LatentProjection, Model
from octavo.models.hugging_face.hook import PAGED
from octavo.models.hugging_face.host import summary, use_implementation
from octavo.models.hugging_face.probe import AttentionCall, Traits, refusal

# Largest difference of two logits, as a share of the logits' range, that rounding can explain.
_TOLERANCE = {"float64": 1e-6, "float32": 1e-3, "float16": 0.05, "bfloat16": 0.15}
# In half precision a router may choose other experts for a token after a rounding; a fault shows in more tokens.
_SHARE_OF_ROWS_FORGIVEN = {"float16": 0.25, "bfloat16": 0.25}
# Windows and chunks up to this size are crossed by the check; what longer ones mean, the masks have said.
_LONGEST_CROSSED = 56


@dataclass(frozen=True)
class _Part:
    """Consecutive tokens of one request, computed in one step.

    Attributes:
        request: Whose they are.
        token_ids: [num_tokens]
        first_position: Of the first of them.
    """

    request: str
    token_ids: Tensor
    first_position: int

    @property
    def positions(self) -> Tensor:
        return torch.arange(len(self.token_ids), device=self.token_ids.device) + self.first_position


class DenseCache:
    """Keys and values of the requests so far, by layer: what a paged cache holds, without pages."""

    def __init__(self, calls: Sequence[AttentionCall]) -> None:
        self.calls = calls
        self._stored: dict[tuple[str, int], tuple[Tensor, Tensor, Tensor]] = {}

    def extended(self, request: str, layer: int, new: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Store new keys, values and positions of a request, and return all it has."""
        old = self._stored.get((request, layer))
        both = new if old is None else tuple(torch.cat(pair) for pair in zip(old, new, strict=True))
        self._stored[request, layer] = both  # type: ignore[assignment]
        return self._stored[request, layer]


class DenseStep:
    """Implements `ForwardBatch`: parts of several requests over a `DenseCache`, in the plainest arithmetic."""

    def __init__(self, cache: DenseCache, parts: Sequence[_Part]) -> None:
        self._cache = cache
        self._parts = parts
        self.token_ids = torch.cat([part.token_ids for part in parts])
        self.positions = torch.cat([part.positions for part in parts])

    def attention(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor | None, *, sinks: Tensor | None = None
    ) -> Tensor:
        """See `ForwardBatch.attention`."""
        assert value is not None
        outputs, start = [], 0
        for part in self._parts:
            tokens = slice(start, start + len(part.token_ids))
            stored = self._cache.extended(part.request, layer, (key[tokens], value[tokens], part.positions))
            outputs.append(_attend(self._cache.calls[layer], query[tokens], part.positions, *stored, sinks))
            start = tokens.stop
        return torch.cat(outputs)

    def latent_attention(self, layer: int, query: Tensor, latents: Tensor, projection: LatentProjection) -> Tensor:
        """Not asked for: models of transformers expand their latents themselves."""
        raise NotImplementedError


def check(model: Model, host_model: Any, traits: Traits, *, dtype: str, device: str) -> None:
    """Compute a few tokens through `model` and through transformers' own attention; raise where they differ.

    Args:
        model: The adapter over `host_model`.
        host_model: The causal language model, with its weights.

    Raises:
        UnsupportedModelError: They differ, or one of the two cannot be computed. The message says why, as far as a few
            more forwards can tell.
    """
    _Comparison(model, host_model, traits, dtype, device).run()


class _Comparison:
    def __init__(self, model: Model, host_model: Any, traits: Traits, dtype: str, device: str) -> None:
        self._model = model
        self._host_model = host_model
        self._traits = traits
        self._dtype = dtype
        self._name = type(host_model).__name__
        sizes = [size for call in traits.calls for size in (call.mask.window, call.mask.chunk) if size is not None]
        crossed = [size for size in sizes if size <= _LONGEST_CROSSED]
        num_long = min(max(11, max(crossed, default=0) + 5), traits.max_position)
        num_ids = min(traits.vocab_size, traits.num_embeddings)
        # Any ids do. These spread over the vocabulary, and random numbers are the caller's.
        ids = (torch.arange(num_long + 6, device=device) * 7919 + 13) % num_ids
        self._long, self._short, self._far = ids[:num_long], ids[num_long:-1], ids[-1:]
        self._last_position = traits.max_position - 1

    def run(self) -> None:
        long, short = self._reference(self._long), self._reference(self._short)
        try:
            got_long, got_short = self._in_steps()
        except Exception as cause:
            raise refusal(
                self._name, f"cannot be run over the new tokens of several requests in one row ({summary(cause)})"
            ) from cause
        if self._agree(long, got_long) and self._agree(short, got_short):
            return
        raise refusal(self._name, self._diagnosis(long))

    def _reference(self, token_ids: Tensor) -> Tensor:
        """Return the logits that transformers computes, its own plain attention in place. [num_tokens, vocab_size]"""
        use_implementation(self._host_model, "eager")
        try:
            with torch.inference_mode():
                ids = token_ids[None]
                output = self._host_model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
                logits: Tensor = output.logits[0]
                return logits
        except Exception as cause:
            raise refusal(
                self._name, f"cannot be run by transformers with its own attention ({summary(cause)})"
            ) from cause
        finally:
            use_implementation(self._host_model, PAGED)

    def _in_steps(self) -> tuple[Tensor, Tensor]:
        """Compute both requests in three steps: a chunk of one, chunks of both, and a token of each.

        The last step also has a request that is as long as can be: it must not change what the others get.
        """
        first, second = len(self._long) - 5, len(self._long) - 1
        steps = [
            [_Part("long", self._long[:first], 0)],
            [_Part("short", self._short[:-1], 0), _Part("long", self._long[first:second], first)],
            [
                _Part("long", self._long[second:], second),
                _Part("far", self._far, self._last_position),
                _Part("short", self._short[-1:], len(self._short) - 1),
            ],
        ]
        rows: dict[str, list[Tensor]] = {"long": [], "short": [], "far": []}
        cache = DenseCache(self._traits.calls)
        for parts in steps:
            logits = self._logits(DenseStep(cache, parts))
            per_part = torch.split(logits, [len(part.token_ids) for part in parts])
            for part, of_part in zip(parts, per_part, strict=True):
                rows[part.request].append(of_part)
        return torch.cat(rows["long"]), torch.cat(rows["short"])

    def _logits(self, step: DenseStep) -> Tensor:
        with torch.inference_mode():
            return self._model.logits(self._model.forward(step))

    def _alone(self, cuts: Sequence[int], stretch: int = 1) -> Tensor:
        """Return the long request's logits when it is alone and cut so, its positions multiplied by `stretch`."""
        cache = DenseCache(self._traits.calls)
        bounds = [0, *cuts, len(self._long)]
        logits = []
        for first, end in pairwise(bounds):
            step = DenseStep(cache, [_Part("long", self._long[first:end], first)])
            step.positions = step.positions * stretch
            logits.append(self._logits(step))
        return torch.cat(logits)

    def _agree(self, wanted: Tensor, got: Tensor) -> bool:
        wanted, got = wanted.double(), got.double()
        finite = wanted[wanted.isfinite()]
        if not len(finite) or wanted.isnan().any():
            return False
        limit = _TOLERANCE[self._dtype] * float((finite - finite.mean()).abs().max())
        # Equal infinities differ by nothing; a NaN compares as false and so counts as different.
        is_close = (wanted == got) | ((wanted - got).abs() <= limit)
        share_different = 1 - float(is_close.all(dim=-1).double().mean())
        return share_different <= _SHARE_OF_ROWS_FORGIVEN.get(self._dtype, 0.0)

    def _diagnosis(self, wanted: Tensor) -> str:
        if not wanted.isfinite().any() or wanted.isnan().any():
            return f"computes numbers that are not finite in {self._dtype}, even with transformers' own attention"
        whole = self._alone([])
        if not self._agree(wanted, whole):
            return (
                "computes other logits when Octavo's attention takes the place of its own: something is added to its "
                "scores that does not reach the attention function, or its logits are made of more than hidden rows"
            )
        if not self._agree(wanted, self._alone([len(self._long) - 5, len(self._long) - 1])):
            suspects = _suspects(self._host_model)
            if not suspects and torch.equal(whole, self._alone([], stretch=self._last_position // len(self._long))):
                return (
                    "counts positions from the start of what it is given and ignores position_ids, so that a request "
                    "cannot go on where its last step ended"
                )
            return (
                f"mixes tokens outside of attention{suspects}: cut into steps it computes other logits, because "
                "between steps Octavo keeps keys and values and no other state"
            )
        return (
            "lets the requests of one step influence each other, as experts with a limited capacity do, or rope "
            "frequencies that follow the longest sequence"
        )


def _attend(
    call: AttentionCall,
    query: Tensor,
    query_positions: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    sinks: Tensor | None,
) -> Tensor:
    """Attend by the definition, in float32 at least. [num_queries, num_query_heads, head_dim]

    Args:
        query: [num_queries, num_query_heads, head_dim]
        query_positions: [num_queries]
        key: [num_keys, num_kv_heads, head_dim]
        value: As `key`.
        positions: Of the keys. [num_keys]
        sinks: [num_query_heads]
    """
    precise = torch.promote_types(query.dtype, torch.float32)
    group = call.num_query_heads // call.num_kv_heads
    key, value = (stored.to(precise).repeat_interleave(group, dim=1) for stored in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query.to(precise), key) * call.scale
    if call.soft_cap is not None:
        scores = torch.tanh(scores / call.soft_cap) * call.soft_cap
    distances = query_positions[:, None] - positions
    is_seen = distances >= 0
    if call.mask.window is not None:
        is_seen &= distances < call.mask.window
    if call.mask.chunk is not None:
        is_seen &= distances <= query_positions[:, None] % call.mask.chunk
    scores = scores.masked_fill(~is_seen, -torch.inf)
    if sinks is not None:
        # A sink takes part in the softmax and has no value.
        column = sinks.to(precise).view(-1, 1, 1).expand(-1, scores.shape[1], 1)
        weights = torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, value).to(query.dtype)


def _suspects(host_model: nn.Module) -> str:
    """Name what probably does the mixing, in brackets; nothing where there is no saying."""
    names = [name for name, module in host_model.named_modules() if isinstance(module, nn.Conv1d)]
    return f" (in {names[0]!r}, a convolution)" if names else ""
