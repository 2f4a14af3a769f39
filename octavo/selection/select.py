"""Names become classes here, before any weight is read.

config ── names ──► parts ── model's spec ──► KV-cache groups ── each: a manager, a backend ──► Selection
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from octavo.config import EngineConfig, PluginChoice, environment_warnings
from octavo.core.interfaces import Checkpoint, ModelSpec
from octavo.core.kv_cache_config import KVCacheGroup, make_groups
from octavo.errors import CheckpointError, ConfigError, PluginContractError, UnsupportedModelError
from octavo.models.unserved import refuse_unserved
from octavo.plugins.families import HASH_FUNCTIONS, HOOKS, MODELS, REQUEST_QUEUES
from octavo.plugins.hooks import Observers
from octavo.plugins.part import choose
from octavo.plugins.registry import Registry
from octavo.selection.backends import NamedBackends, choose_backend, named_backends
from octavo.selection.kv_scales import choose_scaling
from octavo.selection.managers import choose_managers, named_managers
from octavo.selection.named import AUTO, check_kinds, named, named_unless_auto
from octavo.selection.report import Chosen, GroupSelection, ModelNeeds, Selection

logger = logging.getLogger(__name__)

# The model class that "auto" takes where no other of Octavo's own is registered for the model_type.
FALLBACK_MODEL = "transformers"


@dataclass(frozen=True)
class NamedParts:
    """The parts that a config names, the model class aside.

    Attributes:
        request_queue: Orders waiting requests.
        hash_function: Makes the prefix cache's keys.
        observers: In the order of the setting.
        backends: The attention backends.
        managers: The KV-cache managers, by the kind of what layers keep.
    """

    request_queue: Chosen
    hash_function: Chosen
    observers: tuple[Chosen, ...]
    backends: NamedBackends
    managers: dict[str, Chosen]


def named_parts(config: EngineConfig, registry: Registry) -> NamedParts:
    """Find and import what a config names.

    Raises:
        PluginError: A part cannot be had, or does not take its options.
        ConfigError: An observer is listed twice.
    """
    return NamedParts(
        named(config, registry, REQUEST_QUEUES, config.scheduler.request_queue),
        named(config, registry, HASH_FUNCTIONS, config.cache.hash_function),
        _observers(config, registry),
        named_backends(config, registry),
        named_managers(config, registry),
    )


def select(config: EngineConfig, registry: Registry) -> Selection:
    """Choose every part.

    Raises:
        PluginError: A part that was chosen by name cannot be had, or cannot serve.
        ModelError: The model cannot be found, read or served.
        ConfigError: Settings contradict each other or the model.
    """
    # Names are looked up before the model's files: a misspelt one should not take a minute to be found.
    parts = named_parts(config, registry)
    hooks = Observers([observer.part for observer in parts.observers])
    needs = model_needs(config, registry)
    check_kinds("attention_backends", parts.backends.by_kind, needs.groups)
    managers = choose_managers(registry, parts.managers, needs.groups)
    groups = []
    for group, manager in zip(needs.groups, managers, strict=True):
        specs = needs.attention_specs(group)
        backend, others = choose_backend(config, registry, parts.backends, group.spec.kind, specs)
        groups.append(GroupSelection(group, manager, backend, others))
    return Selection(needs, tuple(groups), parts.request_queue, parts.hash_function, parts.observers, hooks)


def model_needs(config: EngineConfig, registry: Registry) -> ModelNeeds:
    """Open the model's files and find what its layers compute and keep. No weight is read.

    Raises:
        ModelError: The model cannot be found, read or served.
        PluginError: The model class that was chosen by name cannot be had.
        ConfigError: The device or dtype cannot be used, or nothing can hold what the layers keep.
    """
    # Imported here, for reading a model's files may import torch, which takes more than a second.
    from octavo.models.checkpoint import open_checkpoint

    needs = _needs(config, registry, open_checkpoint, _usable_device)
    if needs.kv_scales.warning is not None:
        logger.warning("%s", needs.kv_scales.warning)
    return needs


def model_needs_elsewhere(config: EngineConfig, registry: Registry) -> ModelNeeds:
    """As `model_needs`, for an engine on another machine: of the model a config.json is enough, and the device need
    not be there.

    Raises:
        ModelError: As by `model_needs`.
        PluginError: As by `model_needs`.
        ConfigError: Octavo runs on no device of that kind, or nothing can hold what the layers keep.
    """
    from octavo.models.checkpoint import open_config

    return _needs(config, registry, open_config, _known_device)


def _needs(
    config: EngineConfig,
    registry: Registry,
    open_model: Callable[[str | None], Checkpoint],
    device_of: Callable[[str], str],
) -> ModelNeeds:
    for sentence in environment_warnings():
        logger.warning("%s", sentence)
    named_model = named_unless_auto(config, registry, MODELS, config.model_impl)
    checkpoint = open_model(config.model)
    device = device_of(config.device)
    model = named_model or _model_by_type(config, registry, checkpoint.config.get("model_type"))
    if model.part.plugin.is_built_in:
        with _naming(config.model):
            refuse_unserved(f"model_type {checkpoint.config.get('model_type')!r}", checkpoint.config)
    dtype = _dtype(config.dtype, device, checkpoint)
    scaling = choose_scaling(config, checkpoint, dtype)
    with _naming(config.model), model.part.blamed("when it was asked what the model needs"):
        spec: ModelSpec = model.part.loaded.spec_from_config(
            checkpoint.config, dtype=dtype, device=device, block_size=config.cache.block_size, kv_dtype=scaling.kv_dtype
        )
    if not isinstance(spec, ModelSpec) or len(spec.attention_specs) != len(spec.kv_cache_specs):
        raise PluginContractError(
            f"The model {model.part.plugin} answers spec_from_config with something of type {type(spec).__name__}; it "
            "must be a ModelSpec with as many attention specs as KV-cache specs."
        )
    kept = spec.kv_cache_specs
    if config.cache.disable_hybrid_kv_cache_manager:
        kept = tuple(spec.without_recycling() for spec in kept)
    groups = make_groups(kept)
    with _naming(config.model):
        scales = scaling.resolved(spec.attention_specs)
    return ModelNeeds(checkpoint, model, _following(spec, groups), spec.kv_cache_specs, groups, device, dtype, scales)


def _following(spec: ModelSpec, groups: Sequence[KVCacheGroup]) -> ModelSpec:
    """Return what the model needs, with the blocks that its layers' groups have."""
    kept = {layer: group.spec for group in groups for layer in group.layers}
    return replace(
        spec,
        attention_specs=tuple(
            replace(attention, block_size=kept[layer].block_size)
            for layer, attention in enumerate(spec.attention_specs)
        ),
        kv_cache_specs=tuple(kept[layer] for layer in range(len(kept))),
    )


