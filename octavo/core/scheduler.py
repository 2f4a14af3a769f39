"""Decides, step by step, which tokens of which requests are computed.

There is no prefill phase and no decode phase: a request is behind its own tokens by some number, a new prompt by all
of them and a generating request by one, and each step lets requests catch up within the token budget.

    add_request ─► waiting ─► running ─► finished
                      ▲          │
                      └─preempt──┘   blocks given back; its tokens stay, and are computed again

A step may be planned while the one before it runs. Then a generating request awaits a token: it counts as known, the
plan leaves its place open, and the model runner fills it in.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, replace

import numpy as np

from octavo.core.admission import Admission
from octavo.core.chunking import Chunking
from octavo.core.intake import Intake
from octavo.core.interfaces.request_queue import RequestQueue
from octavo.core.kv_cache_manager import KVCacheManager
from octavo.core.outputs import EngineOutput
from octavo.core.request import NO_ROW, Request, RequestStatus
from octavo.core.roster import Roster
from octavo.core.running_pass import RunningPass
from octavo.core.scheduled import Entries, make_plan, row_sampling
from octavo.core.stats import EngineStats
from octavo.core.step_builder import StepBuilder
from octavo.core.step_plan import StepPlan, StepResult
from octavo.core.verdict import ResetResult
from octavo.core.watchdog import Watchdog
from octavo.errors import InvalidRequestError


@dataclass(frozen=True)
class _StepUnderWay:
    """A plan whose output has not arrived.

    Attributes:
        plan: The plan.
        entries: Who owns its entries.
        admitted: Who was admitted in it.
        num_departures: How many requests had left the running ones until then.
    """

    plan: StepPlan
    entries: Entries
    admitted: tuple[Request, ...]
    num_departures: int


class Scheduler:
    """Plans steps and takes in what came of them.

    Args:
        kv_cache_manager: Gives blocks to requests.
        waiting: Orders the requests that hold no blocks.
        max_num_seqs: Requests that run at a time.
        max_num_batched_tokens: Tokens that a step computes at most.
        enable_chunked_prefill: Whether a prompt may be computed over several steps. Without it a prompt runs whole
            in one step or waits.
        long_prefill_token_threshold: Tokens of one prompt that a step computes at most; 0 sets no limit.
        watermark: Share of the pool that no request is admitted into while others run.
    """

    def __init__(
        self,
        kv_cache_manager: KVCacheManager,
        waiting: RequestQueue,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        enable_chunked_prefill: bool = True,
        long_prefill_token_threshold: int = 0,
        watermark: float = 0.0,
    ) -> None:
        self.kv_cache_manager = kv_cache_manager
        self.waiting = waiting
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.enable_chunked_prefill = enable_chunked_prefill
        chunking = Chunking(max_num_batched_tokens, enable_chunked_prefill, long_prefill_token_threshold)
        num_watermark_blocks = int(watermark * kv_cache_manager.pool.num_usable_blocks)
        self._roster = Roster(kv_cache_manager, waiting, max_num_seqs)
        self._admission = Admission(self._roster, chunking, max_num_seqs, num_watermark_blocks)
        self._running_pass = RunningPass(self._roster, chunking)
        self._intake = Intake(self._roster)
        self._watchdog = Watchdog(self._roster)
        # Oldest first. More than one while a step is planned ahead.
        self._under_way: deque[_StepUnderWay] = deque()

    # -- requests come and go -----------------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        """Put a request in line.

        Raises:
            InvalidRequestError: Its id is taken, or it could never run. Nothing has changed.
        """
        if request.request_id in self._roster.requests:
            raise InvalidRequestError(
                f"A request with the id {request.request_id!r} is under way; use another id.", parameter="request_id"
            )
        self.check_admissible(request.num_tokens)
        self._roster.add(request)

    def check_admissible(self, num_prompt_tokens: int) -> None:
        """Raise InvalidRequestError for a prompt length that could never run, with the numbers."""
        verdict = self.kv_cache_manager.could_ever_hold(num_prompt_tokens)
        if not verdict:
            self._roster.counters.never_fitted += 1
            raise InvalidRequestError(
                f"The prompt of {num_prompt_tokens} tokens does not fit: {verdict.reason} "
                f"(requests of up to {self._longest_request(num_prompt_tokens)} tokens). Shorten it, or give the "
                "engine more num_kv_blocks or kv_cache_memory_bytes.",
                parameter="prompt",
            )
        if not self.enable_chunked_prefill and num_prompt_tokens > self.max_num_batched_tokens:
            raise InvalidRequestError(
                f"The prompt has {num_prompt_tokens} tokens, and without chunked prefill it must fit into one step of "
                f"{self.max_num_batched_tokens}. Shorten it, raise max_num_batched_tokens, or set "
                "enable_chunked_prefill=True.",
                parameter="prompt",
            )

    def abort_request(self, request_id: str) -> bool:
        """End a request now; its last output comes with the next step. Unknown ids are ignored.

        Returns:
            Whether the request was under way.
        """
        request = self._roster.requests.get(request_id)
        if request is None:
            return False
        self._roster.end(request, "abort")
        return True

    def take_ended(self) -> EngineOutput:
        """Return what ended outside of a step and was not reported yet, without computing anything."""
        output, self._roster.ended = self._roster.ended, EngineOutput()
        return output

    def has_unfinished_requests(self) -> bool:
        """Say whether a further step has something to compute or to report."""
        return bool(self._roster.requests) or len(self._roster.ended) > 0

    # -- one step -----------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """Choose the tokens of the next step and give their requests the blocks for them."""
        roster = self._roster
        self.kv_cache_manager.begin_step()
        self._watchdog.end_the_lost()
        self._admission.waiting_because = None
        roster.table.expect_tokens(self._awaited_rows())
        step = StepBuilder(self.max_num_batched_tokens)
        self._admission.displace(step)
        prompts = self._running_pass.schedule(step)
        if step.preempted:
            self._admission.waiting_because = "others were preempted in this step"
        else:
            prompts += self._admission.admit_waiting(step)
        self._running_pass.share_the_rest(prompts, step)
        is_idle = not len(step) and not step.preempted and not self._under_way
        if is_idle and roster.requests and not len(roster.ended):
            # An empty pool refuses nobody that was admissible, so a part does not keep its contract.
            self._watchdog.end_the_stuck()
        managers = self.kv_cache_manager.coordinator.managers
        # One that was admitted may have been preempted since.
        new_rows = [row_sampling(request) for request in step.admitted if request.row != NO_ROW]
        entries, plan = make_plan(step.scheduled(), roster.table, managers, new_rows)
        self._under_way.append(_StepUnderWay(plan, entries, tuple(step.admitted), roster.num_departures))
        return plan

    def update_from_output(self, plan: StepPlan, result: StepResult) -> EngineOutput:
        """Take in the tokens of the oldest step under way, end the requests that are done, and report.

        Raises:
            ValueError: The plan is another one: each is to be taken in or rolled back, in order.
        """
        if not self._under_way or self._under_way[0].plan is not plan:
            raise ValueError("the plan is not the oldest one whose output has not arrived")
        self.kv_cache_manager.commit_step()
        output = self.take_ended()
        if plan.num_tokens:
            self._roster.counters.steps += 1
        entries = self._entries_of_oldest()
        self._under_way.popleft()
        if entries is None or not self._intake.take_in_all(plan, entries, result, output):
            self._intake.take_in_one_by_one(plan, result, output)
        return output

    def roll_back(self, plan: StepPlan) -> list[str]:
        """Undo a plan that failed or was not run, and those after it: their requests wait to be computed anew.

        What the step was to write may be written in part, so nothing that was registered for it stays findable.

        Returns:
            The ids of the plan's requests, in order of arrival.
        """
        while True:
            latest = self._under_way.pop()
            requests = self._take_back(latest)
            self.kv_cache_manager.cancel_step()
            if latest.plan is plan:
                return [request.request_id for request in requests]

    def _take_back(self, step: _StepUnderWay) -> list[Request]:
        """Put the requests of a step that is not computed back in line; return those with tokens in it, by arrival."""
        plan = step.plan
        owners = [self._roster.owner(plan, entry) for entry in range(plan.num_entries)]
        owned = zip(owners, plan.num_new_tokens.tolist(), strict=True)
        # Who was admitted may have no tokens in it, and still the runner is not told of its row, and what it found may
        # be what a step that failed was to write.
        num_new_tokens = {request: 0 for request in step.admitted if request.status is RequestStatus.RUNNING}
        num_new_tokens |= {request: number for request, number in owned if request is not None}
        requests = sorted(num_new_tokens, key=lambda request: request.arrival)
        for request in reversed(requests):
            if request.status is RequestStatus.RUNNING:
                request.num_computed_before_preemption = self._roster.num_computed(request)
                self._roster.put_back_in_line(request)
            request.num_computed_before_preemption -= num_new_tokens[request]
        return [request for request in requests if num_new_tokens[request]]

    def _awaited_rows(self) -> list[int]:
        """Return the rows for which steps under way will sample a token."""
        owners = [
            self._roster.owner(step.plan, entry)
            for step in self._under_way
            for entry in np.flatnonzero(step.plan.samples).tolist()
        ]
        return [request.row for request in owners if request is not None and request.row != NO_ROW]

    def is_wanted(self, plan: StepPlan) -> bool:
        """Say whether one of a plan's requests is still under way."""
        return any(self._roster.owner(plan, entry) is not None for entry in range(plan.num_entries))

    def _entries_of_oldest(self) -> Entries | None:
        """Return who owns the entries of the oldest plan under way; None when one of them has left since."""
        oldest = self._under_way[0]
        return oldest.entries if oldest.num_departures == self._roster.num_departures else None

    # -- state, for whoever watches -----------------------------------------------------------------------------

    @property
    def running(self) -> list[Request]:
        """Those that hold blocks, in order of admission."""
        return self._roster.running

    def stats(self) -> EngineStats:
        """Return a snapshot of the counters."""
        pool, num_waiting = self.kv_cache_manager.pool, len(self.waiting)
        return EngineStats(
            running=len(self.running),
            waiting=num_waiting,
            free_blocks=pool.num_free_blocks,
            used_blocks=pool.num_used_blocks,
            cached_blocks=pool.num_cached_blocks,
            waiting_because=self._admission.waiting_because if num_waiting else None,
            evicted_blocks=pool.num_evictions,
            **vars(self._roster.counters),
        )

    def reset_prefix_cache(self, *, reset_running_requests: bool = False) -> ResetResult:
        """Forget all cached prefixes, and say what was done.

        Args:
            reset_running_requests: Whether running requests are preempted for it, the last admitted first, and
                computed anew from nothing; a step that is planned is undone. Without, it is refused while they hold
                blocks.
        """
        preempted = self.running[::-1] if reset_running_requests else []
        for request in preempted:
            self._roster.preempt(request, StepBuilder(0))
        if reset_running_requests and self._under_way:
            self.roll_back(self._under_way[0].plan)
        return replace(self.kv_cache_manager.reset_prefix_cache(), num_preempted=len(preempted))

    def _longest_request(self, too_long: int) -> int:
        """Return how many tokens the longest request has that the KV cache could hold; `too_long` are too many."""
        could_hold = self.kv_cache_manager.could_ever_hold
        return bisect_left(range(1, too_long), True, key=lambda num_tokens: not could_hold(num_tokens))
