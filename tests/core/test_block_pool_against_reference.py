"""The pool and the plain pool of the reference do the same, whatever is asked of them."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from octavo.core.block_pool import BlockPool
from octavo.testing.engines import assert_pool_is_sound
from octavo.testing.reference_cache import ReferencePool

NUM_KEYS, NUM_GROUPS = 6, 2


class BothPools:
    """A pool, the plain one, and tables over them."""

    def __init__(self, num_blocks: int, *, caching: bool) -> None:
        self.pool = BlockPool(num_blocks, enable_caching=caching)
        self.plain = ReferencePool(num_blocks, caching=caching)
        self.tables: list[list[int]] = []

    def allocate(self, rng: random.Random) -> None:
        count = rng.randint(0, 5)
        if count > len(self.plain.free):
            with pytest.raises(ValueError, match="were asked for"):
                self.pool.get_new_blocks(count)
            return
        blocks = self.pool.get_new_blocks(count)
        assert blocks == self.plain.allocate(count)
        self.tables.append(blocks)

    def adopt(self, rng: random.Random) -> None:
        """As a hit does, and with null entries as a window's hit has them."""
        blocks = rng.choices([0, *self.plain.content], k=rng.randint(1, 4))
        self.pool.touch(blocks)
        self.plain.touch(blocks)
        self.tables.append(blocks)

    def free(self, rng: random.Random) -> None:
        """Give back some tables, or parts of them, in one call."""
        blocks: list[int] = []
        for _ in range(rng.choice([1, 1, 2])):
            table = rng.choice(self.tables or [[]])
            first = rng.choice([0, 0, len(table) // 2])
            blocks += reversed(table[first:])
            table[first:] = []
        if rng.random() < 0.2:
            rng.shuffle(blocks)
        self.tables = [table for table in self.tables if table]
        self.pool.free_blocks(blocks)
        self.plain.give_back(blocks)

    def free_too_often(self, rng: random.Random) -> None:
        block = rng.randint(1, self.pool.num_blocks - 1)
        blocks = [block] * (self.plain.references[block] + 1)
        with pytest.raises(ValueError, match=f"block {block} is freed more often than it is held"):
            self.pool.free_blocks(blocks)

    def register(self, rng: random.Random) -> None:
        held = sorted({block for table in self.tables for block in table if block})
        blocks = [block for block in held if block not in self.plain.content][: rng.randint(0, 3)]
        group_id = rng.randrange(NUM_GROUPS)
        keys = [key(rng.randrange(NUM_KEYS)) for _ in blocks]
        self.pool.cache_full_blocks(blocks, keys, group_id)
        for block, its_key in zip(blocks, keys, strict=True):
            self.plain.register(block, (group_id, its_key))

    def unregister(self, rng: random.Random) -> None:
        held = sorted({block for table in self.tables for block in table if block})
        blocks = rng.sample(held, min(len(held), rng.randint(0, 2)))
        self.pool.uncache_blocks(blocks)
        self.plain.unregister(blocks)

    def expect_no_hit(self, rng: random.Random) -> None:
        held = sorted({block for table in self.tables for block in table if block})
        blocks = rng.sample(held, min(len(held), rng.randint(0, 3)))
        self.pool.expect_no_hit(blocks)
        self.plain.expect_no_hit(blocks)

    def reset(self, rng: random.Random) -> None:
        if rng.random() < 0.5:
            self.pool.free_blocks([block for table in self.tables for block in table])
            self.plain.give_back([block for table in self.tables for block in table])
            self.tables = []
        is_idle = not any(block for table in self.tables for block in table)
        assert self.pool.reset_prefix_cache() is is_idle
        if is_idle:
            self.plain.reset()

    def check(self) -> None:
        assert_pool_is_sound(self.pool, self.tables)
        assert self.pool.free_queue() == self.plain.free
        assert [self.pool.ref_count(block) for block in self.plain.references] == [*self.plain.references.values()]
        assert self.pool.num_evictions == self.plain.num_evictions
        assert self.pool.num_cached_blocks == len(self.plain.content)
        for group_id in range(NUM_GROUPS):
            for number in range(NUM_KEYS):
                found = self.pool.get_cached_block(key(number), group_id)
                assert found == self.plain.find((group_id, key(number)))
        by_content: dict[object, list[int]] = {}
        for block, content in self.plain.content.items():
            by_content.setdefault(content, []).append(block)
        assert self.pool.cached_blocks() == by_content
        everything = range(self.pool.num_blocks)
        assert self.pool.count_free(everything) == len(self.plain.free)


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


RANDOM = st.randoms(use_true_random=False)


class PoolMachine(RuleBasedStateMachine):
    """Any order of operations, so that a shortest one that goes wrong is found."""

    @initialize(num_blocks=st.integers(2, 14), caching=st.sampled_from([True, True, True, False]))
    def begin(self, num_blocks, caching):
        self.both = BothPools(num_blocks, caching=caching)

    @rule(rng=RANDOM)
    def allocate(self, rng):
        self.both.allocate(rng)

    @precondition(lambda self: self.both.plain.content)
    @rule(rng=RANDOM)
    def adopt(self, rng):
        self.both.adopt(rng)

    @rule(rng=RANDOM)
    def free(self, rng):
        self.both.free(rng)

    @rule(rng=RANDOM)
    def free_too_often(self, rng):
        self.both.free_too_often(rng)

    @rule(rng=RANDOM)
    def register(self, rng):
        self.both.register(rng)

    @rule(rng=RANDOM)
    def unregister(self, rng):
        self.both.unregister(rng)

    @rule(rng=RANDOM)
    def expect_no_hit(self, rng):
        self.both.expect_no_hit(rng)

    @rule(rng=RANDOM)
    def reset(self, rng):
        self.both.reset(rng)

    @invariant()
    def both_are_alike(self):
        self.both.check()


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=40, stateful_step_count=40, derandomize=True, deadline=None)


def run_operations(seed: int, num_operations: int, num_blocks: int) -> BothPools:
    rng = random.Random(seed)
    both = BothPools(num_blocks, caching=True)
    operations = [both.allocate, both.adopt, both.free, both.free, both.register, both.register, both.unregister]
    operations.append(both.expect_no_hit)
    for number in range(num_operations):
        # Seldom, or there is never much to find.
        rng.choice([both.reset, both.free_too_often] if number % 150 == 149 else operations)(rng)
        both.check()
    return both


@pytest.mark.parametrize(("seed", "num_blocks"), [(0, 5), (1, 12), (2, 24), (3, 40)])
def test_ten_thousand_random_operations_agree_with_a_plain_pool(seed, num_blocks):
    both = run_operations(seed, 2500, num_blocks)
    # It proves nothing about eviction unless it happens.
    assert both.pool.num_evictions > 50


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_many_more_random_operations_agree_with_a_plain_pool(seed):
    run_operations(100 + seed, 10_000, 3 + 3 * seed)
