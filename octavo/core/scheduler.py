"""Decides, step by step, which tokens of which requests are computed.

There is no prefill phase and no decode phase: a request is behind its own tokens by some number, a new prompt by all
of them and a generating request by one, and each step lets requests catch up within the token budget.

    add_request ─► waiting ─► running ─► finished
                      ▲          │
                      └─preempt──┘   blocks given back; its tokens stay, and are computed again
"""

from __future__ import annotations

import logging

import numpy as np

from octavo.core.interfaces.request_queue import RequestQueue
from octavo.core.kv_cache_coordinator import PrefixHit
from octavo.core.kv_cache_manager import Fit, KVCacheManager, ResetResult
from octavo.core.outputs import EngineOutput, FinishReason, TokenLogprobs
from octavo.core.request import Request, RequestStatus
from octavo.core.request_table import RequestTable
from octavo.core.scheduled import Entries, Scheduled, make_plan, row_sampling
from octavo.core.stats import EngineStats
from octavo.core.step_plan import RowSampling, StepPlan, StepResult
from octavo.core.waiting_line import WaitingLine
from octavo.errors import InvalidRequestError, PluginContractError

logger = logging.getLogger(__name__)

KV_CACHE_FULL = "kv_cache_full"
NON_FINITE_LOGITS = "non_finite_logits"


