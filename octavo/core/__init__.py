"""The engine: token ids in, token ids out. No tokenizer, and no torch in the scheduler and the KV cache."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.core.block_pool import BlockPool
    from octavo.core.engine_core import EngineCore
    from octavo.core.kv_cache_coordinator import KVCacheCoordinator
    from octavo.core.kv_cache_manager import KVCacheManager
    from octavo.core.scheduler import Scheduler

_HOMES = {
    "BlockPool": "octavo.core.block_pool",
    "EngineCore": "octavo.core.engine_core",
    "KVCacheCoordinator": "octavo.core.kv_cache_coordinator",
    "KVCacheManager": "octavo.core.kv_cache_manager",
    "Scheduler": "octavo.core.scheduler",
}

__all__ = ["BlockPool", "EngineCore", "KVCacheCoordinator", "KVCacheManager", "Scheduler"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'octavo.core' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
