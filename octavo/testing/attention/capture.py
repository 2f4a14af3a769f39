"""What `can_capture` promises: steps of decode rows that are recorded once, and replayed with other numbers.

A CUDA graph repeats kernels. It knows nothing of what Python did between them, so here a batch is planned, written and
attended for with host arrays that nobody can read, and again after the numbers in its device tensors were changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from octavo.core.interfaces.attention import AttentionBackend, AttentionBatch
from octavo.core.static_inputs import UnreadableArray
from octavo.testing.attention.exercise import AttentionExercise, over, own
from octavo.testing.attention.trial import Trial, Wanted, wanted_of

# Operations that make the host wait for the device, for a number or for how large a result is.
_WAITING = frozenset(
    {
        "_local_scalar_dense",
        "bincount",
        "equal",
        "is_nonzero",
        "item",
        "masked_select",
        "nonzero",
        "nonzero_numpy",
        "unique_consecutive",
        "unique_dim",
        "_unique",
        "_unique2",
    }
)
# New tensors with numbers of the host's in them.
_FROM_HOST = frozenset({"lift_fresh", "lift_fresh_copy"})

# Of what is recorded: a plain layer, rules about who sees whom, latents, and what else changes a kernel.
CAPTURED = (
    "plain",
    "window+keep_first",
    "chunk",
    "soft_cap+sinks",
    "value_is_key_prefix",
    "bfloat16",
    "int8_per_token_head_cache",
)


class CaptureFault(RuntimeError):
    """An operation that cannot be part of a CUDA graph."""


class CapturableOnly(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, torch refuses operations that a CUDA graph cannot hold: those that wait, and those that fetch.

        with CapturableOnly():
            model.forward(batch)

    It sees what goes through torch. Kernels that are launched otherwise pass it by, and so does `tolist` on a CPU.
    """

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if reason := _reason_against(func, args, named):
            raise CaptureFault(f"{func} {reason}, which cannot be part of a CUDA graph.")
        return func(*args, **named)


def _reason_against(func: Any, args: Sequence[Any], named: Mapping[str, Any]) -> str | None:
    name = func.overloadpacket.__name__
    if name in _WAITING:
        return "waits for the device"
    if name in _FROM_HOST:
        return "makes a tensor of numbers that the host has"
    if name == "repeat_interleave" and "Tensor" in func._overloadname and named.get("output_size") is None:
        return "waits for how large its result is"
    if name in ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"):
        indices = args[1]
        if any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices):
            return "has a mask as its index, and waits for how many it picks"
    devices = {part.device.type for part in [*args, *named.values()] if isinstance(part, Tensor) and part.dim()}
    if isinstance(named.get("device"), torch.device) and devices:
        devices.add(named["device"].type)
    if len(devices) > 1:
        return f"copies between {' and '.join(sorted(devices))}"
    return None


@own
class CaptureTests(AttentionExercise):
    """Decode steps that are replayed. Skipped where `can_capture` is False."""

    @over(CAPTURED)
    def test_a_step_that_is_repeated_follows_the_numbers_in_its_tensors(self, trial: Trial) -> None:
        """Other contexts, and blocks elsewhere, in the tensors that the step was first computed from."""
        self._require_capture()
        batches = _batches(trial, 2)
        step = _Step.of(trial, *batches)
        for number in (0, 1):
            step.take(number)
            wanted = batches[number]
            trial.compare(step.compute(), wanted.output, wanted.case, f"computed again as batch {number}, the output")

    @over(("plain", "value_is_key_prefix"))
    def test_rows_that_fill_a_step_up_change_nothing(self, trial: Trial) -> None:
        """Rows at the end with one token each, without context, whose slots are -1 and whose table rows are null."""
        self._require_capture()
        (wanted,) = _batches(trial, 1)
        step = _Step.of(trial, wanted, num_padding=4)
        before = step.null_block.clone()
        output = step.compute()[: len(wanted.output)]
        trial.compare(output, wanted.output, wanted.case, "beside rows of padding, the output")
        if not torch.equal(before, step.null_block):
            raise trial.fault("a token whose slot is -1 was written to the null block.")

    @over(("plain", "value_is_key_prefix"))
    def test_nothing_waits_for_the_device(self, trial: Trial) -> None:
        self._require_capture()
        step = _Step.of(trial, *_batches(trial, 1))
        step.compute()
        try:
            with CapturableOnly():  # type: ignore[no-untyped-call]
                step.compute()
        except CaptureFault as fault:
            raise trial.fault(f"in a step of decode rows, {fault}") from None

    @over(("plain", "window+keep_first", "value_is_key_prefix", "bfloat16"))
    def test_a_recorded_step_can_be_replayed_with_other_numbers(self, trial: Trial) -> None:
        self._require_capture()
        if torch.device(self.device).type != "cuda":
            pytest.skip(f"CUDA graphs take a GPU, and this suite runs on {self.device}.")
        batches = _batches(trial, 3)
        step = _Step.of(trial, *batches)
        step.compute()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = step.compute()
        for number in (1, 2, 0):
            step.take(number)
            graph.replay()
            wanted = batches[number]
            trial.compare(output, wanted.output, wanted.case, f"replayed as batch {number}, the output")

    def _require_capture(self) -> None:
        if not self.backend_class().can_capture:
            pytest.skip(f"{self.backend_class().__name__} sets can_capture to False.")


