"""Small engines for tests: the real scheduler and KV cache, without a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from octavo.core.block_pool import BlockPool
from octavo.core.engine_core import EngineCore
from octavo.core.interfaces import FullAttentionSpec, HashFunction, KVCacheSpec, RequestQueue, SingleTypeKVCacheManager
from octavo.core.kv_cache_coordinator import hash_unit_of
from octavo.core.kv_cache_manager import KVCacheManager
from octavo.core.outputs import EngineOutput
from octavo.core.prefix_hash import PrefixHasher
from octavo.core.scheduler import Scheduler
from octavo.errors import EngineClosedError
from octavo.testing.hashing_runner import HashingRunner

if TYPE_CHECKING:
    from octavo.llm import LLM


@dataclass
class Finished:
    """All that an engine reported about a request."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0


def make_kv_cache_manager(
    manager_class: type[SingleTypeKVCacheManager],
    hash_function: HashFunction | None,
    *,
    num_usable_blocks: int,
    block_size: int,
    num_rows: int = 64,
    reuses_blocks_within_a_step: bool = True,
) -> KVCacheManager:
    """Return a KV cache of one group with `num_usable_blocks` blocks besides the null block.

    Without a hash function the prefix cache is off.
    """
    spec = FullAttentionSpec(block_size, num_kv_heads=1, head_dim=1, dtype="float32")
    return make_hybrid_kv_cache_manager(
        [(manager_class, spec)],
        hash_function,
        num_usable_blocks=num_usable_blocks,
        num_rows=num_rows,
        reuses_blocks_within_a_step=reuses_blocks_within_a_step,
    )


def make_hybrid_kv_cache_manager(
    groups: Sequence[tuple[type[SingleTypeKVCacheManager], KVCacheSpec]],
    hash_function: HashFunction | None,
    *,
    num_usable_blocks: int,
    num_rows: int = 64,
    **options: Any,
) -> KVCacheManager:
    """Return a KV cache of several groups over `num_usable_blocks` blocks besides the null block.

    Without a hash function the prefix cache is off. Further options are the manager's.
    """
    pool = BlockPool(num_usable_blocks + 1, enable_caching=hash_function is not None)
    managers = [manager_class(spec, pool, group_id, num_rows) for group_id, (manager_class, spec) in enumerate(groups)]
    hasher = None
    if hash_function is not None:
        hasher = PrefixHasher(hash_function, hash_unit_of(managers), b"root of the tests")
    return KVCacheManager(pool, managers, hasher, **options)


def make_hashing_engine(
    kv_cache_manager: KVCacheManager,
    queue: RequestQueue,
    *,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
    max_model_len: int = 1024,
    eos_token_ids: frozenset[int] = frozenset(),
    async_scheduling: bool = False,
    **scheduler_options: Any,
) -> tuple[EngineCore, HashingRunner]:
    """Return an engine over a `HashingRunner`, and the runner; further options are the scheduler's."""
    scheduler = Scheduler(
        kv_cache_manager,
        queue,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        **scheduler_options,
    )
    runner = make_hashing_runner(scheduler)
    engine = EngineCore(
        scheduler,
        runner,
        vocab_size=runner.vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=eos_token_ids,
        async_scheduling=async_scheduling,
    )
    return engine, runner


def make_hashing_runner(scheduler: Scheduler, vocab_size: int = 1000) -> HashingRunner:
    """Return a `HashingRunner` for what a scheduler plans."""
    kv_cache_manager, requests = scheduler.kv_cache_manager, scheduler._roster.requests

    def tokens_of(request_id: str) -> Sequence[int]:
        request = requests.get(request_id)
        return () if request is None else request.token_ids

    specs = [manager.spec for manager in kv_cache_manager.coordinator.managers]
    return HashingRunner(kv_cache_manager.pool.num_blocks, specs, vocab_size, tokens_of)


