"""A small backend that serves everything, and the mistakes that people make when they write one."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from octavo.core.interfaces.attention import AttentionBackend, AttentionBatch, AttentionSpec
from octavo.core.interfaces.kv_format import KV_FORMATS, KVFormat, ScaledPages

DTYPES = ("float32", "float16", "bfloat16", "float64")


class Eager(AttentionBackend):
    """One row at a time, dense, in float64."""

    contract_version = 1
    can_gather = True

    @classmethod
    def cannot_serve(cls, spec: AttentionSpec) -> list[str]:
        reasons = [
            f"{name} {getattr(spec, name)} is unknown." for name in ("dtype", "kv_dtype") if not cls.knows(spec, name)
        ]
        if spec.device != "cpu":
            reasons.append("Only a CPU will do.")
        if spec.head_dim_v != spec.head_dim and not spec.value_is_key_prefix:
            reasons.append("Keys and values must be of one size.")
        return reasons

    @classmethod
    def knows(cls, spec: AttentionSpec, name: str) -> bool:
        return getattr(spec, name) in DTYPES

    def plan(self, batch: AttentionBatch) -> AttentionBatch:
        return batch

    def write(self, key: Tensor, value: Tensor | None, kv_cache: Tensor, slots: Tensor) -> None:
        is_stored = self.is_stored(slots)
        block, offset = slots[is_stored] // self.spec.block_size, slots[is_stored] % self.spec.block_size
        if value is None:
            kv_cache[block, offset] = key[is_stored, 0].to(kv_cache.dtype)
        else:
            kv_cache[block, 0, offset] = key[is_stored].to(kv_cache.dtype)
            kv_cache[block, 1, offset] = value[is_stored].to(kv_cache.dtype)

    def gather(self, kv_cache: Tensor, slots: Tensor) -> Tensor:
        dtype: torch.dtype = getattr(torch, self.spec.dtype)
        return kv_cache[slots // self.spec.block_size, slots % self.spec.block_size].to(dtype)

    def attend(
        self,
        query: Tensor,
        kv_cache: Tensor,
        plan: AttentionBatch,
        *,
        sinks: Tensor | None = None,
        return_lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        batch, spec = plan, self.spec
        output = query.new_zeros((len(query), spec.num_query_heads, spec.head_dim_v))
        lse = query.new_zeros(output.shape[:2], dtype=torch.float32)
        for row in range(batch.num_rows):
            start, end = batch.query_starts_host[row : row + 2].tolist()
            context_len = int(batch.context_lens_host[row])
            if start == end or not context_len:
                continue
            keys, values = self.fetch(kv_cache, batch.block_table[row], context_len)
            head_of = self.kv_heads()
            positions = torch.arange(context_len)
            is_seen = self.sees(positions[context_len - (end - start) :, None], positions[None])
            keys, values = (self.without_garbage(part, is_seen.any(dim=0)) for part in (keys, values))
            scores = torch.einsum("qhd,khd->hqk", query[start:end].double(), keys[:, head_of]) * spec.scale
            if spec.soft_cap is not None:
                scores = self.cap(scores)
            scores = scores.masked_fill(~is_seen, -math.inf)
            denominator = scores.logsumexp(-1)
            if sinks is not None:
                denominator = self.with_sinks(denominator, sinks)
            weights = (scores - denominator[..., None]).exp()
            output[start:end] = torch.einsum("hqk,khd->qhd", weights, values[:, head_of]).to(output.dtype)
            lse[start:end] = denominator.T.float()
        return (output, lse) if return_lse else output

    def is_stored(self, slots: Tensor) -> Tensor:
        return slots >= 0

    def fetch(self, kv_cache: Tensor, table: Tensor, context_len: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of the context, in float64."""
        blocks = table[: -(-context_len // self.spec.block_size)].long()
        if self.spec.value_is_key_prefix:
            keys = kv_cache[blocks].flatten(0, 1)[:context_len, None].double()
            return keys, keys[..., : self.spec.head_dim_v]
        keys, values = kv_cache[blocks].transpose(0, 1).flatten(1, 2)[:, :context_len].double()
        return keys, values

    def without_garbage(self, numbers: Tensor, is_seen: Tensor) -> Tensor:
        """Return keys or values with zeros in place of those that no query sees, whose weights are 0."""
        return numbers.masked_fill(~is_seen[:, None, None], 0)

    def kv_heads(self) -> Tensor:
        """Return the KV head of each query head. [num_query_heads]"""
        return torch.arange(self.spec.num_query_heads) // (self.spec.num_query_heads // self.spec.num_kv_heads)

    def cap(self, scores: Tensor) -> Tensor:
        assert self.spec.soft_cap is not None
        return self.spec.soft_cap * torch.tanh(scores / self.spec.soft_cap)

    def with_sinks(self, denominator: Tensor, sinks: Tensor) -> Tensor:
        return torch.logaddexp(denominator, sinks.double()[:, None])

    def sees(self, query: Tensor, key: Tensor) -> Tensor:
        is_near = torch.full(torch.broadcast_shapes(query.shape, key.shape), True)
        if self.spec.window is not None:
            is_near &= self.is_in_window(query, key, self.spec.window)
        if self.spec.chunk is not None:
            is_near &= self.is_in_chunk(query, key, self.spec.chunk)
        return (key <= query) & (is_near | self.is_kept(key))

    def is_in_window(self, query: Tensor, key: Tensor, window: int) -> Tensor:
        return key > query - window

    def is_in_chunk(self, query: Tensor, key: Tensor, chunk: int) -> Tensor:
        return key >= query - query % chunk

    def is_kept(self, key: Tensor) -> Tensor:
        return key < self.spec.keep_first


class QuantisedEager(Eager):
    """The same for the quantised formats too: what is stored and what is read back is in methods of their own."""

    @classmethod
    def knows(cls, spec: AttentionSpec, name: str) -> bool:
        return getattr(spec, name) in (KV_FORMATS if name == "kv_dtype" else DTYPES)

    @property
    def format(self) -> KVFormat:
        return KV_FORMATS[self.spec.kv_dtype]

    def write(self, key: Tensor, value: Tensor | None, kv_cache: Any, slots: Tensor) -> None:
        if not self.format.is_quantised:
            return super().write(key, value, kv_cache, slots)
        vectors = key if value is None else torch.stack((key, value), dim=1)
        codes, scales = self.quantise(vectors)
        # Float8 as bytes: torch does not move all of it.
        self.store(codes.view(torch.uint8), _codes(kv_cache).view(torch.uint8), slots)
        if scales is not None:
            self.store_scales(scales, kv_cache.scales, slots)

    def store(self, numbers: Tensor, pages: Tensor, slots: Tensor) -> None:
        is_stored = self.is_stored(slots)
        block, offset = slots[is_stored] // self.spec.block_size, slots[is_stored] % self.spec.block_size
        if self.spec.value_is_key_prefix:
            pages[block, offset] = numbers[is_stored, 0]
        else:
            pages[block, :, offset] = numbers[is_stored]

    def store_scales(self, scales: Tensor, pages: Tensor, slots: Tensor) -> None:
        self.store(scales, pages, slots)

    def fetch(self, kv_cache: Any, table: Tensor, context_len: int) -> tuple[Tensor, Tensor]:
        if not self.format.is_quantised:
            return super().fetch(kv_cache, table, context_len)
        blocks = table[: -(-context_len // self.spec.block_size)].long()
        return super().fetch(self.numbers_at(kv_cache, blocks), torch.arange(len(blocks)), context_len)

    def gather(self, kv_cache: Any, slots: Tensor) -> Tensor:
        if not self.format.is_quantised:
            return super().gather(kv_cache, slots)
        dtype: torch.dtype = getattr(torch, self.spec.dtype)
        index = (slots // self.spec.block_size, slots % self.spec.block_size)
        return self.numbers_at(kv_cache, index).to(dtype)

    def numbers_at(self, kv_cache: Any, index: Any) -> Tensor:
        """Return the numbers of some blocks, or of some slots."""
        codes = _codes(kv_cache).view(torch.uint8)[index].view(self.format.torch_dtype)
        return self.dequantise(codes, kv_cache.scales[index] if self.format.has_page_scales else None)

    def quantise(self, vectors: Tensor) -> tuple[Tensor, Tensor | None]:
        return self.format.quantise(vectors)

    def dequantise(self, codes: Tensor, scales: Tensor | None) -> Tensor:
        return self.format.dequantise(codes, scales)


def _codes(kv_cache: Any) -> Tensor:
    codes: Tensor = kv_cache.codes if isinstance(kv_cache, ScaledPages) else kv_cache
    return codes
