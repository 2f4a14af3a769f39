"""The engine without a model: real scheduler, real KV cache, a runner that checks what it reads."""

from collections.abc import Callable

import pytest

from octavo.core.engine_core import EngineCore
from octavo.core.kv_cache_manager import KVCacheManager
from octavo.hash_functions import Sha256
from octavo.kv_managers.full_attention import FullAttentionManager
from octavo.request_queues import FCFSQueue
from octavo.testing.engines import assert_nothing_leaks, make_hashing_engine, make_kv_cache_manager
from octavo.testing.hashing_runner import HashingRunner


@pytest.fixture
def make_kv() -> Callable[..., KVCacheManager]:
    def make(num_usable_blocks: int, block_size: int, *, caching: bool = True, **options) -> KVCacheManager:
        return make_kv_cache_manager(
            FullAttentionManager,
            Sha256() if caching else None,
            num_usable_blocks=num_usable_blocks,
            block_size=block_size,
            **options,
        )

    return make


@pytest.fixture
def make_engine(make_kv):
    """Makes engines; whatever the test does to them, in the end nothing may leak."""
    engines: list[EngineCore] = []

    def make(
        num_usable_blocks: int = 64, block_size: int = 4, *, caching: bool = True, reuse: bool = True, **options
    ) -> tuple[EngineCore, HashingRunner]:
        kv = make_kv(
            num_usable_blocks,
            block_size,
            caching=caching,
            num_rows=options.get("max_num_seqs", 8),
            reuses_blocks_within_a_step=reuse,
        )
        engine, runner = make_hashing_engine(kv, FCFSQueue(), **options)
        engines.append(engine)
        return engine, runner

    yield make
    for engine in engines:
        assert_nothing_leaks(engine)
