"""Which KV-cache manager serves a KV-cache group, and what a request then takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from octavo.config import EngineConfig, PluginChoice
from octavo.core.interfaces import AttentionSpec, SingleTypeKVCacheManager
from octavo.core.kv_cache_config import SHORTEST_REQUEST, KVCacheGroup, RequestCost
from octavo.errors import PluginContractError, PluginNotFound, PluginUnsuitable
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
        manager = named.get(group.spec.kind) or _default_manager(registry, group)
        _check_manager(manager.part, group)
        managers.append(manager)
    return tuple(managers)


def request_cost(config: EngineConfig, managers: Sequence[Chosen], groups: Sequence[KVCacheGroup]) -> RequestCost:
    """Return what one request takes at most with these managers, one a group."""
    manager_classes = tuple(manager.part.loaded for manager in managers)
    return RequestCost(tuple(groups), manager_classes, config.scheduler.max_num_batched_tokens)


def _default_manager(registry: Registry, group: KVCacheGroup) -> Chosen:
    try:
        part = choose(registry, KV_MANAGERS, PluginChoice(group.spec.kind))
    except PluginNotFound as cause:
        raise PluginNotFound(
            f"The model's layers keep {group.spec}, and a manager for that is called as its kind. {cause} Install a "
            "package that registers one, or name one that serves such layers in kv_managers."
        ) from None
    return Chosen(part, "default", "named as what the layers keep")


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


def check_reach(
    part: Part, manager: SingleTypeKVCacheManager, attention_specs: Sequence[AttentionSpec], max_model_len: int
) -> None:
    """Make sure that a manager gives back nothing that the layers of its group still read.

    Args:
        part: The manager's class.
        manager: The group's.
        attention_specs: What its layers read.
        max_model_len: Tokens in the longest request.

    Raises:
        PluginContractError: It does: what the model says of its attention and of its KV cache differ, or the manager is
            wrong. Attention would read null blocks.
    """
    for spec in attention_specs:
        for position in _telling_positions(spec, max_model_len):
            with part.blamed("when it was asked which blocks are read no more"):
                skipped = manager.skipped_blocks(position)
            first_read = max(
                0,
                position + 1 - (spec.window or position + 1),
                position - position % spec.chunk if spec.chunk else 0,
            )
            block_size = manager.block_size
            if skipped and (skipped.stop * block_size > first_read or skipped.start * block_size < spec.keep_first):
                raise PluginContractError(
                    f"The KV-cache manager {part.plugin}, which serves {manager.spec}, gives back the blocks "
                    f"{skipped.start} to {skipped.stop - 1} of {block_size} tokens once {position} tokens are "
                    f"computed, and the model's attention (window={spec.window}, chunk={spec.chunk}, "
                    f"keep_first={spec.keep_first}) reads from position {first_read} on. The model's attention specs "
                    "and KV-cache specs have to say the same, or another manager has to be named in kv_managers."
                )


def _telling_positions(spec: AttentionSpec, max_model_len: int) -> list[int]:
    """Return positions around which the set of keys that a query sees changes."""
    block = spec.block_size
    edges = {block, 8 * block, max_model_len}
    for size in (spec.window, spec.chunk):
        if size is not None:
            edges |= {size, 2 * size, 3 * size, size + block, 2 * size + block}
    nearby = {edge + offset for edge in edges for offset in (-block, -1, 0, 1)}
    return sorted(position for position in nearby if 0 < position < max_model_len)
