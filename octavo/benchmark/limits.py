"""What the machine can do at most, measured: how fast it reads memory, and how fast it multiplies matrices.

No figure of an engine says how good it is; its distance from these limits does.
"""

from __future__ import annotations

import dataclasses
import time
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

# Far more than any cache holds, so that memory is what is read.
READ_BYTES = 512 << 20
MATRIX_ROWS = 2048
REPEATS = 7


@dataclass(frozen=True)
class MachineLimits:
    """The best of several tries, with all of torch's threads.

    Attributes:
        read_bytes_per_s: Memory read in order.
        matmul_flop_per_s: The product of two square matrices; a multiplication and an addition are two.
        dtype: Of the matrices, as torch names it.
        num_threads: Threads that torch computed with.
    """

    read_bytes_per_s: float
    matmul_flop_per_s: float
    dtype: str
    num_threads: int

    def tokens_per_s(self, weight_bytes: int) -> float:
        """Return what one stream cannot exceed, its weights being read once for each token."""
        return self.read_bytes_per_s / weight_bytes


def measure_limits(
    dtype: str, device: str = "cpu", *, num_read_bytes: int = READ_BYTES, num_matrix_rows: int = MATRIX_ROWS
) -> MachineLimits:
    """Measure for a second or two. Call it where the model runs: in the thread that computes, and on its device.

    Args:
        dtype: Of the matrices, as torch names it.
        device: As torch names it.
        num_read_bytes: Size of what is read; taken from the device's memory meanwhile.
        num_matrix_rows: Rows and columns of the matrices.
    """
    import torch

    bytes_per_s = read_bytes_per_s(device, num_read_bytes)
    shape = (num_matrix_rows, num_matrix_rows)
    generator = torch.Generator(device).manual_seed(0)
    left, right = (torch.rand(shape, device=device, generator=generator).to(getattr(torch, dtype)) for _ in range(2))
    product_seconds = _least_seconds(lambda: left @ right, device)
    return MachineLimits(
        read_bytes_per_s=bytes_per_s,
        matmul_flop_per_s=2 * num_matrix_rows**3 / product_seconds,
        dtype=dtype,
        num_threads=torch.get_num_threads(),
    )


def read_bytes_per_s(device: str = "cpu", num_read_bytes: int = READ_BYTES) -> float:
    """Return the bytes a second that all cores together read from the device's memory; see `measure_limits`."""
    import torch

    # Consecutive numbers, so that no two pages are alike and nothing can keep them as one.
    numbers = torch.arange(num_read_bytes // 8, dtype=torch.int64, device=device)
    return num_read_bytes / _least_seconds(numbers.sum, device)


def weight_bytes_per_token(model: object, vocab_size: int) -> int:
    """Return the bytes of a model's weights that a single token makes it read.

    All tensors that can be reached from the model count, shared ones once. Of those with a row for each id only the
    largest counts: it makes the logits, and of an embedding besides it a token reads one row. Experts count in full, so
    a model that leaves most of them out for each token reads less.

    Args:
        model: Whatever holds the weights.
        vocab_size: Rows of an embedding.
    """
    by_storage: dict[int, dict[tuple[int, int], Tensor]] = {}
    for tensor in _tensors(model, set()):
        place = (tensor.data_ptr(), tensor.nbytes)
        by_storage.setdefault(tensor.untyped_storage().data_ptr(), {})[place] = tensor
    total, largest_by_id = 0, 0
    for tensors in by_storage.values():
        held = list(tensors.values())
        # Views of one storage may overlap; then they are no more than the storage.
        num_bytes = min(sum(tensor.nbytes for tensor in held), held[0].untyped_storage().nbytes())
        if any(tensor.ndim == 2 and vocab_size in tensor.shape for tensor in held):
            largest_by_id = max(largest_by_id, num_bytes)
        else:
            total += num_bytes
    return total + largest_by_id


def _tensors(holder: Any, seen: set[int]) -> Iterator[Tensor]:
    """Yield what can be reached through attributes, lists, tuples and dicts."""
    import torch

    if id(holder) in seen or isinstance(holder, (type, types.ModuleType, str, bytes, int, float)):
        return
    seen.add(id(holder))
    if isinstance(holder, torch.Tensor):
        yield holder
        return
    if isinstance(holder, Mapping):
        parts = list(holder.values())
    elif isinstance(holder, (list, tuple, set, frozenset)):
        parts = list(holder)
    elif hasattr(holder, "__dict__"):
        parts = list(vars(holder).values())
    elif dataclasses.is_dataclass(holder):
        parts = [getattr(holder, field.name) for field in dataclasses.fields(holder)]
    else:
        return
    for part in parts:
        yield from _tensors(part, seen)


def _least_seconds(work: Callable[[], object], device: str) -> float:
    import torch

    def wait() -> None:
        if device.startswith("cuda"):
            torch.cuda.synchronize(device)

    seconds = []
    # The first try also takes the memory for the result, and starts the threads.
    for _ in range(REPEATS):
        wait()
        start = time.perf_counter()
        work()
        wait()
        seconds.append(time.perf_counter() - start)
    return min(seconds)
