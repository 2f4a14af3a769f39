"""The conformance suite of KV-cache managers.

    from octavo.testing import KVCacheManagerSuite

    class TestSlidingWindow(KVCacheManagerSuite):
        manager = "sliding_window"
        specs = (SlidingWindowSpec(block_size=4, window=10), SlidingWindowSpec(block_size=1, window=3))

        def reads(self, spec, query_position, key_position):
            return key_position > query_position - spec.window

`reads` is the definition that the manager is held to: what may be dropped, what a hit needs and what must be in the
table all follow from it by brute force.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar

from octavo.core.interfaces import KVCacheSpec
from octavo.core.interfaces.kv_cache_manager import NULL_BLOCK
from octavo.testing.conformance import RuleBroken, check_trace, one_liner, reproducible
from octavo.testing.kv_manager.questions import ManagerQuestions
from octavo.testing.kv_manager.reads import longest_supported
from octavo.testing.kv_manager.rules import HIT_IS_WHAT_IS_CACHED, CheckedPool, snapshot
from octavo.testing.kv_manager.world import ManagerWorld

LOOKING_CHANGES_NOTHING = "find_longest_cache_hit changes nothing, and asks the pool each time."
GROUPS_ARE_APART = "A group finds only what was registered in it."

TRACE_LENGTH = 100
# A text so long that 8 bits count neither its tokens nor, in small blocks, its blocks.
LONG_MODEL_LEN = 640
NUM_SHORT_LIVES = 2500


class KVCacheManagerSuite(ManagerQuestions):
    """Holds a KV-cache manager to its contract.

    Attributes:
        manager: The class, or the name that it is registered under.
        specs: What to test it with: several block sizes, odd ones too; small blocks and windows show more. By default
            some `FullAttentionSpec`s, for a manager that serves them.
        max_model_len: Tokens in the longest text of a test. By default 48, or 16 blocks where that is more; it has to
            be several times what the manager keeps.
        num_traces: Random traces for each spec.
    """

    num_traces: ClassVar[int] = 20

    # -- finding ------------------------------------------------------------------------------------------------

    @reproducible
    def test_a_hit_names_what_will_be_read_and_changes_nothing(self) -> None:
        for spec in self._specs():
            model, needed = self._model(spec), self._needed_for_hits(spec)
            rng = random.Random(1)
            for _ in range(30):
                num_blocks = rng.randint(1, len(needed) - 1)
                pool = CheckedPool(2 * num_blocks + 1)
                manager, keys = self._make(spec, pool), [bytes([index]) * 16 for index in range(num_blocks)]
                blocks = pool.get_new_blocks(num_blocks)
                cached = [index for index in range(num_blocks) if rng.random() < rng.choice((0.7, 1.0))]
                pool.cache_full_blocks([blocks[index] for index in cached], [keys[index] for index in cached], 0)
                pool.free_blocks(blocks[::-1])
                for limit in range(0, (num_blocks + 2) * spec.block_size, max(spec.block_size // 3, 1)):
                    num_keys = rng.choice((num_blocks, rng.randint(0, num_blocks)))
                    alignment = rng.choice((1, 1, 2))
                    pattern = [index in cached for index in range(num_keys)]
                    wanted = longest_supported(needed, pattern, min(limit // spec.block_size, num_keys), alignment)
                    read = model.blocks_read_after(wanted * spec.block_size, wanted)
                    expected = [blocks[index] if index in read else NULL_BLOCK for index in range(wanted)]
                    before = snapshot(pool, manager)
                    found = list(manager.find_longest_cache_hit(keys[:num_keys], limit, alignment * spec.block_size))
                    if found != expected:
                        raise RuleBroken(
                            HIT_IS_WHAT_IS_CACHED,
                            f"within {limit} tokens and with blocks {cached} cached of {num_keys} it finds {found}, "
                            f"not {expected}; {spec}",
                        )
                    if snapshot(pool, manager) != before:
                        raise RuleBroken(LOOKING_CHANGES_NOTHING, f"the pool or the tables changed; {spec}")
                pool.reset_prefix_cache()
                found = list(manager.find_longest_cache_hit(keys, num_blocks * spec.block_size, spec.block_size))
                if any(found):
                    raise RuleBroken(LOOKING_CHANGES_NOTHING, f"{found} is found after a reset of the pool; {spec}")

    @reproducible
    def test_groups_do_not_find_each_others_blocks(self) -> None:
        for spec in self._specs():
            num_blocks = len(self._needed_for_hits(spec)) // 2
            num_tokens = num_blocks * spec.block_size
            pool = CheckedPool(4 * num_blocks + 1)
            groups = [self._make(spec, pool, group_id) for group_id in (0, 1)]
            keys = [bytes([index]) * 16 for index in range(num_blocks)]
            for owner, other in (groups, groups[::-1]):
                own_blocks = owner.allocate_new_blocks(0, num_tokens)
                owner.cache_blocks(0, keys, num_tokens)
                found = {
                    manager.group_id: {
                        b for b in manager.find_longest_cache_hit(keys, num_tokens, spec.block_size) if b
                    }
                    for manager in (owner, other)
                }
                if not found[owner.group_id] <= set(own_blocks) or found[other.group_id] & set(own_blocks):
                    raise RuleBroken(
                        GROUPS_ARE_APART,
                        f"group {owner.group_id} registered {own_blocks}; the groups find {found}; {spec}",
                    )
                owner.free(0)
                pool.reset_prefix_cache()

    # -- whole lives --------------------------------------------------------------------------------------------

    @reproducible
    def test_random_requests_read_what_was_written_for_them(self) -> None:
        for index in range(len(self._specs())):
            for seed in range(self.num_traces):
                self.reproduce(seed=seed, spec=index)

    @reproducible
    def test_random_requests_without_a_prefix_cache(self) -> None:
        for index in range(len(self._specs())):
            for seed in range(-1, -1 - max(self.num_traces // 4, 1), -1):
                self.reproduce(seed=seed, spec=index)

    @reproducible
    def test_a_long_request_reads_what_was_written_for_it(self) -> None:
        """Two of one text in a row: the second one finds what the first one left."""
        fields = {"max_model_len": LONG_MODEL_LEN, "__module__": type(self).__module__}
        longer: KVCacheManagerSuite = type(type(self).__name__, (type(self),), fields)()
        for spec in self._specs():
            rng = random.Random(0)
            text = [rng.randrange(3) for _ in range(LONG_MODEL_LEN - 40)]
            world = longer._world(spec, 0, holds_longest=True)
            with _with_log(world, f"{self._manager_class().__name__} and {spec}"):
                for num_tokens in (LONG_MODEL_LEN // 2, len(text)):
                    world.live_alone(text[:num_tokens], rng)
                world.end()

    @reproducible
    def test_thousands_of_requests_leave_nothing(self) -> None:
        spec, rng = self._specs()[0], random.Random(0)
        world = self._world(spec, 0)
        with _with_log(world, f"{self._manager_class().__name__} and {spec}"):
            for number in range(NUM_SHORT_LIVES):
                world.live_shortly(rng)
                if not number % 50:
                    world.check()
            world.end()

    def reproduce(self, *, seed: int, spec: int = 0, keep: Sequence[int] | None = None) -> None:
        """Run one random trace again.

        Args:
            seed: As a failure gave it; below zero there is no prefix cache.
            spec: Which of `specs`, counted from 0.
            keep: The operations to do, all by default.

        Raises:
            RuleBroken: As the first time, if nothing was mended since.
        """
        tested = self._specs()[spec]
        check_trace(
            lambda: self._world(tested, seed),
            seed,
            range(TRACE_LENGTH) if keep is None else keep,
            lambda operations: one_liner(type(self), f"reproduce(seed={seed}, spec={spec}, keep={[*operations]})"),
            f"{self._manager_class().__name__} and {tested}",
        )

    # -- parts --------------------------------------------------------------------------------------------------

    def _world(self, spec: KVCacheSpec, seed: int, *, holds_longest: bool = False) -> ManagerWorld:
        needed = self._needed_for_hits(spec)
        return ManagerWorld(
            lambda pool, group_id, num_rows: self._make(spec, pool, group_id, num_rows),
            self._model(spec),
            lambda pattern, max_blocks: longest_supported(needed, pattern, max_blocks, 1),
            self._max_model_len(spec),
            seed,
            enable_caching=seed >= 0,
            holds_longest=holds_longest,
        )


@contextmanager
def _with_log(world: ManagerWorld, subject: str) -> Iterator[None]:
    """Add to a failure what is tested, and the last operations of a world whose trace is not shortened."""
    try:
        yield
    except RuleBroken as broken:
        lines = [f"  {line[:200]}" for line in world.log[-8:]]
        raise broken.with_context(f"With: {subject}", f"After {len(world.log)} operations, at last:", *lines) from None
