"""The contract of an attention backend, and the data that passes through it.

    plan(batch) ──────────────► Plan                       once per step and KV-cache group
    write(k, v, kv_cache, slots)                           once per layer, before
    attend(q, kv_cache, plan) ► output                     once per layer
    gather(kv_cache, slots) ──► keys                       optional, for MLA: see `can_gather`

A backend sees tokens, blocks and slots. It never sees a request.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from octavo.core.interfaces.kv_cache_spec import KVCacheSpec
from octavo.core.interfaces.kv_format import KV_FORMATS

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor


@dataclass(frozen=True)
class AttentionSpec:
    """What is fixed about a layer's attention, known before the first step.

    Layers with equal specs share one backend object, and so one plan a step.

    A query at position p reads the keys at the positions j <= p for which
    (window is None or j > p - window) and (chunk is None or j >= p - p % chunk), and besides those every
    j <= p with j < keep_first.

    Attributes:
        num_query_heads: Query heads. Head h reads KV head h // (num_query_heads // num_kv_heads).
        num_kv_heads: Heads of keys and values.
        head_dim: Numbers in a query and in a key.
        head_dim_v: Numbers in a value and in an output row's head.
        scale: Factor on every query-key product.
        block_size: Tokens in a block.
        dtype: Of queries, new keys, new values and output, as torch names it.
        kv_dtype: How keys and values are stored, a name of KV_FORMATS. A backend that reads and writes no quantised
            format names only the others in `cannot_serve`.
        device: As torch names it, "cpu" or "cuda:0".
        window: Keys that a query sees, its own included; None for all.
        chunk: Size of the aligned chunks that attention stays within; None for none.
        keep_first: Positions at the start that every query sees, whatever window and chunk say.
        soft_cap: Bound c of the scores, c * tanh(score / c), applied after scale and before masking; None for none.
        sinks: Whether layers pass learned sink logits, one a query head, that take part in the softmax's
            denominator and carry no value.
        value_is_key_prefix: Whether a value is the first `head_dim_v` numbers of its key (MLA). Then only keys
            are stored and `write` gets None for the values.

    Raises:
        ValueError: The numbers make no sense together, whatever the backend; names each field at fault.
    """

    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    scale: float
    block_size: int
    dtype: str
    kv_dtype: str
    device: str
    window: int | None = None
    chunk: int | None = None
    keep_first: int = 0
    soft_cap: float | None = None
    sinks: bool = False
    value_is_key_prefix: bool = False

    def __post_init__(self) -> None:
        if faults := [*self._faults()]:
            raise ValueError(" ".join(faults))

    def _faults(self) -> Iterator[str]:
        """Yield what makes no sense to any backend, as sentences with the way out."""
        for name in ("num_query_heads", "num_kv_heads", "head_dim", "head_dim_v", "block_size"):
            if (count := getattr(self, name)) < 1:
                yield f"{name} is {count}; it must be at least 1."
        if self.num_kv_heads >= 1 and self.num_query_heads % self.num_kv_heads:
            yield (
                f"num_query_heads is {self.num_query_heads}, which is not a multiple of num_kv_heads, "
                f"{self.num_kv_heads}; every KV head must serve equally many query heads."
            )
        if self.value_is_key_prefix and self.num_kv_heads != 1:
            yield (
                f"num_kv_heads is {self.num_kv_heads}, and value_is_key_prefix needs 1; "
                "store one key a token, or turn value_is_key_prefix off."
            )
        if self.value_is_key_prefix and self.head_dim_v > self.head_dim:
            yield (
                f"head_dim_v is {self.head_dim_v}, and with value_is_key_prefix it must be at most head_dim, "
                f"{self.head_dim}."
            )
        if not math.isfinite(self.scale):
            yield f"scale is {self.scale}; it must be a finite number, such as head_dim**-0.5."
        for name in ("window", "chunk"):
            if (size := getattr(self, name)) is not None and size < 1:
                yield f"{name} is {size}; it must be at least 1, since every query sees itself, or None for all keys."
        if self.keep_first < 0:
            yield f"keep_first is {self.keep_first}; it must not be negative: 0 keeps none."
        if self.soft_cap is not None and not (math.isfinite(self.soft_cap) and self.soft_cap > 0):
            yield f"soft_cap is {self.soft_cap}; it must be finite and above 0, or None for no cap."


@dataclass(frozen=True)
class AttentionBatch:
    """One step's tokens, as one KV-cache group sees them.

    Row r of the batch owns the new tokens [query_starts[r], query_starts[r + 1]). Rows with exactly one new token
    ("decode rows") come first. A row without context is padding: it has no tokens, or some whose slots are -1 and whose
    output nobody reads. The host copies are numpy arrays with the same content.

    Attributes:
        num_decode_rows: How many rows at the front have exactly one new token.
        query_starts: Offsets of the rows' new tokens, int32. [num_rows + 1]
        context_lens: Tokens a row's last query may see, its new tokens included, int32. [num_rows]
        block_table: Block ids by row, int32. Entry i holds positions [i * block_size, (i + 1) * block_size). An entry
            0 (the null block), and one past the context, is never read. [num_rows, max_blocks]
        slots: Where each new token's key and value go: block * block_size + offset, int64; -1 writes nothing.
            [num_tokens]
    """

    num_decode_rows: int
    query_starts: Tensor
    context_lens: Tensor
    block_table: Tensor
    slots: Tensor
    query_starts_host: np.ndarray[Any, np.dtype[np.int32]]
    context_lens_host: np.ndarray[Any, np.dtype[np.int32]]
    block_table_host: np.ndarray[Any, np.dtype[np.int32]]

    @property
    def num_rows(self) -> int:
        return len(self.context_lens_host)

    @property
    def num_tokens(self) -> int:
        return int(self.query_starts_host[-1])


class AttentionBackend(ABC):
    """Writes keys and values into the paged cache and attends over it.

    Memory belongs to core. The constructor gets the spec, and raises nothing that `cannot_serve` did not name.
    """

    # Each registered class states these: the contract version it was built for, as a number; and, if it takes options,
    # a pydantic model of them, of which its constructor then gets an instance as the keyword argument `options`.
    contract_version: ClassVar[int]
    Options: ClassVar[type[Any] | None] = None
    # Whether `attend` in a layer sees everything that `write` stored for the same step, of all rows. Then one
    # request may read blocks that another one fills in the same step.
    writes_before_reads: ClassVar[bool] = True
    # Whether the class has a `gather` for specs with `value_is_key_prefix`. An MLA layer may then compute long prompts
    # with full keys and values; without it, every query attends to the latents.
    can_gather: ClassVar[bool] = False
    # Whether a step of decode rows alone can be captured in a CUDA graph and replayed with other numbers in the batch's
    # device tensors. Then for such a batch `plan`, `write` and `attend` look at nothing on the host but shapes: the
    # number of rows, and the width of the block table.
    can_capture: ClassVar[bool] = False

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec

    @classmethod
    @abstractmethod
    def cannot_serve(cls, spec: AttentionSpec) -> list[str]:
        """Return every reason why this backend cannot serve `spec`, as sentences; an empty list when it can.

        A class whose answer depends on its options may take them, `cannot_serve(cls, spec, options=None)`.
        """

    def kv_cache_shape(self, spec: KVCacheSpec, num_blocks: int) -> tuple[int, ...]:
        """Return the logical shape of one layer's cache. Dimension 0 is the block; a block is contiguous.

        By default keys and values side by side, [num_blocks, 2, block_size, num_kv_heads, head_dim]; with
        `value_is_key_prefix` keys alone, [num_blocks, block_size, head_dim].
        """
        if self.spec.value_is_key_prefix:
            return (num_blocks, spec.block_size, self.spec.head_dim)
        return (num_blocks, 2, spec.block_size, self.spec.num_kv_heads, self.spec.head_dim)

    def bind(self, rows: Tensor, spec: KVCacheSpec) -> Any:
        """Turn a layer's bytes into the `kv_cache` that `write` and `attend` take.

        Called once a layer; before that for a cache of two blocks, to see that the layout fits before any weight is
        read; and on a GPU once more, for the step that measures how much memory is left.

        Args:
            rows: One row a block, uint8. Rows may be longer than this layer's page, and their stride longer still:
                the result must be a view, and must not assume that blocks lie back to back.
                [num_blocks, >= spec.page_bytes]
            spec: What the layer keeps.

        Returns:
            By default the bytes viewed as `kv_cache_shape` says, in the format that `AttentionSpec.kv_dtype` names: a
            tensor, or `ScaledPages` where pages hold scales. A layout must fit into `spec.page_bytes`.
        """
        return KV_FORMATS[self.spec.kv_dtype].view_pages(rows, self.kv_cache_shape(spec, rows.shape[0])[1:])

    @abstractmethod
    def plan(self, batch: AttentionBatch) -> Any:
        """Prepare one step. What it returns goes to every `attend` of the step, for all layers of this spec."""

    @abstractmethod
    def write(self, key: Tensor, value: Tensor | None, kv_cache: Any, slots: Tensor) -> None:
        """Store the new tokens' keys and values, as `KVFormat.quantise` makes them where the format is quantised.

        Args:
            key: [num_tokens, num_kv_heads, head_dim]
            value: [num_tokens, num_kv_heads, head_dim_v]; None with `value_is_key_prefix`.
            kv_cache: What `bind` returned for this layer.
            slots: `AttentionBatch.slots`; a token whose slot is -1 is not stored. [num_tokens]
        """

    @abstractmethod
    def attend(
        self, query: Tensor, kv_cache: Any, plan: Any, *, sinks: Tensor | None = None, return_lse: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend from each new token to its row's context, itself included.

        Args:
            query: New tokens of all rows, back to back. [num_tokens, num_query_heads, head_dim]
            kv_cache: What `bind` returned for this layer.
            plan: What `plan` returned for this step.
            sinks: This layer's sink logits, when the spec says that there are any. [num_query_heads]
            return_lse: Whether to return the log of the softmax's denominator too.

        Returns:
            One row per query row, same order and dtype. [num_tokens, num_query_heads, head_dim_v]
            With `return_lse` also the natural log-sum-exp of the scores, sinks included, float32.
            [num_tokens, num_query_heads]
            The result belongs to the caller: a later call must not change it.
        """

    def gather(self, kv_cache: Any, slots: Tensor) -> Tensor:
        """Return keys that `write` stored, in a layer with `value_is_key_prefix`. Only called with `can_gather`.

        It is the reverse of `write`, and like it needs no plan: a step plans only the rows that it attends to.

        Args:
            kv_cache: What `bind` returned for this layer.
            slots: block * block_size + offset, int64; none is -1. [num_keys]

        Returns:
            A tensor of the caller's, in `AttentionSpec.dtype`. [num_keys, head_dim]
        """
        raise NotImplementedError(f"{type(self).__name__} sets can_gather and has no gather")
