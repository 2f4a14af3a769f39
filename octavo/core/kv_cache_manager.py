"""The scheduler's view of the KV cache: does a request fit, what does it find, what does it hold.

Blocks that fill up during a step are registered while the step is planned, before anything is written into them, so
that another request of the same step can already use them. Until the step's output has arrived such keys are
provisional: `commit_step` makes them final, `drop_provisional_keys` takes a request's back.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from octavo.core.block_pool import BlockPool
from octavo.core.interfaces.kv_cache_manager import SingleTypeKVCacheManager
from octavo.core.kv_cache_coordinator import KVCacheCoordinator, PrefixHit, make_coordinator
from octavo.core.prefix_hash import PrefixHasher
from octavo.core.request import NO_ROW, Request
from octavo.core.step_plan import Int32Array


class Fit(enum.Enum):
    """Whether a request can be given what it asks for."""

    FITS = "fits"
    WAIT_STEP = "wait for the next step"
    WAIT_MEMORY = "wait for memory"
    NEVER = "larger than the whole pool"


@dataclass(frozen=True)
class Verdict:
    """A fit, and the numbers behind it as a sentence."""

    fit: Fit
    reason: str = ""

    def __bool__(self) -> bool:
        return self.fit is Fit.FITS


@dataclass(frozen=True)
class ResetResult:
    """Whether a reset was done, and if not why. True exactly when it was done."""

    done: bool
    reason: str = ""

    def __bool__(self) -> bool:
        return self.done


_FITS = Verdict(Fit.FITS)


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
    """

    def __init__(
        self,
        pool: BlockPool,
        managers: list[SingleTypeKVCacheManager],
        hasher: PrefixHasher | None,
        *,
        max_tokens_in_flight: int = 1 << 30,
        reuses_blocks_within_a_step: bool = True,
    ) -> None:
        self.pool = pool
        self.max_tokens_in_flight = max_tokens_in_flight
        self.hasher = hasher
        self.coordinator: KVCacheCoordinator = make_coordinator(managers, enable_prefix_caching=hasher is not None)
        self.reuses_blocks_within_a_step = reuses_blocks_within_a_step
        # Blocks registered in the step that is being planned -> the row that fills them.
        self._provisional_owner: dict[int, int] = {}
        # Row -> registered entries by group before this step, for rows that registered some in it.
        self._registered_before: dict[int, list[int]] = {}
        self._rows_with_adopters: set[int] = set()

    # -- questions ----------------------------------------------------------------------------------------------

    def get_computed_blocks(self, request: Request) -> PrefixHit:
        """Return the longest cached prefix that leaves at least one token to compute. Changes no block."""
        if self.hasher is None or request.params.skip_reading_prefix_cache:
            return self.coordinator.no_hit
        memo = request.hit_memo
        if memo is not None and memo[:2] == (self.pool.generation, request.num_tokens):
            assert isinstance(memo[2], PrefixHit)
            return memo[2]
        self.hasher.extend(request.block_keys, request.token_ids, request.first_block_extra)
        # The last token is always computed: its output is what the next token is sampled from.
        hit = self.coordinator.find_longest_cache_hit(request.block_keys, request.num_tokens - 1)
        request.hit_memo = (self.pool.generation, request.num_tokens, hit)
        return hit

    def could_ever_hold(self, num_tokens: int) -> Verdict:
        """Say whether an empty pool could hold a request of `num_tokens` tokens."""
        needed = self.coordinator.max_blocks_per_request(num_tokens, self.max_tokens_in_flight)
        usable = self.pool.num_usable_blocks
        if needed <= usable:
            return _FITS
        return Verdict(Fit.NEVER, f"{num_tokens} tokens take {needed} blocks, and the whole KV cache has {usable}")

    def can_admit(self, request: Request, hit: PrefixHit) -> Verdict:
        """Say whether all tokens that `request` has now would fit.

        Asking for the whole request, not for its first chunk, keeps it from being admitted now and preempted in the
        middle of its own prefill.
        """
        verdict = self.could_ever_hold(request.num_tokens)
        if not verdict:
            return verdict
        if not self.reuses_blocks_within_a_step and not self._provisional_owner.keys().isdisjoint(hit.block_ids()):
            return Verdict(Fit.WAIT_STEP, "its prefix is being computed in this step")
        # Where blocks are recycled, all of the request's entries are more than it ever holds at a time.
        needed = min(
            self.coordinator.get_num_blocks_to_allocate(NO_ROW, request.num_tokens, hit),
            self.coordinator.max_blocks_per_request(request.num_tokens, self.max_tokens_in_flight),
        )
        return _FITS if needed <= self.pool.num_free_blocks else self._wait_for_memory(needed)

    def quiet_until(self, num_tokens: int) -> int:
        """Return up to how many computed tokens nothing changes about a row's blocks that has `num_tokens` now.

        Until then `allocate_slots` would allocate, register and free nothing, and need not be called.
        """
        return self.coordinator.quiet_until(num_tokens)

    def most_new_blocks(self, num_new_tokens: Int32Array) -> int:
        """Return how many blocks requests that get so many new tokens could take together at most."""
        return self.coordinator.most_new_blocks(num_new_tokens)

    def has_adopters(self, request: Request) -> bool:
        """Say whether another request adopted, in this step, blocks that `request` is to fill in it."""
        return request.row in self._rows_with_adopters

    # -- changes ------------------------------------------------------------------------------------------------

    def allocate_slots(
        self, request: Request, num_computed_tokens: int, num_new_tokens: int, hit: PrefixHit | None = None
    ) -> Verdict:
        """Make room for the next tokens of a request, and register the blocks that they fill.

        Args:
            request: Holds a row; with `hit` the row must be empty.
            num_computed_tokens: Tokens before the new ones, those of `hit` included.
            num_new_tokens: Tokens that this step computes.
            hit: Cached blocks to start from, as `get_computed_blocks` returned them in this step.

        Returns:
            FITS, or WAIT_MEMORY, and then nothing but blocks that nothing reads any more has changed.

        Raises:
            ValueError: There is nothing to allocate for.
        """
        if num_new_tokens < 1:
            raise ValueError(f"num_new_tokens is {num_new_tokens}; a request is given slots for at least one token")
        hit = hit or self.coordinator.no_hit
        row, num_tokens = request.row, num_computed_tokens + num_new_tokens
        self.coordinator.remove_skipped_blocks(row, num_computed_tokens)
        needed = self.coordinator.get_num_blocks_to_allocate(row, num_tokens, hit)
        if needed > self.pool.num_free_blocks:
            return self._wait_for_memory(needed)
        if self._provisional_owner and hit.num_tokens:
            owners = (self._provisional_owner.get(block_id) for block_id in hit.block_ids())
            self._rows_with_adopters.update(owner for owner in owners if owner is not None)
        if needed or hit.num_tokens:
            self.coordinator.allocate(row, num_tokens, hit)
        self.cache_blocks(request, num_tokens)
        return _FITS

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """Register, provisionally, the full blocks among the first `num_tokens` tokens of a request.

        The token sampled last has no keys and values yet, so `num_tokens` counts what is computed, not what is known.
        """
        if self.hasher is None:
            return
        registered = self.coordinator.num_cached_blocks(request.row)
        self.hasher.extend(request.block_keys, request.token_ids, request.first_block_extra)
        new_blocks = self.coordinator.cache_blocks(request.row, request.block_keys, num_tokens)
        if new_blocks:
            self._registered_before.setdefault(request.row, registered)
            self._provisional_owner.update(dict.fromkeys(new_blocks, request.row))

    def commit_step(self) -> None:
        """Make the keys of the planned step final: what they stand for has been computed."""
        self._provisional_owner.clear()
        self._registered_before.clear()
        self._rows_with_adopters.clear()

    def drop_provisional_keys(self, request: Request) -> None:
        """Take back the keys that the request registered in this step: it will not be computed after all."""
        registered = self._registered_before.pop(request.row, None)
        if registered is not None:
            self.coordinator.uncache_blocks(request.row, registered)
            self._provisional_owner = {b: row for b, row in self._provisional_owner.items() if row != request.row}

    def forget_blocks(self, request: Request) -> None:
        """Make what the request holds unfindable, because its content cannot be trusted."""
        self.drop_provisional_keys(request)
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
            "wait for them to finish, or abort them, and call again.",
        )

    def _wait_for_memory(self, needed: int) -> Verdict:
        return Verdict(Fit.WAIT_MEMORY, f"{needed} blocks are needed, {self.pool.num_free_blocks} are free")
