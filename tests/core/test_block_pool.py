"""The block pool: order of reuse, reference counts, and what can be found."""

import random

import pytest

from octavo.core.block_pool import BlockPool
from octavo.testing.engines import assert_pool_is_sound


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def test_the_first_allocation_returns_blocks_in_ascending_order_from_one():
    assert BlockPool(8).get_new_blocks(3) == [1, 2, 3]


def test_a_pool_without_room_for_a_block_besides_the_null_block_is_refused():
    with pytest.raises(ValueError, match="num_blocks=1 is too few"):
        BlockPool(1)


def test_asking_for_more_than_is_free_changes_nothing():
    pool = BlockPool(4)
    with pytest.raises(ValueError, match="4 blocks were asked for and 3 are free"):
        pool.get_new_blocks(4)
    assert pool.free_queue() == [1, 2, 3]


def test_blocks_without_a_key_are_reused_before_all_others_and_blocks_with_one_last():
    pool = BlockPool(8)
    blocks = pool.get_new_blocks(4)
    pool.cache_full_blocks(blocks[:2], [key(1), key(2)], 0)
    pool.free_blocks(reversed(blocks))
    # 4 and 3 have no key; of 2 and 1 the deeper one is evicted first.
    assert pool.free_queue() == [4, 3, 5, 6, 7, 2, 1]


def pool_with_unlikely(unlikely):
    """Return a pool whose blocks 1 .. 4 have keys and are given back in this order, some of them unlikely to be found.

    Blocks 5 and 6 were never used, and 7 has no key.
    """
    pool = BlockPool(8)
    blocks = pool.get_new_blocks(7)
    pool.free_blocks(blocks[4:6])
    pool.cache_full_blocks(blocks[:4], [key(number) for number in blocks[:4]], 0)
    pool.expect_no_hit(unlikely)
    pool.free_blocks(blocks[:4])
    pool.free_blocks(blocks[6:])
    return pool


def test_blocks_that_are_unlikely_to_be_found_are_reused_before_all_others_with_a_key():
    pool = pool_with_unlikely([2, 4])
    assert pool.free_queue() == [7, 5, 6, 2, 4, 1, 3]
    assert_pool_is_sound(pool)
    # They can be found all the same, until they are handed out.
    assert [pool.get_cached_block(key(number), 0) for number in range(1, 5)] == [1, 2, 3, 4]
    assert pool.get_new_blocks(6) == [7, 5, 6, 2, 4, 1]
    assert [pool.get_cached_block(key(number), 0) for number in range(1, 5)] == [None, None, 3, None]


def test_a_block_that_was_found_is_likely_to_be_found_again():
    pool = pool_with_unlikely([1, 2, 3, 4])
    pool.touch([2])
    pool.free_blocks([2])
    assert pool.free_queue() == [7, 5, 6, 1, 3, 4, 2]


def test_with_its_key_a_block_loses_what_was_expected_of_it():
    pool = pool_with_unlikely([1, 2])
    assert pool.get_new_blocks(4) == [7, 5, 6, 1]
    pool.cache_full_blocks([1], [key(9)], 0)
    pool.free_blocks([1])
    assert pool.free_queue() == [2, 3, 4, 1]
    # Of a block without a key nothing is expected.
    (block,) = pool.get_new_blocks(1)
    pool.expect_no_hit([block])
    pool.cache_full_blocks([block], [key(10)], 0)
    pool.free_blocks([block])
    assert pool.free_queue() == [3, 4, 1, 2]


def test_an_unlikely_block_that_is_forgotten_goes_to_the_head_of_the_queue():
    pool = pool_with_unlikely([1, 2])
    pool.forget_blocks([2, 3])
    assert pool.free_queue() == [2, 3, 7, 5, 6, 1, 4]
    assert_pool_is_sound(pool)


def test_after_a_reset_no_block_is_likelier_than_another():
    pool = pool_with_unlikely([2, 4])
    assert pool.reset_prefix_cache()
    assert pool.free_queue() == [7, 5, 6, 2, 4, 1, 3]
    blocks = pool.get_new_blocks(7)
    assert blocks == [7, 5, 6, 2, 4, 1, 3]
    pool.cache_full_blocks(blocks, [key(number) for number in blocks], 0)
    pool.free_blocks(blocks)
    assert pool.free_queue() == blocks
    assert_pool_is_sound(pool)


