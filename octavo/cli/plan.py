"""`octavo plan`: what a KV cache of some size holds."""

import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Annotated

import typer

from octavo.cli.memory_size import parse_memory_size
from octavo.cli.options import with_engine_options, with_model
from octavo.cli.plan_answer import PlanAnswer
from octavo.config import QUANTISED_KV_CACHE_DTYPES, EngineConfig
from octavo.errors import ConfigError, PluginError

if TYPE_CHECKING:
    from octavo.core.kv_cache_plan import CachePlan
    from octavo.plugins.registry import Registry
    from octavo.selection.report import Chosen, ModelNeeds


@with_engine_options
def plan(
    *,
    model_argument: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="As --model, or a config.json alone. Without it, the demo model."),
    ] = None,
    config: EngineConfig,
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Memory of the KV cache, such as 8GiB, 1.5GB or bytes. Without it: what the settings say, or what an "
            "engine would take here.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print an object for a program to read.")] = False,
) -> None:
    """Say what a KV cache holds for MODEL: bytes a token, blocks, the longest request, and how many requests at a time
    by their length. No weight is read and nothing is allocated; the settings count as they would for an engine, and
    --device may name one that is not here."""
    config = with_model(config, model_argument)
    given_bytes = None if memory is None else _given_bytes(memory, config)
    from octavo.plugins.registry import scan
    from octavo.selection.managers import choose_managers, named_managers
    from octavo.selection.select import model_needs_elsewhere

    registry = scan()
    # What a package prints when it is imported or asked must not get between the lines of the answer.
    with redirect_stdout(sys.stderr):
        named = named_managers(config, registry)
        needs = model_needs_elsewhere(config, registry)
        managers = choose_managers(registry, named, needs.groups)
        size = _size_of_cache(config, needs.device, given_bytes)
        plan = _make_plan(config, needs, managers, size)
        switched = _switched(config, registry, named, needs, plan)
        unquantised = _unquantised(config, managers, needs, plan)
        answer = PlanAnswer(config, needs, managers, size.source, plan, switched, unquantised)
        shown = json.dumps(answer.as_object(), default=str) if as_json else "\n".join(answer.lines())
    print(shown)


# -- the plan ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _CacheSize:
    """How large the KV cache is to be: a number of blocks, or else of bytes.

    Attributes:
        source: Where that comes from.
    """

    num_blocks: int | None
    num_bytes: int
    source: str


def _given_bytes(memory: str, config: EngineConfig) -> int:
    for name in ("num_kv_blocks", "kv_cache_memory_bytes"):
        source = config.source_of(name)
        # What a file says is overridden; two flags contradict each other.
        if source.startswith("flag"):
            raise ConfigError(f"The size of the KV cache is given twice, by --memory and by {source}; leave one out.")
    return parse_memory_size("--memory", memory)


def _size_of_cache(config: EngineConfig, device: str, given_bytes: int | None) -> _CacheSize:
    cache = config.cache
    if given_bytes is not None:
        return _CacheSize(None, given_bytes, "given by --memory")
    if cache.num_kv_blocks is not None:
        return _CacheSize(cache.num_kv_blocks, 0, f"num_kv_blocks by {config.source_of('num_kv_blocks')}")
    if cache.kv_cache_memory_bytes is not None:
        source = f"kv_cache_memory_bytes by {config.source_of('kv_cache_memory_bytes')}"
        return _CacheSize(None, cache.kv_cache_memory_bytes, source)
    if device != "cpu":
        raise ConfigError(
            f"How much memory the KV cache gets on {device} is measured when an engine starts, with the weights "
            "loaded. Say what to plan with, such as --memory 8GiB."
        )
    from octavo.core.memory import cpu_kv_cache_bytes

    source = f"{cache.cpu_memory_share:g} of what is free here now; an engine takes it with the weights loaded"
    return _CacheSize(None, cpu_kv_cache_bytes(cache.cpu_memory_share), source)


def _make_plan(
    config: EngineConfig, needs: "ModelNeeds", managers: Sequence["Chosen"], size: _CacheSize
) -> "CachePlan":
    from octavo.core.kv_cache_plan import RequestLimits, plan_from_blocks, plan_from_memory
    from octavo.selection.managers import request_cost

    limits = RequestLimits(needs.spec.max_position, config.max_model_len)
    cost = request_cost(config, managers, needs.groups)
    if size.num_blocks is not None:
        return plan_from_blocks(size.num_blocks, cost, limits)
    return plan_from_memory(size.num_bytes, cost, limits)


def _switched(
    config: EngineConfig, registry: "Registry", named: "Mapping[str, Chosen]", needs: "ModelNeeds", plan: "CachePlan"
) -> "CachePlan | None":
    """Return what the same memory would hold with the other value of disable_hybrid_kv_cache_manager.

    None where it changes nothing, or where nothing serves what the layers would keep then.
    """
    from octavo.core.kv_cache_config import make_groups, num_blocks_in
    from octavo.selection.managers import choose_managers, request_cost

    is_disabled = config.cache.disable_hybrid_kv_cache_manager
    groups = make_groups(needs.stated if is_disabled else [spec.without_recycling() for spec in needs.stated])
    if groups == needs.groups:
        return None
    kinds = {group.spec.kind for group in groups}
    try:
        managers = choose_managers(registry, {kind: named[kind] for kind in kinds & named.keys()}, groups)
    except PluginError:
        return None
    cost = request_cost(config, managers, groups)
    return dataclasses.replace(plan, cost=cost, num_blocks=max(num_blocks_in(plan.available_bytes, groups), 1))


def _unquantised(
    config: EngineConfig, managers: "Sequence[Chosen]", needs: "ModelNeeds", plan: "CachePlan"
) -> "CachePlan | None":
    """Return what the same memory would hold with keys and values in the model's own dtype.

    None where the KV cache is not quantised.
    """
    from octavo.core.kv_cache_config import make_groups, num_blocks_in
    from octavo.core.kv_cache_plan import kept_in
    from octavo.selection.managers import request_cost

    if config.cache.kv_cache_dtype not in QUANTISED_KV_CACHE_DTYPES:
        return None
    stated = [kept_in(spec, needs.dtype) for spec in needs.stated]
    if config.cache.disable_hybrid_kv_cache_manager:
        stated = [spec.without_recycling() for spec in stated]
    groups = make_groups(stated)
    of_kind = {group.spec.kind: manager for group, manager in zip(needs.groups, managers, strict=True)}
    cost = request_cost(config, [of_kind[group.spec.kind] for group in groups], groups)
    return dataclasses.replace(plan, cost=cost, num_blocks=max(num_blocks_in(plan.available_bytes, groups), 1))
