"""What a layer keeps follows from what it reads."""

import pytest

from octavo.core.interfaces import AttentionSpec, ChunkedLocalSpec, FullAttentionSpec, SlidingWindowSpec
from octavo.models.kept import kept_by

PAGE = (4, 2, 8, "float16")


@pytest.mark.parametrize(
    ("read", "kept"),
    [
        ({}, FullAttentionSpec(*PAGE)),
        ({"window": 5}, SlidingWindowSpec(*PAGE, 5)),
        ({"chunk": 12}, ChunkedLocalSpec(*PAGE, 12)),
        # No manager gives back what neither of two rules reads.
        ({"window": 5, "chunk": 12}, FullAttentionSpec(*PAGE)),
        ({"window": 5, "keep_first": 1}, FullAttentionSpec(*PAGE)),
        ({"soft_cap": 2.0, "sinks": True}, FullAttentionSpec(*PAGE)),
    ],
)
def test_a_layer_keeps_what_its_only_window_or_chunk_reads_and_else_everything(read, kept):
    attention = AttentionSpec(
        num_query_heads=4,
        num_kv_heads=2,
        head_dim=8,
        head_dim_v=8,
        scale=1.0,
        block_size=4,
        dtype="float32",
        kv_dtype="float16",
        device="cpu",
        **read,
    )
    assert kept_by(attention) == kept