@contextmanager
def _naming(model: str | None) -> Iterator[None]:
    """Say of which model's config an error speaks: who reads the config does not know where it came from."""
    try:
        yield
    except (CheckpointError, UnsupportedModelError) as error:
        # A package's own kind of error may take other arguments.
        if type(error) not in (CheckpointError, UnsupportedModelError):
            raise
        raise type(error)(f"In {'the demo model' if model is None else repr(model)}: {error}") from error


# -- single parts -----------------------------------------------------------------------------------------------


def _observers(config: EngineConfig, registry: Registry) -> tuple[Chosen, ...]:
    observers: list[Chosen] = []
    for choice in config.hooks:
        part = choose(registry, HOOKS, choice)
        if any(part.plugin == earlier.part.plugin for earlier in observers):
            raise ConfigError(f"hooks lists the observer {part.plugin} twice; it would be told everything twice.")
        observers.append(Chosen(part, config.source_of("hooks")))
    return tuple(observers)


def _model_by_type(config: EngineConfig, registry: Registry, model_type: Any) -> Chosen:
    if model_type is None:
        raise UnsupportedModelError(
            f"The config of {config.model!r} has no model_type, by which a model class is chosen. If it is a model's "
            "config, name the class in model_impl."
        )
    if not isinstance(model_type, str):
        raise CheckpointError(
            f"The config of {config.model!r} gives {model_type!r} as model_type; it has to be the name of one."
        )
    # With "auto" only Octavo's own models are taken: installing a package changes nothing by itself.
    native = {plugin.name for plugin in registry.plugins(MODELS) if plugin.is_built_in}
    is_native = model_type in native
    reason = f"model_type is {model_type!r}" if is_native else f"no class of Octavo's own for model_type {model_type!r}"
    part = choose(registry, MODELS, PluginChoice(model_type if is_native else FALLBACK_MODEL))
    return Chosen(part, config.source_of("model_impl"), f"'auto': {reason}")


def _dtype(dtype: str, device: str, checkpoint: Checkpoint) -> str:
    if dtype != AUTO:
        return dtype
    return "float32" if device == "cpu" else checkpoint.dtype


def _usable_device(device: str) -> str:
    """Return the device of this machine that is meant."""
    import torch

    known = _known_device(device)
    if known != "cpu" and not torch.cuda.is_available():
        raise ConfigError(f"device is {device!r}, and torch sees no GPU here; set device='cpu' or leave it at 'auto'.")
    return known


def _known_device(device: str) -> str:
    """Return the device that is meant, which may be another machine's; "auto" is one of this machine."""
    import torch

    if device == AUTO:
        return "cuda:0" if torch.cuda.is_available() else "cpu"
    try:
        kind = torch.device(device).type
    except RuntimeError as cause:
        raise ConfigError(f"device is {device!r}, which torch does not know: {str(cause).splitlines()[0]}") from None
    if kind not in ("cpu", "cuda") or (kind == "cpu" and device != "cpu"):
        raise ConfigError(f"device is {device!r}; Octavo runs on 'cpu' and on 'cuda' devices.")
    return device
