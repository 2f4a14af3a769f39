"""The families of plugins: one row an extension point.

A family's entry-point group, and the folder or module with Octavo's own members, share a name.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """An extension point.

    Attributes:
        group: The entry-point group that packages register under.
        label: What one member is called in a sentence.
        setting: The config field that names one.
        contract_target: The class that members subclass, as "module:class"; None for a module of functions.
        factory: The method that makes an object, and that gets `options`.
    """

    group: str
    label: str
    setting: str
    contract_target: str | None
    factory: str = "__init__"

    @property
    def name(self) -> str:
        """The last word of the group, such as "request_queues"."""
        return self.group.rpartition(".")[2]

    def contract(self) -> type | None:
        """Import the class that members subclass. A listing does without, and so without numpy."""
        if self.contract_target is None:
            return None
        module, _, name = self.contract_target.partition(":")
        contract: type = getattr(importlib.import_module(module), name)
        return contract


_INTERFACES = "octavo.core.interfaces"

ATTENTION_BACKENDS = Family(
    "octavo.attention_backends", "attention backend", "attention_backend", f"{_INTERFACES}.attention:AttentionBackend"
)
KV_MANAGERS = Family(
    "octavo.kv_managers",
    "KV-cache manager",
    "kv_managers",
    f"{_INTERFACES}.kv_cache_manager:SingleTypeKVCacheManager",
)
REQUEST_QUEUES = Family(
    "octavo.request_queues", "request queue", "request_queue", f"{_INTERFACES}.request_queue:RequestQueue"
)
HASH_FUNCTIONS = Family(
    "octavo.hash_functions", "hash function", "hash_function", f"{_INTERFACES}.hash_function:HashFunction"
)
MODELS = Family("octavo.models", "model", "model_impl", f"{_INTERFACES}.model:Model", factory="from_checkpoint")
HOOKS = Family("octavo.hooks", "observer", "hooks", None)

FAMILIES = (ATTENTION_BACKENDS, KV_MANAGERS, REQUEST_QUEUES, HASH_FUNCTIONS, MODELS, HOOKS)
