"""Who is measured: attention backends through their contract, and torch's FlashAttention over the same numbers."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpu_check.chosen import choice_of, reasons_of
from gpu_check.shapes import Shape
from octavo.config import PluginChoice
from octavo.core.interfaces.attention import AttentionBatch
from octavo.core.interfaces.kv_cache_spec import FullAttentionSpec, KVCacheSpec, MLASpec
from octavo.core.interfaces.kv_format import KV_FORMATS
from octavo.plugins.families import ATTENTION_BACKENDS
from octavo.plugins.part import choose
from octavo.plugins.registry import scan
from octavo.testing.attention.abilities import tolerance_of
from octavo.testing.attention.oracle import attend_by_definition, make_batch

# Queries of a row, up to its last one or its middle one, whose output is compared with the definition.
COMPARED_QUERIES = 4


class NotServedError(Exception):
    """A contender does not take the shape; the message says why."""


class WrongError(Exception):
    """An output differs from attention by its definition; the message says by how much."""


@dataclass(frozen=True)
class Sample:
    """Some queries of one row, and their output by definition.

    Attributes:
        tokens: Their rows in the output.
        output: [len(tokens), num_query_heads, head_dim_v]
    """

    tokens: slice
    output: np.ndarray[Any, np.dtype[np.float64]]


class Data:
    """Random numbers in scattered pages, the same for every contender.

    Args:
        shape: What the step looks like.
        seed: Of the numbers, and of where pages lie.

    Attributes:
        queries: Of the new tokens. [num_tokens, num_query_heads, head_dim]
        keys: Of all tokens of all rows, row after row. [num_context_tokens, num_kv_heads, head_dim]
        values: As `keys`; None where a value is a part of its key.
        slots: Where they are stored. [num_context_tokens]
        batch: The step.
    """

    def __init__(self, shape: Shape, seed: int = 0) -> None:
        self.shape, spec = shape, shape.spec
        generator = torch.Generator(spec.device).manual_seed(seed)
        self._num_queries = np.array([num_queries for num_queries, _ in shape.rows])
        self._context_lens = np.array([context_len for _, context_len in shape.rows])

        def normal(num_tokens: int, num_heads: int, width: int) -> Tensor:
            dtype = getattr(torch, spec.dtype)
            return torch.randn(num_tokens, num_heads, width, device=spec.device, dtype=dtype, generator=generator)

        num_context_tokens = int(self._context_lens.sum())
        self.queries = normal(int(self._num_queries.sum()), spec.num_query_heads, spec.head_dim)
        self.keys = normal(num_context_tokens, spec.num_kv_heads, spec.head_dim)
        self.values = None
        if not spec.value_is_key_prefix:
            self.values = normal(num_context_tokens, spec.num_kv_heads, spec.head_dim_v)
        self._place(np.random.default_rng(seed))

    def _place(self, rng: np.random.Generator) -> None:
        """Deal blocks out in random order."""
        spec = self.shape.spec
        counts = -(-self._context_lens // spec.block_size)
        ids = rng.permutation(np.arange(1, self.shape.num_blocks)).astype(np.int32)
        table = np.zeros((len(counts), int(counts.max())), dtype=np.int32)
        slots, new_slots, start = [], [], 0
        for row, (count, num_queries) in enumerate(zip(counts, self._num_queries, strict=True)):
            table[row, :count] = ids[start : start + count]
            start += count
            positions = np.arange(self._context_lens[row])
            places = table[row, positions // spec.block_size].astype(np.int64) * spec.block_size
            slots.append(places + positions % spec.block_size)
            new_slots.append(slots[-1][-num_queries:])
        self.slots = torch.from_numpy(np.concatenate(slots)).to(spec.device)
        starts = np.cumsum([0, *self._num_queries]).astype(np.int32)
        lens = self._context_lens.astype(np.int32)
        self.batch: AttentionBatch = make_batch(starts, lens, table, np.concatenate(new_slots), spec.device)

    @property
    def kv_cache_spec(self) -> KVCacheSpec:
        spec = self.shape.spec
        if spec.value_is_key_prefix:
            return MLASpec(spec.block_size, spec.head_dim_v, spec.head_dim - spec.head_dim_v, spec.kv_dtype)
        return FullAttentionSpec(spec.block_size, spec.num_kv_heads, spec.head_dim, spec.kv_dtype)

    @cached_property
    def samples(self) -> list[Sample]:
        """The last queries of the first and of the last row, and those in the middle of the first."""
        first, last = 0, len(self.shape.rows) - 1
        ends = {(first, int(self._num_queries[first])), (last, int(self._num_queries[last]))}
        ends.add((first, -(-int(self._num_queries[first]) // 2)))
        return [self._sample(row, end) for row, end in sorted(ends)]

    def _sample(self, row: int, end: int) -> Sample:
        """Compute the output of a row's queries up to its query number `end`."""
        spec = self.shape.spec
        start = max(0, end - COMPARED_QUERIES)
        first_query = int(self._num_queries[:row].sum())
        tokens = slice(first_query + start, first_query + end)
        first_key = int(self._context_lens[:row].sum())
        context = int(self._context_lens[row] - self._num_queries[row]) + end
        keys = self._stored(self.keys[first_key : first_key + context])
        values = keys[..., : spec.head_dim_v]
        if self.values is not None:
            values = self._stored(self.values[first_key : first_key + context])
        queries = self.queries[tokens].double().cpu().numpy()
        output, _ = attend_by_definition(spec, queries, keys.double().numpy(), values.double().numpy())
        return Sample(tokens, output)

    def _stored(self, vectors: Tensor) -> Tensor:
        """Return what is read back of vectors, once they are stored."""
        kv_format = KV_FORMATS[self.shape.spec.kv_dtype]
        if not kv_format.is_quantised:
            return vectors.to(kv_format.torch_dtype).float().cpu()
        return kv_format.dequantise(*kv_format.quantise(vectors)).cpu()

    def check(self, output: Tensor) -> float:
        """Compare an output with the definition; return the largest error over the size of the numbers.

        Raises:
            WrongError: It is more than rounding explains.
        """
        allowed, worst = tolerance_of(self.shape.spec.dtype), 0.0
        for sample in self.samples:
            got = output[sample.tokens].detach().double().cpu().numpy()
            if got.shape != sample.output.shape:
                raise WrongError(f"the output has shape {tuple(output.shape)}.")
            size = float(np.sqrt(np.mean(sample.output**2)))
            errors = np.abs(got - sample.output) / (size + np.abs(sample.output))
            error = float(np.where(np.isnan(errors), np.inf, errors).max())
            if error > allowed:
                raise WrongError(
                    f"the output differs from attention by its definition: an error of {error:.3g} of the size of "
                    f"the numbers, where {allowed:.3g} is allowed."
                )
            worst = max(worst, error)
        return worst


