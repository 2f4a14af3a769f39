"""Makes sure that a model takes the positions of its tokens from `position_ids` and from nothing else.

A model may also ask transformers' cache how many tokens came before, or count the tokens that it is given. In an engine
there is no such cache, and a row holds tokens of many requests: then some factor would be wrong, perhaps only far into
a long sequence. So two tokens at the end of the longest sequence are computed in both ways, and what reaches attention
is compared.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from octavo.models.hugging_face.hook import StepSlot
from octavo.models.hugging_face.host import summary
from octavo.models.hugging_face.probe import Traits, refusal

# What a cache is called, by version.
_CACHE_ARGUMENTS = ("cache", "past_key_values")
_TOLERANCE = {"float64": 1e-6, "float32": 1e-3, "float16": 0.02, "bfloat16": 0.02}


def check_positions(host_model: Any, slot: StepSlot, traits: Traits, *, dtype: str, device: str) -> None:
    """Compare what two tokens are with `position_ids` and with a cache that says how many tokens came before.

    Args:
        host_model: The causal language model, with its weights and the `PAGED` attention.
        slot: The model's.

    Raises:
        UnsupportedModelError: They differ.
    """
    name = type(host_model).__name__
    first_position = traits.max_position - 2
    if first_position < 1:
        return
    decoder = host_model.get_submodule(traits.decoder_name)
    token_ids = torch.arange(2, device=device)[None] % min(traits.vocab_size, traits.num_embeddings)
    by_ids, by_cache = _Vectors(traits), _Vectors(traits)
    cache = {_cache_argument(decoder): _CacheOfLength(first_position)}
    try:
        with torch.inference_mode():
            with slot.answered_by(by_ids):
                decoder(
                    input_ids=token_ids,
                    attention_mask=torch.ones_like(token_ids),
                    position_ids=torch.arange(2, device=device)[None] + first_position,
                    use_cache=False,
                )
            with slot.answered_by(by_cache):
                decoder(
                    input_ids=token_ids,
                    attention_mask=torch.ones((1, first_position + 2), dtype=torch.long, device=device),
                    use_cache=True,
                    **cache,
                )
    except Exception as cause:
        raise refusal(
            name, f"cannot be run at the end of a sequence of {traits.max_position} tokens ({summary(cause)})"
        ) from cause
    if not by_ids.agree_with(by_cache, _TOLERANCE[dtype]):
        raise refusal(
            name,
            "takes positions from something else than position_ids, such as the length of transformers' own cache: "
            f"at position {first_position} it computes something else with a cache than without",
        )


def _cache_argument(decoder: nn.Module) -> str:
    """Return what a decoder calls its cache: by its signature, or where that is silent as Llama does."""
    for forward in (decoder.forward, transformers.LlamaModel.forward):
        for argument in inspect.signature(forward).parameters:
            if argument in _CACHE_ARGUMENTS:
                return argument
    return _CACHE_ARGUMENTS[0]


class _Vectors:
    """Takes down the queries, keys and values of a forward, and attends from each token to itself alone."""

    def __init__(self, traits: Traits) -> None:
        self._traits = traits
        self._vectors: list[Tensor] = []

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        arguments: Mapping[str, Any],
    ) -> Tensor:
        self._vectors += [query, key, value]
        return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1).transpose(1, 2).contiguous()

    def agree_with(self, other: _Vectors, tolerance: float) -> bool:
        if len(self._vectors) != len(other._vectors):
            return False
        return all(
            mine.shape == theirs.shape and float((mine - theirs).abs().max()) <= tolerance * float(mine.abs().max())
            for mine, theirs in zip(self._vectors, other._vectors, strict=True)
        )


class _CacheOfLength(transformers.Cache):  # type: ignore[misc]
    """Says that so many tokens came before, and keeps nothing."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__(layers=[])
        self._num_tokens = num_tokens

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *arguments: Any, **named: Any
    ) -> tuple[Tensor, Tensor]:
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0, *arguments: Any) -> int:
        return self._num_tokens
