"""The families of plugins: one row an extension point.

A family's entry-point group, and the folder or module with Octavo's own members, share a name.
"""

from dataclasses import dataclass

from octavo.core.interfaces import AttentionBackend, HashFunction, Model, RequestQueue, SingleTypeKVCacheManager


@dataclass(frozen=True)
class Family:
    """An extension point.

    Attributes:
        group: The entry-point group that packages register under.
        label: What one member is called in a sentence.
        contract: The class that members subclass.
    """

    group: str
    label: str
    contract: type


ATTENTION_BACKENDS = Family("octavo.attention_backends", "attention backend", AttentionBackend)
KV_MANAGERS = Family("octavo.kv_managers", "KV-cache manager", SingleTypeKVCacheManager)
REQUEST_QUEUES = Family("octavo.request_queues", "request queue", RequestQueue)
HASH_FUNCTIONS = Family("octavo.hash_functions", "hash function", HashFunction)
MODELS = Family("octavo.models", "model", Model)

FAMILIES = (ATTENTION_BACKENDS, KV_MANAGERS, REQUEST_QUEUES, HASH_FUNCTIONS, MODELS)
