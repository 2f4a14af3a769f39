"""The requests under way: where each one stands, what it holds, and how it comes and goes.

add ─► line ─► running ─► forgotten
         ▲        │
         └preempt─┘
"""

from __future__ import annotations

import logging

import numpy as np

from octavo.core.interfaces.request_queue import RequestQueue
from octavo.core.kv_cache_coordinator import PrefixHit
from octavo.core.kv_cache_manager import KVCacheManager
from octavo.core.outputs import EngineOutput, FinishReason, TokenLogprobs
from octavo.core.request import Request, RequestStatus
from octavo.core.request_table import RequestTable
from octavo.core.scheduled import Entries
from octavo.core.stats import Counters
from octavo.core.step_builder import StepBuilder
from octavo.core.step_plan import Int32Array, StepPlan
from octavo.core.waiting_line import WaitingLine
from octavo.errors import PluginContractError

logger = logging.getLogger(__name__)


class Roster:
    """Keeps the requests under way.

    Args:
        kv_cache_manager: Gives blocks to them.
        waiting: Orders those that hold none.
        max_num_seqs: Requests that run at a time.

    Attributes:
        requests: All, by id.
        line: Those that wait.
        running: Those that hold blocks, in order of admission.
        table: The numbers of those that run.
        ended: What ended outside a step; it is reported with the next one.
        counters: What was counted so far.
        num_departures: How often a request has left the running ones.
    """

    def __init__(self, kv_cache_manager: KVCacheManager, waiting: RequestQueue, max_num_seqs: int) -> None:
        self.kv_cache_manager = kv_cache_manager
        self.kv_cache_manager.coordinator.reserve_rows(max_num_seqs)
        self.requests: dict[str, Request] = {}
        self.line = WaitingLine(waiting, self.requests)
        self.running: list[Request] = []
        self.table = RequestTable(max_num_seqs)
        self.ended = EngineOutput()
        self.counters = Counters()
        self.num_departures = 0
        # The running requests as columns, until one comes or goes.
        self._all_running: Entries | None = None

    # -- questions ----------------------------------------------------------------------------------------------

    def entries(self) -> Entries:
        """Return the running requests as columns."""
        if self._all_running is None:
            self._all_running = Entries(self.running)
        return self._all_running

    def num_tokens_behind(self) -> Int32Array:
        """Return how many tokens each running request is to catch up. [num_running]"""
        rows, table = self.entries().rows, self.table
        num_behind: Int32Array = table.num_tokens[rows] - table.num_computed_tokens[rows]
        if table.awaits_tokens:
            num_awaited = table.num_awaited_tokens[rows]
            num_behind += num_awaited
            # With the token that it awaits the request will be as long as it may get.
            is_last = table.num_tokens[rows] + num_awaited >= table.max_total_tokens[rows]
            num_behind[(num_awaited > 0) & is_last] = 0
        return num_behind

    def blocks_owed(self) -> dict[Request, int]:
        """Return, for each running request that is behind, how many blocks its remaining tokens will take."""
        entries, num_behind = self.entries(), self.num_tokens_behind()
        behind = [entries.requests[entry] for entry in np.flatnonzero(num_behind > 0).tolist()]
        return {request: self._num_blocks_owed(request) for request in behind}

    def _num_blocks_owed(self, request: Request) -> int:
        if request.num_tokens <= self.table.quiet_until[request.row]:
            return 0
        return self.kv_cache_manager.num_blocks_owed(request)

    def prompts_under_way(self, num_tokens_behind: Int32Array) -> list[Request]:
        """Return the running requests that are more than one token behind, the most urgent first.

        Args:
            num_tokens_behind: What the method of that name returns.
        """
        requests = self.entries().requests
        return sorted(
            [requests[entry] for entry in np.flatnonzero(num_tokens_behind > 1).tolist()], key=self.line.urgency
        )

    def num_computed(self, request: Request) -> int:
        """Return how many tokens of a running request are computed, or planned to be."""
        return int(self.table.num_computed_tokens[request.row])

    def owner(self, plan: StepPlan, entry: int) -> Request | None:
        """Return the request of a plan entry, or None when it has ended since; its id may be in use again."""
        request = self.requests.get(plan.request_ids[entry])
        return request if request is not None and request.arrival == plan.arrivals[entry] else None

    # -- changes ------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Put a new request in line."""
        # The queue first: it may be somebody else's code, and raise.
        self.line.add(request)
        self.requests[request.request_id] = request
        self.counters.added_requests += 1

    def admit(self, request: Request, hit: PrefixHit, num_new: int, step: StepBuilder) -> None:
        """Give a waiting request a row, the blocks of its hit and those for its first tokens, which may be none yet."""
        self.table.add(request, hit.num_tokens)
        request.num_hit_tokens = hit.num_tokens
        self.kv_cache_manager.choose_findable_prefixes(request, hit)
        if num_new or hit.num_tokens:
            verdict = self.kv_cache_manager.allocate_slots(request, hit.num_tokens, num_new, hit)
            if not verdict:
                managers = {type(manager).__qualname__ for manager in self.kv_cache_manager.coordinator.managers}
                raise PluginContractError(
                    f"The KV cache admitted {request.request_id!r} and then had no room for it: {verdict.reason}. A "
                    f"KV-cache manager does not keep its contract ({', '.join(sorted(managers))}): most likely its "
                    "max_blocks_per_request is too small."
                )
        if num_new:
            self.schedule(request, num_new, step)
            self.table.quiet_until[request.row] = self.kv_cache_manager.quiet_until(
                hit.num_tokens, hit.num_tokens + num_new
            )
        self._count_admission(request, hit)
        request.status = RequestStatus.RUNNING
        self.running.append(request)
        self._all_running = None
        step.admitted.append(request)

    def _count_admission(self, request: Request, hit: PrefixHit) -> None:
        counters = self.counters
        if request.num_cached_tokens is None:
            request.num_cached_tokens = hit.num_tokens
            counters.prompt_tokens += request.num_tokens
            counters.hit_tokens += hit.num_tokens
            if self.kv_cache_manager.reads_prefixes_of(request):
                counters.queried_tokens += request.num_tokens
            return
        num_lost = request.num_computed_before_preemption - hit.num_tokens
        counters.recomputed_tokens += max(num_lost, 0)
        counters.found_tokens += max(-num_lost, 0)

    def has_room_for(self, request: Request, num_new: int, num_in_step: int = 0) -> bool:
        """Give a running request the slots for its next tokens; return whether they could be had.

        Args:
            request: Whose tokens they are.
            num_new: How many.
            num_in_step: Tokens that it has in this step already. What they read must stay.
        """
        num_computed = self.num_computed(request)
        if num_computed + num_new <= self.table.quiet_until[request.row]:
            return True
        num_before, num_tokens = num_computed - num_in_step, num_computed + num_new
        if not self.kv_cache_manager.allocate_slots(request, num_before, num_tokens - num_before):
            return False
        self.table.quiet_until[request.row] = self.kv_cache_manager.quiet_until(num_before, num_tokens)
        return True

    def schedule(self, request: Request, num_new: int, step: StepBuilder) -> None:
        """Let a running request, which has the slots for them, compute its next tokens in a step."""
        step.add(request, num_new)
        self.table.num_computed_tokens[request.row] += num_new

    def preempt(self, request: Request, step: StepBuilder) -> None:
        """Take a running request's blocks, and what it was to compute in the step that is planned."""
        self.counters.preemptions += 1
        request.num_preemptions += 1
        request.num_computed_before_preemption = self.num_computed(request) - step.remove(request)
        step.preempted.append(request)
        self.put_back_in_line(request)
        logger.debug("preempted %s with %d tokens", request.request_id, request.num_tokens)

    def compute_anew(self, request: Request) -> None:
        """Let a running request wait again and begin from nothing, for what it found may have been wrong."""
        request.distrusts_prefix_cache = True
        request.num_computed_before_preemption = self.num_computed(request)
        self.put_back_in_line(request)

    def put_back_in_line(self, request: Request) -> None:
        """Let a running request wait again, without its blocks."""
        self.kv_cache_manager.drop_provisional_keys(request)
        self._leave_running(request)
        request.status = RequestStatus.PREEMPTED
        self.line.add_back(request)

    def end(
        self,
        request: Request,
        finish_reason: FinishReason,
        stop_reason: str | None = None,
        output: EngineOutput | None = None,
    ) -> None:
        """End a request that got no token for it."""
        self.report(self.ended if output is None else output, request, [], finish_reason, stop_reason, None)
        self.release(request)

    def finish(self, request: Request) -> None:
        """Release a request that has its last token."""
        if request.status is RequestStatus.RUNNING:
            # What a step ahead was to compute of it is dropped; all its tokens but the last are computed.
            self.kv_cache_manager.drop_provisional_keys(request)
            self.kv_cache_manager.leave_computed_blocks(request, request.num_tokens - 1)
        self.release(request)

    def report(
        self,
        output: EngineOutput,
        request: Request,
        new_token_ids: list[int],
        finish_reason: FinishReason | None,
        stop_reason: int | str | None,
        logprobs: TokenLogprobs | None,
    ) -> None:
        """Tell what became of a request."""
        output.add(
            request.request_id,
            new_token_ids,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            logprobs=None if logprobs is None else [logprobs],
            num_cached_tokens=request.num_cached_tokens or 0,
            num_preemptions=request.num_preemptions,
        )

    def forget(self, request: Request) -> None:
        """Strike out a request that neither runs nor waits."""
        request.status = RequestStatus.FINISHED
        self.counters.ended_requests += 1
        del self.requests[request.request_id]

    def release(self, request: Request) -> None:
        """Let a request go that has ended, wherever it stands."""
        if request.status is RequestStatus.RUNNING:
            # Ended in the middle of a step, it may have keys for blocks that nothing will fill.
            self.kv_cache_manager.drop_provisional_keys(request)
            self._leave_running(request)
        else:
            self.line.remove(request)
        self.forget(request)

    def _leave_running(self, request: Request) -> None:
        self.running.remove(request)
        self._all_running = None
        self.num_departures += 1
        self.kv_cache_manager.free(request)
        self.table.remove(request)
