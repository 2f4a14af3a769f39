"""Finds what installed packages register, and imports the one that was chosen.

One scan of the installed packages serves all families. Nothing is imported by the scan; `load` imports the chosen
plugin and nothing else. Octavo's own parts come through the same scan.
"""

from __future__ import annotations

import difflib
import functools
import logging
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import importlib_metadata

from octavo.errors import NotInstalled, OctavoError, PluginBroken, PluginConflict, PluginNotFound, describe
from octavo.plugins.families import ATTENTION_BACKENDS, FAMILIES, MODELS, Family

logger = logging.getLogger(__name__)

OWN_PACKAGE = "octavo"


@dataclass(frozen=True)
class Plugin:
    """What a package registers, before anything is imported.

    Attributes:
        family: Its extension point.
        name: What it is chosen by.
        target: Where it is, as "module:attribute"; a module alone for observers.
        package: The distribution that registers it.
        version: Of that distribution.
        location: The folder that the distribution's metadata was found in.
    """

    family: Family
    name: str
    target: str
    package: str
    version: str
    location: str = ""

    @property
    def is_built_in(self) -> bool:
        return self.package == OWN_PACKAGE

    @property
    def origin(self) -> str:
        """Its package and version, such as "octavo-eager 0.1.0"."""
        return f"{self.package} {self.version}"

    def __str__(self) -> str:
        return f"{self.name} ({self.target}, from {self.origin})"


@dataclass(frozen=True)
class Stray:
    """What a package registers under a group that looks like Octavo's and is none.

    Attributes:
        group: The entry-point group, such as "octavo.attention_backend".
        name: What it would be chosen by.
        package: The distribution that registers it.
        version: Of that distribution.
    """

    group: str
    name: str
    package: str
    version: str

    def __str__(self) -> str:
        groups = {family.name: family.group for family in FAMILIES}
        # Close indeed: a group of a later Octavo's is no misspelling of one that there is.
        close = difflib.get_close_matches(self.group.rpartition(".")[2], groups, n=1, cutoff=0.75)
        suggestion = (
            f" Did its authors mean {groups[close[0]]!r}?" if close else f" Groups: {', '.join(groups.values())}."
        )
        return (
            f"{self.package} {self.version} registers '{self.name}' under {self.group!r}, which is no group of this "
            f"Octavo's, so it is never found.{suggestion}"
        )


