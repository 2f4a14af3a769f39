"""Scales that belong to a layer, kept out of its backend: it stores and reads numbers as if there were none.

    key / k  ──► write                  attend(query * k) * v  =  attention to the keys and values themselves
    value / v ─►                        for (query * k) · (key / k) = query · key

So scores, and what follows from them (sinks, soft caps, the softmax's denominator), are what they would be.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.core.interfaces.attention import AttentionSpec
from octavo.core.interfaces.kv_format import KV_FORMATS
from octavo.core.interfaces.kv_scales import LayerScales


class StaticScales:
    """A layer's scales as tensors. Products and quotients are made in float32 and rounded once, to the given dtype.

    For int8, quotients are rounded to whole numbers instead, which are the codes: half precision has them all, but not
    the fractions between them, and a number rounded to the one and then to the other is often not the nearest. An
    fp8_e4m3 code of a number in half precision is rounded twice all the same, and is not the nearest one where the
    first rounding ends in the middle between two codes: with 3% of the numbers in bfloat16.

    Args:
        scales: The layer's.
        spec: Its attention.
        device: Where its keys and values are, as torch names it.
    """

    def __init__(self, scales: LayerScales, spec: AttentionSpec, device: str) -> None:
        value = scales.key if spec.value_is_key_prefix else scales.value
        self._codes_are_whole = KV_FORMATS[spec.kv_dtype].element == "int8"
        # [num_kv_heads or 1, 1]
        self._key, self._value = (
            torch.tensor(of_heads, dtype=torch.float32, device=device)[:, None] for of_heads in (scales.key, value)
        )
        # Query head h reads KV head h // group. [num_query_heads or 1, 1]
        group = spec.num_query_heads // spec.num_kv_heads
        self._query, self._output = (
            of_heads if len(of_heads) == 1 else of_heads.repeat_interleave(group, dim=0)
            for of_heads in (self._key, self._value)
        )

    def stored_key(self, key: Tensor) -> Tensor:
        """Return keys as they are to be written. [num_tokens, num_kv_heads, head_dim]"""
        return self._stored(key, self._key)

    def stored_value(self, value: Tensor | None) -> Tensor | None:
        """Return values as they are to be written. [num_tokens, num_kv_heads, head_dim_v]"""
        return None if value is None else self._stored(value, self._value)

    def query(self, query: Tensor) -> Tensor:
        """Return queries that give with stored keys the scores of these with the keys themselves."""
        return (query * self._query).to(query.dtype)

    def output(self, output: Tensor) -> Tensor:
        """Return sums of values, of sums of stored values. [num_tokens, num_query_heads, head_dim_v]"""
        return (output * self._output).to(output.dtype)

    def gathered(self, keys: Tensor) -> Tensor:
        """Return keys of one head as they were before they were stored. [num_keys, head_dim]"""
        return (keys * self._key).to(keys.dtype)

    def _stored(self, vectors: Tensor, scales: Tensor) -> Tensor:
        # A tensor of float32 beside one of half precision makes the quotient float32.
        quotients = vectors / scales
        return (quotients.round() if self._codes_are_whole else quotients).to(vectors.dtype)


def static_scales(scales: LayerScales | None, spec: AttentionSpec, device: str) -> StaticScales | None:
    """Return a layer's scales; None where there is nothing to scale."""
    return None if scales is None or scales.changes_nothing else StaticScales(scales, spec, device)
