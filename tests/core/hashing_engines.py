"""Engines with every setting of the scheduler, over a runner whose tokens are right exactly when the KV cache is."""

from collections.abc import Sequence

from octavo.core.engine_core import EngineCore
from octavo.core.interfaces import (
    ChunkedLocalSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MLASpec,
    RequestQueue,
    SingleTypeKVCacheManager,
    SlidingWindowSpec,
)
from octavo.core.sampling_params import SamplingParams
from octavo.core.scheduler import Scheduler
from octavo.hash_functions import Sha256
from octavo.kv_managers.chunked_local import ChunkedLocalManager
from octavo.kv_managers.full_attention import FullAttentionManager
from octavo.kv_managers.mla import MLAManager
from octavo.kv_managers.sliding_window import SlidingWindowManager
from octavo.request_queues import FCFSQueue
from octavo.testing.engines import (
    Finished,
    assert_nothing_leaks,
    assert_tables_are_sound,
    collect,
    make_hashing_runner,
    make_hybrid_kv_cache_manager,
)
from octavo.testing.hashing_runner import HashingRunner, expected_tokens

VOCAB_SIZE = 1000

# A KV-cache group: who keeps its tables, and what its layers keep.
Group = tuple[type[SingleTypeKVCacheManager], KVCacheSpec]


def full(block_size: int) -> Group:
    return FullAttentionManager, FullAttentionSpec(block_size, num_kv_heads=1, head_dim=1, dtype="float32")


def mla(block_size: int) -> Group:
    return MLAManager, MLASpec(block_size, latent_dim=1, rope_dim=1, dtype="float32")


def window(block_size: int, size: int) -> Group:
    spec = SlidingWindowSpec(block_size, num_kv_heads=1, head_dim=1, dtype="float32", window=size)
    return SlidingWindowManager, spec


def chunk(block_size: int, size: int) -> Group:
    spec = ChunkedLocalSpec(block_size, num_kv_heads=1, head_dim=1, dtype="float32", chunk=size)
    return ChunkedLocalManager, spec


def greedy(max_tokens: int = 8, **options) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0, **options)


def make_engine(
    num_usable_blocks: int = 64,
    block_size: int = 4,
    *,
    groups: Sequence[Group] = (),
    queue: RequestQueue | None = None,
    caching: bool = True,
    reuse: bool = True,
    max_model_len: int = 1024,
    async_scheduling: bool = False,
    **settings,
) -> tuple[EngineCore, HashingRunner]:
    """Return an engine and its runner. `settings` are the scheduler's; without groups all layers form one."""
    settings = {"max_num_seqs": 8, "max_num_batched_tokens": 64} | settings
    kv_cache_manager = make_hybrid_kv_cache_manager(
        groups or [full(block_size)],
        Sha256() if caching else None,
        num_usable_blocks=num_usable_blocks,
        num_rows=settings["max_num_seqs"],
        max_tokens_in_flight=settings["max_num_batched_tokens"],
        reuses_blocks_within_a_step=reuse,
    )
    scheduler = Scheduler(kv_cache_manager, FCFSQueue() if queue is None else queue, **settings)
    runner = make_hashing_runner(scheduler, VOCAB_SIZE)
    engine = EngineCore(
        scheduler,
        runner,
        vocab_size=VOCAB_SIZE,
        max_model_len=max_model_len,
        async_scheduling=async_scheduling,
    )
    return engine, runner


def step(engine: EngineCore, records: dict[str, Finished]) -> None:
    """Compute a step, add what it brought to `records`, and look at the pool and the tables."""
    collect(records, engine.step())
    assert_tables_are_sound(engine.scheduler)


def finish(engine: EngineCore, records: dict[str, Finished] | None = None, *, max_steps: int = 5000):
    """Step until nothing is under way, and see that nothing is left; return what came of each request."""
    records = {} if records is None else records
    for _ in range(max_steps):
        if not engine.has_unfinished_requests():
            assert_nothing_leaks(engine)
            return records
        step(engine, records)
    raise AssertionError(f"still {engine.stats()} after {max_steps} steps")


def assert_cold(record: Finished, prompt: Sequence[int], num_tokens: int) -> None:
    """See that a request has got what it gets alone and with nothing cached, and all that it asked for."""
    assert record.finish_reason == "length"
    assert record.stop_reason is None
    assert len(record.token_ids) == num_tokens
    assert record.token_ids == expected_tokens(prompt, num_tokens, VOCAB_SIZE)


def scheduled(runner: HashingRunner) -> list[dict[str, int]]:
    """Return each step's {request id: new tokens}."""
    return [dict(zip(plan.request_ids, plan.num_new_tokens.tolist(), strict=True)) for plan in runner.plans]
