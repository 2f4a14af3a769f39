"""Makes an engine from a config: the only file where names become objects."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from octavo.config import EngineConfig
from octavo.core.block_pool import BlockPool
from octavo.core.engine_core import EngineCore
from octavo.core.interfaces import (
    AttentionBackend,
    AttentionSpec,
    Checkpoint,
    HashFunction,
    KVCacheSpec,
    Model,
    ModelSpec,
    SingleTypeKVCacheManager,
    Tokenizer,
)
from octavo.core.interfaces.attention import reasons_against
from octavo.core.kv_cache_config import (
    SHORTEST_REQUEST,
    KVCacheConfig,
    KVCacheGroup,
    RequestCost,
    format_bytes,
    make_groups,
    num_blocks_from_memory,
)
from octavo.core.kv_cache_manager import KVCacheManager
from octavo.core.prefix_hash import PrefixHasher, hash_root, hash_seed_from_environment
from octavo.core.scheduler import Scheduler
from octavo.errors import CheckpointError, ConfigError, NotEnoughMemoryError, PluginUnsuitable, UnsupportedModelError
from octavo.plugins.families import ATTENTION_BACKENDS, HASH_FUNCTIONS, KV_MANAGERS, MODELS, REQUEST_QUEUES
from octavo.plugins.registry import Registry, scan

logger = logging.getLogger(__name__)

# Which of Octavo's own attention backends `attention_backend="auto"` takes: the first that can serve.
AUTO_BACKENDS = ("torch_sdpa",)


@dataclass(frozen=True)
class Assembly:
    """An engine and what stands around it.

    Attributes:
        engine: Token ids in, token ids out.
        tokenizer: The model's; None when its files have none, and then only token ids can be served.
        kv_cache_config: The layout that was chosen.
        attention_backend: Name of the backend that was chosen.
    """

    engine: EngineCore
    tokenizer: Tokenizer | None
    kv_cache_config: KVCacheConfig
    attention_backend: str


def build_engine(config: EngineConfig) -> Assembly:
    """Load the model and make everything around it.

    Raises:
        ModelError: The model cannot be found, read or served.
        PluginError: A part that was chosen by name cannot be had, or cannot serve.
        NotEnoughMemoryError: The KV cache does not hold one request of the length asked for.
        ConfigError: Settings contradict each other or the model.
    """
    # Imported here, for torch takes more than a second.
    from octavo.core.model_runner import ModelRunner
    from octavo.models.checkpoint import open_checkpoint

    registry = scan()
    # Names are looked up before the weights are read: a misspelt one should not take a minute to be found.
    queue = registry.load(REQUEST_QUEUES, config.scheduler.request_queue)()
    hash_function: HashFunction = registry.load(HASH_FUNCTIONS, config.cache.hash_function)()
    if config.attention_backend != "auto":
        registry.load(ATTENTION_BACKENDS, config.attention_backend)
    if config.model_impl != "auto":
        registry.load(MODELS, config.model_impl)
    for manager in config.cache.kv_managers.values():
        registry.load(KV_MANAGERS, manager)

    checkpoint = open_checkpoint(config.model)
    device = _device(config.device)
    dtype = _dtype(config.dtype, device, checkpoint)
    model_class = _model_class(registry, config.model_impl, checkpoint)
    kv_dtype = dtype if config.cache.kv_cache_dtype == "auto" else config.cache.kv_cache_dtype
    spec = model_class.spec_from_config(
        checkpoint.config, dtype=dtype, device=device, block_size=config.cache.block_size, kv_dtype=kv_dtype
    )
    _check_positions(config.max_model_len, spec)
    backend_name, backends = _backends(registry, config.attention_backend, spec.attention_specs)
    groups = make_groups(spec.kv_cache_specs)
    model: Model = model_class.from_checkpoint(checkpoint, dtype=dtype, device=device)
    _check_kinds(config.cache.kv_managers, groups)
    manager_classes = tuple(_manager_class(registry, config.cache.kv_managers, group.spec) for group in groups)
    cost = RequestCost(groups, manager_classes, config.scheduler.max_num_batched_tokens)
    kv_cache_config = KVCacheConfig(_num_blocks(config, model, backends, cost, device), groups)
    _check_size(kv_cache_config, device)
    max_model_len = _max_model_len(config, spec, cost, kv_cache_config.num_blocks)
    _log_choices(config, backend_name, device, dtype, kv_cache_config, max_model_len)

    pool = BlockPool(kv_cache_config.num_blocks, enable_caching=config.cache.enable_prefix_caching)
    managers = [
        manager_class(group.spec, pool, group_id, config.scheduler.max_num_seqs)
        for group_id, (manager_class, group) in enumerate(zip(manager_classes, groups, strict=True))
    ]
    scheduler = Scheduler(
        KVCacheManager(
            pool,
            managers,
            _hasher(config, hash_function, groups),
            reuses_blocks_within_a_step=all(backend.writes_before_reads for backend in backends),
        ),
        queue,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        enable_chunked_prefill=config.scheduler.enable_chunked_prefill,
    )
    engine = EngineCore(
        scheduler,
        ModelRunner(model, backends, kv_cache_config, device),
        vocab_size=spec.vocab_size,
        max_model_len=max_model_len,
        # A file may name ids that its model cannot generate.
        eos_token_ids=frozenset(token_id for token_id in checkpoint.eos_token_ids if 0 <= token_id < spec.vocab_size),
        seed=config.seed,
        accepts_cache_salts=hash_function.is_collision_resistant,
    )
    return Assembly(engine, _tokenizer(checkpoint), kv_cache_config, backend_name)


# -- parts ------------------------------------------------------------------------------------------------------


def _device(device: str) -> str:
    import torch

    if device == "auto":
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


def _dtype(dtype: str, device: str, checkpoint: Checkpoint) -> str:
    if dtype != "auto":
        return dtype
    return "float32" if device == "cpu" else checkpoint.dtype


def _model_class(registry: Registry, model_impl: str, checkpoint: Checkpoint) -> type[Model]:
    if model_impl != "auto":
        chosen: type[Model] = registry.load(MODELS, model_impl)
        return chosen
    model_type = checkpoint.config.get("model_type")
    # With "auto" only Octavo's own models are taken: installing a package changes nothing by itself.
    native = [plugin.name for plugin in registry.plugins(MODELS) if plugin.is_built_in]
    if model_type not in native:
        raise UnsupportedModelError(
            f"The checkpoint's model_type is {model_type!r}, and Octavo has {', '.join(native)}. Convert the model, or "
            "install a package that registers a model for it and name it in model_impl."
        )
    model_class: type[Model] = registry.load(MODELS, str(model_type))
    return model_class


def _backends(registry: Registry, name: str, specs: Sequence[AttentionSpec]) -> tuple[str, list[AttentionBackend]]:
    """Choose the backend for all layers; make one object for each distinct spec."""
    chosen, backend_class = _backend_class(registry, name, specs)
    by_spec = {spec: backend_class(spec) for spec in dict.fromkeys(specs)}
    return chosen, [by_spec[spec] for spec in specs]


def _backend_class(registry: Registry, name: str, specs: Sequence[AttentionSpec]) -> tuple[str, type[AttentionBackend]]:
    against: dict[str, list[str]] = {}
    for candidate in AUTO_BACKENDS if name == "auto" else (name,):
        backend_class: type[AttentionBackend] = registry.load(ATTENTION_BACKENDS, candidate)
        against[candidate] = reasons_against(backend_class, specs)
        if not against[candidate]:
            return candidate, backend_class
    reasons = " ".join(f"{candidate}: {' '.join(why)}" for candidate, why in against.items())
    raise PluginUnsuitable(f"No attention backend can serve this model here. {reasons}")


def _manager_class(registry: Registry, choices: dict[str, str], spec: KVCacheSpec) -> type[SingleTypeKVCacheManager]:
    name = choices.get(spec.kind, spec.kind)
    manager_class: type[SingleTypeKVCacheManager] = registry.load(KV_MANAGERS, name)
    if not isinstance(spec, manager_class.serves):
        raise PluginUnsuitable(
            f"The KV-cache manager '{name}' serves {manager_class.serves.__name__}, and the model's layers keep "
            f"{type(spec).__name__}; choose another one in kv_managers."
        )
    return manager_class


def _check_kinds(choices: dict[str, str], groups: Sequence[KVCacheGroup]) -> None:
    kinds = [group.spec.kind for group in groups]
    for kind in choices:
        if kind not in kinds:
            raise ConfigError(
                f"kv_managers chooses '{choices[kind]}' for the kind {kind!r}, and the model's layers keep: "
                f"{', '.join(kinds)}."
            )


def _hasher(config: EngineConfig, hash_function: HashFunction, groups: Sequence[KVCacheGroup]) -> PrefixHasher | None:
    if not config.cache.enable_prefix_caching:
        return None
    seed = hash_seed_from_environment() if config.cache.hash_seed is None else config.cache.hash_seed
    return PrefixHasher(hash_function, groups[0].spec.block_size, hash_root(hash_function, seed))


def _tokenizer(checkpoint: Checkpoint) -> Tokenizer | None:
    try:
        return checkpoint.tokenizer()
    except CheckpointError as cause:
        logger.warning("serving token ids only: %s", cause)
        return None


# -- sizes ------------------------------------------------------------------------------------------------------


def _check_positions(max_model_len: int | str, spec: ModelSpec) -> None:
    if isinstance(max_model_len, int) and not SHORTEST_REQUEST <= max_model_len <= spec.max_position:
        raise ConfigError(
            f"max_model_len is {max_model_len}; it must be from {SHORTEST_REQUEST} (a prompt token and a new one) to "
            f"{spec.max_position}, the longest sequence that the model's positions are made for."
        )


def _check_size(kv_cache_config: KVCacheConfig, device: str) -> None:
    """Refuse a size that was asked for and that no memory of this device could hold."""
    from octavo.core import memory

    total = memory.total_bytes(device)
    if kv_cache_config.total_bytes > total:
        raise NotEnoughMemoryError(
            f"A KV cache of {kv_cache_config.num_blocks} blocks takes {kv_cache_config.total_bytes} bytes "
            f"({format_bytes(kv_cache_config.total_bytes)}), and {device} has {total} bytes ({format_bytes(total)}) in "
            "all. Lower num_kv_blocks or kv_cache_memory_bytes, or leave both out.",
            max_model_len_that_fits=0,
        )


def _num_blocks(
    config: EngineConfig, model: Model, backends: Sequence[AttentionBackend], cost: RequestCost, device: str
) -> int:
    if config.cache.num_kv_blocks is not None:
        return config.cache.num_kv_blocks
    if config.cache.kv_cache_memory_bytes is not None:
        available = config.cache.kv_cache_memory_bytes
    else:
        available = _available_bytes(config, model, backends, cost, device)
    shortest = SHORTEST_REQUEST if config.max_model_len == "auto" else config.max_model_len
    return num_blocks_from_memory(available, cost, shortest)


def _available_bytes(
    config: EngineConfig, model: Model, backends: Sequence[AttentionBackend], cost: RequestCost, device: str
) -> int:
    from octavo.core import memory
    from octavo.core.model_runner import ModelRunner

    if device == "cpu":
        return memory.cpu_kv_cache_bytes(config.cache.cpu_memory_share)
    num_tokens, num_rows = config.scheduler.max_num_batched_tokens, config.scheduler.max_num_seqs

    def profiling_forward() -> None:
        num_blocks = memory.num_profiling_blocks(num_tokens, num_rows, config.cache.block_size)
        runner = ModelRunner(model, backends, KVCacheConfig(num_blocks, cost.groups), device)
        runner.run(memory.profiling_plan(num_tokens, num_rows, config.cache.block_size))

    return memory.accelerator_kv_cache_bytes(
        memory.CudaMemory(device), config.cache.gpu_memory_utilization, profiling_forward
    )


def _max_model_len(config: EngineConfig, spec: ModelSpec, cost: RequestCost, num_blocks: int) -> int:
    if config.max_model_len == "auto":
        fits = cost.longest_request(num_blocks - 1, spec.max_position)
        if not fits:
            raise NotEnoughMemoryError(
                f"num_kv_blocks={num_blocks} holds no request; a prompt token and a new one take more. Raise it.",
                max_model_len_that_fits=0,
            )
        return fits
    needed = cost.num_blocks(config.max_model_len)
    if needed > num_blocks - 1:
        logger.warning(
            "num_kv_blocks=%d holds %d usable blocks, and one request of max_model_len=%d takes %d: longer requests "
            "end with finish_reason 'length' when the KV cache is full",
            num_blocks,
            num_blocks - 1,
            config.max_model_len,
            needed,
        )
    return config.max_model_len


def _log_choices(
    config: EngineConfig, backend: str, device: str, dtype: str, kv_cache: KVCacheConfig, max_model_len: int
) -> None:
    logger.info(
        "model %s on %s in %s; attention backend %s (%s); KV cache of %d blocks of %d tokens, %s; requests of up to %d "
        "tokens",
        config.model or "demo",
        device,
        dtype,
        backend,
        "first of Octavo's own that can serve" if config.attention_backend == "auto" else "as configured",
        kv_cache.num_blocks,
        config.cache.block_size,
        format_bytes(kv_cache.total_bytes),
        max_model_len,
    )