class Registry:
    """The plugins of the installed packages.

    Args:
        plugins: What was found; `scan` finds it.
        strays: What was found under groups that are none.
    """

    def __init__(self, plugins: Sequence[Plugin], strays: Sequence[Stray] = ()) -> None:
        self.strays = tuple(strays)
        self._plugins = tuple(plugins)
        self._loaded: dict[Plugin, Any] = {}
        # Names of Octavo's own that other packages register too, and that a warning was given for.
        self._warned_of: set[tuple[Family, str]] = set()

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
        if not any(plugin.is_built_in for plugin in self._plugins):
            raise NotInstalled(
                f"No {family.label} of Octavo's own is registered: the package is importable but not installed. "
                "Install it, from a checkout with: pip install -e ."
            )
        members = self.plugins(family)
        package, colon, plain_name = name.rpartition(":")
        matches = [p for p in members if p.name == plain_name and (not colon or is_same_package(package, p.package))]
        if not matches:
            raise PluginNotFound(self._not_found(family, name))
        if matches[0].is_built_in:
            # A built-in name stays Octavo's, whatever gets installed beside it.
            self._warn_of_reserved_name(matches)
            return matches[0]
        if len(matches) == 1:
            return matches[0]
        choices = " or ".join(f"'{plugin.package}:{plugin.name}'" for plugin in matches)
        raise PluginConflict(
            f"{len(matches)} packages register the {family.label} '{plain_name}': "
            f"{', '.join(map(str, matches))}. Choose {choices}."
        )

    def load(self, family: Family, name: str) -> Any:
        """Import what `name` stands for, once: a class of the family's contract, or an observer's module.

        Raises:
            PluginError: As `find`, and:
            PluginBroken: Importing it raised; the cause is attached.
            PluginContractError: It is not a concrete subclass of the family's contract, or was built for another
                version of it.
        """
        return self.load_plugin(self.find(family, name))

    def load_plugin(self, plugin: Plugin) -> Any:
        """As `load`, for a plugin that was found before."""
        if plugin not in self._loaded:
            # Not at the top: a mere listing does without the contracts, which import numpy.
            from octavo.plugins.contract_check import check_contract

            loaded = _import(plugin)
            try:
                check_contract(plugin.family, loaded, str(plugin), plugin.package, is_built_in=plugin.is_built_in)
            except OctavoError:
                raise
            # A class may run code of its own when it is looked at.
            except Exception as cause:
                raise PluginBroken(
                    f"The {plugin.family.label} {plugin} raised {describe(cause)} when it was looked at"
                ) from cause
            self._loaded[plugin] = loaded
        return self._loaded[plugin]

    def fault_of_name(self, plugin: Plugin) -> str | None:
        """Return what is wrong with the name that a plugin is registered under, as a sentence; None when nothing is."""
        is_taken = plugin.name == "auto" and plugin.family in (ATTENTION_BACKENDS, MODELS)
        if is_taken or not re.fullmatch(r"[\w.-]+", plugin.name):
            return (
                f"The {plugin.family.label} {plugin} uses a name that not every setting can carry: 'auto' lets Octavo "
                "choose, a colon stands behind a package's name, and commas, spaces and brackets are a flag's own. Its "
                "authors must choose another name, of letters, digits, '_', '-' and '.'."
            )
        rivals = [p for p in self.plugins(plugin.family) if p.name == plugin.name and p != plugin]
        if any(rival.is_built_in for rival in rivals):
            return (
                f"The {plugin.family.label} {plugin} uses a name that is reserved for Octavo's own. It is reached as "
                f"'{plugin.package}:{plugin.name}' alone; its authors should choose another name."
            )
        if rivals and not plugin.is_built_in:
            return (
                f"The {plugin.family.label} {plugin} shares its name with {', '.join(map(str, rivals))}. It is reached "
                f"as '{plugin.package}:{plugin.name}' alone."
            )
        return None

    def _not_found(self, family: Family, name: str) -> str:
        installed = self.plugins(family)
        package, colon, plain_name = name.rpartition(":")
        by_lower_name = {plugin.name.lower(): plugin.name for plugin in installed}
        close = difflib.get_close_matches(plain_name.lower(), by_lower_name, n=1)
        said = [f"No {family.label} is called {name!r}."]
        if close:
            said.append(f"Did you mean {by_lower_name[close[0]]!r}?")
        if colon:
            said.append(_what_is_installed_of(package, installed))
        said += [
            f"There is a {other.family.label} of that name, {other}."
            for other in self._plugins
            if other.name == plain_name and other.family != family
        ]
        said += [str(stray) for stray in self.strays if stray.name == plain_name]
        listed = ", ".join(p.name if p.is_built_in else f"{p.name} ({p.origin})" for p in installed) or "none"
        return " ".join([*said, f"Installed: {listed}."])

    def _warn_of_reserved_name(self, matches: Sequence[Plugin]) -> None:
        own, *others = matches
        if others and (own.family, own.name) not in self._warned_of:
            self._warned_of.add((own.family, own.name))
            logger.warning(
                "the %s '%s' is Octavo's own; %s cannot take its name, and would be chosen as %s",
                own.family.label,
                own.name,
                " and ".join(map(str, others)),
                " or ".join(f"'{plugin.package}:{plugin.name}'" for plugin in others),
            )


