"""Attention by its definition, in float64: who sees whom, and what comes of it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from octavo.core.interfaces.attention import AttentionSpec
from octavo.testing.attention.stored_numbers import Floats

Ints = NDArray[np.int64]


def sees(spec: AttentionSpec, query_positions: Ints, key_positions: Ints) -> NDArray[np.bool_]:
    """Return whether each query reads each key, word for word as `AttentionSpec` says.

    Args:
        query_positions: [num_queries]
        key_positions: [num_keys]

    Returns:
        [num_queries, num_keys]
    """
    p, j = query_positions[:, None], key_positions[None, :]
    is_near = np.full((len(query_positions), len(key_positions)), True)
    if spec.window is not None:
        is_near &= j > p - spec.window
    if spec.chunk is not None:
        is_near &= j >= p - p % spec.chunk
    return (j <= p) & (is_near | (j < spec.keep_first))


def attend_by_definition(
    spec: AttentionSpec, queries: Floats, keys: Floats, values: Floats, sinks: Floats | None = None
) -> tuple[Floats, Floats]:
    """Attend from the last positions of one row to its whole history.

    Args:
        queries: Of the row's last tokens. [num_queries, num_query_heads, head_dim]
        keys: Of all the row's tokens. [context_len, num_kv_heads, head_dim]
        values: [context_len, num_kv_heads, head_dim_v]
        sinks: One logit a query head. [num_query_heads]

    Returns:
        Output, [num_queries, num_query_heads, head_dim_v], and natural log-sum-exp of the scores, sinks included,
        [num_queries, num_query_heads].
    """
    num_queries, context_len = len(queries), len(keys)
    group_size = spec.num_query_heads // spec.num_kv_heads
    output = np.zeros((num_queries, spec.num_query_heads, spec.head_dim_v))
    lse = np.full((num_queries, spec.num_query_heads), -np.inf)
    if not num_queries:
        return output, lse
    is_seen = sees(spec, np.arange(context_len - num_queries, context_len), np.arange(context_len))
    for head in range(spec.num_query_heads):
        kv_head = head // group_size
        scores = queries[:, head] @ keys[:, kv_head].T * spec.scale
        if spec.soft_cap is not None:
            scores = spec.soft_cap * np.tanh(scores / spec.soft_cap)
        scores[~is_seen] = -np.inf
        highest = scores.max(axis=1, keepdims=True)
        if sinks is not None:
            highest = np.maximum(highest, sinks[head])
        weights = np.exp(scores - highest)
        denominator = weights.sum(axis=1, keepdims=True)
        if sinks is not None:
            denominator += np.exp(sinks[head] - highest)
        lse[:, head] = (highest + np.log(denominator))[:, 0]
        output[:, head] = weights / denominator @ values[:, kv_head]
    return output, lse
