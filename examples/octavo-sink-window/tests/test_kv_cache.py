"""The manager keeps to its contract, and keeps what its picture shows."""

from octavo_sink_window import SinkWindowManager, SinkWindowSpec

from octavo.core.interfaces import FullAttentionSpec
from octavo.testing import KVCacheManagerSuite


def make_spec(block_size, keep_first, window):
    return SinkWindowSpec(block_size, 1, 4, "float32", keep_first, window)


# Blocks of 4: the first two, and the last three while a token at a time is computed.
FIRST_TWO_LAST_THREE = make_spec(4, 8, 9)


class TestSinkWindow(KVCacheManagerSuite):
    manager = "sink_window"
    specs = (FIRST_TWO_LAST_THREE, make_spec(4, 6, 10), make_spec(1, 2, 3), make_spec(4, 0, 5), make_spec(8, 1, 1))

    def reads(self, spec, query_position, key_position):
        return key_position < spec.keep_first or key_position > query_position - spec.window


def test_without_recycling_everything_is_kept():
    kept = FIRST_TWO_LAST_THREE.without_recycling()
    assert (type(kept), kept) == (FullAttentionSpec, FullAttentionSpec(4, 1, 4, "float32"))
    assert kept.page_bytes == FIRST_TWO_LAST_THREE.page_bytes


class FakePool:
    """Hands out 1, 2, 3 ... and takes back in a list."""

    def __init__(self):
        self.num_taken = 0
        self.freed = []

    def get_new_blocks(self, count):
        self.num_taken += count
        return list(range(self.num_taken - count + 1, self.num_taken + 1))

    def free_blocks(self, block_ids):
        self.freed += block_ids


def test_the_first_two_and_the_last_three_blocks_stay():
    pool = FakePool()
    manager = SinkWindowManager(FIRST_TWO_LAST_THREE, pool, 0, 1)
    held = []
    for num_computed in range(40):
        manager.remove_skipped_blocks(0, num_computed)
        manager.allocate_new_blocks(0, num_computed + 1)
        held.append(sum(1 for block in manager.block_table(0) if block))
    assert manager.block_table(0).tolist() == [1, 2, 0, 0, 0, 0, 0, 8, 9, 10]
    assert pool.freed == [3, 4, 5, 6, 7]
    assert max(held) == 5 == SinkWindowManager.max_blocks_per_request(FIRST_TWO_LAST_THREE, 1000, 1)


def test_a_hit_needs_the_first_blocks_and_a_windows_worth_of_the_last():
    manager = SinkWindowManager(FIRST_TWO_LAST_THREE, FakePool(), 0, 1)
    for cached, num_blocks in [
        ("xxxxxxxx", 8),
        ("xx....xx", 8),
        ("xx...x.x", 2),
        ("xx.xx..x", 5),
        ("x.xxxxxx", 1),
        (".xxxxxxx", 0),
        ("xxxx....", 4),
    ]:
        assert manager.longest_prefix(lambda block, cached=cached: cached[block] == "x", 8, 1) == num_blocks
