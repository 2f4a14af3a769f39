"""Engines with every setting of the scheduler, over a runner whose tokens are right exactly when the KV cache is."""

from collections.abc import Sequence

from octavo.core.engine_core import EngineCore
from octavo.core.interfaces import RequestQueue
from octavo.core.sampling_params import SamplingParams
from octavo.core.scheduler import Scheduler
from octavo.hash_functions import Sha256
from octavo.kv_managers.full_attention import FullAttentionManager
from octavo.request_queues import FCFSQueue
from octavo.testing.engines import (
    Finished,
    assert_nothing_leaks,
    assert_tables_are_sound,
    collect,
    make_kv_cache_manager,
)
from octavo.testing.hashing_runner import HashingRunner, expected_tokens

VOCAB_SIZE = 1000


def greedy(max_tokens: int = 8, **options) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0, **options)


def make_engine(
    num_usable_blocks: int = 64,
    block_size: int = 4,
    *,
    queue: RequestQueue | None = None,
    caching: bool = True,
    reuse: bool = True,
    max_model_len: int = 1024,
    async_scheduling: bool = False,
    **settings,
) -> tuple[EngineCore, HashingRunner]:
    """Return an engine and its runner. `settings` are the scheduler's."""
    settings = {"max_num_seqs": 8, "max_num_batched_tokens": 64} | settings
    kv_cache_manager = make_kv_cache_manager(
        FullAttentionManager,
        Sha256() if caching else None,
        num_usable_blocks=num_usable_blocks,
        block_size=block_size,
        num_rows=settings["max_num_seqs"],
        reuses_blocks_within_a_step=reuse,
    )
    runner = HashingRunner(num_usable_blocks + 1, block_size, VOCAB_SIZE)
    engine = EngineCore(
        Scheduler(kv_cache_manager, FCFSQueue() if queue is None else queue, **settings),
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
