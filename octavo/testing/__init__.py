"""What tests are made of: conformance suites, tiny models, a scripted model, fakes. For ours and for plugin authors'.

The suites hold a part to its contract, in three lines of a test file:

    from octavo.testing import AttentionBackendSuite

    class TestMine(AttentionBackendSuite):
        backend = "mine"

Names are imported when they are first used, so that importing this package needs neither torch nor pytest.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.testing.attention.suite import AttentionBackendSuite
    from octavo.testing.hash_suite import HashFunctionSuite
    from octavo.testing.kv_manager.suite import KVCacheManagerSuite
    from octavo.testing.queue_suite import RequestQueueSuite
    from octavo.testing.trial_package import installed

_HOMES = {
    "AttentionBackendSuite": "octavo.testing.attention.suite",
    "HashFunctionSuite": "octavo.testing.hash_suite",
    "KVCacheManagerSuite": "octavo.testing.kv_manager.suite",
    "RequestQueueSuite": "octavo.testing.queue_suite",
    "installed": "octavo.testing.trial_package",
}

__all__ = ["AttentionBackendSuite", "HashFunctionSuite", "KVCacheManagerSuite", "RequestQueueSuite", "installed"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'octavo.testing' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
