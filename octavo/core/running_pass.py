"""What running requests compute in a step: those that generate first, then prompts under way."""

from __future__ import annotations

import numpy as np

from octavo.core.chunking import Chunking
from octavo.core.outputs import KV_CACHE_FULL
from octavo.core.request import Request, RequestStatus
from octavo.core.roster import Roster
from octavo.core.scheduled import Entries, Scheduled
from octavo.core.step_builder import StepBuilder


class RunningPass:
    """Lets running requests catch up.

    Args:
        roster: The requests under way.
        chunking: How prompts are cut.
    """

    def __init__(self, roster: Roster, chunking: Chunking) -> None:
        self._roster = roster
        self._kv_cache_manager = roster.kv_cache_manager
        self._chunking = chunking

    def schedule(self, step: StepBuilder) -> list[Request]:
        """Let running requests catch up; return those that have been given a part of their prompt."""
        if not self._roster.running:
            return []
        num_behind = self._roster.num_tokens_behind()
        entries, prompts = self._roster.entries(), []
        is_next = num_behind == 1
        if not is_next.all():
            prompts = self._roster.prompts_under_way(num_behind)
            entries = Entries([entries.requests[entry] for entry in np.flatnonzero(is_next).tolist()])
        scheduled = self.schedule_all_generating(entries, step.rest)
        if scheduled is not None:
            step.add_all(scheduled)
        else:
            self._schedule_generating_in_turn(entries, step)
        return self._schedule_prompts(prompts, step)

    def share_the_rest(self, prompts: list[Request], step: StepBuilder) -> None:
        """Give what is left of the budget to prompts that got a share of it and are still behind."""
        if not self._chunking.is_enabled:
            return
        for request in prompts:
            if not step.rest:
                return
            if request.status is not RequestStatus.RUNNING:
                continue
            num_behind, num_in_step = self._roster.table.num_tokens_behind(request), step.num_new_tokens(request)
            num_more = min(num_behind, step.rest, self._chunking.most_at_once - num_in_step)
            if num_more > 0 and self._roster.has_room_for(request, num_more, num_in_step):
                self._roster.schedule(request, num_more, step)

    def schedule_all_generating(self, entries: Entries, budget: int) -> Scheduled | None:
        """Give each of several requests its next token, where the budget and the free blocks are enough for all.

        The same as one after the other, in columns. In most steps of most requests nothing changes about blocks; only
        where something does the KV cache is asked.

        Returns:
            None where somebody might have to do without.
        """
        if len(entries) > budget:
            return None
        table, rows = self._roster.table, entries.rows
        num_tokens = table.num_computed_tokens[rows] + 1
        num_new = np.ones(len(entries), np.int32)
        changing = np.flatnonzero(num_tokens > table.quiet_until[rows]).tolist()
        kv_cache_manager = self._kv_cache_manager
        if changing and kv_cache_manager.most_new_blocks(num_new[changing]) > kv_cache_manager.pool.num_free_blocks:
            return None
        for entry in changing:
            if not self._roster.has_room_for(entries.requests[entry], 1):
                # A manager takes more than blocks for the new tokens. Who was served keeps what he got.
                return None
        table.num_computed_tokens[rows] = num_tokens
        return Scheduled(entries, num_new)

    def _schedule_generating_in_turn(self, entries: Entries, step: StepBuilder) -> None:
        """Give requests their next tokens in order of admission, as far as the budget and the blocks go."""
        for request in entries.requests:
            if not step.rest:
                return
            if request.status is RequestStatus.RUNNING and self._make_room_for(request, 1, step):
                self._roster.schedule(request, 1, step)

    def _schedule_prompts(self, prompts: list[Request], step: StepBuilder) -> list[Request]:
        """Let prompts under way catch up, the most urgent first; return those that got something."""
        scheduled: list[Request] = []
        for index, request in enumerate(prompts):
            if request.status is not RequestStatus.RUNNING:
                continue
            num_behind = self._roster.table.num_tokens_behind(request)
            num_others_behind = len(prompts) - index - 1 + len(self._roster.line)
            num_new = self._chunking.share(request, num_behind, step.rest, num_others_behind)
            if not num_new:
                # What must run whole and does not fit this time is not to be passed by others for ever.
                step.rest = 0
                return scheduled
            if self._make_room_for(request, num_new, step):
                self._roster.schedule(request, num_new, step)
                scheduled.append(request)
        return scheduled

    def _make_room_for(self, request: Request, num_new: int, step: StepBuilder) -> bool:
        """Give a running request the slots for its next tokens, preempting others for it; return whether it could."""
        roster = self._roster
        while not roster.has_room_for(request, num_new):
            if len(roster.running) == 1:
                # Alone, and the pool is full: no preemption can help. The token that it awaits is still to be told.
                if not roster.table.num_awaited_tokens[request.row]:
                    roster.end(request, "length", KV_CACHE_FULL)
                return False
            victim = max(roster.running, key=roster.line.urgency)
            roster.preempt(victim, step)
            if victim is request:
                return False
        return True
