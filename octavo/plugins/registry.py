"""Finds what installed packages register, and imports the one that was chosen.

One scan of the installed packages serves all families. Nothing is imported by the scan; `load` imports the chosen
plugin and nothing else. Octavo's own parts come through the same scan.
"""

from __future__ import annotations

import difflib
import functools
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import importlib_metadata

from octavo.core.interfaces import CONTRACT_VERSION
from octavo.errors import NotInstalled, PluginBroken, PluginConflict, PluginContractError, PluginNotFound
from octavo.plugins.families import FAMILIES, Family

logger = logging.getLogger(__name__)

OWN_PACKAGE = "octavo"


@dataclass(frozen=True)
class Plugin:
    """What a package registers, before anything is imported.

    Attributes:
        family: Its extension point.
        name: What it is chosen by.
        target: Where the class is, as "module:attribute".
        package: The distribution that registers it.
        version: Of that distribution.
    """

    family: Family
    name: str
    target: str
    package: str
    version: str

    @property
    def is_built_in(self) -> bool:
        return self.package == OWN_PACKAGE

    def __str__(self) -> str:
        return f"{self.name} ({self.target}, from {self.package} {self.version})"


class Registry:
    """The plugins of the installed packages.

    Args:
        plugins: What was found; `scan` finds it.
    """

    def __init__(self, plugins: Sequence[Plugin]) -> None:
        self._plugins = tuple(plugins)

    def plugins(self, family: Family) -> tuple[Plugin, ...]:
        """Return the family's plugins, Octavo's own first, then by name and package."""
        members = [plugin for plugin in self._plugins if plugin.family == family]
        return tuple(sorted(members, key=lambda plugin: (not plugin.is_built_in, plugin.name, plugin.package)))

    def find(self, family: Family, name: str) -> Plugin:
        """Return the plugin that `name`, or "package:name", stands for.

        Raises:
            NotInstalled: Nothing of Octavo itself is registered, so its package is on the path but not installed.
            PluginNotFound: No package registers the name; the message has the closest one and all there are.
            PluginConflict: Several do; the message names them.
        """
        members = self.plugins(family)
        if not any(plugin.is_built_in for plugin in members):
            raise NotInstalled(
                f"No {family.label} of Octavo's own is registered: the package is importable but not installed. "
                "Install it, from a checkout with: pip install -e ."
            )
        package, _, plain_name = name.rpartition(":")
        matches = [p for p in members if p.name == plain_name and (not package or _is_same_package(package, p.package))]
        if not matches:
            raise PluginNotFound(_not_found(family, name, [plugin.name for plugin in members]))
        own = [plugin for plugin in matches if plugin.is_built_in]
        if len(matches) == 1 or own:
            # A built-in name stays Octavo's, whatever gets installed beside it.
            return own[0] if own else matches[0]
        choices = " or ".join(f"'{plugin.package}:{plugin.name}'" for plugin in matches)
        raise PluginConflict(
            f"{len(matches)} packages register the {family.label} '{plain_name}': "
            f"{', '.join(map(str, matches))}. Choose {choices}."
        )

    def load(self, family: Family, name: str) -> type[Any]:
        """Import the class that `name` stands for.

        Raises:
            PluginError: As `find`, and:
            PluginBroken: Importing it raised; the cause is attached.
            PluginContractError: It is not a concrete subclass of the family's contract, or was built for another
                version of it.
        """
        plugin = self.find(family, name)
        try:
            loaded: Any = importlib_metadata.EntryPoint(plugin.name, plugin.target, family.group).load()
        # A module that leaves by SystemExit is broken too; it must not take the process with it.
        except (Exception, SystemExit) as cause:
            raise PluginBroken(
                f"The {family.label} {plugin} cannot be imported: {type(cause).__name__}: {cause}"
            ) from cause
        if not (isinstance(loaded, type) and issubclass(loaded, family.contract)):
            raise PluginContractError(
                f"The {family.label} {plugin} is not a subclass of "
                f"{family.contract.__module__}.{family.contract.__qualname__}, which it must be."
            )
        missing = sorted(getattr(loaded, "__abstractmethods__", ()))
        if missing:
            raise PluginContractError(f"The {family.label} {plugin} does not define {', '.join(missing)}.")
        version = getattr(loaded, "contract_version", None)
        if version != CONTRACT_VERSION:
            raise PluginContractError(
                f"The {family.label} {plugin} was built for contract version {version}, and this Octavo has version "
                f"{CONTRACT_VERSION}; install a release of {plugin.package} that was built for it."
            )
        return loaded


@functools.cache
def scan() -> Registry:
    """Look through the installed packages once a process. Imports none of what they register."""
    by_package: dict[str, list[Plugin]] = {}
    for distribution in importlib_metadata.distributions():
        try:
            plugins = _plugins_of(distribution)
        except Exception as cause:
            # What remains of a package that was removed by hand must not keep everything else from working.
            where = distribution.locate_file("")
            logger.warning("passing over a package in %s, whose metadata cannot be read: %s", where, cause)
            continue
        if plugins:
            # A package can be met twice, on two entries of sys.path; Python would import the first.
            by_package.setdefault(_canonical(plugins[0].package), plugins)
    return Registry([plugin for plugins in by_package.values() for plugin in plugins])


def _plugins_of(distribution: Any) -> list[Plugin]:
    families = {family.group: family for family in FAMILIES}
    return [
        Plugin(families[entry.group], entry.name, entry.value, distribution.name, distribution.version)
        for entry in distribution.entry_points
        if entry.group in families
    ]


def _is_same_package(name: str, other: str) -> bool:
    return _canonical(name) == _canonical(other)


def _canonical(package: str) -> str:
    """Return a distribution's name as package indexes compare them: "My_Plugin" is "my-plugin"."""
    return re.sub(r"[-_.]+", "-", package).lower()


def _not_found(family: Family, name: str, installed: Sequence[str]) -> str:
    close = difflib.get_close_matches(name.rpartition(":")[2], installed, n=1)
    suggestion = f" Did you mean {close[0]!r}?" if close else ""
    names = ", ".join(dict.fromkeys(installed))
    return f"No {family.label} is called {name!r}.{suggestion} Installed: {names}."
