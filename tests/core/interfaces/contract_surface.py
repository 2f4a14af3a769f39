"""What plugin authors build on, as text: every name, parameter, annotation and default of the contracts.

    python tests/core/interfaces/contract_surface.py

writes contract_v<N>.txt beside this file, N being the contract version of the code.
"""

import dataclasses
import inspect
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

from octavo.core import interfaces
from octavo.plugins import hookspecs

FOLDER = Path(__file__).parent


def surface_file() -> Path:
    """Return where the surface of this contract version is kept."""
    return FOLDER / f"contract_v{interfaces.CONTRACT_VERSION}.txt"


def surface() -> str:
    """Return the contracts as text, a line for each thing that an author can call, define or read."""
    lines = [f"CONTRACT_VERSION = {interfaces.CONTRACT_VERSION}"]
    for name in sorted(interfaces.__all__):
        contract = getattr(interfaces, name)
        if inspect.isclass(contract):
            lines += ["", *_class_lines(contract)]
        elif get_args(contract):
            lines += ["", f"{name} = {' | '.join(map(repr, get_args(contract)))}"]
        elif isinstance(contract, Mapping):
            lines += ["", f"{name} = {' | '.join(map(repr, contract))}"]
    lines += ["", "# hooks"]
    for told in vars(hookspecs).values():
        if inspect.isclass(told) and told.__module__ == hookspecs.__name__:
            lines += ["", *_class_lines(told)]
    lines += ["", *(f"def {name}{_signature(hook)}" for name, hook in vars(hookspecs).items() if _is_hook(hook))]
    return "\n".join(lines) + "\n"


def _class_lines(contract: type) -> Iterator[str]:
    bases = ", ".join(base.__name__ for base in contract.__bases__ if base is not object)
    yield f"class {contract.__name__}({bases})" if bases else f"class {contract.__name__}"
    fields = {field.name for field in dataclasses.fields(contract)} if dataclasses.is_dataclass(contract) else set()
    for name, annotation in vars(contract).get("__annotations__", {}).items():
        if name.startswith("_"):
            continue
        default = f" = {vars(contract)[name]!r}" if name in vars(contract) else ""
        yield f"    {'field ' if name in fields else ''}{name}: {_shown(annotation)}{default}"
    abstract = getattr(contract, "__abstractmethods__", frozenset())
    for name, member in vars(contract).items():
        line = _member_line(name, member)
        is_made_for_it = name in ("__init__", "__len__", "__iter__") and not fields
        if line and (not name.startswith("_") or is_made_for_it) and not _is_protocols_own(contract, name):
            yield f"    {'abstract ' if name in abstract else ''}{line}"


def _member_line(name: str, member: Any) -> str | None:
    if isinstance(member, property):
        return f"property {name} -> {_shown(inspect.signature(member.fget).return_annotation)}"  # type: ignore[arg-type]
    if isinstance(member, classmethod):
        return f"classmethod {name}{_signature(member.__func__)}"
    return f"def {name}{_signature(member)}" if inspect.isfunction(member) else None


def _is_protocols_own(contract: type, name: str) -> bool:
    return getattr(contract, "_is_protocol", False) and name == "__init__"


def _is_hook(member: Any) -> bool:
    return inspect.isfunction(member) and hasattr(member, f"{hookspecs.PROJECT}_spec")


def _signature(function: Any) -> str:
    """Return a signature with annotations as they are written, whether the module evaluates them or not."""
    signature = inspect.signature(function)
    shown = []
    mark_is_due = True
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and mark_is_due:
            shown.append("*")
            mark_is_due = False
        annotation = "" if parameter.annotation is parameter.empty else f": {_shown(parameter.annotation)}"
        default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
        shown.append(f"{parameter.name}{annotation}{default}")
    return f"({', '.join(shown)}) -> {_shown(signature.return_annotation)}"


def _shown(annotation: Any) -> str:
    """Return an annotation without the modules of its names, which are no part of the contract."""
    if isinstance(annotation, str):
        return annotation
    if annotation is None:
        return "None"
    text = annotation.__name__ if isinstance(annotation, type) and not get_args(annotation) else str(annotation)
    return re.sub(r"\b(octavo\.core\.interfaces\.\w+|collections\.abc|typing)\.", "", text)


if __name__ == "__main__":
    surface_file().write_text(surface())
    print(f"wrote {surface_file()}")
