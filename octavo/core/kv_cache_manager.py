"""The scheduler's view of the KV cache: does a request fit, what does it find, what does it hold.

Blocks that fill up during a step are registered while the step is planned, before anything is written into them, so
that another request of the same step can already use them. Until the step's output has arrived such keys are
provisional: `commit_step` makes them final, `drop_provisional_keys` takes a request's back. More than one step may be
under way: one runs while the next is planned.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from octavo.core.block_pool import BlockPool
from octavo.core.interfaces.kv_cache_manager import SingleTypeKVCacheManager
from octavo.core.kv_cache_coordinator import KVCacheCoordinator, PrefixHit, make_coordinator
from octavo.core.prefix_hash import PrefixHasher
from octavo.core.request import NO_ROW, Request
from octavo.core.step_plan import Int32Array
from octavo.core.verdict import FITS, Fit, ResetResult, Verdict


@dataclass
class _ProvisionalKeys:
    """What one step registered.

    Attributes:
        owners: Blocks -> the row that fills them.
        filled: Blocks that the step fills, also those whose keys were taken back since.
        registered_before: Row -> registered entries by group before the step, for rows that registered some in it.
    """

    owners: dict[int, int] = field(default_factory=dict)
    filled: set[int] = field(default_factory=set)
    registered_before: dict[int, list[int]] = field(default_factory=dict)


class KVCacheManager:
    """Gives blocks to requests and finds what is cached for them.

    Args:
        pool: The blocks.
        managers: One for each KV-cache group, over that pool.
        hasher: Makes the prefix cache's keys; None switches the cache off.
        max_tokens_in_flight: New tokens that a request may have in a step. It bounds what a request holds where
            blocks are recycled.
        reuses_blocks_within_a_step: Whether a request may read blocks that another one fills in the same step, which
            holds where each layer writes for all rows before it reads for any.
        drafter_groups: Groups of a drafter that reads one position ahead; see `KVCacheCoordinator`.
    """

    def __init__(
        self,
        pool: BlockPool,
        managers: list[SingleTypeKVCacheManager],
        hasher: PrefixHasher | None,
        *,
        max_tokens_in_flight: int = 1 << 30,
        reuses_blocks_within_a_step: bool = True,
        drafter_groups: Collection[int] = (),
    ) -> None:
        self.pool = pool
        self.max_tokens_in_flight = max_tokens_in_flight
        self.hasher = hasher
        hash_unit = None if hasher is None else hasher.block_size
        self.coordinator: KVCacheCoordinator = make_coordinator(managers, hash_unit, drafter_groups)
        # By one of these, where there is one, it is told what is cached: its blocks stay for as long as a request does.
        self._lasting = next((m for m in managers if m.shorter_prefixes_hold), managers[0])
        self.reuses_blocks_within_a_step = reuses_blocks_within_a_step
        # Of each step that is under way, oldest first; the last one is being planned.
        self._provisional: deque[_ProvisionalKeys] = deque()

    # -- questions ----------------------------------------------------------------------------------------------

    def reads_prefixes_of(self, request: Request) -> bool:
        """Say whether cached prefixes are looked up for a request."""
        is_wanted = not (request.params.skip_reading_prefix_cache or request.distrusts_prefix_cache)
        return self.hasher is not None and is_wanted

    def get_computed_blocks(self, request: Request) -> PrefixHit:
        """Return the longest cached prefix that leaves at least one token to compute. Changes no block."""
        if not self.reads_prefixes_of(request):
            return self.coordinator.no_hit
        memo = request.hit_memo
        if memo is not None and memo[:2] == (self.pool.generation, request.num_tokens):
            assert isinstance(memo[2], PrefixHit)
            return memo[2]
        assert self.hasher is not None
        self.hasher.extend(request.block_keys, request.token_ids, request.first_block_extra)
        # The last token is always computed: its output is what the next token is sampled from.
        hit = self.coordinator.find_longest_cache_hit(request.block_keys, request.num_tokens - 1)
        request.hit_memo = (self.pool.generation, request.num_tokens, hit)
        return hit

    def could_ever_hold(self, num_tokens: int) -> Verdict:
        """Say whether an empty pool could hold a request of `num_tokens` tokens."""
        needed = sum(self._most_blocks(num_tokens))
        usable = self.pool.num_usable_blocks
        if needed <= usable:
            return FITS
        return Verdict(Fit.NEVER, f"{num_tokens} tokens take {needed} blocks, and the whole KV cache has {usable}")

    def can_admit(self, request: Request, hit: PrefixHit, num_reserved_blocks: int = 0) -> Verdict:
        """Say whether all tokens that `request` has now would fit, with some blocks to be left for others.

        Asking for the whole request, not for its first chunk, keeps it from being admitted now and preempted in the
        middle of its own prefill.
        """
        verdict = self.could_ever_hold(request.num_tokens)
        if not verdict:
            return verdict
        if not self.reuses_blocks_within_a_step and not self._current_step.owners.keys().isdisjoint(hit.block_ids()):
            return Verdict(Fit.WAIT_STEP, "its prefix is being computed in this step")
        num_unreserved = self.pool.num_free_blocks - num_reserved_blocks
        # The hit saves blocks; where there are enough without it, nothing needs to be counted.
        if self.coordinator.num_blocks_needed(request.num_tokens) <= num_unreserved:
            return FITS
        needed = self._num_blocks_to_admit(request, hit)
        if needed <= num_unreserved:
            return FITS
        return self._wait_for_memory(needed, num_reserved_blocks)

    def next_block(self, prompt: Request, num_computed_tokens: int) -> tuple[int, bytes] | None:
        """Return how long the next possible hit on a running request's known tokens is, and its key; None for none.

        Args:
            prompt: The request.
            num_computed_tokens: How many of its tokens are computed, or planned to be.
        """
        if self.hasher is None:
            return None
        alignment = self.coordinator.alignment
        num_tokens = num_computed_tokens - num_computed_tokens % alignment + alignment
        index = num_tokens // self.hasher.block_size - 1
        return (num_tokens, prompt.block_keys[index]) if index < len(prompt.block_keys) else None

    def needs_block(self, request: Request, num_tokens: int, key: bytes) -> bool:
        """Say whether a waiting request begins with tokens that are not cached and could be a hit.

        Args:
            request: The request.
            num_tokens: How many tokens.
            key: What they are.
        """
        if not self.reads_prefixes_of(request) or not self.could_ever_hold(request.num_tokens):
            return False
        assert self.hasher is not None
        # A hit leaves a token to compute, so that all tokens are none that could be found.
        if num_tokens >= request.num_tokens:
            return False
        self.hasher.extend(request.block_keys, request.token_ids, request.first_block_extra)
        index = num_tokens // self.hasher.block_size - 1
        is_cached = self.pool.get_cached_block(key, self._lasting.group_id) is not None
        return request.block_keys[index] == key and not is_cached

    def num_blocks_behind(self, request: Request, prompt: Request | None) -> int:
        """Return the most blocks that a waiting request takes behind those that it shares with a prompt under way."""
        num_shared = 0 if prompt is None else self._num_shared_tokens(request, prompt)
        return sum(
            min(manager.num_blocks_needed(request.num_tokens) - num_shared // manager.block_size, most)
            for manager, most in zip(self.coordinator.managers, self._most_blocks(request.num_tokens), strict=True)
        )

    def _num_shared_tokens(self, request: Request, prompt: Request) -> int:
        """Return with how many tokens, as many as a hit may have, a waiting request begins as a prompt under way."""
        assert self.hasher is not None
        unit, alignment = self.hasher.block_size, self.coordinator.alignment
        keys, others = request.block_keys[: (request.num_tokens - 1) // unit], prompt.block_keys
        # A key stands for all before it too, so behind the first two that differ all do.
        num_equal = bisect_left(
            range(min(len(keys), len(others))), True, key=lambda index: keys[index] != others[index]
        )
        return num_equal * unit - num_equal * unit % alignment

    def num_blocks_held(self, request: Request) -> int:
        """Return how many blocks a request that holds a row has, over all groups."""
        return len(self.coordinator.block_ids(request.row))

    def num_blocks_owed(self, request: Request) -> int:
        """Return how many blocks the remaining tokens of a request that holds a row will take."""
        coordinator, num_tokens = self.coordinator, request.num_tokens
        missing = coordinator.num_blocks_to_allocate_by_group(request.row, num_tokens, coordinator.no_hit)
        most = self._most_blocks(num_tokens)
        owed = 0
        for manager, num_missing, most_of_group in zip(coordinator.managers, missing, most, strict=True):
            if num_missing and int(manager.num_blocks[request.row]) + num_missing > most_of_group:
                # Some are recycled before. Giving back what others hold as well frees nothing.
                held = manager.block_table(request.row).tolist()
                num_alone = sum(self.pool.ref_count(block_id) == 1 for block_id in held if block_id)
                num_missing = max(min(num_missing, most_of_group - num_alone), 0)
            owed += num_missing
        return owed

    def num_victims_to_admit(
        self, request: Request, hit: PrefixHit, victims: Sequence[Request], num_reserved_blocks: Sequence[int]
    ) -> int | None:
        """Return how many requests, from the first on, must give their blocks up so that another one fits.

        Args:
            request: Who is to be admitted.
            hit: What it would find now.
            victims: Running requests, in the order in which they would be given up.
            num_reserved_blocks: Blocks to be left for others when one victim, two, and so on, are gone.

        Returns:
            None where all of them together are not enough.
        """
        coordinator = self.coordinator
        most = self._most_blocks(request.num_tokens)
        needed = coordinator.num_blocks_to_allocate_by_group(NO_ROW, request.num_tokens, hit)
        hit_ids = [frozenset(blocks) for blocks in hit.blocks]
        num_free = self.pool.num_free_blocks
        num_at_best = num_free + coordinator.num_table_entries(victim.row for victim in victims)
        if sum(map(min, needed, most)) + min(num_reserved_blocks) > num_at_best:
            # Not even if they shared none of their blocks.
            return None
        held: dict[int, int] = {}
        for index, victim in enumerate(victims):
            for group_id, block_ids in enumerate(coordinator.block_ids_by_group(victim.row)):
                for block_id in block_ids:
                    held[block_id] = held.get(block_id, 0) + 1
                    if held[block_id] == self.pool.ref_count(block_id):
                        num_free += 1
                        # The victims alone hold it: once it is free, to adopt it takes a free block.
                        needed[group_id] += block_id in hit_ids[group_id]
            if sum(map(min, needed, most)) + num_reserved_blocks[index] <= num_free:
                return index + 1
        return None

    @property
    def _current_step(self) -> _ProvisionalKeys:
        if not self._provisional:
            self.begin_step()
        return self._provisional[-1]

    def _num_blocks_to_admit(self, request: Request, hit: PrefixHit) -> int:
        # Where blocks are recycled, all of the request's entries are more than it ever holds at a time.
        missing = self.coordinator.num_blocks_to_allocate_by_group(NO_ROW, request.num_tokens, hit)
        return sum(map(min, missing, self._most_blocks(request.num_tokens)))

    def _most_blocks(self, num_tokens: int) -> list[int]:
        """Return the most blocks that a request of so many tokens holds at a time, for each group."""
        return self.coordinator.max_blocks_by_group(num_tokens, self.max_tokens_in_flight)

    def quiet_until(self, num_computed_tokens: int, num_tokens: int) -> int:
        """Return up to how many computed tokens nothing changes about a row's blocks that has `num_tokens` now.

        Until then `allocate_slots` would allocate, register and free nothing, and need not be called.

        Args:
            num_computed_tokens: What `allocate_slots` was told last.
            num_tokens: The same and the new tokens.
        """
        return self.coordinator.quiet_until(num_computed_tokens, num_tokens)

    def most_new_blocks(self, num_new_tokens: Int32Array) -> int:
        """Return how many blocks requests that get so many new tokens could take together at most."""
        return self.coordinator.most_new_blocks(num_new_tokens)

    # -- changes ------------------------------------------------------------------------------------------------

    def choose_findable_prefixes(self, request: Request, hit: PrefixHit) -> None:
        """Say what of a request that is admitted stays findable longest, where blocks are given back on the way.

        These are the beginnings that somebody is likely to ask for again: what it found, where others turned off
        before it, and its prompt. What it leaves at its end is kept like that anyway.
        """
        lengths = {hit.num_tokens, hit.junction, *self.coordinator.last_hits(request.num_prompt_tokens)}
        request.findable_prefixes = sorted(length for length in lengths if length > 0)

    def keep_shared_prefix(self, prompt: Request, request: Request) -> None:
        """Let what a waiting request shares with a prompt under way stay findable when that one has moved on."""
        num_shared = self._num_shared_tokens(request, prompt)
        if prompt.findable_prefixes is not None and num_shared not in (0, *prompt.findable_prefixes):
            prompt.findable_prefixes = sorted([*prompt.findable_prefixes, num_shared])

    def allocate_slots(
        self, request: Request, num_computed_tokens: int, num_new_tokens: int, hit: PrefixHit | None = None
    ) -> Verdict:
        """Make room for the next tokens of a request, and register the blocks that they fill.

        Args:
            request: Holds a row; with `hit` the row must be empty.
            num_computed_tokens: Tokens before the new ones, those of `hit` included.
            num_new_tokens: Tokens that this step computes; none where it only adopts `hit`.
            hit: Cached blocks to start from, as `get_computed_blocks` returned them in this step.

        Returns:
            FITS, or WAIT_MEMORY, and then nothing but blocks that nothing reads any more has changed.

        Raises:
            ValueError: There is nothing to allocate for.
        """
        hit = hit or self.coordinator.no_hit
        if num_new_tokens < (0 if hit.num_tokens else 1):
            raise ValueError(f"num_new_tokens is {num_new_tokens}; a request is given slots for at least one token")
        row, num_tokens = request.row, num_computed_tokens + num_new_tokens
        self._give_back_skipped(request, num_computed_tokens)
        needed = self.coordinator.get_num_blocks_to_allocate(row, num_tokens, hit)
        if needed > self.pool.num_free_blocks:
            return self._wait_for_memory(needed)
        if needed or hit.num_tokens:
            self.coordinator.allocate(row, num_tokens, hit)
        self.cache_blocks(request, num_tokens)
        return FITS

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """Register, provisionally, the full blocks among the first `num_tokens` tokens of a request.

        The token sampled last has no keys and values yet, so `num_tokens` counts what is computed, not what is known.
        A token that is computed before it is known ends no block yet; its block is registered in a later step.
        """
        if self.hasher is None:
            return
        registered = self.coordinator.num_cached_blocks(request.row)
        new_blocks = self._register(request, num_tokens)
        if new_blocks:
            step = self._current_step
            step.registered_before.setdefault(request.row, registered)
            step.owners.update(dict.fromkeys(new_blocks, request.row))
            step.filled.update(new_blocks)

    def leave_computed_blocks(self, request: Request, num_tokens: int) -> None:
        """Register, for good, what a request leaves behind that ends with `num_tokens` computed tokens.

        Where blocks are given back on the way, that is what a request needs that goes on from there.
        """
        if self.hasher is not None:
            self._register(request, num_tokens)
            self._give_back_skipped(request, num_tokens)

    def begin_step(self) -> None:
        """Say that the next step is planned from now on. What the one before it registered stays provisional."""
        self._provisional.append(_ProvisionalKeys())

    def commit_step(self) -> None:
        """Make the keys of the oldest step under way final: what they stand for has been computed."""
        if self._provisional:
            self._provisional.popleft()

    def cancel_step(self) -> None:
        """Forget the step that was planned last; each of its requests has dropped its provisional keys before."""
        if self._provisional:
            self._provisional.pop()

    def drop_provisional_keys(self, request: Request) -> None:
        """Take back the keys that the request registered in steps under way: it will not be computed after all."""
        for step in reversed(self._provisional):
            registered = step.registered_before.pop(request.row, None)
            if registered is None:
                continue
            self.coordinator.uncache_blocks(request.row, registered)
            # What one step fills may be recycled while the next is planned, and then no table leads to it any more.
            blocks = [block_id for block_id, row in step.owners.items() if row == request.row]
            self.pool.forget_blocks(self._registered_under_keys_of(request, blocks))
            step.owners = {block_id: row for block_id, row in step.owners.items() if row != request.row}

    def forget_blocks(self, request: Request) -> None:
        """Make what the request holds and has held unfindable, because its content cannot be trusted."""
        self.drop_provisional_keys(request)
        # Whose blocks they were cannot be told any more, so all of that content go.
        recycled = self.coordinator.recycled_keys(request.row, request.block_keys)
        self.pool.forget_blocks(
            [block_id for group_id, key in recycled for block_id in self.pool.blocks_of(key, group_id)]
        )
        self.coordinator.uncache_blocks(request.row, [0] * len(self.coordinator.managers))

    def free(self, request: Request) -> None:
        """Give the request's blocks back. Those with a key stay findable until they are reused."""
        self.coordinator.free(request.row)

    def reset_prefix_cache(self) -> ResetResult:
        """Make every block unfindable. Refused while requests hold blocks."""
        if self.pool.reset_prefix_cache():
            return ResetResult(True)
        return ResetResult(
            False,
            f"{self.pool.num_used_blocks} blocks are held by requests that are under way; "
            "wait for them to finish, abort them, or pass reset_running_requests=True, and call again.",
        )

    def _give_back_skipped(self, request: Request, num_computed_tokens: int) -> None:
        """Free what nothing of a request will read any more.

        What nobody else is likely to find either is to be evicted first, lest it push out what is likelier to be found.
        """
        if request.findable_prefixes is not None and self.hasher is not None:
            unneeded = self.coordinator.skipped_and_unneeded(
                request.row, num_computed_tokens, request.findable_prefixes
            )
            # Somebody else who holds a block found it, as others may.
            self.pool.expect_no_hit(block_id for block_id in unneeded if self.pool.ref_count(block_id) == 1)
        self.coordinator.remove_skipped_blocks(request.row, num_computed_tokens)

    def _registered_under_keys_of(self, request: Request, block_ids: Iterable[int]) -> list[int]:
        own_keys = set(request.block_keys)
        keys = {block_id: self.pool.key_of(block_id) for block_id in block_ids}
        return [block_id for block_id, key in keys.items() if key is not None and key[1] in own_keys]

    def _register(self, request: Request, num_tokens: int) -> list[int]:
        assert self.hasher is not None
        self.hasher.extend(request.block_keys, request.token_ids, request.first_block_extra)
        return self.coordinator.cache_blocks(request.row, request.block_keys, min(num_tokens, request.num_tokens))

    def _wait_for_memory(self, needed: int, num_reserved: int = 0) -> Verdict:
        kept = f", {num_reserved} of them kept for others" if num_reserved else ""
        return Verdict(Fit.WAIT_MEMORY, f"{needed} blocks are needed, {self.pool.num_free_blocks} are free{kept}")
