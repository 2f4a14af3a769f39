"""The debug mode `verify_prefix_cache`: what is found in the prefix cache is recomputed and compared.

    same tokens            a key that is found must stand for the very tokens that were looked up; else it is no hit
    same keys and values   a request's hit is computed anew into spare blocks, before its first step, and compared

A difference is an error in the log and in the counters, and the request computes its prefix itself.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import numpy as np

from octavo.core.interfaces.kv_cache_manager import NULL_BLOCK
from octavo.core.kv_cache_coordinator import PrefixHit
from octavo.core.kv_cache_manager import KVCacheManager
from octavo.core.request import Request
from octavo.core.step_plan import StepPlan
from octavo.core.verdict import Verdict

logger = logging.getLogger(__name__)

# How far keys and values that are computed twice may lie apart, by dtype and `kv_dtype`; `block_differences` says in
# which unit. In another batch, or cut into other chunks, the same numbers are added up in another order, and each layer
# makes more of it. With SmolLM2-135M on a CPU the largest difference of 528 tokens in 30 layers was 2e-5 in float32,
# 0.03 in float16 and 0.3 in bfloat16. Those of other tokens' keys and values are above 1 somewhere in a block.
#
# Where the cache is quantised, a number that lies between two codes gets now the one and now the other, and what later
# layers make of it is quantised again. With the same model and 499 tokens, in chunks of 7, 64 and 300 against all at
# once, in float32 and in bfloat16, with scales for the tensor, the head, or the token and head, the largest difference
# was 1.8 in fp8_e4m3 and 1.3 in int8; that of a block of other tokens was never below 6.5. But int8 without scales, its
# codes being -1, 0 and 1 for the most part, came to 5.9: that is called a fault, and costs computing the block again.
TOLERANCES = {
    "float64": 1e-3,
    "float32": 1e-3,
    "float16": 0.125,
    "bfloat16": 1.0,
    "fp8_e4m3": 3.0,
    "fp8_e4m3_per_token_head": 3.0,
    "int8": 3.0,
    "int8_per_token_head": 3.0,
}
# Of any other type, and of pages that are compared byte by byte.
OTHER_TOLERANCE = 1.0


class VerifiableRunner(Protocol):
    """What this mode asks of a runner."""

    def fill_kv_cache(self, plan: StepPlan) -> None:
        """Write the keys and values of a plan's tokens. Nothing is sampled, and nothing about other rows changes."""

    def block_differences(
        self, group_id: int, block_ids: Sequence[int], other_block_ids: Sequence[int]
    ) -> dict[int, float]:
        """Compare what blocks hold, one by one with others, in each layer of a KV-cache group.

        Returns:
            By layer, as the model counts them, the largest |a - b| / (|b| + mean of the block's |b|) of any element.
            NaN where one is not finite.
        """


@dataclass
class VerificationCounters:
    """What was verified so far; see `EngineStats`."""

    verified_tokens: int = 0
    unverified_tokens: int = 0
    verification_failures: int = 0


@dataclass(frozen=True)
class AdoptedHit:
    """What a request was admitted with.

    Attributes:
        request: Who.
        hit: What it adopted.
        is_first: Whether it was admitted for the first time, that is, not after a preemption.
    """

    request: Request
    hit: PrefixHit
    is_first: bool


@dataclass(frozen=True)
class _Fault:
    """The first block of a hit that differs.

    Attributes:
        group_id: Its KV-cache group.
        block_index: Its place in the request's table.
        position: Of its first token.
        differences: By layer, those that are too large.
    """

    group_id: int
    block_index: int
    position: int
    differences: dict[int, float]


