"""How waiting requests come to run: admitted into what is free, or in the place of less urgent ones."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from octavo.core.chunking import Chunking
from octavo.core.outputs import KV_CACHE_FULL
from octavo.core.request import Request
from octavo.core.roster import Roster
from octavo.core.scheduled import Entries
from octavo.core.step_builder import StepBuilder
from octavo.core.verdict import Fit, Verdict

logger = logging.getLogger(__name__)


# Requests at the front of the line that others may pass in a step; each is looked at.
MOST_PASSED = 64


class _PromptsUnderWay:
    """The blocks that running prompts fill in the steps after this one, and no step has filled yet.

    Args:
        roster: The requests under way.
        running: Those that are behind.
    """

    def __init__(self, roster: Roster, running: Iterable[Request]) -> None:
        self._roster = roster
        self._next_blocks: list[tuple[int, bytes, Request]] = []
        for request in running:
            self.add(request)

    def add(self, request: Request) -> None:
        """Take in a running request."""
        kv_cache_manager = self._roster.kv_cache_manager
        next_block = kv_cache_manager.next_block(request, self._roster.num_computed(request))
        if next_block is not None:
            self._next_blocks.append((*next_block, request))

    def computing_for(self, request: Request) -> Request | None:
        """Return who is about to compute the block that a waiting request needs next; None where nobody is."""
        for num_tokens, key, prompt in self._next_blocks:
            if self._roster.kv_cache_manager.needs_block(request, num_tokens, key):
                return prompt
        return None


class Admission:
    """Admits waiting requests.

    Args:
        roster: The requests under way.
        chunking: How prompts are cut.
        max_num_seqs: Requests that run at a time.
        num_watermark_blocks: Blocks that no request is admitted into while others run.

    Attributes:
        waiting_because: Why the head of the line was not admitted in the latest step; None where it was not asked.
    """

    def __init__(self, roster: Roster, chunking: Chunking, max_num_seqs: int, num_watermark_blocks: int) -> None:
        self._roster = roster
        self._kv_cache_manager = roster.kv_cache_manager
        self._chunking = chunking
        self._max_num_seqs = max_num_seqs
        self._num_watermark_blocks = num_watermark_blocks
        self.waiting_because: str | None = None
        # Those whom the head of the line displaces, least urgent first, and for which head and running requests.
        self._displaceable: tuple[Request, Entries, list[Request]] | None = None

    def displace(self, step: StepBuilder) -> None:
        """Let the head of the line take the place of running requests, where its queue says so."""
        roster = self._roster
        while roster.line.may_displace and len(roster.line) and roster.running:
            head = roster.line.first()
            if head in step.preempted:
                # It may await a token still. Nobody comes and goes in one step.
                return
            victims = self._victims_of(head)
            if not victims:
                return
            for victim in victims:
                roster.preempt(victim, step)
            if roster.line.first() is not head:
                # The queue orders by something else than it displaces by.
                return
            # What it finds may be free by now.
            hit = self._kv_cache_manager.get_computed_blocks(head)
            roster.line.take_first(head)
            roster.admit(head, hit, 0, step)

    def _victims_of(self, head: Request) -> list[Request]:
        """Return whom the head of the line displaces: nobody if it fits anyway, or if it would not fit even then."""
        candidates = self._displaceable_by(head)
        if not candidates:
            return []
        num_running = len(self._roster.running)
        hit = self._kv_cache_manager.get_computed_blocks(head)
        # Those that generate included: they may take a block in this very step.
        owed = self._roster.blocks_owed()
        num_owed = sum(owed.values())
        verdict = self._kv_cache_manager.can_admit(head, hit, num_owed + self._watermark(num_running))
        has_slot = num_running < self._max_num_seqs
        if (verdict and has_slot) or verdict.fit in (Fit.WAIT_STEP, Fit.NEVER):
            return []
        num_for_budget = self._num_victims_for_budget(head, head.num_tokens - hit.num_tokens, candidates)
        reserved = []
        for num_gone, victim in enumerate(candidates, 1):
            num_owed -= owed.get(victim, 0)
            reserved.append(num_owed + self._watermark(num_running - num_gone))
        num_for_memory = self._kv_cache_manager.num_victims_to_admit(head, hit, candidates, reserved)
        if num_for_budget is None or num_for_memory is None:
            return []
        return candidates[: max(num_for_budget, num_for_memory)]

    def _num_victims_for_budget(self, head: Request, num_missing: int, candidates: list[Request]) -> int | None:
        """Return how many of the victims must go so that the head can run in this step; None where all are too few.

        Only a prompt that must run whole needs more of the budget than there will be at any rate.
        """
        if not self._chunking.must_run_whole(head):
            return 0
        running = self._roster.entries().requests
        num_behind = dict(zip(running, self._roster.num_tokens_behind().tolist(), strict=True))
        num_over = num_missing + sum(num_behind.values()) - self._chunking.max_num_batched_tokens
        for num_gone, victim in enumerate(candidates):
            if num_over <= 0:
                return num_gone
            num_over -= num_behind[victim]
        return len(candidates) if num_over <= 0 else None

    def _displaceable_by(self, head: Request) -> list[Request]:
        """Return the running requests that the head of the line displaces, the least urgent first."""
        running, known = self._roster.entries(), self._displaceable
        if known is None or known[0] is not head or known[1] is not running:
            displaced = [request for request in running.requests if self._roster.line.displaces(head, request)]
            known = self._displaceable = head, running, sorted(displaced, key=self._roster.line.urgency, reverse=True)
        return known[2]

    def admit_waiting(self, step: StepBuilder) -> list[Request]:
        """Admit waiting requests in the queue's order while slots, budget and memory last; return them."""
        roster = self._roster
        admitted: list[Request] = []
        if not len(roster.line):
            return admitted
        owed = roster.blocks_owed()
        num_owed = sum(owed.values())
        prompts = _PromptsUnderWay(roster, owed)
        # At the front of the line, requests that wait for a step alone, and are passed meanwhile. Slots and blocks are
        # kept for them, so that it costs them nothing.
        num_passed = 0
        while (request := self._next(num_passed, step)) is not None:
            if (prompt := prompts.computing_for(request)) is not None:
                # Both would compute it, each for itself.
                roster.counters.waits_for_step += 1
                self._wait(request, Verdict(Fit.WAIT_STEP, f"its prefix is being computed by {prompt.request_id!r}"))
                self._kv_cache_manager.keep_shared_prefix(prompt, request)
                num_owed += self._kv_cache_manager.num_blocks_behind(request, prompt)
                num_passed += 1
                continue
            hit = self._kv_cache_manager.get_computed_blocks(request)
            num_reserved = num_owed + self._watermark(len(roster.running))
            verdict = self._kv_cache_manager.can_admit(request, hit, num_reserved)
            if verdict.fit is Fit.NEVER:
                # It fitted when it arrived, and has outgrown the pool since.
                roster.counters.never_fitted += 1
                roster.end(request, "length", KV_CACHE_FULL)
                continue
            if verdict.fit is Fit.WAIT_STEP:
                roster.counters.waits_for_step += 1
                self._wait(request, verdict)
                num_owed += self._kv_cache_manager.num_blocks_behind(request, None)
                num_passed += 1
                continue
            if verdict.fit is Fit.WAIT_MEMORY:
                roster.counters.waits_for_memory += 1
                self._wait(request, verdict)
                break
            num_behind = request.num_tokens - hit.num_tokens
            num_new = self._chunking.share(request, num_behind, step.rest, len(roster.line) - num_passed - 1)
            if not num_new:
                self._say(
                    f"{num_behind} tokens must run in one step (enable_chunked_prefill=False), and this one has room "
                    f"for {step.rest} more"
                )
                break
            if num_passed:
                roster.line.remove(request)
            else:
                roster.line.take_first(request)
            roster.admit(request, hit, num_new, step)
            admitted.append(request)
            prompts.add(request)
            num_owed += self._kv_cache_manager.num_blocks_owed(request)
        return admitted

    def _next(self, num_passed: int, step: StepBuilder) -> Request | None:
        """Return whom to look at next; None where nobody waits any more, or the step has no room for anybody."""
        roster = self._roster
        if len(roster.line) <= num_passed or num_passed == MOST_PASSED:
            return None
        if len(roster.running) + num_passed >= self._max_num_seqs:
            self._say(f"no slot is free (max_num_seqs is {self._max_num_seqs})")
            return None
        if not step.rest:
            self._say("the step's budget is spent (max_num_batched_tokens)")
            return None
        return roster.line.behind(num_passed) if num_passed else roster.line.first()

    def _wait(self, request: Request, verdict: Verdict) -> None:
        """Keep why a request is not admitted."""
        logger.debug("%s waits: %s", request.request_id, verdict.reason)
        self._say(f"{verdict.fit.name}: {verdict.reason}")

    def _say(self, reason: str) -> None:
        # The first that waits is the head of the line.
        self.waiting_because = self.waiting_because or reason

    def _watermark(self, num_running: int) -> int:
        """Return how many blocks are kept for requests that run."""
        return self._num_watermark_blocks if num_running else 0
