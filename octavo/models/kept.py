"""What a layer keeps in the KV cache, told from what its queries read."""

from octavo.core.interfaces.attention import AttentionSpec
from octavo.core.interfaces.kv_cache_spec import ChunkedLocalSpec, FullAttentionSpec, KVCacheSpec, SlidingWindowSpec


def kept_by(attention: AttentionSpec) -> KVCacheSpec:
    """Return what a layer with keys and values keeps: what it reads, or all where that is no single window or chunk.

    All is always right to keep. Values are stored at the size of keys.
    """
    page = attention.block_size, attention.num_kv_heads, attention.head_dim, attention.kv_dtype
    if attention.keep_first:
        return FullAttentionSpec(*page)
    match attention.window, attention.chunk:
        case int(window), None:
            return SlidingWindowSpec(*page, window)
        case None, int(chunk):
            return ChunkedLocalSpec(*page, chunk)
    return FullAttentionSpec(*page)
