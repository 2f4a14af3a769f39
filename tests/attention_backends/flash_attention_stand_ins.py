"""FlashAttention's functions in plain torch, for machines without a GPU: what they take, refuse and mean.

Each has the signature of the real one, and raises where that would, or where it would silently compute something else.
What a query sees is in the docstrings of the flash-attention project: query i of a row reads the keys from
i + keys - queries - left to i + keys - queries + right, both included, and -1 stands for no limit.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.attention.varlen import AuxRequest
from torch.utils._python_dispatch import _disable_current_modes


@dataclass(frozen=True)
class Kernel:
    """What a kernel loads besides the keys that a query sees, all of it multiplied by 0.

    Attributes:
        tile: Keys that are loaded at a time; None for what is seen alone.
        loads_behind: Whether slots behind the context are loaded, as far as its last page goes. FlashAttention 2 puts
            zeros in their place; torch's own tests fill them with NaN for that one and not for FlashAttention 3.
    """

    tile: int | None = None
    loads_behind: bool = False


# The kernel that the functions run. What its numbers may be: the real ones take no float32, which is here to compare.
kernel = Kernel()
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
calls: list[str] = []


@contextmanager
def loading(**settings: object):
    """Make the kernel load more than what is seen."""
    global kernel
    before, kernel = kernel, replace(kernel, **settings)
    try:
        yield
    finally:
        kernel = before


def varlen_attn(
    query,
    key,
    value,
    cu_seq_q,
    cu_seq_k,
    max_q,
    max_k,
    *,
    return_aux=None,
    scale=None,
    window_size=(-1, -1),
    enable_gqa=False,
    seqused_k=None,
    block_table=None,
    num_splits=None,
):
    """torch.nn.attention.varlen.varlen_attn of torch 2.13: with a block table as FlashAttention 3, else as 2."""
    is_paged = block_table is not None
    calls.append("torch, paged" if is_paged else "torch, copied")
    num_heads_k = key.size(2) if is_paged else key.size(1)
    require(enable_gqa or query.size(1) == num_heads_k, "heads are grouped, and enable_gqa is off")
    require(not is_paged or seqused_k is not None, "block_table needs seqused_k")
    require(not is_paged or cu_seq_k is None, "If cu_seqlens_k is passed in, then page table is not supported")
    require(is_paged or cu_seq_k is not None, "FlashAttention 2 needs cu_seq_k")
    require(isinstance(window_size, tuple), "window_size is compared with a tuple")
    if not is_paged:
        # Decode with grouped heads: they take the place of positions, row by row.
        is_swapped = max_q == 1 and query.size(1) > num_heads_k and window_size == (-1, -1)
        require(not is_swapped or len(query) == len(cu_seq_q) - 1, "each row must have one query, for q is reshaped")
    output, lse = run(
        query,
        key,
        value,
        cu_seq_q,
        lens_of(cu_seq_k) if seqused_k is None else seqused_k,
        key_starts=cu_seq_k,
        block_table=block_table,
        max_queries=max_q,
        max_keys=max_k,
        scale=scale,
        window=window_size,
    )
    return (output, lse) if return_aux == AuxRequest(lse=True) else output


def flash_attn_with_kvcache(
    q,
    k_cache,
    v_cache,
    *,
    cache_seqlens,
    page_table,
    cu_seqlens_q,
    max_seqlen_q,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    return_softmax_lse=False,
):
    """flash_attn_interface.flash_attn_with_kvcache (FlashAttention 3), of its arguments those that serve here."""
    calls.append("flash_attn_3")
    output, lse = run(
        q,
        k_cache,
        v_cache,
        cu_seqlens_q,
        cache_seqlens,
        block_table=page_table,
        max_queries=max_seqlen_q,
        max_keys=page_table.shape[1] * k_cache.shape[1],
        scale=softmax_scale,
        window=(window_size[0], 0) if causal else window_size,
        soft_cap=softcap,
    )
    return (output, lse) if return_softmax_lse else output


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
):
    """flash_attn.flash_attn_varlen_func of flash-attn 2.8."""
    calls.append("flash_attn")
    require(block_table is not None, "only paged calls are made")
    require(k.shape[1] % 256 == 0, "Paged KV cache block size must be divisible by 256")
    is_swapped = max_seqlen_q == 1 and q.shape[1] > k.shape[2] and window_size == (-1, -1)
    require(not is_swapped or len(q) == len(cu_seqlens_q) - 1, "each row must have one query, for q is reshaped")
    output, lse = run(
        q,
        k,
        v,
        cu_seqlens_q,
        lens_of(cu_seqlens_k),
        key_starts=cu_seqlens_k,
        block_table=block_table,
        max_queries=max_seqlen_q,
        max_keys=max_seqlen_k,
        scale=softmax_scale,
        window=(window_size[0], 0) if causal else window_size,
        soft_cap=softcap,
    )
    return (output, lse, None) if return_attn_probs else output


def require(is_right: bool, sentence: str) -> None:
    if not is_right:
        raise RuntimeError(sentence)


def lens_of(starts: Tensor) -> Tensor:
    return starts.diff()


def run(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    query_starts: Tensor,
    key_lens: Tensor,
    *,
    max_queries: int,
    max_keys: int,
    scale: float | None,
    window: tuple[int, int],
    key_starts: Tensor | None = None,
    block_table: Tensor | None = None,
    soft_cap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Check what all kernels check, and attend row by row. The log-sum-exp is [num_query_heads, num_tokens]."""
    # What a kernel reads it reads on the device, so that whoever watches torch's operators sees nothing of it.
    with _disable_current_modes():
        return run_unseen(
            query,
            keys,
            values,
            query_starts,
            key_lens,
            max_queries,
            max_keys,
            scale,
            window,
            key_starts,
            block_table,
            soft_cap,
        )


