"""How numbers lie in a page: as they are, or quantised, with a scale for all of a layer or for each vector.

    kv_dtype                    a stored number           a stored vector's scale
    "float32", "bfloat16" ...   as torch has the type     none
    "fp8_e4m3", "int8"          one byte                  none in the page: what is stored was divided by the layer's
    "..._per_token_head"        one byte                  a float32 in the page, for each token and head

A page with scales holds all its codes, then, from the next multiple of four bytes on, all its scales in the same order:

    [2, block_size, num_kv_heads, head_dim] codes    0-3 bytes    [2, block_size, num_kv_heads] float32

with `value_is_key_prefix` [block_size, head_dim] and [block_size].
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# Bytes that a scale takes, and to whose multiple the first one is moved.
SCALE_BYTES = 4
# The code that stands for NaN in int8; those of numbers are -127 to 127.
INT8_NAN = -128


@dataclass(frozen=True)
class ScaledPages:
    """A layer's bytes as codes and scales: vector v is codes[v] * scales[v].

    Attributes:
        codes: [num_blocks, *shape], `shape` being a page's as `kv_cache_shape` says.
        scales: float32. [num_blocks, *shape[:-1]]
    """

    codes: Tensor
    scales: Tensor


@dataclass(frozen=True)
class KVFormat:
    """What a `kv_dtype` stands for.

    Attributes:
        name: The `kv_dtype`.
        element: Type of a stored number, as torch names it.
        element_bytes: Its size.
        largest: The largest magnitude of a code; None where numbers are stored as they are.
        has_page_scales: Whether each stored vector has a scale of its own, in the page.
    """

    name: str
    element: str
    element_bytes: int
    largest: float | None = None
    has_page_scales: bool = False

    @property
    def is_quantised(self) -> bool:
        return self.largest is not None

    @property
    def torch_dtype(self) -> torch.dtype:
        import torch

        dtype: torch.dtype = getattr(torch, self.element)
        return dtype

    def scales_offset(self, num_vectors: int, head_dim: int) -> int:
        """Return the byte of a page at which its scales begin."""
        return -(-num_vectors * head_dim * self.element_bytes // SCALE_BYTES) * SCALE_BYTES

    def page_bytes(self, num_vectors: int, head_dim: int) -> int:
        """Return what a page takes.

        Args:
            num_vectors: Keys and values in it, of all tokens and heads.
            head_dim: Numbers in one.
        """
        if not self.has_page_scales:
            return num_vectors * head_dim * self.element_bytes
        return self.scales_offset(num_vectors, head_dim) + num_vectors * SCALE_BYTES

    def view_pages(self, rows: Tensor, shape: tuple[int, ...]) -> Tensor | ScaledPages:
        """View a layer's bytes as numbers, or as codes and scales. Nothing is copied.

        Args:
            rows: uint8, whose stride and offset are multiples of the element's size, and of SCALE_BYTES where there are
                scales. [num_blocks, >= page_bytes]
            shape: Of one page, as `kv_cache_shape` says.
        """
        import torch

        num_vectors, head_dim = math.prod(shape[:-1]), shape[-1]
        num_bytes = num_vectors * head_dim * self.element_bytes
        numbers = torch.unflatten(rows[:, :num_bytes].view(self.torch_dtype), 1, shape)
        if not self.has_page_scales:
            return numbers
        offset = self.scales_offset(num_vectors, head_dim)
        scales = rows[:, offset : offset + num_vectors * SCALE_BYTES].view(torch.float32)
        return ScaledPages(numbers, torch.unflatten(scales, 1, shape[:-1]))

    def quantise(self, vectors: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return codes and scales of vectors, for a quantised format.

        A scale is the vector's largest magnitude over `largest`, in float32, and at least the smallest normal number. A
        code is the number over its scale, rounded to the nearest, ties to even, and cut off at `largest`. NaN stays
        NaN: as a code, and where each vector has a scale, as that, so that one NaN makes the whole vector NaN. So does
        an infinite number there; elsewhere it is cut off like any other.

        Args:
            vectors: [..., head_dim]

        Returns:
            Codes as `vectors`, in the element's type, and float32 scales, [...]; None where the page has none.
        """
        import torch

        if self.largest is None:
            raise ValueError(f"{self.name} is stored as it is; there is nothing to quantise.")
        numbers, scales = vectors.float(), None
        if self.has_page_scales:
            smallest = torch.finfo(torch.float32).tiny
            scales = (numbers.abs().amax(dim=-1) / self.largest).clamp(min=smallest)
            numbers = numbers / scales[..., None]
        numbers = numbers.clamp(-self.largest, self.largest)
        if self.element == "int8":
            numbers = numbers.round().nan_to_num(nan=INT8_NAN)
        return numbers.to(self.torch_dtype), scales

    def dequantise(self, codes: Tensor, scales: Tensor | None) -> Tensor:
        """Return what codes stand for, float32. The reverse of `quantise`.

        Args:
            codes: [..., head_dim]
            scales: [...]; None where the page has none.
        """
        numbers = codes.float()
        if self.element == "int8":
            numbers = numbers.masked_fill(codes == INT8_NAN, math.nan)
        return numbers if scales is None else numbers * scales[..., None]


# What `kv_dtype` may be, by its name.
KV_FORMATS = MappingProxyType(
    {
        kv_format.name: kv_format
        for kv_format in (
            KVFormat("float32", "float32", 4),
            KVFormat("float16", "float16", 2),
            KVFormat("bfloat16", "bfloat16", 2),
            KVFormat("float64", "float64", 8),
            # 448 is the largest number of e4m3; it has no infinity.
            KVFormat("fp8_e4m3", "float8_e4m3fn", 1, 448.0),
            KVFormat("int8", "int8", 1, 127.0),
            KVFormat("fp8_e4m3_per_token_head", "float8_e4m3fn", 1, 448.0, has_page_scales=True),
            KVFormat("int8_per_token_head", "int8", 1, 127.0, has_page_scales=True),
        )
    }
)
# Bytes of one number of those that are stored as they are, by the name torch gives the dtype.
DTYPE_BYTES = MappingProxyType({f.name: f.element_bytes for f in KV_FORMATS.values() if not f.is_quantised})
