"""Whether what a package registers is what its family's contract asks for."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from types import FunctionType, ModuleType, WrapperDescriptorType
from typing import Any

from octavo.core.interfaces.version import CONTRACT_VERSION
from octavo.errors import PluginContractError
from octavo.plugins.families import Family

logger = logging.getLogger(__name__)

METHODS = (FunctionType, classmethod)


def check_contract(family: Family, loaded: Any, shown: str, package: str, *, is_built_in: bool) -> None:
    """Raise when `loaded` is not a part of this family; warn when it was built for the previous contract version.

    Args:
        family: The extension point that it was registered under.
        loaded: What the entry point led to.
        shown: How sentences call it: name, target, package and version.
        package: Where a better release of it would come from.
        is_built_in: Whether it is one of Octavo's own.

    Raises:
        PluginContractError: The message says what is missing.
    """
    contract = family.contract()
    subject = f"The {family.label} {shown}"
    if contract is not None:
        if not (isinstance(loaded, type) and issubclass(loaded, contract)):
            wanted = f"{contract.__module__}.{contract.__qualname__}"
            if isinstance(loaded, type):
                raise PluginContractError(f"{subject} is not a subclass of {wanted}, which it must be.")
            hint = "; its entry point must name the class: module:Class" if isinstance(loaded, ModuleType) else ""
            raise PluginContractError(
                f"{subject} is of type {type(loaded).__name__}, and must be a subclass of {wanted}{hint}."
            )
        missing = sorted(getattr(loaded, "__abstractmethods__", ()))
        if missing:
            raise PluginContractError(f"{subject} does not define {', '.join(missing)}.")
    # First, because a part for another version may be different in everything below.
    _check_version(subject, _stated_version(loaded, is_built_in), package)
    _check_options(subject, loaded)
    if contract is not None:
        faults = (
            *_missing_attributes(contract, loaded),
            *_attribute_faults(contract, loaded),
            *_method_faults(contract, loaded),
            *_signature_faults(family, contract, loaded),
        )
        for fault in faults:
            raise PluginContractError(f"{subject} {fault}")


def _stated_version(loaded: Any, is_built_in: bool) -> Any:
    """Return the contract version that the part itself states; None when it does not.

    One that it inherits from a class of Octavo's says what that class was built for.
    """
    if not isinstance(loaded, type):
        return getattr(loaded, "contract_version", None)
    for ancestor in loaded.__mro__:
        if "contract_version" in vars(ancestor):
            is_octavos = ancestor.__module__.partition(".")[0] == "octavo"
            return None if is_octavos and not is_built_in else vars(ancestor)["contract_version"]
    return None


def _check_version(subject: str, version: Any, package: str) -> None:
    if version is None:
        raise PluginContractError(
            f"{subject} does not say which contract version it was built for. This Octavo has version "
            f"{CONTRACT_VERSION}; a part that was built for it says: contract_version = {CONTRACT_VERSION}"
        )
    if type(version) is int and version == CONTRACT_VERSION:
        return
    if type(version) is int and version == CONTRACT_VERSION - 1:
        logger.warning(
            "%s was built for contract version %d, and this Octavo has version %d; it is used, and the next version "
            "will refuse it",
            f"{subject[0].lower()}{subject[1:]}",
            version,
            CONTRACT_VERSION,
        )
        return
    if type(version) is not int:
        raise PluginContractError(
            f"{subject} says contract_version = {version!r}, of type {type(version).__name__}; it must be a whole "
            f"number, such as {CONTRACT_VERSION}."
        )
    way_out = f"install a release of {package} that was built for it"
    if version > CONTRACT_VERSION:
        way_out = "install an Octavo that has it"
    raise PluginContractError(
        f"{subject} was built for contract version {version}, and this Octavo has version {CONTRACT_VERSION}; "
        f"{way_out}."
    )


def _check_options(subject: str, loaded: Any) -> None:
    schema = getattr(loaded, "Options", None)
    if schema is None:
        return
    if isinstance(loaded, ModuleType):
        raise PluginContractError(
            f"{subject} has Options, and is a module, which nobody gives them to; make it a class whose constructor "
            "takes options."
        )
    from pydantic import BaseModel

    if not (isinstance(schema, type) and issubclass(schema, BaseModel)):
        raise PluginContractError(f"{subject} has Options that are not a pydantic model.")


def _missing_attributes(contract: type, loaded: type) -> Iterator[str]:
    """Yield what the contract declares without giving it a value, and the class does not set either."""
    for name in contract.__annotations__:
        if not hasattr(contract, name) and not hasattr(loaded, name):
            yield f"does not set {name}."


def _attribute_faults(contract: type, loaded: type) -> Iterator[str]:
    """Yield the flags and words that are of another type than the contract's: any object would count as true."""
    for name in contract.__annotations__:
        promised, stated = getattr(contract, name, None), inspect.getattr_static(loaded, name, None)
        if isinstance(promised, bool) and not isinstance(stated, bool):
            yield f"sets {name} to something of type {type(stated).__name__}; it must be True or False."
        if isinstance(promised, str) and not isinstance(stated, str):
            yield f"sets {name} to something of type {type(stated).__name__}; it must be a text such as {promised!r}."


