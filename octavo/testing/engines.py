"""Small engines for tests: the real scheduler and KV cache, without a model."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from octavo.core.block_pool import BlockPool
from octavo.core.engine_core import EngineCore
from octavo.core.interfaces import FullAttentionSpec, HashFunction, RequestQueue, SingleTypeKVCacheManager
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
    pool = BlockPool(num_usable_blocks + 1, enable_caching=hash_function is not None)
    hasher = None if hash_function is None else PrefixHasher(hash_function, block_size, b"root of the tests")
    managers = [manager_class(spec, pool, 0, num_rows)]
    return KVCacheManager(pool, managers, hasher, reuses_blocks_within_a_step=reuses_blocks_within_a_step)


def make_hashing_engine(
    kv_cache_manager: KVCacheManager,
    queue: RequestQueue,
    *,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
    max_model_len: int = 1024,
    enable_chunked_prefill: bool = True,
    eos_token_ids: frozenset[int] = frozenset(),
) -> tuple[EngineCore, HashingRunner]:
    """Return an engine over a `HashingRunner`, and the runner."""
    block_size = kv_cache_manager.coordinator.managers[0].block_size
    runner = HashingRunner(kv_cache_manager.pool.num_blocks, block_size)
    scheduler = Scheduler(
        kv_cache_manager,
        queue,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        enable_chunked_prefill=enable_chunked_prefill,
    )
    engine = EngineCore(
        scheduler,
        runner,
        vocab_size=runner.vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=eos_token_ids,
    )
    return engine, runner


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
    assert all(value >= 0 for value in vars(stats).values())
    assert_pool_is_sound(pool)
    assert sorted(pool.free_queue()) == list(range(1, pool.num_blocks))
    for manager in scheduler.kv_cache_manager.coordinator.managers:
        assert not manager.num_blocks.any()
        assert not manager.num_cached_blocks.any()
        assert not manager.block_tables.any()


def assert_pool_is_sound(pool: BlockPool) -> None:
    """Check what always holds of a pool."""
    queue = pool.free_queue()
    assert len(queue) == len(set(queue)) == pool.num_free_blocks
    assert 0 not in queue
    assert set(queue) == {b for b in range(1, pool.num_blocks) if pool.ref_count(b) == 0}
    cached = pool.cached_blocks()
    found = [block_id for blocks in cached.values() for block_id in blocks]
    assert len(found) == len(set(found)) == pool.num_cached_blocks
    assert 0 not in found
    if not pool.enable_caching:
        assert not found


def assert_llm_is_idle(llm: LLM) -> None:
    """Check that neither the engine nor what stands around it remembers a request."""
    # Behind everything that callers have asked for so far, closed streams included.
    with suppress(EngineClosedError):
        llm._engine_thread.call(lambda: None)
    assert_nothing_leaks(llm._engine)
    assert not llm._engine_thread._mailboxes
    assert not llm._engine_thread._processor.has_unfinished
    assert not llm._engine_thread._processor.live_core_ids
