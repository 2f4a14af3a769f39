"""FlashAttention over the paged cache: prefill and decode rows in one call, by kernels that others wrote.

plan     rows ──► one call's arguments, the same in all layers
attend   keys and values as strided views of the pages ──► varlen_attn, flash_attn_with_kvcache ... ──► output

Which function is called is the provider's matter: flash_attn_providers.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from octavo.attention_backends.flash_attn_providers import PAGED_PROVIDERS, PROVIDERS, Provider, Step
from octavo.core.interfaces.attention import AttentionBackend, AttentionBatch, AttentionSpec
from octavo.core.interfaces.kv_cache_spec import KVCacheSpec
from octavo.errors import ConfigError, PluginUnsuitable

OLDEST_CAPABILITY = (8, 0)
MAX_HEAD_DIM = 256
HEAD_DIM_MULTIPLE = 8
# What the kernels load at a time, so that each vector has to begin at a multiple of it.
LOADED_BYTES = 16
_KNOWN_FIELDS = frozenset(field.name for field in fields(AttentionSpec))


class FlashAttentionOptions(BaseModel):
    """Whose kernels to call, where the order is not to decide."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)

    provider: Literal["auto", "torch", "flash_attn_3", "flash_attn", "torch_gather"] = "auto"
    """As flash_attn_providers.py lists them. "auto" takes the first that can serve, and never torch_gather."""


@dataclass(frozen=True)
class Places:
    """Where the keys of all rows are stored, row after row, for a provider that reads no pages.

    Attributes:
        blocks: int64. [num_keys]
        offsets: In the block, int64. [num_keys]
    """

    blocks: Tensor
    offsets: Tensor


@dataclass(frozen=True)
class Plan:
    """One step: the call's arguments, and what to copy first where pages are not read."""

    step: Step
    places: Places | None