class VerifyingKVCacheManager(KVCacheManager):
    """Reports keys that stand for two prefixes, and keeps the hits that were adopted until they are verified.

    Its hasher is a `ContentHasher`, whose keys are found only where they stand for the same; so nothing here needs to
    keep a wrong block from being used. Arguments as in `KVCacheManager`.
    """

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self.counters = VerificationCounters()
        self._adopted: dict[Request, AdoptedHit] = {}
        # Blocks whose collision was reported, so that a request which waits reports it once.
        self._reported: WeakKeyDictionary[Request, set[int]] = WeakKeyDictionary()

    def get_computed_blocks(self, request: Request) -> PrefixHit:
        hit = super().get_computed_blocks(request)
        if self.hasher is not None and self.reads_prefixes_of(request):
            block_size = self.hasher.block_size
            for index in range(hit.num_tokens // block_size, (request.num_tokens - 1) // block_size):
                if self._collides(request.block_keys[index]):
                    self._report_collision(request, index)
        return hit

    def allocate_slots(
        self, request: Request, num_computed_tokens: int, num_new_tokens: int, hit: PrefixHit | None = None
    ) -> Verdict:
        verdict = super().allocate_slots(request, num_computed_tokens, num_new_tokens, hit)
        if verdict and hit is not None and hit.num_tokens:
            self._adopted[request] = AdoptedHit(request, hit, request.num_cached_tokens is None)
        return verdict

    def free(self, request: Request) -> None:
        self._adopted.pop(request, None)
        super().free(request)

    def take_adopted(self, arrivals: Collection[int]) -> list[AdoptedHit]:
        """Return the hits of some requests that were not returned before, in order of admission."""
        taken = [adopted for request, adopted in self._adopted.items() if request.arrival in arrivals]
        for adopted in taken:
            del self._adopted[adopted.request]
        return taken

    def is_written(self, block_id: int) -> bool:
        """Say whether a findable block holds what it stands for, before the step that was planned last has run."""
        return block_id not in self._current_step.filled

    def _collides(self, key: bytes) -> bool:
        """Say whether there is a block of this digest, and none that stands for the same."""
        groups = range(len(self.coordinator.managers))
        return any(
            self.pool.get_cached_block(bytes(key), group_id) is not None
            and self.pool.get_cached_block(key, group_id) is None
            for group_id in groups
        )

    def _report_collision(self, request: Request, index: int) -> None:
        reported = self._reported.setdefault(request, set())
        if index in reported:
            return
        reported.add(index)
        self.counters.verification_failures += 1
        logger.error(
            "prefix cache: the key of block %d of request %r is also that of a cached block with other content, which "
            "is not used: two prefixes have the same digest",
            index,
            request.request_id,
        )


class PrefixVerifier:
    """Computes hits anew and compares.

    Args:
        kv_cache_manager: Knows the hits.
        runner: Computes.
        max_num_batched_tokens: Tokens that it may be given at a time.
        unused_row: A row that no request has.
        tolerance: The largest difference that counts as none, as `tolerance` returns it.
    """

    def __init__(
        self,
        kv_cache_manager: VerifyingKVCacheManager,
        runner: VerifiableRunner,
        *,
        max_num_batched_tokens: int,
        unused_row: int,
        tolerance: float,
    ) -> None:
        self._kv_cache_manager = kv_cache_manager
        self._pool = kv_cache_manager.pool
        self._runner = runner
        self._max_num_batched_tokens = max_num_batched_tokens
        self._unused_row = unused_row
        self._tolerance = tolerance
        self.counters = kv_cache_manager.counters

    def verify(self, plan: StepPlan) -> bool:
        """Compare the hits of the requests that a plan, the one made last, computes for the first time.

        Returns:
            Whether all are as they should be. Else the plan must not be run: what is wrong can no longer be found, and
            its requests, once they are back in line, compute it themselves.
        """
        are_right = [self._verify(adopted) for adopted in self._kv_cache_manager.take_adopted(plan.arrivals)]
        return all(are_right)

    def _verify(self, adopted: AdoptedHit) -> bool:
        hit = adopted.hit
        num_tokens = self._num_tokens_that_fit(hit.num_tokens)
        block_sizes = self._block_sizes
        # Of each group the entries to compare.
        compared = [
            [
                index
                for index, block_id in enumerate(blocks[: num_tokens // block_size])
                if block_id != NULL_BLOCK and self._kv_cache_manager.is_written(block_id)
            ]
            for blocks, block_size in zip(hit.blocks, block_sizes, strict=True)
        ]
        num_compared = max(len(entries) * size for entries, size in zip(compared, block_sizes, strict=True))
        self.counters.verified_tokens += num_compared
        self.counters.unverified_tokens += hit.num_tokens - num_compared
        if not num_compared:
            return True
        end = max((entries[-1] + 1) * size for entries, size in zip(compared, block_sizes, strict=True) if entries)
        with self._spare_tables(end) as tables:
            self._compute(adopted.request, end, tables)
            faults = [self._first_fault(group_id, hit, tables, entries) for group_id, entries in enumerate(compared)]
        fault = min((fault for fault in faults if fault is not None), key=lambda fault: fault.position, default=None)
        if fault is None:
            return True
        self._report(adopted, fault)
        self._make_unfindable(hit, fault.position)
        if adopted.is_first:
            # What is still found ends before the fault, and where every group supports it.
            left = self._kv_cache_manager.get_computed_blocks(adopted.request).num_tokens
            alignment = self._kv_cache_manager.coordinator.alignment
            adopted.request.num_cached_tokens = min(left, fault.position - fault.position % alignment)
        return False

    @property
    def _block_sizes(self) -> list[int]:
        return [manager.block_size for manager in self._kv_cache_manager.coordinator.managers]

    def _num_tokens_that_fit(self, num_tokens: int) -> int:
        """Return for how many of a hit's tokens there are free blocks, in whole blocks of each group."""
        num_free = self._pool.num_free_blocks
        if sum(-(-num_tokens // size) for size in self._block_sizes) <= num_free:
            return num_tokens
        unit = math.lcm(*self._block_sizes)
        return unit * (num_free // sum(unit // size for size in self._block_sizes))

    @contextlib.contextmanager
    def _spare_tables(self, num_tokens: int) -> Iterator[list[list[int]]]:
        """Hold free blocks for so many tokens; a table for each group. Cached blocks among them lose their keys."""
        tables = [self._pool.get_new_blocks(-(-num_tokens // size)) for size in self._block_sizes]
        try:
            yield tables
        finally:
            self._pool.free_blocks([block_id for table in tables for block_id in table])

    def _compute(self, request: Request, num_tokens: int, tables: list[list[int]]) -> None:
        """Write a request's first tokens to the blocks of other tables than its own."""
        for first in range(0, num_tokens, self._max_num_batched_tokens):
            token_ids = request.token_ids[first : min(first + self._max_num_batched_tokens, num_tokens)]
            self._runner.fill_kv_cache(
                StepPlan(
                    request_ids=[request.request_id],
                    arrivals=[request.arrival],
                    rows=np.array([self._unused_row], np.int32),
                    num_new_tokens=np.array([len(token_ids)], np.int32),
                    first_positions=np.array([first], np.int32),
                    token_ids=np.array(token_ids, np.int32),
                    samples=np.array([False]),
                    num_decode_entries=int(len(token_ids) == 1),
                    block_tables=tuple(np.array([table], np.int32) for table in tables),
                    new_rows=[],
                )
            )

    def _first_fault(self, group_id: int, hit: PrefixHit, tables: list[list[int]], entries: list[int]) -> _Fault | None:
        spare, found = tables[group_id], hit.blocks[group_id]
        if not entries or not self._too_large(group_id, [found[i] for i in entries], [spare[i] for i in entries]):
            return None
        for index in entries:
            differences = self._too_large(group_id, [found[index]], [spare[index]])
            if differences:
                return _Fault(group_id, index, index * self._block_sizes[group_id], differences)
        return None

    def _too_large(self, group_id: int, block_ids: list[int], others: list[int]) -> dict[int, float]:
        differences = self._runner.block_differences(group_id, block_ids, others)
        # Not the other way round: NaN is larger than nothing.
        return {layer: size for layer, size in differences.items() if not size <= self._tolerance}

    def _report(self, adopted: AdoptedHit, fault: _Fault) -> None:
        self.counters.verification_failures += 1
        logger.error(
            "prefix cache: the request %r found keys and values that differ from what its tokens give now, from its "
            "block %d on (block %d of the pool, KV-cache group %d). Difference by layer: %s; up to %g is rounding. "
            "They are dropped and computed anew.",
            adopted.request.request_id,
            fault.block_index,
            adopted.hit.blocks[fault.group_id][fault.block_index],
            fault.group_id,
            ", ".join(f"{layer}: {size:.3g}" for layer, size in fault.differences.items()),
            self._tolerance,
        )

    def _make_unfindable(self, hit: PrefixHit, position: int) -> None:
        """Take the keys off a hit's blocks from the one on that holds a position."""
        for blocks, block_size in zip(hit.blocks, self._block_sizes, strict=True):
            self._pool.uncache_blocks(block_id for block_id in blocks[position // block_size :] if block_id)


def tolerance(dtypes: Collection[str]) -> float:
    """Return the largest difference that counts as none, where weights, activations and cache have these types."""
    return max(TOLERANCES.get(dtype, OTHER_TOLERANCE) for dtype in dtypes)