def _method_faults(contract: type, loaded: type) -> Iterator[str]:
    """Yield what stands in a method's place and cannot be called, or would return before it has done anything."""
    names = {name for name, member in vars(contract).items() if isinstance(member, METHODS)}
    for name in sorted(names | getattr(contract, "__abstractmethods__", frozenset())):
        own = inspect.getattr_static(loaded, name, None)
        if name == "__init__" or isinstance(inspect.getattr_static(contract, name, None), property):
            continue
        function = getattr(own, "__func__", own)
        if isinstance(own, property) or not callable(function):
            yield f"sets {name} to something of type {type(own).__name__}; it must be a method."
        elif inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
            yield f"defines {name} with async, and it is called without."
        elif inspect.isgeneratorfunction(function) and name != "__iter__":
            yield f"defines {name} as a generator, which does nothing before somebody iterates; it must return."


def _signature_faults(family: Family, contract: type, loaded: type) -> Iterator[str]:
    """Yield the methods that could not be called as the contract calls them."""
    takes_options = getattr(loaded, "Options", None) is not None
    for name in dict.fromkeys([*vars(contract), family.factory]):
        promised = inspect.getattr_static(contract, name)
        own = inspect.getattr_static(loaded, name, None)
        is_factory = name == family.factory
        if (name.startswith("_") and not is_factory) or not isinstance(promised, (*METHODS, WrapperDescriptorType)):
            continue
        if own is promised and not (is_factory and takes_options):
            continue
        if isinstance(promised, classmethod) and isinstance(own, FunctionType):
            yield f"defines {name} without @classmethod."
            continue
        if not isinstance(own, (*METHODS, staticmethod)):
            if own is vars(object).get(name) and takes_options:
                yield f"has Options, and no {name} that takes them: {name}(options=...)."
            continue
        # Without a constructor of its own, a contract's objects are made without arguments.
        wanted = _parameters(promised) if isinstance(promised, METHODS) else []
        if is_factory and takes_options:
            wanted.append(inspect.Parameter("options", inspect.Parameter.KEYWORD_ONLY))
        offered = inspect.Signature([p.replace(annotation=p.empty) for p in _parameters(own)])
        # Callers that leave out what has a default must be served too.
        for passed in (wanted, [p for p in wanted if p.default is p.empty]):
            positional = [p.name for p in passed if p.kind is not p.KEYWORD_ONLY]
            by_name = {p.name: "..." for p in passed if p.kind is p.KEYWORD_ONLY}
            try:
                offered.bind(*positional, **by_name)
            except TypeError as cause:
                call = ", ".join([*positional, *(f"{key}=..." for key in by_name)])
                verb = "defines" if name in vars(loaded) else "inherits"
                yield f"{verb} {name}{offered}, which cannot be called as {name}({call}): {cause}."
                break


def _parameters(method: FunctionType | classmethod[Any, Any, Any] | staticmethod[Any, Any]) -> list[inspect.Parameter]:
    """Return a method's parameters, as a caller sees them: without self or cls."""
    function = method if isinstance(method, FunctionType) else method.__func__
    parameters = list(inspect.signature(function).parameters.values())
    if isinstance(method, staticmethod) or (parameters and parameters[0].kind is inspect.Parameter.VAR_POSITIONAL):
        return parameters
    return parameters[1:]
