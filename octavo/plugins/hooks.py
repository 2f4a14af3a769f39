"""Tells observers what the engine does, and keeps their faults away from it."""

from __future__ import annotations

import difflib
import inspect
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pluggy

from octavo.errors import PluginContractError
from octavo.plugins import hookspecs
from octavo.plugins.hookspecs import EngineStarted, RequestAdded, RequestFinished, StepFinished
from octavo.plugins.part import Part

logger = logging.getLogger(__name__)

HOOK_NAMES = ("engine_started", "request_added", "step_finished", "request_finished", "register_routes")


class Observers:
    """The observers of one engine.

    Each attribute is None when nobody listens, so that the engine asks, and makes what it would tell, only then.

    Args:
        parts: The observers that the config lists; they are told in this order.

    Raises:
        PluginContractError: One implements a hook that does not exist, or with other arguments, or none at all. Then
            none of them observes anything.
    """

    engine_started: Callable[[EngineStarted], None] | None
    request_added: Callable[[RequestAdded], None] | None
    step_finished: Callable[[StepFinished], None] | None
    request_finished: Callable[[RequestFinished], None] | None
    register_routes: Callable[[Any], None] | None

    def __init__(self, parts: Sequence[Part] = ()) -> None:
        # A manager for each: an observer that raises must not keep the next one from being told.
        managers = [(part, _manager(part)) for part in parts]
        for name in HOOK_NAMES:
            listeners = [
                _Listener(part, name, getattr(manager.hook, name))
                for part, manager in managers
                if getattr(manager.hook, name).get_hookimpls()
            ]
            setattr(self, name, _tell_all(name, listeners) if listeners else None)


class _Listener:
    """One observer's implementation of one hook."""

    def __init__(self, part: Part, hook_name: str, caller: pluggy.HookCaller) -> None:
        self._part = part
        self._hook_name = hook_name
        self._caller = caller
        self._has_failed = False

    def tell(self, **told: Any) -> None:
        try:
            self._caller(**told)
        # Nothing that an observer does may end a step or a request: neither SystemExit nor a cancelled task.
        except BaseException as error:
            # An interrupt is the user's, and comes in the main thread only.
            if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
                raise
            if not self._has_failed:
                self._has_failed = True
                logger.exception(
                    "the observer %s raised in %s; the engine goes on, and further faults there are not reported",
                    self._part.plugin,
                    self._hook_name,
                )


def _tell_all(hook_name: str, listeners: Sequence[_Listener]) -> Callable[[Any], None]:
    argument = _argument_of(hook_name)

    def tell(told: Any) -> None:
        for listener in listeners:
            listener.tell(**{argument: told})

    return tell


def _manager(part: Part) -> pluggy.PluginManager:
    """Return a plugin manager with one observer registered.

    Raises:
        PluginContractError: As `Observers`.
    """
    observer = part.create() if isinstance(part.loaded, type) else part.loaded
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.register(observer, name=str(part.plugin))
    callers = {caller.name: caller for caller in manager.get_hookcallers(observer) or ()}
    for fault in _faults(observer, callers):
        raise PluginContractError(f"The observer {part.plugin} {fault}")
    # Last: what pluggy would refuse in its own words has been said in ours.
    manager.add_hookspecs(hookspecs)
    return manager


def _faults(observer: Any, callers: Mapping[str, pluggy.HookCaller]) -> Iterator[str]:
    """Yield what would keep an observer's hooks from being called."""
    listed = ", ".join(HOOK_NAMES)
    for name in sorted(callers.keys() - set(HOOK_NAMES)):
        close = difflib.get_close_matches(name, HOOK_NAMES, n=1)
        suggestion = f" Did you mean {close[0]!r}?" if close else ""
        yield f"implements a hook called {name!r}, which Octavo does not have.{suggestion} Hooks: {listed}."
    for name, caller in callers.items():
        for implementation in caller.get_hookimpls():
            given, taken = _argument_of(name), implementation.argnames
            if not {*taken} <= {given}:
                yield (
                    f"defines {name}({', '.join(taken)}), and is given one argument: {name}({given}), or {name}() to "
                    "do without."
                )
            if implementation.wrapper or implementation.hookwrapper:
                yield f"defines {name} as a wrapper, and there is nothing to wrap: observers are only told."
            if inspect.iscoroutinefunction(implementation.function):
                yield f"defines {name} with async, so it would never run."
    for name in HOOK_NAMES:
        if name not in callers and _is_function(getattr(observer, name, None)):
            yield f"defines {name} without the mark @octavo.hookimpl, so it would never be called."
    if not callers:
        yield f"implements no hook. Mark its functions with @octavo.hookimpl. Hooks: {listed}."


def _argument_of(hook_name: str) -> str:
    (argument,) = inspect.signature(getattr(hookspecs, hook_name)).parameters
    return argument


def _is_function(member: Any) -> bool:
    # Not what a module imports from the specs, such as their own functions.
    return inspect.isroutine(member) and getattr(member, "__module__", None) != hookspecs.__name__
