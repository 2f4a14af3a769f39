"""Octavo: a paged-KV inference engine for large language models whose parts are plugins.

Names are imported when they are first used, so that `import octavo` costs next to nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.config import CacheConfig, EngineConfig, PluginChoice, SchedulerConfig
    from octavo.core.outputs import CompletionOutput, RequestOutput, TokenLogprobs
    from octavo.core.sampling_params import SamplingParams
    from octavo.llm import LLM
    from octavo.plugins.hookspecs import hookimpl

__version__ = "0.1.0"

_HOMES = {
    "LLM": "octavo.llm",
    "SamplingParams": "octavo.core.sampling_params",
    "EngineConfig": "octavo.config",
    "CacheConfig": "octavo.config",
    "SchedulerConfig": "octavo.config",
    "PluginChoice": "octavo.config",
    "RequestOutput": "octavo.core.outputs",
    "CompletionOutput": "octavo.core.outputs",
    "TokenLogprobs": "octavo.core.outputs",
    "hookimpl": "octavo.plugins.hookspecs",
}

__all__ = [
    "LLM",
    "CacheConfig",
    "CompletionOutput",
    "EngineConfig",
    "PluginChoice",
    "RequestOutput",
    "SamplingParams",
    "SchedulerConfig",
    "TokenLogprobs",
    "__version__",
    "hookimpl",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'octavo' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
