"""Joins what the splits of decode rows found: the second step of split-KV decode."""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.attention_backends.triton.formats import loop_bound, round_to

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit(do_not_specialize=["num_vectors", "num_splits"])
def join_splits_kernel(
    partial_output,
    partial_lse,
    output,
    lse,
    num_vectors,
    num_splits,
    HEAD: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    HAS_LSE: tl.constexpr,
):
    """Weigh each split's output by its share of the softmax's denominator. Grid: (blocks of vectors,).

    A vector is a token's query head.

    Args:
        partial_output: float32. [num_splits, num_vectors, HEAD]
        partial_lse: float32, natural; -inf where a split saw nothing. [num_splits, num_vectors]
        output: [num_vectors, HEAD]
        lse: float32. [num_vectors]
    """
    vectors = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    is_vector = vectors < num_vectors
    dims = tl.arange(0, BLOCK_D)
    in_output = is_vector[:, None] & (dims < HEAD)[None, :]
    acc = tl.full([BLOCK_V, BLOCK_D], 0.0, tl.float32)
    highest = tl.full([BLOCK_V], float("-inf"), tl.float32)
    total = tl.full([BLOCK_V], 0.0, tl.float32)
    for split in range(loop_bound(num_splits)):
        lines = (split * num_vectors + vectors).to(tl.int64)
        share = tl.load(partial_lse + lines, mask=is_vector, other=float("-inf")) * LOG2_E
        new_highest = tl.maximum(highest, share)
        base = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        weight = tl.exp2(share - base)
        shrink = tl.exp2(highest - base)
        highest = new_highest
        total = total * shrink + weight
        part = tl.load(partial_output + lines[:, None] * HEAD + dims[None, :], mask=in_output, other=0.0)
        acc = acc * shrink[:, None] + part * weight[:, None]
    saw_nothing = total == 0.0
    acc = acc / tl.where(saw_nothing, 1.0, total)[:, None]
    places = vectors.to(tl.int64)[:, None] * HEAD + dims[None, :]
    tl.store(output + places, round_to(acc, output.dtype.element_ty), mask=in_output)
    if HAS_LSE:
        tl.store(lse + vectors, tl.where(saw_nothing, float("-inf"), (highest + tl.log2(total)) * LN_2), mask=is_vector)
