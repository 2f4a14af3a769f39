"""Multi-head latent attention keeps every block, as full attention does, and smaller pages."""

import itertools

import pytest

from octavo.core.block_pool import BlockPool
from octavo.core.interfaces import MLASpec
from octavo.kv_managers.mla import MLAManager
from octavo.testing import KVCacheManagerSuite


def latent_spec(block_size):
    return MLASpec(block_size, latent_dim=4, rope_dim=2, dtype="float32")


class TestMLA(KVCacheManagerSuite):
    manager = "mla"
    specs = (latent_spec(4),)
    num_traces = 5


@pytest.mark.slow
class TestManyMLA(KVCacheManagerSuite):
    manager = "mla"
    specs = (latent_spec(1), latent_spec(3), latent_spec(16))
    num_traces = 4


@pytest.mark.parametrize(
    ("dtype", "page_bytes"),
    # Tokens x (latent + rope) x bytes of a number: one vector a token, and no factor 2 for keys and values.
    [("bfloat16", 16 * 576 * 2), ("float16", 16 * 576 * 2), ("float32", 16 * 576 * 4)],
)
def test_a_page_holds_one_vector_a_token_for_keys_and_values_together(dtype, page_bytes):
    spec = MLASpec(16, latent_dim=512, rope_dim=64, dtype=dtype)
    assert spec.page_bytes == page_bytes
    assert spec.bytes_per_token == page_bytes / 16


def test_there_is_nothing_to_give_back_with_or_without_recycling():
    spec = MLASpec(16, latent_dim=512, rope_dim=64, dtype="bfloat16")
    assert spec.without_recycling() is spec


def test_another_block_size_changes_the_page_and_nothing_else():
    spec = MLASpec(16, latent_dim=512, rope_dim=64, dtype="bfloat16")
    assert spec.with_block_size(64) == MLASpec(64, latent_dim=512, rope_dim=64, dtype="bfloat16")
    assert spec.with_block_size(64).page_bytes == 4 * spec.page_bytes == 73728


def test_every_block_stays_and_a_hit_ends_at_the_first_that_is_missing():
    manager = MLAManager(latent_spec(4), BlockPool(13), 0, 1)
    assert manager.shorter_prefixes_hold
    for pattern in itertools.product((False, True), repeat=6):
        for max_blocks, alignment in itertools.product(range(7), (1, 2, 3)):
            hits = [n for n in range(0, max_blocks + 1, alignment) if all(pattern[:n])]
            assert manager.longest_prefix(pattern.__getitem__, max_blocks, alignment) == max(hits)
    manager.allocate_new_blocks(0, 40)
    manager.remove_skipped_blocks(0, 40)
    assert manager.block_table(0).tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    assert MLAManager.max_blocks_per_request(manager.spec, 4096, 64) == 1024
