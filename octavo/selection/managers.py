"""Which KV-cache manager serves a KV-cache group, and what a request then takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from octavo.config import EngineConfig, PluginChoice
from octavo.core.kv_cache_config import SHORTEST_REQUEST, KVCacheGroup, RequestCost
from octavo.errors import PluginContractError, PluginUnsuitable
from octavo.plugins.families import KV_MANAGERS
from octavo.plugins.part import Part, choose
from octavo.plugins.registry import Registry
from octavo.selection.named import check_kinds, named_by_kind
from octavo.selection.report import Chosen


def named_managers(config: EngineConfig, registry: Registry) -> dict[str, Chosen]:
    """Find and import the KV-cache managers that a config names, by the kind of what layers keep.

    Raises:
        PluginError: One cannot be had, or does not take its options.
    """
    return named_by_kind(config, registry, KV_MANAGERS, "kv_managers", config.cache.kv_managers)


def choose_managers(
    registry: Registry, named: Mapping[str, Chosen], groups: Sequence[KVCacheGroup]
) -> tuple[Chosen, ...]:
    """Return each group's manager: the one that is named for its kind, else the one that is called as its kind.

    Raises:
        ConfigError: One is named for a kind that no layer keeps.
        PluginError: One cannot be had, or cannot serve its group.
    """
    check_kinds("kv_managers", named, groups)
    managers = []
    for group in groups:
        manager = named.get(group.spec.kind) or _default_manager(registry, group.spec.kind)
        _check_manager(manager.part, group)
        managers.append(manager)
    return tuple(managers)


def request_cost(config: EngineConfig, managers: Sequence[Chosen], groups: Sequence[KVCacheGroup]) -> RequestCost:
    """Return what one request takes at most with these managers, one a group."""
    manager_classes = tuple(manager.part.loaded for manager in managers)
    return RequestCost(tuple(groups), manager_classes, config.scheduler.max_num_batched_tokens)


def _default_manager(registry: Registry, kind: str) -> Chosen:
    return Chosen(choose(registry, KV_MANAGERS, PluginChoice(kind)), "default", "named as what the layers keep")


def _check_manager(part: Part, group: KVCacheGroup) -> None:
    with part.blamed("when it was asked what it serves"):
        serves_it = isinstance(group.spec, part.loaded.serves)
        most = part.loaded.max_blocks_per_request(group.spec, SHORTEST_REQUEST, 1) if serves_it else 1
    if type(most) is not int or most < 1:
        raise PluginContractError(
            f"The KV-cache manager {part.plugin} says with max_blocks_per_request that a request of {SHORTEST_REQUEST} "
            f"tokens holds {most!r} blocks; it must be a whole number of at least 1."
        )
    if not serves_it:
        raise PluginUnsuitable(
            f"The KV-cache manager {part.plugin} serves {part.loaded.serves.__name__}, and the model's layers keep "
            f"{type(group.spec).__name__}; choose another one in kv_managers."
        )