@dataclass
class _Step:
    """A decode step over tensors that stay where they are. Each batch has a cache of its own bytes, laid into one."""

    backend: AttentionBackend
    batches: Sequence[Wanted]
    caches: Sequence[Tensor]
    rows: Tensor
    kv_cache: Any
    tensors: dict[str, Tensor]
    batch: AttentionBatch

    @classmethod
    def of(cls, trial: Trial, *batches: Wanted, num_padding: int = 0) -> _Step:
        """Return a step that computes the first of some batches, which have equally many rows."""
        backend = trial.make_backend(trial.spec)
        num_blocks = max(wanted.case.num_blocks for wanted in batches)
        width = max(wanted.case.max_blocks for wanted in batches)
        cases = [replace(wanted.case, num_blocks=num_blocks) for wanted in batches]
        caches = []
        for case in cases:
            rows = case.empty_rows()
            case.write_history(backend, backend.bind(rows, case.kv_cache_spec))
            caches.append(rows)
        rows = caches[0].clone()
        num_rows = len(cases[0].rows) + num_padding
        device = trial.spec.device
        case = cases[0]
        tensors = {
            "query": torch.zeros((num_rows, *case.queries().shape[1:]), dtype=case.queries().dtype, device=device),
            "context_lens": torch.zeros(num_rows, dtype=torch.int32, device=device),
            "block_table": torch.zeros((num_rows, width), dtype=torch.int32, device=device),
            "slots": torch.full((num_rows,), -1, dtype=torch.int64, device=device),
        }
        for name, part in zip(("key", "value"), case.new_keys_and_values(), strict=True):
            if part is not None:
                tensors[name] = torch.zeros((num_rows, *part.shape[1:]), dtype=part.dtype, device=device)
        batch = AttentionBatch(
            num_decode_rows=num_rows,
            query_starts=torch.arange(num_rows + 1, dtype=torch.int32, device=device),
            context_lens=tensors["context_lens"],
            block_table=tensors["block_table"],
            slots=tensors["slots"],
            query_starts_host=np.arange(num_rows + 1, dtype=np.int32),
            context_lens_host=_unreadable("context_lens_host", num_rows),
            block_table_host=_unreadable("block_table_host", num_rows, width),
        )
        step = cls(backend, batches, caches, rows, backend.bind(rows, case.kv_cache_spec), tensors, batch)
        step.take(0)
        return step

    @property
    def null_block(self) -> Tensor:
        return self.rows[0]

    def take(self, number: int) -> None:
        """Put another batch's numbers into the tensors."""
        wanted = self.batches[number].case
        self.rows.copy_(self.caches[number])
        batch = wanted.batch()
        keys, values = wanted.new_keys_and_values()
        numbers = {"query": wanted.queries(), "key": keys, "value": values, "context_lens": batch.context_lens}
        numbers["slots"] = batch.slots
        for name, tensor in self.tensors.items():
            if name == "block_table":
                tensor.zero_()
                tensor[: batch.num_rows, : batch.block_table.shape[1]] = batch.block_table
            elif (source := numbers[name]) is not None:
                tensor[: len(source)] = source

    def compute(self) -> Tensor:
        """Plan, write and attend, as a model's layer would. [num_rows, num_query_heads, head_dim_v]"""
        plan = self.backend.plan(self.batch)
        key, value = self.tensors["key"], self.tensors.get("value")
        self.backend.write(key, value, self.kv_cache, self.batch.slots)
        sinks = self.batches[0].case.sinks
        output = self.backend.attend(self.tensors["query"], self.kv_cache, plan, sinks=sinks)
        assert isinstance(output, Tensor)
        return output


def _batches(trial: Trial, count: int) -> list[Wanted]:
    """Draw batches of equally many decode rows for one layer: its sinks stay as they are."""
    batches = [trial.rows(_decode_lengths(trial, variant), variant=variant) for variant in range(count)]
    if not trial.spec.sinks:
        return batches
    return [wanted_of(replace(wanted.case, sinks=batches[0].case.sinks)) for wanted in batches]


def _decode_lengths(trial: Trial, variant: int) -> list[tuple[int, int]]:
    """Return decode rows with contexts around the edges of blocks, and some longer ones."""
    rng = np.random.default_rng(trial.seed + 100 * variant)
    block_size = trial.spec.block_size
    edges = [block_size, block_size + 1, 1]
    longest = max(70, 2 * block_size + 6, *(2 * size for size in (trial.spec.window, trial.spec.chunk) if size))
    contexts = [*edges, *rng.integers(1, longest + 1, 2).tolist()]
    return [(1, int(context)) for context in rng.permutation(contexts)]


def _unreadable(name: str, *shape: int) -> Any:
    return UnreadableArray(name, *shape)
