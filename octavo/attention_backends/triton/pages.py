"""A layer's part of the KV cache, as the kernels address it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.core.interfaces.attention import AttentionSpec
from octavo.core.interfaces.kv_cache_spec import KVCacheSpec
from octavo.core.interfaces.kv_format import KV_FORMATS, SCALE_BYTES, ScaledPages
from octavo.errors import ConfigError


@dataclass(frozen=True)
class BoundPages:
    """Views of a layer's bytes, and how far apart things lie in them, in elements.

    Codes of fp8 are viewed as uint8: kernels turn them into numbers themselves.

    Attributes:
        keys: [num_blocks, block_size, num_kv_heads, head_dim]
        values: As `keys`; None with `value_is_key_prefix`.
        key_scales: float32; None where pages hold no scales. [num_blocks, block_size, num_kv_heads]
        value_scales: Likewise.
        strides: Of a page, a slot and a head, in `keys` and in `values`.
        scale_strides: Of the same, in the scales; zeros where there are none.
    """

    keys: Tensor
    values: Tensor | None
    key_scales: Tensor | None
    value_scales: Tensor | None
    strides: tuple[int, int, int]
    scale_strides: tuple[int, int, int]


def bind_pages(rows: Tensor, spec: AttentionSpec, kept: KVCacheSpec, shape: tuple[int, ...]) -> BoundPages:
    """View a layer's bytes as pages of `shape`. Nothing is copied.

    Args:
        rows: One row a block, uint8. [num_blocks, >= kept.page_bytes]
        kept: What the layer keeps.
        shape: [2, block_size, num_kv_heads, head_dim], or [block_size, head_dim] with `value_is_key_prefix`.

    Raises:
        ConfigError: The bytes cannot be viewed so.
    """
    kv_format = KV_FORMATS[spec.kv_dtype]
    layout_bytes = kv_format.page_bytes(math.prod(shape[:-1]), shape[-1])
    if rows.dtype != torch.uint8 or rows.dim() != 2:
        raise ConfigError(f"triton binds a matrix of uint8, not {rows.dim()} dimensions of {rows.dtype}.")
    if kept.block_size != spec.block_size:
        raise ConfigError(
            f"The KV-cache spec has blocks of {kept.block_size} tokens and the attention blocks of {spec.block_size}. "
            "Give both the same block_size."
        )
    if kept.page_bytes < layout_bytes or rows.shape[1] < layout_bytes:
        raise ConfigError(
            f"A block of this layer takes {layout_bytes} bytes; the KV-cache spec's page has {kept.page_bytes} "
            f"and the rows have {rows.shape[1]}. Heads, head_dim or dtype of the two specs differ."
        )
    unit = max(kv_format.element_bytes, SCALE_BYTES if kv_format.has_page_scales else 1)
    if rows.stride(1) != 1 or rows.stride(0) % unit or rows.storage_offset() % unit:
        raise ConfigError(
            f"Rows with strides {rows.stride()} from byte {rows.storage_offset()} on cannot be viewed as "
            f"{spec.kv_dtype}. Let them start at multiples of {unit} bytes, their bytes in a row."
        )
    pages = kv_format.view_pages(rows, shape)
    if isinstance(pages, ScaledPages):
        keys, values = _split(pages.codes, spec)
        key_scales, value_scales = _split(pages.scales, spec)
        return BoundPages(keys, values, key_scales, value_scales, _strides(keys), _strides(key_scales))
    keys, values = _split(pages, spec)
    return BoundPages(keys, values, None, None, _strides(keys), (0, 0, 0))


def _split(pages: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor | None]:
    """Return views of keys and of values, each [num_blocks, block_size, num_kv_heads, ...]."""
    if pages.dtype == torch.float8_e4m3fn:
        pages = pages.view(torch.uint8)
    if spec.value_is_key_prefix:
        return pages.unsqueeze(2), None
    return pages[:, 0], pages[:, 1]


def _strides(pages: Tensor) -> tuple[int, int, int]:
    return (pages.stride(0), pages.stride(1), pages.stride(2))
