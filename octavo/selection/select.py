"""Names become classes here, before any weight is read.

config ── names ──► parts ── model's spec ──► KV-cache groups ── each: a manager, a backend ──► Selection
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.config import EngineConfig, PluginChoice, environment_warnings
from octavo.core.interfaces import Checkpoint, ModelSpec
from octavo.core.kv_cache_config import SHORTEST_REQUEST, KVCacheGroup, make_groups
from octavo.errors import ConfigError, PluginContractError, PluginUnsuitable
from octavo.plugins.families import HASH_FUNCTIONS, HOOKS, KV_MANAGERS, MODELS, REQUEST_QUEUES
from octavo.plugins.hooks import Observers
from octavo.plugins.part import Part, choose
from octavo.plugins.registry import Registry
from octavo.selection.backends import choose_backend, named_backends
from octavo.selection.named import AUTO, named, named_by_kind, named_unless_auto
from octavo.selection.report import Chosen, GroupSelection, ModelNeeds, Selection

logger = logging.getLogger(__name__)

# The model class that "auto" takes where no other of Octavo's own is registered for the model_type.
FALLBACK_MODEL = "transformers"


def select(config: EngineConfig, registry: Registry) -> Selection:
    """Choose every part.

    Raises:
        PluginError: A part that was chosen by name cannot be had, or cannot serve.
        ModelError: The model cannot be found, read or served.
        ConfigError: Settings contradict each other or the model.
    """
    # Names are looked up before the model's files: a misspelt one should not take a minute to be found.
    queue = named(config, registry, REQUEST_QUEUES, config.scheduler.request_queue)
    hash_function = named(config, registry, HASH_FUNCTIONS, config.cache.hash_function)
    observers = _observers(config, registry)
    hooks = Observers([observer.part for observer in observers])
    backends = named_backends(config, registry)
    managers = named_by_kind(config, registry, KV_MANAGERS, "kv_managers", config.cache.kv_managers)
    needs = model_needs(config, registry)
    _check_kinds("attention_backends", backends.by_kind, needs.groups)
    _check_kinds("kv_managers", managers, needs.groups)
    groups = []
    for group in needs.groups:
        kind = group.spec.kind
        backend, others = choose_backend(config, registry, backends, kind, needs.attention_specs(group))
        manager = managers.get(kind) or _default_manager(registry, kind)
        _check_manager(manager.part, group)
        groups.append(GroupSelection(group, manager, backend, others))
    return Selection(needs, tuple(groups), queue, hash_function, observers, hooks)


def model_needs(config: EngineConfig, registry: Registry) -> ModelNeeds:
    """Open the model's files and find what its layers compute and keep. No weight is read.

    Raises:
        ModelError: The model cannot be found, read or served.
        PluginError: The model class that was chosen by name cannot be had.
        ConfigError: The device or dtype cannot be used, or nothing can hold what the layers keep.
    """
    for sentence in environment_warnings():
        logger.warning("%s", sentence)
    named_model = named_unless_auto(config, registry, MODELS, config.model_impl)
    # Imported here, for torch takes more than a second.
    from octavo.models.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(config.model)
    device = _device(config.device)
    dtype = _dtype(config.dtype, device, checkpoint)
    model = named_model or _model_by_type(config, registry, checkpoint.config.get("model_type"))
    kv_dtype = dtype if config.cache.kv_cache_dtype == AUTO else config.cache.kv_cache_dtype
    with model.part.blamed("when it was asked what the model needs"):
        spec: ModelSpec = model.part.loaded.spec_from_config(
            checkpoint.config, dtype=dtype, device=device, block_size=config.cache.block_size, kv_dtype=kv_dtype
        )
    if not isinstance(spec, ModelSpec) or len(spec.attention_specs) != len(spec.kv_cache_specs):
        raise PluginContractError(
            f"The model {model.part.plugin} answers spec_from_config with something of type {type(spec).__name__}; it "
            "must be a ModelSpec with as many attention specs as KV-cache specs."
        )
    return ModelNeeds(checkpoint, model, spec, make_groups(spec.kv_cache_specs), device, dtype)


# -- single parts -----------------------------------------------------------------------------------------------


def _observers(config: EngineConfig, registry: Registry) -> tuple[Chosen, ...]:
    observers: list[Chosen] = []
    for choice in config.hooks:
        part = choose(registry, HOOKS, choice)
        if any(part.plugin == earlier.part.plugin for earlier in observers):
            raise ConfigError(f"hooks lists the observer {part.plugin} twice; it would be told everything twice.")
        observers.append(Chosen(part, config.source_of("hooks")))
    return tuple(observers)


def _default_manager(registry: Registry, kind: str) -> Chosen:
    return Chosen(choose(registry, KV_MANAGERS, PluginChoice(kind)), "default", "named as what the layers keep")


def _model_by_type(config: EngineConfig, registry: Registry, model_type: Any) -> Chosen:
    # With "auto" only Octavo's own models are taken: installing a package changes nothing by itself.
    native = {plugin.name for plugin in registry.plugins(MODELS) if plugin.is_built_in}
    is_native = model_type in native
    reason = f"model_type is {model_type!r}" if is_native else f"no class of Octavo's own for model_type {model_type!r}"
    part = choose(registry, MODELS, PluginChoice(model_type if is_native else FALLBACK_MODEL))
    return Chosen(part, config.source_of("model_impl"), f"'auto': {reason}")


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


def _check_kinds(setting: str, choices: Mapping[str, Chosen], groups: Sequence[KVCacheGroup]) -> None:
    kinds = [group.spec.kind for group in groups]
    for kind, chosen in choices.items():
        if kind not in kinds:
            raise ConfigError(
                f"{setting} chooses '{chosen.part.plugin.name}' for the kind {kind!r}, and the model's layers keep: "
                f"{', '.join(kinds)}."
            )


def _dtype(dtype: str, device: str, checkpoint: Checkpoint) -> str:
    if dtype != AUTO:
        return dtype
    return "float32" if device == "cpu" else checkpoint.dtype


def _device(device: str) -> str:
    import torch

    if device == AUTO:
        return "cuda:0" if torch.cuda.is_available() else "cpu"
    try:
        kind = torch.device(device).type
    except RuntimeError as cause:
        raise ConfigError(f"device is {device!r}, which torch does not know: {str(cause).splitlines()[0]}") from None
    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device is {device!r}, and torch sees no GPU here; set device='cpu' or leave it at 'auto'.")
    if kind not in ("cpu", "cuda") or (kind == "cpu" and device != "cpu"):
        raise ConfigError(f"device is {device!r}; Octavo runs on 'cpu' and on 'cuda' devices.")
    return device
