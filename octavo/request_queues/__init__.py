"""Octavo's own request queues, each registered under `octavo.request_queues` like anybody's.

Each is imported when it is first used: one with options needs pydantic, and the others need nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.request_queues.fcfs import FCFSQueue
    from octavo.request_queues.priority import PriorityQueue

_HOMES = {"FCFSQueue": "octavo.request_queues.fcfs", "PriorityQueue": "octavo.request_queues.priority"}

__all__ = ["FCFSQueue", "PriorityQueue"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'octavo.request_queues' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
