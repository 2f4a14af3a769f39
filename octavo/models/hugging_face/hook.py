"""Where transformers calls Octavo's attention.

transformers lets an attention function be registered under a name. Each model here has a `StepSlot` that its modules
point to; the function, which is the same for all models, finds through the module that calls it what is going on in
that model, and leaves it the work:

    model ──► attention module ──► registered function ──► module's StepSlot ──► a recording | one step of an engine
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import transformers
from torch import Tensor, nn

# The attention of an engine's steps; no mask function goes by this name, so that transformers builds no masks.
PAGED = "octavo_paged"
# The attention of a recording; its mask function says what a mask would let a query see.
RECORDING = "octavo_recording"

_SLOT = "octavo_step_slot"
_MASK_FUNCTION = "octavo_mask_function"


class Attention(Protocol):
    """What answers the attention calls of a model's forward."""

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        arguments: Mapping[str, Any],
    ) -> Tensor:
        """Return the attention's output. [1, num_tokens, num_query_heads, head_dim_v]

        Args:
            module: The model's module that calls.
            query: [1, num_query_heads, num_tokens, head_dim]
            key: [1, num_kv_heads, num_tokens, head_dim]
            value: [1, num_kv_heads, num_tokens, head_dim_v]
            mask: What the model built as a mask.
            arguments: Scaling, window, soft cap, sinks and whatever else the model says.
        """


class StepSlot(threading.local):
    """Says who answers a model's attention calls in this thread at the moment."""

    attention: Attention | None = None

    @contextmanager
    def answered_by(self, attention: Attention) -> Iterator[None]:
        self.attention = attention
        try:
            yield
        finally:
            self.attention = None


def bind(model: nn.Module) -> StepSlot:
    """Give a model's modules a slot of their own, and return it."""
    slot = StepSlot()
    for module in model.modules():
        setattr(module, _SLOT, slot)
    return slot


def register() -> None:
    """Tell transformers of Octavo's attention. Doing it again changes nothing."""
    for name in (PAGED, RECORDING):
        transformers.AttentionInterface.register(name, _attention_function)
    transformers.AttentionMaskInterface.register(RECORDING, _mask_function)


def mask_function_of(mask: Tensor) -> Callable[..., Any] | None:
    """Return the rule of a mask that the `RECORDING` attention got; None when the model made something else of it."""
    function: Callable[..., Any] | None = getattr(mask, _MASK_FUNCTION, None)
    return function


def _attention_function(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, **arguments: Any
) -> tuple[Tensor, None]:
    """The attention function of all models; see `transformers.AttentionInterface`."""
    slot: StepSlot | None = getattr(module, _SLOT, None)
    if slot is None or slot.attention is None:
        raise RuntimeError(
            f"{type(module).__name__} called Octavo's attention outside of a step. The model belongs to an engine; "
            "load another copy for other uses."
        )
    return slot.attention.attend(module, query, key, value, attention_mask, arguments), None


def _mask_function(batch_size: int, kv_length: int, mask_function: Callable[..., Any], **arguments: Any) -> Tensor:
    """Return a stand-in for a mask that knows its rule; whatever a model makes of it knows it no more."""
    device = arguments.get("device") or arguments["cache_position"].device
    dtype = arguments.get("dtype", torch.float32)
    # As the mask of the eager attention: zeros where a query sees, to be added to scores.
    stand_in = torch.zeros((batch_size, 1, kv_length, kv_length), dtype=dtype, device=device)
    setattr(stand_in, _MASK_FUNCTION, mask_function)
    return stand_in
