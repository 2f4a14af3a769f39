"""Decode steps as CUDA graphs: recorded when the engine starts, replayed with other numbers.

A decode step is many small kernels, and the host may need longer to launch them than the GPU to run them. A graph
launches all of them at once. It repeats to the letter what was recorded, so everything that differs from step to step
is in tensors that stay where they are (`StaticInputs`), and steps are padded to a size that was recorded:

    plan of 5 decode rows ─► fill the first 8 rows: 5 requests, 3 of padding ─► replay the graph of 8 ─► hidden rows
                                                                                                            │
                                                                  those of the 5 that sample ─► logits ◄────┘

Recorded is `Model.forward`, from the embedding to the last norm. What is before it (changed cells of block tables,
slots) and behind it (logits, sampling) depends on how many there are, and runs as ever.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from octavo.core.device_inputs import DeviceInputs
from octavo.core.interfaces import AttentionBackend, Model
from octavo.core.static_inputs import StaticInputs
from octavo.core.step_inputs import StepInputs
from octavo.core.step_plan import StepPlan

logger = logging.getLogger(__name__)

# Steps are recorded up to this size unless sizes are named: the larger a step, the less its launches count.
LARGEST_DEFAULT_SIZE = 512
# Rows from one size to the next, from 8 rows on.
_STEP_BETWEEN_SIZES = 8
# Runs before a step is recorded. The first one compiles kernels and sets up libraries, the second shows that nothing of
# this is left to do.
_NUM_TRIAL_RUNS = 2


def capture_sizes(max_num_seqs: int, wanted: Sequence[int] | None) -> tuple[int, ...]:
    """Return the numbers of rows for which steps are recorded, in order.

    Args:
        max_num_seqs: Rows that run at a time at most; a larger step never comes.
        wanted: What the user asked for; None for 1, 2, 4, 8, further multiples of 8, and `max_num_seqs`.
    """
    if wanted is not None:
        return tuple(sorted({size for size in wanted if size <= max_num_seqs}))
    largest = min(max_num_seqs, LARGEST_DEFAULT_SIZE)
    sizes = {1, 2, 4, *range(_STEP_BETWEEN_SIZES, largest + 1, _STEP_BETWEEN_SIZES), largest}
    return tuple(sorted(size for size in sizes if size <= largest))


def sizes_to_capture(
    device: str,
    model: Model,
    backends: Sequence[AttentionBackend],
    *,
    max_num_seqs: int,
    wanted: Sequence[int] | None,
    enforce_eager: bool,
) -> tuple[int, ...]:
    """Return the numbers of rows for which an engine records steps; none where it cannot or shall not.

    On a GPU the log says why there are none. Arguments besides the device and its parts are settings.
    """
    if torch.device(device).type != "cuda":
        return ()
    sizes = capture_sizes(max_num_seqs, wanted)
    reasons = ["enforce_eager is set"] if enforce_eager else reasons_against(model, backends)
    if not reasons and not sizes:
        reasons = [f"cudagraph_capture_sizes has no size up to max_num_seqs, {max_num_seqs}"]
    if not reasons:
        return sizes
    logger.info("decode steps run without CUDA graphs: %s", "; ".join(reasons))
    return ()


def reasons_against(model: Model, backends: Sequence[AttentionBackend]) -> list[str]:
    """Return why the decode steps of a model cannot be recorded; an empty list when they can."""
    classes: dict[type, None] = dict.fromkeys(type(backend) for backend in backends if not backend.can_capture)
    reasons = [f"the attention backend {cls.__name__} does not set can_capture" for cls in classes]
    if not model.can_capture:
        reasons.insert(0, f"the model class {type(model).__name__} does not set can_capture")
    return reasons


class Recorder(Protocol):
    """Records what a function does on the device."""

    def record(self, step: Callable[[], None]) -> Callable[[], None]:
        """Run `step` until nothing is left to be set up, and record it.

        Returns:
            What does the same on the device again, with the numbers that are in its tensors then.
        """


class CudaGraphRecorder:
    """Records with CUDA graphs. All of them share one pool of memory, for they run one after the other.

    Args:
        device: Where the step runs, as torch names it.
    """

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        with torch.cuda.device(self._device):
            self._pool = torch.cuda.graph_pool_handle()
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def record(self, step: Callable[[], None]) -> Callable[[], None]:
        """See `Recorder.record`."""
        with torch.cuda.device(self._device):
            # On the stream of the capture: some libraries keep memory for each stream that they have seen.
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                for _ in range(_NUM_TRIAL_RUNS):
                    step()
            torch.cuda.current_stream().wait_stream(self._stream)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            # "thread_local": what other threads of the process do on the device meanwhile is no error.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                step()
        return graph.replay


class DecodeGraphs:
    """Recorded decode steps, one for each size.

    Args:
        forward: Computes the hidden rows of a step. [num_tokens, hidden_size]
        source: Keeps the block tables.
        sizes: Numbers of rows to record a step for, in order; at least one.
        table_widths: Columns of each KV-cache group's block table: blocks of the longest request.
        recorder: Records.
    """

    def __init__(
        self,
        forward: Callable[[StepInputs], Tensor],
        source: DeviceInputs,
        sizes: Sequence[int],
        table_widths: Sequence[int],
        recorder: Recorder,
    ) -> None:
        start = time.perf_counter()
        self._sizes = tuple(sizes)
        self._inputs = StaticInputs(source, self._sizes[-1], table_widths)
        self._inputs.fill_for_trial()
        # All steps leave their hidden rows in one place: what one leaves is read before the next one runs.
        self._hidden = torch.empty_like(forward(self._inputs.of_size(self._sizes[-1])))
        # The largest first, so that the others find their memory in its pool.
        self._replays = {size: self._record(size, forward, recorder) for size in reversed(self._sizes)}
        logger.info(
            "captured %d CUDA graphs for decode steps of up to %d rows in %.1f seconds",
            len(self._sizes),
            self._sizes[-1],
            time.perf_counter() - start,
        )

    def size_for(self, plan: StepPlan) -> int | None:
        """Return the smallest recorded size that holds a plan; None when it has to run as it is."""
        if plan.num_entries > self._sizes[-1] or not self._inputs.hold(plan):
            return None
        return self._sizes[bisect_left(self._sizes, plan.num_entries)]

    def run(self, plan: StepPlan, size: int) -> tuple[Tensor, Tensor]:
        """Compute a plan by the recorded step of a size.

        Returns:
            The hidden rows, which the next call overwrites, [size, hidden_size], and those of them that sample.
        """
        sample_rows = self._inputs.fill(plan, size)
        self._replays[size]()
        return self._hidden[:size], sample_rows

    def _record(self, size: int, forward: Callable[[StepInputs], Tensor], recorder: Recorder) -> Callable[[], None]:
        inputs, hidden = self._inputs.of_size(size), self._hidden[:size]

        def step() -> None:
            hidden.copy_(forward(inputs))

        try:
            return recorder.record(step)
        except Exception as error:
            error.add_note(
                f"while a decode step of {size} rows was captured in a CUDA graph; enforce_eager=True runs without"
            )
            raise
