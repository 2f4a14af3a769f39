"""Makes an engine from a config: the only file where names become objects."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from octavo.config import EngineConfig
from octavo.core.block_pool import BlockPool
from octavo.core.content_keys import ContentHasher
from octavo.core.engine_core import EngineCore
from octavo.core.interfaces import AttentionBackend, HashFunction, Model, ModelSpec, Tokenizer
from octavo.core.kv_cache_config import (
    SHORTEST_REQUEST,
    KVCacheConfig,
    RequestCost,
    describe_groups,
    format_bytes,
    num_blocks_from_memory,
    padding_warning,
)
from octavo.core.kv_cache_coordinator import hash_unit_of
from octavo.core.kv_cache_manager import KVCacheManager
from octavo.core.prefix_hash import PrefixHasher, check_hash_function, hash_root, hash_seed_from_environment
from octavo.core.prefix_verifier import PrefixVerifier, VerifiableRunner, VerifyingKVCacheManager, tolerance
from octavo.core.scheduler import Scheduler
from octavo.errors import CheckpointError, ConfigError, NotEnoughMemoryError
from octavo.plugins.hooks import Observers
from octavo.plugins.hookspecs import EngineStarted
from octavo.plugins.registry import scan
from octavo.selection.managers import check_reach, request_cost
from octavo.selection.report import ModelNeeds, Selection
from octavo.selection.select import select

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Assembly:
    """An engine and what stands around it.

    Attributes:
        engine: Token ids in, token ids out.
        tokenizer: The model's; None when its files have none, and then only token ids can be served.
        kv_cache_config: The layout that was chosen.
        selection: The parts that were chosen, and why.
        observers: Whom to tell what the engine does.
        started: What to tell them first.
    """

    engine: EngineCore
    tokenizer: Tokenizer | None
    kv_cache_config: KVCacheConfig
    selection: Selection
    observers: Observers
    started: EngineStarted


def build_engine(config: EngineConfig) -> Assembly:
    """Load the model and make everything around it.

    Raises:
        ModelError: The model cannot be found, read or served.
        PluginError: A part that was chosen by name cannot be had, or cannot serve.
        NotEnoughMemoryError: The KV cache does not hold one request of the length asked for.
        ConfigError: Settings contradict each other or the model.
    """
    # Imported here, for torch takes more than a second.
    from octavo.core import cuda_graphs
    from octavo.core.model_runner import ModelRunner

    _check_verification(config)
    selection = select(config, scan())
    report = selection.lines()
    for line in report:
        logger.info("%s", line)
    needs, spec, device = selection.needs, selection.needs.spec, selection.needs.device
    _check_positions(config.max_model_len, spec)
    # Whatever can raise is made before the weights are read.
    queue = selection.request_queue.part.create()
    hash_function = _hash_function(selection)
    backends = _backends(selection)
    model = _model(needs)

    groups = tuple(selected.group for selected in selection.groups)
    manager_parts = [selected.manager.part for selected in selection.groups]
    cost = request_cost(config, [selected.manager for selected in selection.groups], groups)
    sizes = cuda_graphs.sizes_to_capture(
        device,
        model,
        backends,
        max_num_seqs=config.scheduler.max_num_seqs,
        wanted=config.cudagraph_capture_sizes,
        enforce_eager=config.enforce_eager,
    )
    kv_cache_config = KVCacheConfig(_num_blocks(config, needs, model, backends, cost, sizes), groups)
    _check_size(kv_cache_config, device)
    max_model_len = _max_model_len(config, spec, cost, kv_cache_config.num_blocks)
    logger.info(
        "model %s on %s in %s; KV cache of %d blocks of %s tokens, %s; requests of up to %d tokens",
        config.model or "demo",
        device,
        needs.dtype,
        kv_cache_config.num_blocks,
        " or ".join(map(str, sorted({group.spec.block_size for group in groups}))),
        format_bytes(kv_cache_config.total_bytes),
        max_model_len,
    )
    _report_groups(cost, max_model_len)
    if config.cache.disable_hybrid_kv_cache_manager:
        _report_recycling(cost)

    pool = BlockPool(kv_cache_config.num_blocks, enable_caching=config.cache.enable_prefix_caching)
    managers = [
        part.create(group.spec, pool, group_id, config.scheduler.max_num_seqs)
        for group_id, (part, group) in enumerate(zip(manager_parts, groups, strict=True))
    ]
    for part, manager, group in zip(manager_parts, managers, groups, strict=True):
        check_reach(part, manager, needs.attention_specs(group), max_model_len)
    runner = ModelRunner(model, backends, kv_cache_config, device, needs.kv_scales.layers)
    if sizes:
        runner.capture_decode_steps(sizes, [manager.num_blocks_needed(max_model_len) for manager in managers])
    make_kv_cache_manager = VerifyingKVCacheManager if config.cache.verify_prefix_cache else KVCacheManager
    kv_cache_manager = make_kv_cache_manager(
        pool,
        managers,
        _hasher(config, hash_function, hash_unit_of(managers)),
        max_tokens_in_flight=config.scheduler.max_num_batched_tokens,
        reuses_blocks_within_a_step=all(backend.writes_before_reads for backend in backends),
    )
    scheduler = Scheduler(
        kv_cache_manager,
        queue,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        enable_chunked_prefill=config.scheduler.enable_chunked_prefill,
        long_prefill_token_threshold=config.scheduler.long_prefill_token_threshold,
        watermark=config.scheduler.watermark,
    )
    engine = EngineCore(
        scheduler,
        runner,
        vocab_size=spec.vocab_size,
        max_model_len=max_model_len,
        # A file may name ids that its model cannot generate.
        eos_token_ids=frozenset(i for i in needs.checkpoint.eos_token_ids if 0 <= i < spec.vocab_size),
        seed=config.seed,
        accepts_cache_salts=hash_function.is_collision_resistant,
        async_scheduling=config.scheduler.async_scheduling,
        prefix_verifier=_prefix_verifier(config, kv_cache_manager, runner, needs.dtype),
    )
    started = EngineStarted(
        config.model,
        device,
        needs.dtype,
        max_model_len,
        kv_cache_config.num_blocks,
        kv_cache_config.total_bytes,
        tuple(report),
    )
    return Assembly(engine, _tokenizer(needs), kv_cache_config, selection, selection.hooks, started)


# -- parts ------------------------------------------------------------------------------------------------------


def _backends(selection: Selection) -> list[AttentionBackend]:
    """Make one backend for each distinct spec of a group, and see it take a layer's memory; return each layer's."""
    from octavo.core.model_runner import try_bind

    needs = selection.needs
    by_layer: dict[int, AttentionBackend] = {}
    for selected in selection.groups:
        part = selected.backend.part
        by_spec = {spec: part.create(spec) for spec in needs.attention_specs(selected.group)}
        for backend in by_spec.values():
            with part.blamed("when it was given a layer's memory"):
                try_bind(backend, selected.group.spec, needs.device)
        by_layer |= {layer: by_spec[needs.spec.attention_specs[layer]] for layer in selected.group.layers}
    return [by_layer[layer] for layer in range(len(by_layer))]


def _check_verification(config: EngineConfig) -> None:
    if config.cache.verify_prefix_cache and not config.cache.enable_prefix_caching:
        raise ConfigError(
            "verify_prefix_cache checks what is found in the prefix cache, and enable_prefix_caching=False switches it "
            "off; leave one of the two out."
        )


def _hash_function(selection: Selection) -> HashFunction:
    part = selection.hash_function.part
    hash_function: HashFunction = part.create()
    with part.blamed("when it made a digest"):
        check_hash_function(hash_function)
    return hash_function


def _model(needs: ModelNeeds) -> Model:
    part = needs.model.part
    with part.blamed("when it loaded the weights"):
        model: Model = part.loaded.from_checkpoint(
            needs.checkpoint, dtype=needs.dtype, device=needs.device, **part.keywords
        )
    return model


def _hasher(config: EngineConfig, hash_function: HashFunction, hash_unit: int) -> PrefixHasher | None:
    if not config.cache.enable_prefix_caching:
        return None
    seed = hash_seed_from_environment() if config.cache.hash_seed is None else config.cache.hash_seed
    make_hasher = ContentHasher if config.cache.verify_prefix_cache else PrefixHasher
    return make_hasher(hash_function, hash_unit, hash_root(hash_function, seed))


def _prefix_verifier(
    config: EngineConfig, kv_cache_manager: KVCacheManager, runner: VerifiableRunner, dtype: str
) -> PrefixVerifier | None:
    if not isinstance(kv_cache_manager, VerifyingKVCacheManager):
        return None
    specs = [manager.spec for manager in kv_cache_manager.coordinator.managers]
    kv_dtypes = [getattr(spec, "dtype", dtype) for spec in specs]
    return PrefixVerifier(
        kv_cache_manager,
        runner,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        unused_row=config.scheduler.max_num_seqs,
        # A cache of more digits than the model has the model's rounding.
        tolerance=tolerance([dtype, *kv_dtypes]),
    )


def _tokenizer(needs: ModelNeeds) -> Tokenizer | None:
    try:
        return needs.checkpoint.tokenizer()
    except CheckpointError as cause:
        logger.warning("serving token ids only: %s", cause)
        return None


def _report_groups(cost: RequestCost, max_model_len: int) -> None:
    if len(cost.groups) > 1:
        logger.info("one pool for %s", describe_groups(cost.groups))
    warning = padding_warning(cost, max_model_len)
    if warning is not None:
        logger.warning("%s", warning)


def _report_recycling(cost: RequestCost) -> None:
    """Warn where blocks are given back although the config says that they are to be kept."""
    specs = {
        group.spec for group, is_bounded in zip(cost.groups, cost.is_bounded_by_group(), strict=True) if is_bounded
    }
    for spec in specs:
        logger.warning(
            "disable_hybrid_kv_cache_manager has no effect on the layers that keep %s: its without_recycling does not "
            "say what else they could keep",
            spec,
        )


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
    config: EngineConfig,
    needs: ModelNeeds,
    model: Model,
    backends: Sequence[AttentionBackend],
    cost: RequestCost,
    sizes: Sequence[int],
) -> int:
    if config.cache.num_kv_blocks is not None:
        return config.cache.num_kv_blocks
    if config.cache.kv_cache_memory_bytes is not None:
        available = config.cache.kv_cache_memory_bytes
    else:
        available = _available_bytes(config, needs, model, backends, cost, sizes)
    shortest = SHORTEST_REQUEST if config.max_model_len == "auto" else config.max_model_len
    return num_blocks_from_memory(available, cost, shortest)


def _available_bytes(
    config: EngineConfig,
    needs: ModelNeeds,
    model: Model,
    backends: Sequence[AttentionBackend],
    cost: RequestCost,
    sizes: Sequence[int],
) -> int:
    from octavo.core import memory
    from octavo.core.model_runner import ModelRunner

    device = needs.device
    if device == "cpu":
        return memory.cpu_kv_cache_bytes(config.cache.cpu_memory_share)
    num_tokens, num_rows = config.scheduler.max_num_batched_tokens, config.scheduler.max_num_seqs

    block_sizes = [group.spec.block_size for group in cost.groups]
    device_memory = memory.CudaMemory(device)
    # Unless it is given, how long requests can be follows from the size of the cache, which is not known yet.
    longest = needs.spec.max_position if config.max_model_len == "auto" else config.max_model_len

    def runner_of(num_blocks: int) -> ModelRunner:
        return ModelRunner(model, backends, KVCacheConfig(num_blocks, cost.groups), device, needs.kv_scales.layers)

    def profiling_forward() -> None:
        runner = runner_of(memory.num_profiling_blocks(num_tokens, num_rows, block_sizes))
        runner.run(memory.profiling_plan(num_tokens, num_rows, block_sizes))

    def capture(some_sizes: Sequence[int]) -> ModelRunner:
        # Two blocks: the null block, and the one that steps are tried out with.
        runner = runner_of(2)
        runner.capture_decode_steps(some_sizes, [-(-longest // size) for size in block_sizes])
        return runner

    return memory.accelerator_kv_cache_bytes(
        device_memory,
        config.cache.gpu_memory_utilization,
        profiling_forward,
        lambda: memory.graph_bytes(device_memory, sizes, capture),
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
