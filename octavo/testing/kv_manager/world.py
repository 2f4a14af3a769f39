"""Requests that come, grow, share, are preempted and go, over a real block pool, with every rule checked after each."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from octavo.core.block_pool import BlockPool
from octavo.core.interfaces import SingleTypeKVCacheManager
from octavo.core.interfaces.kv_cache_manager import NULL_BLOCK
from octavo.core.kv_cache_coordinator import PrefixHit
from octavo.core.kv_cache_manager import KVCacheManager
from octavo.core.prefix_hash import PrefixHasher
from octavo.core.request import NO_ROW, Request
from octavo.core.sampling_params import SamplingParams
from octavo.core.verdict import Fit
from octavo.testing.conformance import RuleBroken
from octavo.testing.kv_manager.checks import GARBAGE, CheckedRows, Live
from octavo.testing.kv_manager.reads import ReadModel
from octavo.testing.kv_manager.rules import (
    GETS_TO_ITS_END,
    NOTHING_IS_LEFT,
    PREDICTION_IS_EXACT,
    ROWS_CAN_BE_ADDED,
    SKIPPED_IS_DROPPED,
    TABLE_HAS_ITS_LENGTH,
    CheckedPool,
    ShortHash,
)

# Small, so that texts share beginnings and differ soon.
VOCAB_SIZE = 3
FIRST_NUM_ROWS = 2
MAX_NUM_ROWS = 6
# In some worlds there is room for many.
CROWD_NUM_ROWS = 20


class ManagerWorld(CheckedRows):
    """A manager under the verbs that a scheduler uses, in its order.

    A step is planned request by request, then run: all rows are written, then all are read, and the keys of the step
    become final. Requests are preempted, aborted and ended between and, as far as nobody adopted their blocks, in it.

    Args:
        make_manager: Gets a pool, a group id and a number of rows.
        model: Who reads what.
        longest_hit: Returns how many blocks a pattern of cached blocks supports, given a limit.
        max_model_len: Tokens in the longest request.
        seed: What the sizes are drawn from.
        enable_caching: Whether there is a prefix cache.
        holds_longest: Whether the pool has blocks for all tokens of the longest request, twice, whatever of it is
            kept at a time.
    """

    def __init__(
        self,
        make_manager: Callable[[BlockPool, int, int], SingleTypeKVCacheManager],
        model: ReadModel,
        longest_hit: Callable[[Sequence[bool], int], int],
        max_model_len: int,
        seed: int,
        *,
        enable_caching: bool = True,
        holds_longest: bool = False,
    ) -> None:
        self.log: list[str] = []
        rng = random.Random(f"sizes.{seed}")
        # From single tokens to several blocks.
        self.max_chunk = rng.randint(1, 1 + rng.choice((1, 3)) * model.block_size)
        self.max_model_len = max_model_len
        # The pool that is thrown away is for this question only.
        asked = make_manager(BlockPool(2), 0, 1)
        max_blocks = type(asked).max_blocks_per_request(asked.spec, max_model_len, self.max_chunk)
        # Rarely room for all: what happens when it is short is what tells managers apart.
        num_usable = max_blocks + rng.randint(0, max_blocks + 2)
        self.is_crowded = rng.random() < 0.2
        num_rows = FIRST_NUM_ROWS
        if self.is_crowded:
            num_usable = 6 * max_blocks
            num_rows = rng.choice((FIRST_NUM_ROWS, CROWD_NUM_ROWS))
        if holds_longest:
            num_usable = max(num_usable, 2 * -(-max_model_len // model.block_size))
        pool = CheckedPool(num_usable + 1, enable_caching=enable_caching)
        group_id = rng.choice((0, 3))
        manager = make_manager(pool, group_id, num_rows)
        super().__init__(manager, pool, group_id, model, longest_hit, max_blocks=max_blocks, num_rows=num_rows)
        hasher = PrefixHasher(ShortHash(), self.block_size, b"root") if enable_caching else None
        self.kv = KVCacheManager(pool, [manager], hasher)
        self.waiting: list[Live] = []
        # Those of whose blocks another request adopted some before the open step has filled them.
        self._owners_of_adopted: list[Live] = []
        self.texts: list[list[int]] = [[0] * (4 * self.block_size)]
        self._num_arrivals = 0
        self.log.append(
            f"make a pool of {num_usable} blocks; steps of at most {self.max_chunk} tokens a request, so "
            f"max_blocks_per_request is {max_blocks}"
        )

    # -- operations ---------------------------------------------------------------------------------------------

    def do(self, rng: random.Random) -> None:
        """Do one operation, as the random numbers say, and check everything."""
        operations: list[tuple[int, Callable[[random.Random], None]]] = [
            (12, self._arrive),
            (12, self._continue_some),
            (24, self._admit_some),
            (16, self._run),
            (8, self._run_some_steps),
            (2, self._fail),
            (2, self._preempt_some),
            (2, self._abort_some),
            (2, self._end_some),
            (2, self._add_rows),
            (1, self._reset),
        ]
        weights = [weight for weight, _ in operations]
        (operation,) = rng.choices([operation for _, operation in operations], weights)
        operation(rng)
        self.check()

    def end(self) -> None:
        """Abort all that is under way, and check that nothing is left."""
        self.log.append("abort everything")
        for live in tuple(self.running):
            self._leave(live)
        self._close_step()
        self.check()
        if self.pool.num_used_blocks:
            raise RuleBroken(NOTHING_IS_LEFT, f"{self.pool.num_used_blocks} blocks are held when nobody is there")

    def live_alone(self, tokens: Sequence[int], rng: random.Random) -> None:
        """Take a request from its arrival to the largest length, with nobody beside it."""
        live = self._take_in(tokens)
        # A few steps for each token are more than it takes.
        for step in range(5 * self.max_model_len):
            self._admit(rng)
            self._continue_some(rng)
            self._run(rng)
            if not step % 32:
                self.check()
            if not self.waiting and not self.running:
                break
        if live.request.num_tokens < self.max_model_len:
            raise RuleBroken(
                GETS_TO_ITS_END,
                f"{live} got to {live.request.num_tokens} tokens of {self.max_model_len}, alone in a pool of "
                f"{self.pool.num_blocks - 1} blocks",
            )
        self.check()

    def live_shortly(self, rng: random.Random) -> None:
        """Take a request through one step, and let it go."""
        live = self._take_in([rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 2 * self.block_size))])
        self._admit(rng)
        self._run(rng)
        if live in self.running:
            self._leave(live)
        self.waiting.clear()

    def _arrive(self, rng: random.Random) -> None:
        for _ in range(4 if self.is_crowded else 1):
            if len(self.waiting) <= (12 if self.is_crowded else 4):
                self._arrive_one(rng)

    def _arrive_one(self, rng: random.Random) -> None:
        tokens: list[int] = []
        if rng.random() < 0.8:
            text = rng.choice(self.texts)
            tokens = text[: rng.choice((len(text), rng.randint(0, len(text))))]
        tokens = tokens + [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 3 * self.block_size))]
        tokens = tokens[: self.max_model_len - 1]
        self._take_in(tokens)
        if len(self.texts) < 6:
            self.texts.append(tokens)

    def _take_in(self, tokens: Sequence[int]) -> Live:
        request = Request(
            f"r{self._num_arrivals}",
            tokens,
            SamplingParams(),
            max_model_len=self.max_model_len,
            arrival=self._num_arrivals,
        )
        self._num_arrivals += 1
        live = Live(request, [])
        self._extend_content(live)
        self.waiting.append(live)
        self.log.append(f"{live} arrives with {len(tokens)} tokens")
        return live

    def _continue_some(self, rng: random.Random) -> None:
        # In a step those that run come before those that wait: an adopted block has no victim for an owner.
        if self._owners_of_adopted:
            return
        for live in [live for live in self.running if live not in self.planned and rng.random() < 0.8]:
            if live in self.running:
                self._continue(live, rng)

    def _continue(self, live: Live, rng: random.Random) -> None:
        num_new = min(live.request.num_tokens - live.num_computed, rng.randint(1, self.max_chunk))
        while not self._allocate(live, num_new, None):
            victim = rng.choice(self.running)
            self.log.append(f"  preempt {victim} for it")
            self._put_back(victim)
            if victim is live:
                return

    def _admit_some(self, rng: random.Random) -> None:
        for _ in range(4 if self.is_crowded else 1):
            self._admit(rng)

    def _admit(self, rng: random.Random) -> None:
        if not self.waiting or len(self.running) == self.num_rows:
            return
        live = rng.choice(self.waiting)
        hit = self.kv.get_computed_blocks(live.request)
        self._learn_keys(live)
        self._check_hit(live, hit)
        verdict = self.kv.can_admit(live.request, hit)
        if verdict.fit is not Fit.FITS:
            self.log.append(f"{live} is not admitted: {verdict.reason}")
            if verdict.fit is Fit.NEVER or not self.running:
                self.waiting.remove(live)
            return
        self.waiting.remove(live)
        self._owners_of_adopted += [
            other for other in self.running if not hit.block_ids().isdisjoint(self._unwritten(other))
        ]
        live.request.row = rng.choice(sorted(set(range(self.num_rows)) - {other.request.row for other in self.running}))
        self.running.append(live)
        live.num_written = live.num_computed = hit.num_tokens
        num_new = min(live.request.num_tokens - hit.num_tokens, rng.randint(1, self.max_chunk))
        if not self._allocate(live, num_new, hit):
            raise RuleBroken(PREDICTION_IS_EXACT, f"{live} was admitted for all its tokens, and a part does not fit")

    def _run(self, rng: random.Random) -> None:
        """Write all rows, then read all."""
        if not self.planned:
            return
        self.log.append(f"run the step of {', '.join(map(str, self.planned))}")
        for live in self.planned:
            self._write(live, live.num_computed, None)
        for live in self.planned:
            for query in range(live.num_written, live.num_computed):
                self._check_reads(live, query)
        for live in self.planned:
            live.num_written = live.num_computed
        self._close_step()
        for live in tuple(self.running):
            if live.num_computed == live.request.num_tokens:
                self._sample(live, rng)

    def _run_some_steps(self, rng: random.Random) -> None:
        """Let everybody run for a while, so that texts grow past windows and memory gets short."""
        self._run(rng)
        for _ in range(rng.randint(1, 8)):
            self._continue_some(rng)
            self._run(rng)
            self.check()

    def _sample(self, live: Live, rng: random.Random) -> None:
        live.request.append_token(rng.randrange(VOCAB_SIZE))
        self._extend_content(live)
        if live.request.num_tokens == self.max_model_len:
            self.log.append(f"  {live} has reached its length")
            self._finish(live)

    def _fail(self, rng: random.Random) -> None:
        """Let the step break off after half of its writes, and undo it."""
        if not self.planned:
            return
        self.log.append(f"the step of {', '.join(map(str, self.planned))} fails and is undone")
        for live in self.planned[: -(-len(self.planned) // 2)]:
            self._write(live, live.num_computed, GARBAGE)
        for live in sorted(self.planned, key=lambda live: live.request.arrival, reverse=True):
            self._put_back(live)
        self._close_step()

    def _preempt_some(self, rng: random.Random) -> None:
        live = self._removable(rng)
        if live is not None:
            self.log.append(f"preempt {live}")
            self._put_back(live)

    def _abort_some(self, rng: random.Random) -> None:
        live = self._removable(rng)
        if live is not None:
            self.log.append(f"abort {live}")
            self._leave(live)

    def _end_some(self, rng: random.Random) -> None:
        live = self._removable(rng)
        if live is not None and live not in self.planned:
            self.log.append(f"{live} ends")
            if rng.random() < 0.2:
                self.log[-1] += ", and what it computed cannot be trusted"
                self.kv.forget_blocks(live.request)
                self._check_unfindable(live, 0)
            self._finish(live)

    def _add_rows(self, rng: random.Random) -> None:
        num_rows = min(rng.randint(1, self.num_rows + 2), MAX_NUM_ROWS)
        if self.is_crowded:
            num_rows = rng.randint(1, CROWD_NUM_ROWS)
        self.log.append(f"reserve {num_rows} rows")
        before = [self.manager.block_table(row).tolist() for row in range(self.num_rows)]
        self.kv.coordinator.reserve_rows(num_rows)
        self.num_rows = max(num_rows, self.num_rows)
        lengths = {len(self.manager.block_tables), len(self.manager.num_blocks), len(self.manager.num_cached_blocks)}
        after = [self.manager.block_table(row).tolist() for row in range(min(*lengths, self.num_rows))]
        if min(lengths) < self.num_rows or after != before + [[]] * (self.num_rows - len(before)):
            raise RuleBroken(ROWS_CAN_BE_ADDED, f"with {sorted(lengths)} rows, {before} became {after}")

    def _reset(self, rng: random.Random) -> None:
        if self.kv.reset_prefix_cache():
            self.log.append("reset the prefix cache")

    # -- smaller steps ------------------------------------------------------------------------------------------

    def _allocate(self, live: Live, num_new: int, hit: PrefixHit | None) -> bool:
        row, num_tokens = live.request.row, live.num_computed + num_new
        what = f"{live} (row {row}) gets slots for {num_new} tokens after {live.num_computed}"
        self.log.append(what if hit is None else f"{what}, {hit.num_tokens} of them from the cache: {hit.blocks[0]}")
        self._drop_skipped(live)
        blocks = () if hit is None else hit.blocks[0]
        predicted = self.manager.get_num_blocks_to_allocate(row, num_tokens, blocks)
        if hit is not None:
            unplaced = self.manager.get_num_blocks_to_allocate(NO_ROW, num_tokens, blocks)
            if unplaced != predicted:
                raise RuleBroken(
                    PREDICTION_IS_EXACT, f"{unplaced} for a request without a row, {predicted} for an empty row"
                )
        num_free = self.pool.num_free_blocks
        num_registered = len(blocks) if hit else int(self.manager.num_cached_blocks[row])
        table = self.manager.block_table(row).tolist()
        verdict = self.kv.allocate_slots(live.request, live.num_computed, num_new, hit)
        if bool(verdict) != (predicted <= num_free):
            raise RuleBroken(PREDICTION_IS_EXACT, f"{predicted} predicted, {num_free} free, and: {verdict}")
        taken = num_free - self.pool.num_free_blocks
        if taken != (predicted if verdict else 0):
            raise RuleBroken(PREDICTION_IS_EXACT, f"{predicted} were predicted and {taken} were taken")
        after = self.manager.block_table(row).tolist()
        if after[: len(table)] != table:
            raise RuleBroken(TABLE_HAS_ITS_LENGTH, f"{live}'s table was {table} and is {after} after allocating")
        if not verdict:
            self.log.append(f"  it has to wait: {verdict.reason}")
            return False
        live.num_computed = num_tokens
        self.planned.append(live)
        self._learn_keys(live)
        self._check_registered(live, num_registered)
        return True

    def _drop_skipped(self, live: Live) -> None:
        row, manager = live.request.row, self.manager
        before = manager.block_table(row).tolist()
        manager.remove_skipped_blocks(row, live.num_computed)
        after = manager.block_table(row).tolist()
        skipped = manager.skipped_blocks(live.num_computed)
        wanted = [NULL_BLOCK if index in skipped else block_id for index, block_id in enumerate(before)]
        if after != wanted:
            raise RuleBroken(
                SKIPPED_IS_DROPPED, f"skipped_blocks({live.num_computed}) is {skipped}; {before} became {after}"
            )
        self._check_eviction_order([old for old, new in zip(before, after, strict=True) if old != new])
        num_free = self.pool.num_free_blocks
        manager.remove_skipped_blocks(row, live.num_computed)
        if self.pool.num_free_blocks != num_free:
            raise RuleBroken(SKIPPED_IS_DROPPED, "a second call freed further blocks")

    def _put_back(self, live: Live) -> None:
        """Preempt a request, or undo its part of a failed step."""
        if live in self.planned:
            first_new = min(live.num_written // self.block_size, len(self.manager.block_table(live.request.row)))
            self.kv.drop_provisional_keys(live.request)
            self._check_unfindable(live, first_new)
        self._leave(live)
        live.num_computed = live.num_written = 0
        self.waiting.insert(0, live)

    def _finish(self, live: Live) -> None:
        self.texts[:] = [*self.texts[-5:], list(live.request.token_ids)]
        self._leave(live)

    def _leave(self, live: Live) -> None:
        row = live.request.row
        self.kv.drop_provisional_keys(live.request)
        table = [int(block_id) for block_id in self.manager.block_table(row) if block_id != NULL_BLOCK]
        self.kv.free(live.request)
        self._check_eviction_order(table)
        left = (self.manager.num_blocks[row], self.manager.num_cached_blocks[row], self.manager.block_tables[row].any())
        if any(left):
            raise RuleBroken(
                NOTHING_IS_LEFT, f"row {row} has {left[0]} entries, {left[1]} registered, after {live} left"
            )
        live.request.row = NO_ROW
        self.running.remove(live)
        if live in self.planned:
            self.planned.remove(live)

    def _unwritten(self, live: Live) -> set[int]:
        """Return the blocks that the open step fills for a running request."""
        table = self.manager.block_table(live.request.row)
        return {int(block_id) for block_id in table[live.num_written // self.block_size :] if block_id}

    def _close_step(self) -> None:
        self.kv.commit_step()
        self.planned.clear()
        self._owners_of_adopted.clear()

    def _removable(self, rng: random.Random) -> Live | None:
        """Return a running request that nobody depends on in the open step."""
        candidates = [live for live in self.running if live not in self._owners_of_adopted]
        return rng.choice(candidates) if candidates else None