def collect(finished: dict[str, Finished], output: EngineOutput) -> None:
    """Add a step's output to what is known of each request."""
    for entry, request_id in enumerate(output.request_ids):
        record = finished.setdefault(request_id, Finished())
        assert record.finish_reason is None, f"{request_id} has news after its end"
        record.token_ids += output.token_ids_of(entry)
        record.finish_reason = output.finish_reasons[entry]
        record.stop_reason = output.stop_reasons[entry]
        record.num_cached_tokens = output.num_cached_tokens[entry]
        record.num_preemptions = output.num_preemptions[entry]


def run_to_end(engine: EngineCore, max_steps: int = 10_000) -> dict[str, Finished]:
    """Step until nothing is left; return what came of each request."""
    finished: dict[str, Finished] = {}
    for _ in range(max_steps):
        if not engine.has_unfinished_requests():
            return finished
        collect(finished, engine.step())
    raise AssertionError(f"still {engine.stats()} after {max_steps} steps")


def assert_nothing_leaks(engine: EngineCore) -> None:
    """Check what holds whenever no request is under way: the pool is whole, and nobody is remembered."""
    scheduler, pool = engine.scheduler, engine.scheduler.kv_cache_manager.pool
    stats = engine.stats()
    assert not engine.has_unfinished_requests()
    assert stats.running == stats.waiting == stats.used_blocks == 0
    assert not scheduler.running
    assert not len(scheduler.waiting)
    assert stats.waiting_because is None
    assert all(value >= 0 for value in vars(stats).values() if value is not None)
    assert stats.hit_tokens <= stats.queried_tokens <= stats.prompt_tokens
    assert stats.added_requests == stats.ended_requests
    assert_pool_is_sound(pool)
    assert sorted(pool.free_queue()) == list(range(1, pool.num_blocks))
    for manager in scheduler.kv_cache_manager.coordinator.managers:
        assert not manager.num_blocks.any()
        assert not manager.num_cached_blocks.any()
        assert not manager.block_tables.any()


def assert_pool_is_sound(pool: BlockPool, tables: Iterable[Iterable[int]] | None = None) -> None:
    """Check what always holds of a pool.

    Args:
        pool: The pool.
        tables: All block tables over it, null entries included; None where they are not known.
    """
    blocks = range(1, pool.num_blocks)
    queue = pool.free_queue()
    assert len(queue) == len(set(queue)) == pool.num_free_blocks
    assert pool.num_free_blocks + pool.num_used_blocks == pool.num_usable_blocks == len(blocks)
    assert set(queue) == {block_id for block_id in blocks if pool.ref_count(block_id) == 0}
    assert set(queue) == {block_id for block_id in blocks if pool.is_free(block_id)}

    cached = pool.cached_blocks()
    key_of = {block_id: key for key, block_ids in cached.items() for block_id in block_ids}
    assert len(key_of) == sum(map(len, cached.values())) == pool.num_cached_blocks, "a block has two keys"
    assert key_of == {block_id: key for block_id, key in enumerate(pool._key_of) if key is not None}
    assert key_of.keys() <= set(blocks)
    for (group_id, key), block_ids in cached.items():
        assert pool.get_cached_block(key, group_id) == block_ids[0]
    assert pool.enable_caching or not cached

    if tables is not None:
        occurrences = Counter(block_id for table in tables for block_id in table)
        assert [pool.ref_count(block_id) for block_id in blocks] == [occurrences[block_id] for block_id in blocks]


def assert_tables_are_sound(scheduler: Scheduler) -> None:
    """Check what always holds of a pool and the tables of the running requests over it."""
    kv_cache_manager = scheduler.kv_cache_manager
    managers = kv_cache_manager.coordinator.managers
    tables = [manager.block_table(request.row).tolist() for request in scheduler.running for manager in managers]
    assert_pool_is_sound(kv_cache_manager.pool, tables)


def assert_llm_is_idle(llm: LLM) -> None:
    """Check that neither the engine nor what stands around it remembers a request."""
    # Behind everything that callers have asked for so far, closed streams included.
    with suppress(EngineClosedError):
        llm._engine_thread.call(lambda: None)
    assert_nothing_leaks(llm._engine)
    assert not llm._engine_thread._mailboxes
    assert not llm._engine_thread._processor.has_unfinished
    assert not llm._engine_thread._processor.live_core_ids
