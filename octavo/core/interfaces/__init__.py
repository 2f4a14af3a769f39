"""The contracts that plugin authors import. Nothing here imports torch."""

from octavo.core.interfaces.attention import AttentionBackend, AttentionBatch, AttentionSpec
from octavo.core.interfaces.hash_function import Encoding, HashFunction
from octavo.core.interfaces.kv_cache_manager import BlockSource, SingleTypeKVCacheManager
from octavo.core.interfaces.kv_cache_spec import (
    ChunkedLocalSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MLASpec,
    SlidingWindowSpec,
)
from octavo.core.interfaces.kv_format import KV_FORMATS, KVFormat, ScaledPages
from octavo.core.interfaces.model import Checkpoint, ForwardBatch, LatentProjection, Model, ModelSpec, Tokenizer
from octavo.core.interfaces.request_queue import QueuedRequest, RequestQueue
from octavo.core.interfaces.version import CONTRACT_VERSION

__all__ = [
    "CONTRACT_VERSION",
    "KV_FORMATS",
    "AttentionBackend",
    "AttentionBatch",
    "AttentionSpec",
    "BlockSource",
    "Checkpoint",
    "ChunkedLocalSpec",
    "Encoding",
    "ForwardBatch",
    "FullAttentionSpec",
    "HashFunction",
    "KVCacheSpec",
    "KVFormat",
    "LatentProjection",
    "MLASpec",
    "Model",
    "ModelSpec",
    "QueuedRequest",
    "RequestQueue",
    "ScaledPages",
    "SingleTypeKVCacheManager",
    "SlidingWindowSpec",
    "Tokenizer",
]
