"""Fills a model's tensors from a checkpoint, several at a time."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.core.interfaces.model import Checkpoint
from octavo.errors import CheckpointError, NotEnoughMemoryError, UnsupportedModelError
from octavo.models.kv_scales import is_kv_cache_name

# Each thread holds one dequantised tensor; past a few, memory and its bandwidth are what is short.
_MAX_THREADS = 8


@dataclass(frozen=True)
class _Part:
    """A checkpoint's tensor, and the rows of a model's tensor that it fills."""

    name: str
    destination: Tensor


class WeightLoader:
    """Allocates a model's tensors in their final place and fills them with `load`.

    Fused tensors are filled part by part, so beside the model only the tensors in the threads' hands are in memory.
    """

    def __init__(self, checkpoint: Checkpoint, *, dtype: torch.dtype, device: str) -> None:
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._device = device
        self._parts: list[_Part] = []
        self._known_names = frozenset(checkpoint.tensor_names())

    def has(self, name: str) -> bool:
        """Whether the checkpoint has a tensor of that name."""
        return name in self._known_names

    def tensor(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return a tensor that `load` will fill with the checkpoint's tensor `name`.

        Args:
            dtype: To keep it in; the model's when not given.
        """
        return self.stacked({name: shape[0]}, *shape[1:], dtype=dtype)

    def stacked(self, rows: dict[str, int], *row_shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return a tensor that `load` will fill with several of the checkpoint's, one below the other.

        Args:
            rows: How many rows each of the checkpoint's tensors has, in order.
            row_shape: The shape that they share from dimension 1 on.
            dtype: To keep it in; the model's when not given.

        Raises:
            CheckpointError: The checkpoint lacks one of them.
            NotEnoughMemoryError: The device has no room for them.
        """
        for name in rows:
            if name not in self._known_names:
                self._checkpoint.tensor(name)  # raises, before the work of reading the others
        result = self._allocate((sum(rows.values()), *row_shape), dtype or self._dtype, next(iter(rows)))
        for name, destination in zip(rows, torch.split(result, list(rows.values())), strict=True):
            self._parts.append(_Part(name, destination))
        return result

    def unclaimed(self, may_ignore: Callable[[str], bool]) -> list[str]:
        """Return the checkpoint's tensors that nothing asked for and `may_ignore` does not excuse.

        Scales for a quantised KV cache are not among them: no weight depends on them.
        """
        claimed = {part.name for part in self._parts}
        return [
            name
            for name in self._checkpoint.tensor_names()
            if not (name in claimed or may_ignore(name) or is_kv_cache_name(name))
        ]

    def refuse_unclaimed(self, may_ignore: Callable[[str], bool]) -> None:
        """Raise UnsupportedModelError when weights are left over: left out, they would change the result."""
        if unclaimed := self.unclaimed(may_ignore):
            tensors = "1 tensor" if len(unclaimed) == 1 else f"{len(unclaimed)} tensors"
            raise UnsupportedModelError(
                f"The checkpoint holds {tensors} that the model of its config has no place for, "
                f"{unclaimed[0]!r} the first. The model is a variant that is not computed here, or the config is wrong."
            )

    def load(self) -> None:
        """Read, convert and copy everything.

        Raises:
            CheckpointError: A tensor is missing, unreadable, of the wrong shape or not of numbers.
        """
        # The large ones first, so that no thread ends on one while the others are idle.
        parts = sorted(self._parts, key=lambda part: part.destination.numel(), reverse=True)
        num_threads = min(_MAX_THREADS, os.cpu_count() or 1)
        executor = ThreadPoolExecutor(num_threads, thread_name_prefix="load-weights")
        try:
            list(executor.map(self._fill, parts))
        finally:
            executor.shutdown(wait=True, cancel_futures=True)

    def _allocate(self, shape: tuple[int, ...], dtype: torch.dtype, name: str) -> Tensor:
        try:
            return torch.empty(shape, dtype=dtype, device=self._device)
        # As torch reports memory that there is not, and sizes that no memory has.
        except (RuntimeError, TypeError, MemoryError) as error:
            raise NotEnoughMemoryError(
                f"There is no room on {self._device} for {name!r}, of shape {list(shape)} in {dtype}. Choose a "
                "smaller dtype or model, or another device.",
                max_model_len_that_fits=0,
            ) from error

    def _fill(self, part: _Part) -> None:
        # Inference mode is per thread.
        with torch.inference_mode():
            source = self._checkpoint.tensor(part.name)
            if source.shape != part.destination.shape or not source.is_floating_point():
                raise CheckpointError(
                    f"Tensor {part.name!r} is {source.dtype} of shape {list(source.shape)}; the config asks for "
                    f"floating-point numbers of shape {list(part.destination.shape)}. The weights and the config do "
                    "not belong together, or the weights are quantised in a way that is not supported."
                )
            part.destination.copy_(source)
