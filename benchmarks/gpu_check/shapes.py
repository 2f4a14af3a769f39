"""The batches whose speed is measured, and the arithmetic of what they must read and compute."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpu_check.sizes import Sizes
from octavo.core.interfaces.attention import AttentionSpec
from octavo.core.interfaces.kv_format import DTYPE_BYTES, KV_FORMATS


@dataclass(frozen=True)
class Shape:
    """One step of one layer.

    Attributes:
        name: What it is called in a line.
        rows: New tokens and context of each row, those with one new token first.
        spec: The layer.
    """

    name: str
    rows: tuple[tuple[int, int], ...]
    spec: AttentionSpec

    @property
    def is_decode(self) -> bool:
        return all(num_queries == 1 for num_queries, _ in self.rows)

    @property
    def num_pairs(self) -> int:
        """Pairs of a query and a key that it sees, of all rows."""
        return sum(
            int(num_seen(self.spec, np.arange(context_len - num_queries, context_len)).sum())
            for num_queries, context_len in self.rows
        )

    @property
    def num_read_tokens(self) -> int:
        """Tokens whose keys and values some query sees, of all rows."""
        # What the first query of a row sees nothing of, the later ones see nothing of either.
        count = 0
        for num_queries, context_len in self.rows:
            first = first_near(self.spec, np.array([context_len - num_queries]))[0]
            count += context_len - int(first) + min(self.spec.keep_first, int(first))
        return count

    @property
    def read_bytes(self) -> int:
        """Bytes that have to pass between memory and processor: keys and values with their scales, queries, output.

        The block table, and what lies unused in pages, is left out.
        """
        spec, kv_format = self.spec, KV_FORMATS[self.spec.kv_dtype]
        num_vectors = 1 if spec.value_is_key_prefix else 2 * spec.num_kv_heads
        token_bytes = num_vectors * (spec.head_dim * kv_format.element_bytes + (4 if kv_format.has_page_scales else 0))
        num_tokens = sum(num_queries for num_queries, _ in self.rows)
        width = spec.num_query_heads * (spec.head_dim + spec.head_dim_v) * DTYPE_BYTES[spec.dtype]
        return self.num_read_tokens * token_bytes + num_tokens * width

    @property
    def flops(self) -> int:
        """Floating-point operations of the two products; a multiplication and an addition are two."""
        return 2 * self.num_pairs * self.spec.num_query_heads * (self.spec.head_dim + self.spec.head_dim_v)

    @property
    def num_blocks(self) -> int:
        """Blocks that the rows take, the null block counted in."""
        return 1 + sum(-(-context_len // self.spec.block_size) for _, context_len in self.rows)


def first_near(spec: AttentionSpec, positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the first key that window and chunk leave to queries at some positions. [num_queries]"""
    first = np.zeros_like(positions)
    if spec.window is not None:
        first = np.maximum(first, positions - spec.window + 1)
    if spec.chunk is not None:
        first = np.maximum(first, positions - positions % spec.chunk)
    return first


def num_seen(spec: AttentionSpec, positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return how many keys queries at some positions see. [num_queries]"""
    first = first_near(spec, positions)
    return positions - first + 1 + np.minimum(first, spec.keep_first)


# -- what is measured -------------------------------------------------------------------------------------------------


def decode_shapes(sizes: Sizes, device: str, block_size: int = 16) -> list[Shape]:
    """Return the decode batches, the most telling first."""
    rows = ((1, sizes.decode_context),) * sizes.decode_rows
    grouped = _spec(sizes.grouped, device, block_size)
    latent = _spec(sizes.latent, device, block_size)
    shapes = [Shape(_name(rows, grouped), rows, grouped), Shape(_name(rows, latent), rows, latent)]
    for kv_dtype in ("fp8_e4m3", "int8_per_token_head", "int8", "fp8_e4m3_per_token_head"):
        quantised = replace(grouped, kv_dtype=kv_dtype)
        shapes.append(Shape(_name(rows, quantised), rows, quantised))
    with_window = replace(grouped, window=sizes.window)
    return [*shapes, Shape(_name(rows, with_window), rows, with_window)]


def prefill_shapes(sizes: Sizes, device: str, block_size: int = 16) -> list[Shape]:
    """Return the prefill batches, the most telling first."""
    grouped = _spec(sizes.grouped, device, block_size)
    one = ((sizes.long_prompt, sizes.long_prompt),)
    several = ((sizes.prompt, sizes.prompt),) * sizes.prompts
    with_window = replace(grouped, window=sizes.window)
    return [
        Shape(_name(rows, spec), rows, spec) for rows, spec in ((one, grouped), (several, grouped), (one, with_window))
    ]


def _spec(fields: Mapping[str, Any], device: str, block_size: int) -> AttentionSpec:
    scale = fields["head_dim"] ** -0.5
    return AttentionSpec(
        **fields, scale=scale, block_size=block_size, dtype="bfloat16", kv_dtype="bfloat16", device=device
    )


def _name(rows: tuple[tuple[int, int], ...], spec: AttentionSpec) -> str:
    heads = f"{spec.num_query_heads}/{spec.num_kv_heads} heads of {spec.head_dim}"
    if spec.value_is_key_prefix:
        heads = f"MLA, {spec.num_query_heads} heads of {spec.head_dim}/{spec.head_dim_v}"
    window = "" if spec.window is None else f", window {spec.window}"
    kv_dtype = spec.kv_dtype if spec.kv_dtype != spec.dtype else spec.dtype
    return f"{len(rows)} x {rows[0][1]}, {heads}, {kv_dtype}{window}"