def test_reference_counts_of_two_requests_that_share_a_prefix():
    pool = BlockPool(5)
    a = pool.get_new_blocks(3)
    pool.cache_full_blocks(a, [key(0), key(1), key(2)], 0)
    pool.touch(a[:2])
    b = [*a[:2], *pool.get_new_blocks(1)]
    pool.cache_full_blocks(b[2:], [key(3)], 0)
    all_blocks = [*a, b[2]]
    assert [pool.ref_count(block) for block in all_blocks] == [2, 2, 1, 1]
    pool.free_blocks(reversed(a))
    assert [pool.ref_count(block) for block in all_blocks] == [1, 1, 0, 1]
    pool.free_blocks(reversed(b))
    assert [pool.ref_count(block) for block in all_blocks] == [0, 0, 0, 0]
    assert [pool.get_cached_block(key(i), 0) for i in range(4)] == all_blocks


def test_a_block_that_is_handed_out_again_can_no_longer_be_found():
    pool = BlockPool(3)
    blocks = pool.get_new_blocks(2)
    pool.cache_full_blocks(blocks, [key(1), key(2)], 0)
    pool.free_blocks(reversed(blocks))
    assert pool.get_new_blocks(1) == [2]
    assert pool.get_cached_block(key(2), 0) is None
    assert pool.get_cached_block(key(1), 0) == 1
    assert pool.num_evictions == 1


def test_the_same_key_in_another_group_is_not_found():
    pool = BlockPool(3)
    pool.cache_full_blocks(pool.get_new_blocks(1), [key(1)], 0)
    assert pool.get_cached_block(key(1), 1) is None


def test_groups_that_registered_the_same_key_lose_it_one_by_one():
    pool = BlockPool(5)
    blocks = pool.get_new_blocks(4)
    pool.cache_full_blocks(blocks[:2], [key(1), key(1)], 0)
    pool.cache_full_blocks(blocks[2:], [key(1), key(1)], 1)
    assert pool.num_cached_blocks == 4
    assert pool.cached_blocks() == {(0, key(1)): [1, 2], (1, key(1)): [3, 4]}
    pool.uncache_blocks([3])
    assert [pool.get_cached_block(key(1), group) for group in (0, 1)] == [1, 4]
    pool.uncache_blocks([4, 2])
    assert [pool.get_cached_block(key(1), group) for group in (0, 1)] == [1, None]
    assert pool.cached_blocks() == {(0, key(1)): [1]}
    assert pool.num_cached_blocks == 1


def test_a_hit_takes_a_free_block_out_of_the_queue_once_and_it_is_not_handed_out_while_held():
    pool = BlockPool(4)
    blocks = pool.get_new_blocks(3)
    pool.cache_full_blocks(blocks, [key(1), key(2), key(3)], 0)
    pool.free_blocks(reversed(blocks))
    pool.touch([2])
    assert pool.free_queue() == [3, 1]
    assert pool.get_new_blocks(2) == [3, 1]
    pool.free_blocks([2])
    assert pool.free_queue() == [2]
    pool.free_blocks([1, 3])
    assert_pool_is_sound(pool)


def test_two_blocks_with_one_content_stay_findable_until_both_are_gone():
    pool = BlockPool(4)
    first, second = pool.get_new_blocks(2)
    pool.cache_full_blocks([first, second], [key(1), key(1)], 0)
    assert pool.get_cached_block(key(1), 0) == first
    pool.free_blocks([first])
    assert pool.get_new_blocks(2) == [3, first]
    assert pool.get_cached_block(key(1), 0) == second
    pool.uncache_blocks([second])
    assert pool.get_cached_block(key(1), 0) is None
    assert pool.num_cached_blocks == 0


def test_freeing_a_block_twice_in_one_call_needs_two_references():
    pool = BlockPool(4)
    (block,) = pool.get_new_blocks(1)
    with pytest.raises(ValueError, match=f"block {block} is freed more often than it is held"):
        pool.free_blocks([block, block])
    assert pool.ref_count(block) == 1
    pool.touch([block])
    pool.free_blocks([block, block])
    assert pool.num_free_blocks == 3
    assert sorted(pool.get_new_blocks(3)) == [1, 2, 3]


def test_freeing_a_free_block_is_refused():
    pool = BlockPool(3)
    with pytest.raises(ValueError, match="block 1 is freed more often"):
        pool.free_blocks([1])
    assert pool.num_free_blocks == 2


def test_null_entries_are_never_counted_linked_or_freed():
    pool = BlockPool(3)
    pool.touch([0, 0])
    pool.free_blocks([0, 0, 0])
    assert pool.free_queue() == [1, 2]
    assert not pool.is_free(0)