class Scheduler:
    """Plans steps and takes in what came of them.

    Args:
        kv_cache_manager: Gives blocks to requests.
        waiting: Orders the requests that hold no blocks.
        max_num_seqs: Requests that run at a time.
        max_num_batched_tokens: Tokens that a step computes at most.
        enable_chunked_prefill: Whether a prompt may be computed over several steps. Without it a prompt runs whole
            in one step or waits.
    """

    def __init__(
        self,
        kv_cache_manager: KVCacheManager,
        waiting: RequestQueue,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        enable_chunked_prefill: bool = True,
    ) -> None:
        self.kv_cache_manager = kv_cache_manager
        self.kv_cache_manager.coordinator.reserve_rows(max_num_seqs)
        self.waiting = waiting
        self.running: list[Request] = []
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.enable_chunked_prefill = enable_chunked_prefill
        self._requests: dict[str, Request] = {}
        self._line = WaitingLine(waiting, self._requests)
        self._table = RequestTable(max_num_seqs)
        # The running requests as columns, until one comes or goes.
        self._all_running: Entries | None = None
        # The latest plan, its entries, and the departures up to then.
        self._planned: tuple[StepPlan, Entries, int] | None = None
        self._num_departures = 0
        # Requests that ended outside a step; they are reported with the next one.
        self._ended = EngineOutput()
        self._queried_tokens = 0
        self._hit_tokens = 0
        self._recomputed_tokens = 0
        self._preemptions = 0
        self._steps = 0

    # -- requests come and go -----------------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        """Put a request in line.

        Raises:
            InvalidRequestError: Its id is taken, or it could never run. Nothing has changed.
        """
        if request.request_id in self._requests:
            raise InvalidRequestError(
                f"A request with the id {request.request_id!r} is under way; use another id.", parameter="request_id"
            )
        self.check_admissible(request.num_tokens)
        # The queue first: it may be somebody else's code, and raise.
        self._line.add(request)
        self._requests[request.request_id] = request

    def check_admissible(self, num_prompt_tokens: int) -> None:
        """Raise InvalidRequestError for a prompt length that could never run, with the numbers."""
        verdict = self.kv_cache_manager.could_ever_hold(num_prompt_tokens)
        if not verdict:
            raise InvalidRequestError(
                f"The prompt of {num_prompt_tokens} tokens does not fit: {verdict.reason} "
                f"({self._capacity_in_tokens()} tokens). Shorten it, or give the engine more num_kv_blocks or "
                "kv_cache_memory_bytes.",
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
        request = self._requests.get(request_id)
        if request is None:
            return False
        self._end(request, "abort")
        return True

    def take_ended(self) -> EngineOutput:
        """Return what ended outside of a step and was not reported yet, without computing anything."""
        output, self._ended = self._ended, EngineOutput()
        return output

    def has_unfinished_requests(self) -> bool:
        """Say whether a further step has something to compute or to report."""
        return bool(self._requests) or len(self._ended) > 0

    # -- one step -----------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """Choose the tokens of the next step and give their requests the blocks for them."""
        num_preempted = 0
        scheduled = self.schedule_all_running()
        if scheduled is None:
            scheduled, num_preempted = self._schedule_running_in_turn()
        new_rows: list[RowSampling] = []
        if not num_preempted and len(self._line):
            scheduled = self._admit_waiting(scheduled, new_rows)
        if not len(scheduled.entries) and not num_preempted and self._requests and not len(self._ended):
            # An empty pool refuses nobody that was admissible, so somebody has lost a request, or counts wrongly.
            raise PluginContractError(self._why_nothing_goes_on())
        entries, plan = make_plan(scheduled, self._table, self.kv_cache_manager.coordinator.managers, new_rows)
        self._planned = plan, entries, self._num_departures
        return plan

    def update_from_output(self, plan: StepPlan, result: StepResult) -> EngineOutput:
        """Take in the tokens of a step, end the requests that are done, and report."""
        self.kv_cache_manager.commit_step()
        output = self.take_ended()
        if plan.num_tokens:
            self._steps += 1
        entries = self.entries_of(plan)
        if entries is not None and plan.samples.all() and True not in result.failed:
            self._take_in_all(entries, result, output)
        else:
            self._take_in_one_by_one(plan, result, output)
        return output

    def roll_back(self, plan: StepPlan) -> list[str]:
        """Undo a plan whose step failed: its requests give their blocks back and wait to be computed anew.

        What the step was to write may be written in part, so nothing that was registered for it stays findable.

        Returns:
            The requests' ids, in order of arrival.
        """
        owners = [self._owner(plan, entry) for entry in range(plan.num_entries)]
        requests = sorted((request for request in owners if request is not None), key=lambda request: request.arrival)
        for request in reversed(requests):
            self._put_back_in_line(request)
        self.kv_cache_manager.commit_step()
        return [request.request_id for request in requests]

    # -- taking a step in ---------------------------------------------------------------------------------------

    def _take_in_all(self, entries: Entries, result: StepResult, output: EngineOutput) -> None:
        """Take in a token for each entry: the same as `_take_in_one_by_one`, in columns."""
        rows, table = entries.rows, self._table
        table.num_tokens[rows] += 1
        table.last_token_ids[rows] = result.token_ids
        for request, token_id in zip(entries.requests, result.token_ids, strict=True):
            request.token_ids.append(token_id)
        first = len(output)
        output.add_column(
            entries.request_ids,
            result.token_ids,
            result.logprobs,
            entries.num_cached_tokens,
            entries.num_preemptions,
        )
        is_ended = table.num_tokens[rows] >= table.max_total_tokens[rows]
        if not entries.stop_token_ids.isdisjoint(result.token_ids):
            is_ended |= np.isin(result.token_ids, list(entries.stop_token_ids))
        for entry in np.flatnonzero(is_ended).tolist():
            request = entries.requests[entry]
            # A stop id of one request may be any other id to the next.
            finish_reason, stop_reason = request.end_with(result.token_ids[entry])
            if finish_reason is not None:
                output.finish_reasons[first + entry] = finish_reason
                output.stop_reasons[first + entry] = stop_reason
                self._release(request)

    def _take_in_one_by_one(self, plan: StepPlan, result: StepResult, output: EngineOutput) -> None:
        sampled = zip(result.token_ids, result.failed, result.logprobs, strict=True)
        for entry in np.flatnonzero(plan.samples).tolist():
            token_id, has_failed, logprobs = next(sampled)
            request = self._owner(plan, entry)
            if request is None:
                # Aborted while the step ran.
                continue
            if has_failed:
                self.kv_cache_manager.forget_blocks(request)
                self._end(request, "error", NON_FINITE_LOGITS, output)
                continue
            finish_reason, stop_reason = request.append_token(token_id)
            self._table.num_tokens[request.row] += 1
            self._table.last_token_ids[request.row] = token_id
            self._report(output, request, [token_id], finish_reason, stop_reason, logprobs)
            if finish_reason is not None:
                self._release(request)

    # -- state, for whoever watches -----------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """Return a snapshot of the counters."""
        pool = self.kv_cache_manager.pool
        return EngineStats(
            running=len(self.running),
            waiting=len(self.waiting),
            free_blocks=pool.num_free_blocks,
            used_blocks=pool.num_used_blocks,
            queried_tokens=self._queried_tokens,
            hit_tokens=self._hit_tokens,
            recomputed_tokens=self._recomputed_tokens,
            preemptions=self._preemptions,
            steps=self._steps,
        )

    def reset_prefix_cache(self) -> ResetResult:
        """Forget all cached prefixes, if no request holds blocks; say what was done."""
        return self.kv_cache_manager.reset_prefix_cache()

    # -- the running pass ---------------------------------------------------------------------------------------

    def schedule_all_running(self) -> Scheduled | None:
        """Let every running request catch up, where the budget and the free blocks are enough for all of them.

        The same as `_schedule_running_in_turn`, in columns. In most steps of most requests nothing changes about
        blocks; only where something does the KV cache is asked.

        Returns:
            None where somebody might have to do with less.
        """
        entries, table = self._running_entries(), self._table
        rows = entries.rows
        num_computed = table.num_computed_tokens[rows]
        num_new = table.num_tokens[rows] - num_computed
        if int(num_new.sum()) > self.max_num_batched_tokens or not num_new.all():
            return None
        changing = np.flatnonzero(num_computed + num_new > table.quiet_until[rows]).tolist()
        if self.kv_cache_manager.most_new_blocks(num_new[changing]) > self.kv_cache_manager.pool.num_free_blocks:
            return None
        for entry in changing:
            request, computed, new = entries.requests[entry], int(num_computed[entry]), int(num_new[entry])
            if not self.kv_cache_manager.allocate_slots(request, computed, new):
                # A manager takes more than blocks for the new tokens. Who was served keeps what he got.
                return None
            table.quiet_until[request.row] = self.kv_cache_manager.quiet_until(computed + new)
        table.num_computed_tokens[rows] += num_new
        return Scheduled(entries, num_new)

    def _schedule_running_in_turn(self) -> tuple[Scheduled, int]:
        """Let running requests catch up, in order of admission. Return how many were preempted for it, too."""
        scheduled: dict[Request, int] = {}
        budget = self.max_num_batched_tokens
        num_preempted = 0
        for request in tuple(self.running):
            if request.status is not RequestStatus.RUNNING:
                continue
            num_new = min(self._table.num_tokens_behind(request), budget)
            if num_new == 0:
                continue
            while not self._has_room_for(request, num_new):
                if len(self.running) == 1:
                    # Alone, and the pool is full: no preemption can help.
                    self._end(request, "length", KV_CACHE_FULL)
                    break
                victim = max(self.running, key=_last_served)
                budget += scheduled.pop(victim, 0)
                self._preempt(victim)
                num_preempted += 1
                if victim is request:
                    break
            if request.status is RequestStatus.RUNNING:
                scheduled[request] = num_new
                self._table.num_computed_tokens[request.row] += num_new
                budget -= num_new
        return Scheduled(Entries(tuple(scheduled)), np.array(list(scheduled.values()), np.int32)), num_preempted

    def _has_room_for(self, request: Request, num_new: int) -> bool:
        """Give a running request the slots for its next tokens; return whether they could be had."""
        computed = self._num_computed(request)
        if computed + num_new <= self._table.quiet_until[request.row]:
            return True
        if not self.kv_cache_manager.allocate_slots(request, computed, num_new):
            return False
        self._table.quiet_until[request.row] = self.kv_cache_manager.quiet_until(computed + num_new)
        return True

    def _preempt(self, request: Request) -> None:
        # Adoption happens in the waiting pass, which comes after the last preemption of a step.
        assert not self.kv_cache_manager.has_adopters(request)
        self._preemptions += 1
        request.num_preemptions += 1
        request.num_computed_before_preemption = self._num_computed(request)
        self._put_back_in_line(request)
        logger.debug("preempted %s with %d tokens", request.request_id, request.num_tokens)

    def _put_back_in_line(self, request: Request) -> None:
        self.kv_cache_manager.drop_provisional_keys(request)
        self._leave_running(request)
        request.status = RequestStatus.PREEMPTED
        self._line.add_back(request)

    # -- the waiting pass ---------------------------------------------------------------------------------------

    def _admit_waiting(self, scheduled: Scheduled, new_rows: list[RowSampling]) -> Scheduled:
        """Admit waiting requests in the queue's order while slots, budget and memory last; return all together.

        Budget is left only when no running request is behind, so nobody is owed blocks for a prompt under way.
        """
        budget = self.max_num_batched_tokens - int(scheduled.num_new_tokens.sum())
        admitted: dict[Request, int] = {}
        while budget and len(self._line) and len(self.running) < self.max_num_seqs:
            request = self._line.first()
            hit = self.kv_cache_manager.get_computed_blocks(request)
            verdict = self.kv_cache_manager.can_admit(request, hit)
            if verdict.fit is Fit.NEVER:
                # It fitted when it arrived, and has outgrown the pool since.
                self._end(request, "length", KV_CACHE_FULL)
                continue
            num_new = self._first_chunk(request, hit, budget)
            if not verdict or not num_new:
                logger.debug("%s waits: %s", request.request_id, verdict.reason or "no room in this step's budget")
                break
            self._line.take_first(request)
            self._admit(request, hit, num_new)
            new_rows.append(row_sampling(request))
            admitted[request] = num_new
            budget -= num_new
        return scheduled.with_more(admitted) if admitted else scheduled

    def _first_chunk(self, request: Request, hit: PrefixHit, budget: int) -> int:
        """Return how many tokens of a waiting request to compute first; 0 to let it wait."""
        num_missing = request.num_tokens - hit.num_tokens
        # A preempted request may have grown past the budget; computing it whole would never be possible.
        may_be_cut = self.enable_chunked_prefill or request.num_tokens > self.max_num_batched_tokens
        if num_missing <= budget:
            return num_missing
        return budget if may_be_cut else 0

    def _admit(self, request: Request, hit: PrefixHit, num_new: int) -> None:
        self._table.add(request, hit.num_tokens)
        verdict = self.kv_cache_manager.allocate_slots(request, hit.num_tokens, num_new, hit)
        assert verdict, f"admitted and then refused: {verdict.reason}"
        self._table.num_computed_tokens[request.row] += num_new
        self._table.quiet_until[request.row] = self.kv_cache_manager.quiet_until(hit.num_tokens + num_new)
        if request.num_cached_tokens is None:
            self._queried_tokens += request.num_tokens
            self._hit_tokens += hit.num_tokens
            request.num_cached_tokens = hit.num_tokens
        else:
            self._recomputed_tokens += max(request.num_computed_before_preemption - hit.num_tokens, 0)
        request.status = RequestStatus.RUNNING
        self.running.append(request)
        self._all_running = None

    # -- smaller steps ------------------------------------------------------------------------------------------

    def _running_entries(self) -> Entries:
        if self._all_running is None:
            self._all_running = Entries(self.running)
        return self._all_running

    def entries_of(self, plan: StepPlan) -> Entries | None:
        """Return who owns the entries of the latest plan; None when one of them has left since."""
        if self._planned is None or self._planned[0] is not plan or self._planned[2] != self._num_departures:
            return None
        return self._planned[1]

    def _why_nothing_goes_on(self) -> str:
        pool = self.kv_cache_manager.pool
        return (
            f"Nothing can go on: of {len(self._requests)} requests under way {len(self.running)} are running, the "
            f"request queue {self._line.name} says that {len(self._line)} wait, and "
            f"{pool.num_free_blocks} of {pool.num_usable_blocks} blocks are free. A request queue or a KV-cache "
            "manager does not keep its contract."
        )

    def _owner(self, plan: StepPlan, entry: int) -> Request | None:
        """Return the request of a plan entry, or None when it has ended since; its id may be in use again."""
        request = self._requests.get(plan.request_ids[entry])
        return request if request is not None and request.arrival == plan.arrivals[entry] else None

    def _num_computed(self, request: Request) -> int:
        return int(self._table.num_computed_tokens[request.row])

    def _capacity_in_tokens(self) -> int:
        block_size = max(manager.block_size for manager in self.kv_cache_manager.coordinator.managers)
        return self.kv_cache_manager.pool.num_usable_blocks * block_size

    def _end(
        self,
        request: Request,
        finish_reason: FinishReason,
        stop_reason: str | None = None,
        output: EngineOutput | None = None,
    ) -> None:
        """End a request that got no token for it."""
        self._report(self._ended if output is None else output, request, [], finish_reason, stop_reason, None)
        self._release(request)

    def _release(self, request: Request) -> None:
        if request.status is RequestStatus.RUNNING:
            # Ended in the middle of a step, it may have keys for blocks that nothing will fill.
            self.kv_cache_manager.drop_provisional_keys(request)
            self._leave_running(request)
        else:
            self._line.remove(request)
        request.status = RequestStatus.FINISHED
        del self._requests[request.request_id]

    def _leave_running(self, request: Request) -> None:
        self.running.remove(request)
        self._all_running = None
        self._num_departures += 1
        self.kv_cache_manager.free(request)
        self._table.remove(request)

    def _report(
        self,
        output: EngineOutput,
        request: Request,
        new_token_ids: list[int],
        finish_reason: FinishReason | None,
        stop_reason: int | str | None,
        logprobs: TokenLogprobs | None,
    ) -> None:
        output.add(
            request.request_id,
            new_token_ids,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            logprobs=None if logprobs is None else [logprobs],
            num_cached_tokens=request.num_cached_tokens or 0,
            num_preemptions=request.num_preemptions,
        )


def _last_served(request: Request) -> tuple[int, int]:
    """Order in which running requests are given up, the largest first: least urgent, then last to arrive."""
    return request.priority, request.arrival
