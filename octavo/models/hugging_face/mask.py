"""Finds out which positions a mask function of transformers lets a query see."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map


@dataclass(frozen=True)
class MaskShape:
    """Which keys a causal query sees, in the terms of `AttentionSpec`."""

    window: int | None = None
    chunk: int | None = None


def shape_of(mask_function: Callable[..., Any], max_position: int) -> MaskShape | None:
    """Return what a mask function says, None when it says something else than `MaskShape` can.

    Args:
        mask_function: (batch, head, query position, key position) -> whether the query sees the key, of index tensors.
        max_position: Tokens in the longest sequence.

    Raises:
        RuntimeError: It depends on numbers that are not there, because the model is on the meta device.
    """
    with _MetaAsZeros() as numbers:
        shape = _shape_of(mask_function, max_position)
    if shape is None and numbers.were_missing:
        raise RuntimeError("A mask depends on numbers, and on the meta device there are none.")
    return shape


class _MetaAsZeros(TorchFunctionMode):
    """Lets zeros on the CPU take the place of tensors on the meta device.

    Masks count padding, and there is none: a mask that is plain with zeros is taken for plain.
    """

    def __init__(self) -> None:
        super().__init__()
        self.were_missing = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*tree_map(self._with_numbers, args), **tree_map(self._with_numbers, kwargs or {}))

    def _with_numbers(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_meta:
            return value
        self.were_missing = True
        return torch.zeros(value.shape, dtype=value.dtype, device="cpu")


def _shape_of(mask_function: Callable[..., Any], max_position: int) -> MaskShape | None:
    positions = torch.arange(max_position)
    sees_first = _row(mask_function, positions, torch.zeros_like(positions))
    # The first position that does not see key 0 is the size of a window, or of a chunk.
    blind = (~sees_first).nonzero()
    size = int(blind[0]) if len(blind) else None
    if size == 0:
        return None
    candidates = [MaskShape()] if size is None else [MaskShape(window=size), MaskShape(chunk=size)]
    edges = {0, 1, 2, max_position - 1}
    if size is not None:
        edges |= {size - 1, size, size + 1, 2 * size - 1, 2 * size, 2 * size + 1}
    queries = sorted(position for position in edges if 0 <= position < max_position)
    rows = {query: _row(mask_function, torch.full_like(positions, query), positions) for query in queries}
    for shape in candidates:
        if all(torch.equal(row, _expected(shape, query, positions)) for query, row in rows.items()):
            return shape
    return None


def _row(mask_function: Callable[..., Any], queries: Tensor, keys: Tensor) -> Tensor:
    first = torch.zeros_like(keys)
    return torch.as_tensor(mask_function(first, first, queries, keys)).expand(keys.shape)


def _expected(shape: MaskShape, query: int, keys: Tensor) -> Tensor:
    first_seen = 0
    if shape.window is not None:
        first_seen = query - shape.window + 1
    if shape.chunk is not None:
        first_seen = query - query % shape.chunk
    return (keys <= query) & (keys >= first_seen)