def test_a_reset_is_refused_while_a_block_is_held_and_complete_afterwards():
    pool = BlockPool(4)
    blocks = pool.get_new_blocks(2)
    pool.cache_full_blocks(blocks, [key(1), key(1)], 0)
    assert not pool.reset_prefix_cache()
    assert pool.get_cached_block(key(1), 0) == 1
    pool.free_blocks(blocks)
    assert pool.reset_prefix_cache()
    assert pool.get_cached_block(key(1), 0) is None
    assert pool.num_cached_blocks == 0


def test_without_caching_nothing_is_ever_registered():
    pool = BlockPool(4, enable_caching=False)
    pool.cache_full_blocks(pool.get_new_blocks(1), [key(1)], 0)
    assert pool.num_cached_blocks == 0


def test_what_can_be_found_changes_only_together_with_the_generation():
    pool = BlockPool(4)
    blocks = pool.get_new_blocks(2)
    before = pool.generation
    pool.free_blocks([blocks.pop()])
    pool.touch(blocks)
    assert pool.generation == before
    pool.cache_full_blocks(blocks, [key(1)], 0)
    assert pool.generation > before


class PlainPool:
    """The pool as two lists, a set and two dictionaries: slow, and easy to believe."""

    def __init__(self, num_blocks: int) -> None:
        self.first = list(range(1, num_blocks))
        self.second: list[int] = []
        self.refs = dict.fromkeys(range(1, num_blocks), 0)
        self.keys: dict[int, bytes] = {}
        self.unlikely: set[int] = set()

    @property
    def queue(self) -> list[int]:
        return self.first + self.second

    def get(self, count: int) -> list[int]:
        taken = self.queue[:count]
        for block in taken:
            self._take(block)
            self.forget(block)
            self.refs[block] = 1
        return taken

    def forget(self, block: int) -> None:
        self.keys.pop(block, None)
        self.unlikely.discard(block)

    def touch(self, blocks: list[int]) -> None:
        for block in blocks:
            if not self.refs[block]:
                self._take(block)
            self.refs[block] += 1
            self.unlikely.discard(block)

    def free(self, blocks: list[int]) -> None:
        for block in blocks:
            self.refs[block] -= 1
        gone = [b for b in dict.fromkeys(blocks) if not self.refs[b]]
        keyless = [b for b in gone if b not in self.keys]
        self.first = keyless + self.first + [b for b in gone if b in self.unlikely]
        self.second += [b for b in gone if b in self.keys and b not in self.unlikely]

    def _take(self, block: int) -> None:
        (self.first if block in self.first else self.second).remove(block)


@pytest.mark.parametrize("seed", range(4))
def test_ten_thousand_random_operations_agree_with_a_plain_model(seed):
    rng = random.Random(seed)
    pool, plain = BlockPool(24), PlainPool(24)
    held: list[list[int]] = []
    for _ in range(2500):
        operation = rng.choice(["get", "get", "free", "free", "touch", "cache", "cache", "uncache", "expect no hit"])
        if operation == "get":
            count = rng.randint(0, min(5, len(plain.queue)))
            taken = pool.get_new_blocks(count)
            assert taken == plain.get(count)
            held.append(taken)
        elif operation == "free" and held:
            blocks = held.pop(rng.randrange(len(held)))
            pool.free_blocks(reversed(blocks))
            plain.free(blocks[::-1])
        elif operation == "touch" and plain.keys:
            blocks = rng.sample(sorted(plain.keys), rng.randint(1, min(3, len(plain.keys))))
            pool.touch(blocks)
            plain.touch(blocks)
            held.append(blocks)
        elif operation == "cache":
            blocks = [b for b in {b for table in held for b in table} if b not in plain.keys][:3]
            keys = [key(rng.randrange(6)) for _ in blocks]
            pool.cache_full_blocks(blocks, keys, 0)
            plain.keys.update(zip(blocks, keys, strict=True))
        elif operation == "uncache":
            blocks = [b for b in plain.keys if plain.refs[b]][:1]
            pool.uncache_blocks(blocks)
            for block in blocks:
                plain.forget(block)
        elif operation == "expect no hit":
            blocks = [b for b in plain.refs if plain.refs[b] and rng.random() < 0.3]
            pool.expect_no_hit(blocks)
            plain.unlikely.update(b for b in blocks if b in plain.keys)
        assert pool.free_queue() == plain.queue
        assert_pool_is_sound(pool)
        assert {b for blocks in pool.cached_blocks().values() for b in blocks} == set(plain.keys)
        for number in range(6):
            found = pool.get_cached_block(key(number), 0)
            assert plain.keys[found] == key(number) if found else key(number) not in plain.keys.values()
