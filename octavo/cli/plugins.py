"""`octavo plugins`: what is installed."""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout
from typing import Annotated, Any

import typer

from octavo.errors import OctavoError, PluginNotFound, PluginOptionsError
from octavo.plugins.families import FAMILIES, HOOKS
from octavo.plugins.registry import Plugin, Registry, Stray, is_same_package, scan

# What a command that found a fault exits with; 2 is for one that could not do its work.
EXIT_FAULT = 1


def plugins(
    *,
    package: Annotated[str | None, typer.Argument(help="Only what this package registers.")] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Import each one and say what is wrong with it; exits with 1 then.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a list of objects for a program to read.")] = False,
) -> None:
    """List the installed parts by family: name, package, version and where each is. Imports none of them."""
    registry = scan()
    found = [
        plugin
        for family in FAMILIES
        for plugin in registry.plugins(family)
        if package is None or is_same_package(package, plugin.package)
    ]
    strays = [s for s in registry.strays if check and (package is None or is_same_package(package, s.package))]
    if package is not None and not found and not strays:
        raise PluginNotFound(f"No package called {package!r} is installed that registers a part of Octavo's.")
    # What a package prints when it is imported must not get between the lines of the list.
    with redirect_stdout(sys.stderr):
        faults = {plugin: fault_of(registry, plugin) for plugin in found} if check else {}
    if as_json:
        objects = [_as_object(plugin, faults) for plugin in found] + [_stray_as_object(stray) for stray in strays]
        print(json.dumps(objects, indent=2))
    else:
        for line in [*_table(found, faults), *(f"FAULT  {stray}" for stray in strays)]:
            print(line)
    if strays or any(faults.values()):
        raise typer.Exit(EXIT_FAULT)


def fault_of(registry: Registry, plugin: Plugin) -> str | None:
    """Import a plugin; return what is wrong with it, or with its name, as a sentence, None when nothing is."""
    # Not at the top: a mere listing does without what it imports.
    from octavo.plugins.part import load_part

    try:
        part = load_part(registry, plugin, options={})
        if plugin.family is HOOKS:
            from octavo.plugins.hooks import Observers

            Observers([part])
    except PluginOptionsError:
        # It wants options that only its user can give.
        pass
    except OctavoError as error:
        return str(error)
    return registry.fault_of_name(plugin)


def _as_object(plugin: Plugin, faults: dict[Plugin, str | None]) -> dict[str, Any]:
    checked = {"fault": faults[plugin]} if plugin in faults else {}
    return {
        "family": plugin.family.name,
        "name": plugin.name,
        "package": plugin.package,
        "version": plugin.version,
        "target": plugin.target,
        "location": plugin.location,
        "is_built_in": plugin.is_built_in,
        **checked,
    }


def _stray_as_object(stray: Stray) -> dict[str, Any]:
    return {
        "family": None,
        "name": stray.name,
        "package": stray.package,
        "version": stray.version,
        "target": None,
        "location": None,
        "is_built_in": False,
        "fault": str(stray),
    }


def _table(found: list[Plugin], faults: dict[Plugin, str | None]) -> list[str]:
    """Return lines of columns as wide as their longest entry, faults below the plugins that they are about."""
    rows = [(p.family.name, p.name, p.package, p.version, p.target) for p in found]
    head = ("FAMILY", "NAME", "PACKAGE", "VERSION", "TARGET")
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    shown = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in (head, *rows)]
    if not faults:
        return shown
    lines = [f"       {shown[0]}"]
    for plugin, line in zip(found, shown[1:], strict=True):
        fault = faults[plugin]
        lines += [f"ok     {line}"] if fault is None else [f"FAULT  {line}", f"       {fault}"]
    return lines
