"""Stores new tokens' keys and values in their slots, as they are, converted, or quantised."""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.attention_backends.triton.formats import decode, encode, round_to, scale_of


@triton.jit
def _store_vectors(
    source,
    pages,
    scales,
    is_stored,
    in_vectors,
    source_places,
    page_places,
    scale_places,
    FORMAT: tl.constexpr,
    HAS_SCALES: tl.constexpr,
):
    vectors = tl.load(source + source_places, mask=in_vectors, other=0.0)
    if FORMAT == "float":
        if vectors.dtype != pages.dtype.element_ty:
            vectors = round_to(decode(vectors, FORMAT, False, tl.float32), pages.dtype.element_ty)
    else:
        numbers = decode(vectors, "float", False, tl.float32)
        if HAS_SCALES:
            scale = scale_of(numbers, FORMAT)
            numbers = tl.div_rn(numbers, tl.broadcast_to(scale[:, None], numbers.shape))
            tl.store(scales + scale_places, scale, mask=is_stored)
        vectors = encode(numbers, FORMAT)
    tl.store(pages + page_places, vectors, mask=in_vectors)


@triton.jit(do_not_specialize=["num_vectors"])
def write_kernel(
    key,
    value,
    slots,
    keys,
    values,
    key_scales,
    value_scales,
    num_vectors,
    stride_key_token,
    stride_key_head,
    stride_value_token,
    stride_value_head,
    stride_page,
    stride_slot,
    stride_head,
    stride_page_scale,
    stride_slot_scale,
    stride_head_scale,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    FORMAT: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    HAS_VALUES: tl.constexpr,
):
    """Store BLOCK_V vectors, a vector being one KV head of one token. Grid: (blocks of vectors,).

    Args:
        key: [tokens, NUM_KV_HEADS, HEAD]
        value: As `key`; not read without HAS_VALUES.
        slots: Where each token goes, -1 for nowhere. [tokens]
        keys: First number of the first key of all pages; those of fp8 as uint8. Likewise the three after it.
        num_vectors: tokens * NUM_KV_HEADS.
    """
    vectors = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    tokens = (vectors // NUM_KV_HEADS).to(tl.int64)
    heads = (vectors % NUM_KV_HEADS).to(tl.int64)
    slot = tl.load(slots + tokens, mask=vectors < num_vectors, other=-1)
    is_stored = slot >= 0
    pages = slot // BLOCK_SIZE
    offsets = slot % BLOCK_SIZE
    dims = tl.arange(0, BLOCK_D)
    in_vectors = is_stored[:, None] & (dims < HEAD)[None, :]
    page_places = (pages * stride_page + offsets * stride_slot + heads * stride_head)[:, None] + dims[None, :]
    scale_places = pages * stride_page_scale + offsets * stride_slot_scale + heads * stride_head_scale
    _store_vectors(
        key,
        keys,
        key_scales,
        is_stored,
        in_vectors,
        (tokens * stride_key_token + heads * stride_key_head)[:, None] + dims[None, :],
        page_places,
        scale_places,
        FORMAT,
        HAS_SCALES,
    )
    if HAS_VALUES:
        _store_vectors(
            value,
            values,
            value_scales,
            is_stored,
            in_vectors,
            (tokens * stride_value_token + heads * stride_value_head)[:, None] + dims[None, :],
            page_places,
            scale_places,
            FORMAT,
            HAS_SCALES,
        )