@dataclass(frozen=True)
class Prepared:
    """A contender that is ready.

    Attributes:
        attend: Computes the step's output.
        plan: Prepares a step, where the contender does such a thing.
    """

    attend: Callable[[], Tensor]
    plan: Callable[[], Any] | None = None


class Contender(ABC):
    """Someone who computes the step.

    Attributes:
        name: As a line calls it.
        is_peer: Whether it is there to compare with, and no part of Octavo's.
    """

    name: str
    is_peer: bool = False

    @abstractmethod
    def prepare(self, data: Data) -> Prepared:
        """Get ready.

        Raises:
            NotServedError: It does not take this shape.
        """


class BackendContender(Contender):
    """An attention backend, as `chosen` reads it, and more options of it."""

    def __init__(self, backend: str, options: Mapping[str, Any] | None = None) -> None:
        self.name = backend
        self._options = options or {}

    def prepare(self, data: Data) -> Prepared:
        spec, choice = data.shape.spec, choice_of(self.name)
        part = choose(scan(), ATTENTION_BACKENDS, PluginChoice(choice.name, {**choice.options, **self._options}))
        if reasons := reasons_of(part, spec):
            raise NotServedError(" ".join(reasons))
        backend = part.create(spec)
        page_bytes = data.kv_cache_spec.page_bytes
        rows = torch.zeros((data.shape.num_blocks, page_bytes), dtype=torch.uint8, device=spec.device)
        kv_cache = backend.bind(rows, data.kv_cache_spec)
        backend.write(data.keys, data.values, kv_cache, data.slots)
        plan = backend.plan(data.batch)
        return Prepared(lambda: backend.attend(data.queries, kv_cache, plan), lambda: backend.plan(data.batch))


