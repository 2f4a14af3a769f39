"""The conformance suite on the device, a class for each backend and dtype. `suite.py` runs it, with a task."""

from __future__ import annotations

import inspect
from typing import Any

from gpu_check.chosen import choice_of
from gpu_check.suite import class_name
from gpu_check.workers import task
from octavo.plugins.families import ATTENTION_BACKENDS
from octavo.plugins.part import checked_options
from octavo.plugins.registry import scan
from octavo.testing import AttentionBackendSuite


def suite_class(backend: str, dtype: str, device: str) -> type[AttentionBackendSuite]:
    """Return the suite of a backend whose plain layer has a dtype."""
    choice = choice_of(backend)
    fields: dict[str, Any] = {
        "__module__": __name__,
        "backend": _asked_with(choice.name, choice.options) if choice.options else choice.name,
        "options": choice.options,
        "device": device,
        "plain": {"dtype": dtype, "kv_dtype": dtype},
        # One of the two that the suite takes by default: half the time.
        "seeds": (0,),
    }
    return type(class_name({"backend": backend, "dtype": dtype}), (AttentionBackendSuite,), fields)


def _asked_with(name: str, given: dict[str, Any]) -> type[Any]:
    """Return a backend that answers `cannot_serve` with its options in mind, as an engine asks it."""
    loaded: type[Any] = scan().load(ATTENTION_BACKENDS, name)
    if "options" not in inspect.signature(loaded.cannot_serve).parameters:
        return loaded
    options = checked_options(f"the attention backend {name}", loaded, given)

    def cannot_serve(cls: type[Any], spec: Any, options: Any = options) -> list[str]:
        answer: list[str] = super(asked, cls).cannot_serve(spec, options)
        return answer

    fields = {"contract_version": loaded.contract_version, "cannot_serve": classmethod(cannot_serve)}
    asked: type[Any] = type(loaded.__name__, (loaded,), fields)
    return asked


for suite in task()["suites"]:
    globals()[class_name(suite)] = suite_class(suite["backend"], suite["dtype"], task()["device"])