@functools.cache
def scan() -> Registry:
    """Look through the installed packages once a process. Imports none of what they register."""
    by_package: dict[str, list[Plugin | Stray]] = {}
    for distribution in importlib_metadata.distributions():
        try:
            found = _entries_of(distribution)
        except Exception as cause:
            # What remains of a package that was removed by hand must not keep everything else from working.
            where = distribution.locate_file("")
            logger.warning("passing over a package in %s, whose metadata cannot be read: %s", where, cause)
            continue
        if found:
            # A package can be met twice, on two entries of sys.path; Python would import the first.
            by_package.setdefault(_canonical(found[0].package), found)
    everything = [entry for entries in by_package.values() for entry in entries]
    return Registry(
        [entry for entry in everything if isinstance(entry, Plugin)],
        [entry for entry in everything if isinstance(entry, Stray)],
    )


def _entries_of(distribution: Any) -> list[Plugin | Stray]:
    families = {family.group: family for family in FAMILIES}
    # Of what most packages register nothing is for Octavo; looking for its name costs less than parsing it all.
    if f"[{OWN_PACKAGE}." not in (distribution.read_text("entry_points.txt") or ""):
        return []
    entries = [entry for entry in distribution.entry_points if entry.group.startswith(f"{OWN_PACKAGE}.")]
    if not entries:
        return []
    # Parsed only for packages that register something: it takes longer than all the rest.
    metadata = distribution.metadata
    name, version, location = metadata["Name"], metadata["Version"], str(distribution.locate_file(""))
    if not name:
        raise ValueError("it has no name")
    return [
        Plugin(families[entry.group], entry.name, entry.value, name, version, location)
        if entry.group in families
        else Stray(entry.group, entry.name, name, version)
        for entry in entries
    ]


def _import(plugin: Plugin) -> Any:
    package = plugin.target.partition(":")[0].partition(".")[0]
    before = set(sys.modules)
    try:
        return importlib_metadata.EntryPoint(plugin.name, plugin.target, plugin.family.group).load()
    except KeyboardInterrupt:
        raise
    # A module that leaves by SystemExit, or as a cancelled task does, is broken too; it must not take us with it.
    except BaseException as cause:
        # Python forgets the module that raised. Forget what it had imported of its own package too, so that no half
        # of the plugin stays and another try starts from nothing.
        for name in set(sys.modules) - before:
            if name == package or name.startswith(f"{package}."):
                _forget_module(name)
        hint = ""
        if ":" not in plugin.target and plugin.family.contract_target is not None:
            hint = ". Its entry point names no class; one is written module:Class"
        raise PluginBroken(f"The {plugin.family.label} {plugin} cannot be imported: {describe(cause)}{hint}") from cause


def _forget_module(name: str) -> None:
    module = sys.modules.pop(name)
    parent, _, child = name.rpartition(".")
    # `from parent import child` would find it there and import nothing.
    if parent in sys.modules and vars(sys.modules[parent]).get(child) is module:
        delattr(sys.modules[parent], child)


def is_same_package(name: str, other: str) -> bool:
    """Say whether two names stand for one distribution, as package indexes compare them."""
    return _canonical(name) == _canonical(other)


def _canonical(package: str) -> str:
    """Return a distribution's name as package indexes compare them: "My_Plugin" is "my-plugin"."""
    return re.sub(r"[-_.]+", "-", package).lower()


def _what_is_installed_of(package: str, installed: Sequence[Plugin]) -> str:
    """Say of a package that was named, and does not register what was asked for, whether it is there at all."""
    own = [plugin.name for plugin in installed if is_same_package(plugin.package, package)]
    try:
        distribution = importlib_metadata.distribution(package)
    # An odd name, or one that nothing is installed under.
    except (importlib_metadata.PackageNotFoundError, ValueError):
        return f"No package {package!r} is installed."
    try:
        shown = f"{package} {distribution.version}"
    # What remains of a package that was removed by hand.
    except Exception:
        shown = f"{package}, whose metadata cannot be read,"
    where = f"{shown} in {distribution.locate_file('')}"
    return f"{where} registers {', '.join(own)}." if own else f"{where} registers none."