def run_unseen(
    query, keys, values, query_starts, key_lens, max_queries, max_keys, scale, window, key_starts, block_table, soft_cap
):
    num_rows = len(query_starts) - 1
    check(query, keys, values, query_starts, key_lens, key_starts, block_table)
    require(num_rows > 0, "batch size must be positive")
    require(type(max_queries) is int and type(max_keys) is int, "bounds are numbers on the host")
    require(int(query_starts.diff().max()) <= max_queries, "a row has more queries than max_q, and would lose some")
    require(int(key_lens.max()) <= max_keys, "a row has more keys than max_k")
    output = torch.full_like(query, math.nan)
    lse = query.new_full((query.shape[1], len(query)), math.nan, dtype=torch.float32)
    for row in range(num_rows):
        start, end, num_keys = int(query_starts[row]), int(query_starts[row + 1]), int(key_lens[row])
        if block_table is None:
            first = int(key_starts[row])
            stored = [part[first : first + num_keys] for part in (keys, values)]
        else:
            pages = block_table[row, : -(-num_keys // keys.shape[1])].long()
            stored = [part[pages].flatten(0, 1) for part in (keys, values)]
        row_output, row_lse = attend_row(query[start:end], *stored, num_keys, scale, window, soft_cap)
        output[start:end], lse[:, start:end] = row_output, row_lse
    return output, lse


def check(query, keys, values, query_starts, key_lens, key_starts, block_table) -> None:
    num_rows, head_dim = len(query_starts) - 1, query.shape[2]
    require(query.dtype in DTYPES, "FlashAttention only support fp16 and bf16 data type")
    require(keys.dtype == values.dtype == query.dtype, "query, key and value must have the same dtype")
    require(all(part.stride(-1) == 1 for part in (query, keys, values)), "last dimension must be contiguous")
    require(head_dim % 8 == 0 and head_dim <= 256, "head size must be a multiple of 8, and at most 256")
    require(query.dim() == 3 and query.shape[1] % keys.shape[-2] == 0, "query heads must be a multiple of KV heads")
    require(keys.shape == values.shape and keys.shape[-1] == head_dim, "keys and values must have the same shape")
    require(keys.dim() == (3 if block_table is None else 4), "keys have the wrong number of dimensions")
    for offsets, length in ((query_starts, num_rows + 1), (key_starts, num_rows + 1), (key_lens, num_rows)):
        if offsets is not None:
            require(offsets.dtype == torch.int32 and offsets.is_contiguous(), "offsets and lengths must be int32")
            require(offsets.shape == (length,), "offsets or lengths have the wrong shape")
    if block_table is not None:
        require(block_table.dtype == torch.int32 and block_table.stride(-1) == 1, "block_table must be int32, in rows")
        require(block_table.dim() == 2 and len(block_table) == num_rows, "block_table must have a row for each request")


def attend_row(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    num_keys: int,
    scale: float | None,
    window: tuple[int, int],
    soft_cap: float,
) -> tuple[Tensor, Tensor]:
    """Attend from one row's queries, [num_queries, heads, head_dim], to its slots, of which the first ones are keys."""
    num_queries, num_heads = query.shape[:2]
    if not num_keys:
        return torch.zeros_like(query), query.new_full((num_heads, num_queries), math.inf, dtype=torch.float32)
    own = torch.arange(num_queries)[:, None] + num_keys - num_queries
    slot = torch.arange(len(keys))
    left, right = (math.inf if size < 0 else size for size in window)
    is_seen = (slot >= own - left) & (slot <= own + right) & (slot < num_keys)
    is_loaded = loaded(is_seen, num_keys)
    group = num_heads // keys.shape[1]
    keys = keys.double().masked_fill(~is_loaded[:, None, None], 0).repeat_interleave(group, dim=1)
    values = values.double().masked_fill(~is_loaded[:, None, None], 0).repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", query.double(), keys) * (query.shape[2] ** -0.5 if scale is None else scale)
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    scores = scores.masked_fill(~is_seen, -math.inf)
    output = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
    return output.to(query.dtype), scores.logsumexp(-1).float()


def loaded(is_seen: Tensor, num_keys: int) -> Tensor:
    """Return which slots a kernel loads, and so multiplies. [num_slots]"""
    is_loaded = is_seen.any(0) if len(is_seen) else torch.zeros(is_seen.shape[1], dtype=torch.bool)
    if kernel.tile is not None and is_loaded.any():
        first = int(is_loaded.nonzero()[0]) // kernel.tile * kernel.tile
        is_loaded[first : len(is_loaded) if kernel.loads_behind else num_keys] = True
    return is_loaded