class FlashAttentionBackend(AttentionBackend):
    """Calls FlashAttention once a layer for all rows of a step.

    A kernel that reads pages loads a tile of keys at a time and gives those that a query does not see a weight of 0. So
    numbers in slots that nobody sees are multiplied by 0, and must be finite: the null block, which stands in front of
    windows, a block's slots in front of a window, and with FlashAttention 3 those behind the context. They are: the
    engine's cache is made of zeros, nothing writes the null block, and `write` stores no value that is not finite.
    """

    contract_version = 1
    Options = FlashAttentionOptions

    # Numbers that the kernels compute with.
    dtypes: ClassVar[tuple[str, ...]] = ("float16", "bfloat16")
    # What the option `provider` chooses from, and what "auto" asks, in this order.
    providers: ClassVar[dict[str, Provider]] = dict(PROVIDERS)
    auto_providers: ClassVar[Sequence[Provider]] = PAGED_PROVIDERS

    def __init__(self, spec: AttentionSpec, *, options: FlashAttentionOptions | None = None) -> None:
        """Raise PluginUnsuitable when `cannot_serve` names a reason."""
        super().__init__(spec)
        if reasons := self.cannot_serve(spec, options):
            raise PluginUnsuitable("flash_attn cannot serve this attention: " + " ".join(reasons))
        capability = self.capability_of(spec.device)
        self._provider = next(
            provider for provider in self._asked(options) if not list(provider.reasons_against(spec, capability))
        )
        self._function: Callable[..., Any] = self._provider.load()
        # False in the class, so that who asks it instead of the object captures nothing. Where keys are copied out of
        # their pages, how many there are is a number on the host.
        self.can_capture = self._provider.reads_pages  # type: ignore[misc]

    @property
    def provider(self) -> str:
        """Whose function is called, as the option `provider` names it."""
        return self._provider.name

    @classmethod
    def cannot_serve(cls, spec: AttentionSpec, options: FlashAttentionOptions | None = None) -> list[str]:
        """Return every reason why this backend cannot serve `spec`, as sentences; an empty list when it can.

        Without a GPU what is installed for one is not looked at.

        Args:
            options: What the object would be made with; nothing means the defaults.
        """
        reasons = [*cls._reasons_about_the_device(spec), *cls._reasons_about_the_attention(spec)]
        capability = cls.capability_of(spec.device)
        by_provider = [list(provider.reasons_against(spec, capability)) for provider in cls._asked(options)]
        if all(by_provider):
            # Two providers may lack the same thing.
            reasons += dict.fromkeys(reason for each in by_provider for reason in each)
        return reasons

    @classmethod
    def capability_of(cls, device: str) -> tuple[int, int] | None:
        """Return the compute capability of an NVIDIA GPU, such as (9, 0); None for anything else."""
        try:
            if torch.device(device).type != "cuda" or torch.version.cuda is None or not torch.cuda.is_available():
                return None
            return torch.cuda.get_device_capability(device)
        except (RuntimeError, AssertionError):
            return None

    @classmethod
    def _reasons_about_the_device(cls, spec: AttentionSpec) -> Iterator[str]:
        capability = cls.capability_of(spec.device)
        if capability is None:
            torch_build = "this torch, built for ROCm," if torch.version.hip else "torch"
            yield f"FlashAttention needs an NVIDIA GPU that {torch_build} can use, and the device is {spec.device!r}."
        elif capability < OLDEST_CAPABILITY:
            yield (
                f"FlashAttention needs compute capability {OLDEST_CAPABILITY[0]}.{OLDEST_CAPABILITY[1]} or more, and "
                f"{spec.device!r} has {capability[0]}.{capability[1]}."
            )

    @classmethod
    def _reasons_about_the_attention(cls, spec: AttentionSpec) -> Iterator[str]:
        if spec.dtype not in cls.dtypes:
            known = " and ".join(cls.dtypes)
            yield f"FlashAttention computes in {known}, and dtype is {spec.dtype!r}; set one of them."
        if spec.kv_dtype != spec.dtype:
            yield (
                f"FlashAttention reads keys and values in the queries' dtype, {spec.dtype}, and kv_dtype is "
                f"{spec.kv_dtype!r}; set kv_cache_dtype='auto'."
            )
        if spec.head_dim % HEAD_DIM_MULTIPLE or spec.head_dim > MAX_HEAD_DIM:
            yield (
                f"FlashAttention takes a head_dim of at most {MAX_HEAD_DIM} that is a multiple of "
                f"{HEAD_DIM_MULTIPLE}, and it is {spec.head_dim}."
            )
        if spec.head_dim_v != spec.head_dim and not spec.value_is_key_prefix:
            yield (
                f"flash_attn serves values as wide as keys, and head_dim is {spec.head_dim}, head_dim_v "
                f"{spec.head_dim_v}."
            )
        if spec.value_is_key_prefix:
            yield "flash_attn does not serve MLA, where a value is a part of its key (value_is_key_prefix)."
        if spec.chunk is not None:
            yield f"FlashAttention keeps queries within no chunk, and chunk is {spec.chunk}."
        if spec.keep_first:
            yield f"FlashAttention keeps no first positions in view, and keep_first is {spec.keep_first}."
        if spec.sinks:
            yield "FlashAttention takes no sink logits, and the layers pass some (sinks)."
        if unknown := [field.name for field in fields(spec) if field.name not in _KNOWN_FIELDS]:
            yield f"{type(spec).__name__} has {', '.join(unknown)}, which this backend knows nothing of."

    @classmethod
    def _asked(cls, options: FlashAttentionOptions | None) -> Sequence[Provider]:
        name = "auto" if options is None else options.provider
        return cls.auto_providers if name == "auto" else (cls.providers[name],)

    def bind(self, rows: Tensor, spec: KVCacheSpec) -> Tensor:
        """View a layer's bytes as `kv_cache_shape` says. Nothing is copied.

        Raises:
            ConfigError: Blocks begin where the kernels, which load 16 bytes at a time, cannot.
        """
        if rows.stride(0) % LOADED_BYTES or rows.data_ptr() % LOADED_BYTES:
            raise ConfigError(
                f"FlashAttention loads {LOADED_BYTES} bytes at a time, and the blocks of this layer lie "
                f"{rows.stride(0)} bytes apart, from byte {rows.data_ptr() % LOADED_BYTES} of {LOADED_BYTES} on: pages "
                "of other layers are of odd sizes. Choose another backend in attention_backends for this kind."
            )
        view: Tensor = super().bind(rows, spec)
        return view

    def plan(self, batch: AttentionBatch) -> Plan:
        """Prepare one step. For decode rows alone it reads nothing on the host but shapes, unless keys are copied."""
        has_one_query_each = batch.num_decode_rows == batch.num_rows
        # A kernel that is told of one query at most takes it that every row has one. Where some have none it is told of
        # two, which is as good a bound.
        max_queries = 1 if has_one_query_each else max(2, int(np.diff(batch.query_starts_host).max(initial=0)))
        if self._provider.reads_pages:
            key_lens, block_table, places = batch.context_lens, batch.block_table, None
            max_keys = batch.block_table.shape[1] * self.spec.block_size
        else:
            lens, places = self._places(batch)
            key_lens, block_table = torch.from_numpy(lens).to(batch.slots.device), None
            max_keys = int(lens.max(initial=0))
        key_starts = torch.nn.functional.pad(key_lens.cumsum(0, dtype=torch.int32), (1, 0))
        step = Step(
            query_starts=batch.query_starts,
            key_starts=key_starts,
            key_lens=key_lens,
            block_table=block_table,
            max_queries=max_queries,
            max_keys=max_keys,
            is_causal=not has_one_query_each,
        )
        return Plan(step, places)

    def _places(self, batch: AttentionBatch) -> tuple[np.ndarray[Any, np.dtype[np.int32]], Places]:
        """Return how many keys some query of each row sees, [num_rows], and where they are."""
        context_lens = batch.context_lens_host.astype(np.int64)
        first_seen = np.zeros_like(context_lens)
        if self.spec.window is not None:
            first_queries = context_lens - np.diff(batch.query_starts_host)
            first_seen = np.maximum(first_queries - (self.spec.window - 1), 0)
        lens = np.maximum(context_lens - first_seen, 0)
        rows = np.repeat(np.arange(batch.num_rows), lens)
        positions = np.arange(lens.sum()) - np.repeat(np.cumsum(lens) - lens, lens) + first_seen[rows]
        blocks = batch.block_table_host[rows, positions // self.spec.block_size].astype(np.int64)
        device = batch.slots.device
        places = Places(
            torch.from_numpy(blocks).to(device), torch.from_numpy(positions % self.spec.block_size).to(device)
        )
        return lens.astype(np.int32), places

    def write(self, key: Tensor, value: Tensor | None, kv_cache: Tensor, slots: Tensor) -> None:
        """Store the new tokens' keys and values; a token whose slot is -1 is not stored.

        Where a value has a number that is not finite, zeros are stored for it and NaN for its key: whoever sees the
        token gets NaN, as it must be, and whoever does not gets nothing of it.

        Args:
            key: [num_tokens, num_kv_heads, head_dim]
            value: [num_tokens, num_kv_heads, head_dim]
            kv_cache: What `bind` returned for this layer.
            slots: block * block_size + offset, int64, or -1. [num_tokens]
        """
        if value is None:
            raise ValueError("write got no values, and value_is_key_prefix is off.")
        is_finite = value.isfinite().all(-1, keepdim=True)
        new = torch.stack((key.where(is_finite, math.nan), value.where(is_finite, 0)), dim=1)
        # Picking the stored tokens would make a GPU wait for their number. Instead a token that is not stored puts back
        # what slot 0 holds, in the null block, which no other token is written to.
        places = slots.clamp(min=0)
        block, offset = torch.div(places, self.spec.block_size, rounding_mode="floor"), places % self.spec.block_size
        # As the new tokens: [num_tokens, 2, num_kv_heads, head_dim]
        by_slot = kv_cache.transpose(1, 2)
        by_slot.index_put_((block, offset), new.where((slots >= 0)[:, None, None, None], by_slot[block, offset]))

    def attend(
        self, query: Tensor, kv_cache: Tensor, plan: Plan, *, sinks: Tensor | None = None, return_lse: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend from each new token to its row's context, itself included.

        A token of a row without context gets zeros and a log-sum-exp of -inf.

        Args:
            query: New tokens of all rows, back to back. [num_tokens, num_query_heads, head_dim]
            kv_cache: What `bind` returned for this layer.
            plan: What `plan` returned for this step.
            sinks: None.
            return_lse: Whether to return the log of the softmax's denominator too.

        Returns:
            One row per query row, same order and dtype. [num_tokens, num_query_heads, head_dim]
            With `return_lse` also the natural log-sum-exp of the scores, float32. [num_tokens, num_query_heads]

        Raises:
            ValueError: `sinks` is given.
        """
        if sinks is not None:
            raise ValueError("The spec says sinks=False, and attend got some.")
        if not len(query) or not plan.step.max_keys:
            output, lse = torch.zeros_like(query), query.new_full(query.shape[:2], -math.inf, dtype=torch.float32)
            return (output, lse) if return_lse else output
        keys, values = kv_cache.unbind(1)
        if plan.places is not None:
            index = (plan.places.blocks, plan.places.offsets)
            keys, values = keys[index], values[index]
        output, lse = self._provider.attend(self._function, query, keys, values, plan.step, self.spec)
        return (output, _by_token(lse, query)) if return_lse else output


def _by_token(lse: Tensor, query: Tensor) -> Tensor:
    """Bring a log-sum-exp to one row a token, [num_tokens, num_query_heads].

    The kernels return [num_query_heads, num_tokens]; torch's docstring says the reverse, and may come to mean it. Where
    both are equally many, the kernels are believed. For a query that sees nothing they say +inf.

    Raises:
        ValueError: It has neither shape.
    """
    num_tokens, num_heads = query.shape[:2]
    if lse.shape == (num_heads, num_tokens):
        lse = lse.transpose(0, 1)
    elif lse.shape != (num_tokens, num_heads):
        raise ValueError(
            f"FlashAttention returned a log-sum-exp of shape {tuple(lse.shape)} for {num_tokens} tokens and "
            f"{num_heads} query heads; this version of it is not served."
        )
    return lse.masked_fill(lse == math.inf, -math.inf)
