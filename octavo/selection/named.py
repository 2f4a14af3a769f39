"""Parts that a config names, before anything is known of the model."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

from octavo.config import EngineConfig, PluginChoice
from octavo.core.kv_cache_config import KVCacheGroup
from octavo.errors import ConfigError, PluginOptionsError
from octavo.plugins.families import Family
from octavo.plugins.part import choose
from octavo.plugins.registry import Registry
from octavo.selection.report import Chosen

AUTO = "auto"


def named(config: EngineConfig, registry: Registry, family: Family, choice: PluginChoice) -> Chosen:
    """Return the part that the family's own setting names.

    Raises:
        PluginError: It cannot be had, or does not take the options.
    """
    return Chosen(choose(registry, family, choice), config.source_of(family.setting))


def named_unless_auto(config: EngineConfig, registry: Registry, family: Family, choice: PluginChoice) -> Chosen | None:
    """As `named`, but None for "auto".

    Raises:
        PluginOptionsError: Also for options beside "auto", which takes none.
    """
    if choice.name != AUTO:
        return named(config, registry, family, choice)
    if choice.options:
        raise PluginOptionsError(
            f"{family.setting} is 'auto', which takes no options, and was given "
            f"{', '.join(map(repr, choice.options))}; name the part that they are for."
        )
    return None


def named_by_kind(
    config: EngineConfig, registry: Registry, family: Family, setting: str, choices: dict[str, PluginChoice]
) -> dict[str, Chosen]:
    """Return the parts that a setting names for each kind of what layers keep."""
    source = config.source_of(setting)
    return {kind: Chosen(choose(registry, family, choice), source) for kind, choice in choices.items()}


def check_kinds(setting: str, choices: Mapping[str, Chosen], groups: Sequence[KVCacheGroup]) -> None:
    """Make sure that what a setting chooses by kind is for kinds that the model's layers keep.

    Raises:
        ConfigError: A choice is for another kind, and would have no effect.
    """
    kinds = list(dict.fromkeys(group.spec.kind for group in groups))
    for kind, chosen in choices.items():
        if kind not in kinds:
            raise ConfigError(
                f"{setting} chooses '{chosen.part.plugin.name}' for the kind {kind!r}, and the model's layers keep: "
                f"{', '.join(kinds)}.{_way_out(kind, kinds)}"
            )


def _way_out(kind: str, kinds: Sequence[str]) -> str:
    close = difflib.get_close_matches(kind, kinds, n=1)
    if close:
        return f" Did you mean {close[0]!r}?"
    return " Name one of these, or leave the choice out." if len(kinds) > 1 else ""