# -- torch's FlashAttention -------------------------------------------------------------------------------------------


class VarlenAttention(Contender):
    """torch.nn.attention.varlen over keys and values that lie row after row."""

    name = "torch varlen_attn, contiguous"
    is_peer = True

    def prepare(self, data: Data) -> Prepared:
        arguments = self._arguments(data)
        return Prepared(lambda: _varlen_attn()(**arguments))

    def _arguments(self, data: Data) -> dict[str, Any]:
        """Return what varlen_attn is called with.

        Raises:
            NotServedError: The installed one lacks something.
        """
        known, spec, rows = inspect.signature(_varlen_attn()).parameters, data.shape.spec, data.shape.rows
        needed = ["window_size"] + (["enable_gqa"] if spec.num_query_heads != spec.num_kv_heads else [])
        self._require(needed, known)
        # One query a row sees everything before it anyway, and the kernel packs its heads only if no side is bounded.
        bounds = (-1, -1) if data.shape.is_decode else (-1, 0)
        lens = torch.tensor([0, *(context_len for _, context_len in rows)], dtype=torch.int32, device=spec.device)
        arguments: dict[str, Any] = {
            "query": data.queries,
            "key": data.keys,
            "value": data.values,
            "cu_seq_q": data.batch.query_starts,
            "cu_seq_k": lens.cumsum(0, dtype=torch.int32),
            "max_q": max(num_queries for num_queries, _ in rows),
            "max_k": max(context_len for _, context_len in rows),
            # Both bounds count keys beside the query's own.
            "window_size": bounds if spec.window is None else (spec.window - 1, 0),
        }
        return arguments | ({"enable_gqa": True} if "enable_gqa" in needed else {})

    def _require(self, needed: list[str], known: Mapping[str, Any]) -> None:
        if lacking := [name for name in needed if name not in known]:
            raise NotServedError(f"varlen_attn of torch {torch.__version__} has no {' and no '.join(lacking)}.")


class PagedVarlenAttention(VarlenAttention):
    """torch.nn.attention.varlen over pages of the same size and order as the backends'."""

    name = "torch varlen_attn, paged"

    def _arguments(self, data: Data) -> dict[str, Any]:
        spec, arguments = data.shape.spec, super()._arguments(data)
        self._require(["block_table", "seqused_k"], inspect.signature(_varlen_attn()).parameters)
        for name in ("key", "value"):
            numbers = arguments[name]
            pages = numbers.new_zeros((data.shape.num_blocks, spec.block_size, *numbers.shape[1:]))
            pages.flatten(0, 1)[data.slots] = numbers
            arguments[name] = pages
        paged = {"block_table": data.batch.block_table, "seqused_k": data.batch.context_lens}
        return {**arguments, **paged, "cu_seq_k": None}


class DenseFlashAttention(Contender):
    """scaled_dot_product_attention, held to FlashAttention, where all rows are equally long."""

    name = "torch SDPA flash, contiguous"
    is_peer = True

    def prepare(self, data: Data) -> Prepared:
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.nn.functional import scaled_dot_product_attention

        spec, rows = data.shape.spec, data.shape.rows
        if len(set(rows)) > 1 or spec.window is not None or data.values is None:
            raise NotServedError("it takes rows of one length, and no window.")
        queries, keys, values = (
            torch.unflatten(numbers, 0, (len(rows), -1)).transpose(1, 2)
            for numbers in (data.queries, data.keys, data.values)
        )

        def attend() -> Tensor:
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                output = scaled_dot_product_attention(
                    queries, keys, values, is_causal=not data.shape.is_decode, scale=spec.scale, enable_gqa=True
                )
            return output.transpose(1, 2).flatten(0, 1)

        return Prepared(attend)


def peers_for(shape: Shape) -> list[Contender]:
    """Return whom the backends are compared with: none where torch's FlashAttention has no such thing."""
    spec = shape.spec
    if spec.value_is_key_prefix or spec.kv_dtype != spec.dtype or spec.sinks or spec.soft_cap is not None:
        return []
    return [PagedVarlenAttention(), VarlenAttention(), DenseFlashAttention()]


def _varlen_attn() -> Callable[..., Any]:
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn
