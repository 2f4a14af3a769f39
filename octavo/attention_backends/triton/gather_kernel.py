"""Fetches stored keys out of their pages, dequantised: the reverse of the write, for MLA."""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.attention_backends.triton.formats import decode, round_to


@triton.jit(do_not_specialize=["num_keys"])
def gather_kernel(
    slots,
    keys,
    key_scales,
    output,
    num_keys,
    stride_page,
    stride_slot,
    stride_page_scale,
    stride_slot_scale,
    BLOCK_SIZE: tl.constexpr,
    HEAD: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    FORMAT: tl.constexpr,
    HAS_SCALES: tl.constexpr,
):
    """Fetch BLOCK_V keys. Grid: (blocks of keys,).

    Args:
        slots: Where each key is. [num_keys]
        keys: First number of the first key of all pages; those of fp8 as uint8.
        key_scales: Likewise, with HAS_SCALES.
        output: [num_keys, HEAD]
    """
    vectors = (tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)).to(tl.int64)
    is_key = vectors < num_keys
    slot = tl.load(slots + vectors, mask=is_key, other=0)
    dims = tl.arange(0, BLOCK_D)
    in_output = is_key[:, None] & (dims < HEAD)[None, :]
    places = slot // BLOCK_SIZE * stride_page + slot % BLOCK_SIZE * stride_slot
    numbers = tl.load(keys + places[:, None] + dims[None, :], mask=in_output, other=0)
    if FORMAT != "float" or numbers.dtype != output.dtype.element_ty:
        numbers = decode(numbers, FORMAT, False, tl.float32)
        if HAS_SCALES:
            scale_places = slot // BLOCK_SIZE * stride_page_scale + slot % BLOCK_SIZE * stride_slot_scale
            numbers = numbers * tl.load(key_scales + scale_places, mask=is_key, other=0.0)[:, None]
        numbers = round_to(numbers, output.dtype.element_ty)
    tl.store(output + vectors[:, None] * HEAD + dims[None, :], numbers, mask=in_output)
