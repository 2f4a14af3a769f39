"""What an engine does, in plain Python: the rules of docs/scheduling.md, to be read from top to bottom.

One request at a time, and nothing is kept that can be found out again. It is slow and easy to believe; random traces
hold the engine to it, order and counters included. The cache that it plans for is in `reference_cache.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from octavo.testing.reference_cache import ReferenceCache, ReferenceHit, ReferenceRequest

# Requests at the front of the line that others may pass in a step.
MOST_PASSED = 64


@dataclass(frozen=True)
class News:
    """What a step brought for a request."""

    request_id: str
    token: int | None
    finish_reason: str | None
    stop_reason: int | str | None
    num_cached: int
    num_preemptions: int


class Refused(ValueError):
    """A request cannot be served as asked."""


class ReferenceEngine:
    """Plans steps and takes in what came of them.

    Args:
        cache: The blocks.
        next_token: Returns the token that follows, or None where the logits are not finite.
        heeds_priority: Whether requests wait in the order of their priority, and not only of their arrival.
        ageing: By how many arrivals a request passes one that is more urgent by a priority of 1; None for never.
        shares_within_a_step: Whether a request may read blocks that another one fills in the same step.
    """

    def __init__(
        self,
        cache: ReferenceCache,
        next_token: Callable[[ReferenceRequest], int | None],
        *,
        heeds_priority: bool = False,
        ageing: int | None = None,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 64,
        max_model_len: int = 1024,
        enable_chunked_prefill: bool = True,
        long_prefill_token_threshold: int = 0,
        watermark: float = 0.01,
        shares_within_a_step: bool = True,
    ) -> None:
        self.cache = cache
        self.pool = cache.pool
        self.next_token = next_token
        self.heeds_priority = heeds_priority
        self.ageing = ageing
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.enable_chunked_prefill = enable_chunked_prefill
        self.long_prefill_token_threshold = long_prefill_token_threshold
        self.num_watermark_blocks = int(watermark * len(self.pool.references))
        self.shares_within_a_step = shares_within_a_step
        self.waiting: list[ReferenceRequest] = []
        # In order of admission.
        self.running: list[ReferenceRequest] = []
        # The step that is planned: tokens by request, in the order in which they were first given some.
        self.plan: dict[ReferenceRequest, int] = {}
        self.rest = 0
        self.has_preempted = False
        self.news: list[News] = []
        self.num_arrivals = 0
        self.counters: Counter[str] = Counter()

    # -- requests come and go -----------------------------------------------------------------------------------

    def add(self, request: ReferenceRequest) -> None:
        """Put a request in line, or refuse it, and then nothing has changed."""
        num_tokens = len(request.tokens)
        if request.priority and not self.heeds_priority:
            raise Refused("its priority would be ignored")
        if not 0 < num_tokens < self.max_model_len:
            raise Refused("its prompt is empty, or leaves no room for a token")
        if self.never_fits(num_tokens):
            self.counters["never_fitted"] += 1
            raise Refused("an empty pool could not hold it")
        if not self.enable_chunked_prefill and num_tokens > self.max_num_batched_tokens:
            raise Refused("its prompt does not fit into a step")
        if request.request_id in [other.request_id for other in self.running + self.waiting]:
            raise Refused("its id is taken")
        request.num_prompt = num_tokens
        request.max_total_tokens = min(num_tokens + request.max_tokens, self.max_model_len)
        request.arrival = self.num_arrivals
        self.num_arrivals += 1
        self.counters["added_requests"] += 1
        self.waiting.append(request)

    def abort(self, request_id: str) -> None:
        """End a request; its last news come with the next step."""
        for request in self.running + self.waiting:
            if request.request_id == request_id:
                self.end(request, "abort")

    def reset_prefix_cache(self) -> bool:
        """Forget everything, if no running request holds a block; return whether that was done."""
        if any(request.blocks for request in self.running):
            return False
        self.pool.reset()
        return True

    def reset_running_requests(self) -> None:
        """Take the blocks of all running requests, the last one admitted first; then nothing stands in the way."""
        for request in reversed(self.running[:]):
            self.preempt(request)

    # -- one step -----------------------------------------------------------------------------------------------

    def schedule(self) -> list[tuple[ReferenceRequest, int]]:
        """Return how many tokens of which requests the next step computes: those with one of them first."""
        self.plan, self.rest, self.has_preempted = {}, self.max_num_batched_tokens, False
        self.displace()
        self.serve_generating_and_prompts()
        if not self.has_preempted:
            self.admit_waiting()
        if self.enable_chunked_prefill:
            self.share_out_the_rest()
        return sorted(self.plan.items(), key=lambda entry: entry[1] != 1)

    def take_in(self, plan: list[tuple[ReferenceRequest, int]]) -> list[News]:
        """Take in a step that was computed: give each request that has caught up its next token."""
        for request in self.running:
            request.num_final = request.num_sealed[:]
        self.counters["steps"] += bool(plan)
        for request, num_new in plan:
            if request not in self.running:
                # Aborted while the step ran.
                continue
            self.counters["computed_tokens"] += num_new
            if request.behind:
                continue
            token = self.next_token(request)
            if token is None:
                # Nobody can say how far back its blocks are wrong.
                self.cache.drop_recycled(request)
                self.cache.drop_keys(request, [0] * len(request.tables))
                if request.num_adopted:
                    # The fault may be in what it found. It begins again without.
                    self.plan.pop(request)
                    request.skips_reading = True
                    self.put_back_in_line(request)
                else:
                    self.end(request, "error", "non_finite_logits")
                continue
            request.tokens.append(token)
            self.counters["generated_tokens"] += 1
            if token in request.eos_ids:
                self.finish(request, "stop", token)
            elif token in request.stop_ids:
                self.finish(request, "stop", token, token)
            elif len(request.tokens) >= request.max_total_tokens:
                self.finish(request, "length", token)
            else:
                self.report(request, None, None, token)
        self.plan = {}
        news, self.news = self.news, []
        return news

    def roll_back(self, plan: list[tuple[ReferenceRequest, int]]) -> None:
        """Undo a step that failed: its requests wait to be computed anew. The last one to arrive goes back first."""
        for request in sorted((request for request, _ in plan), key=lambda request: request.arrival, reverse=True):
            if request in self.running:
                self.put_back_in_line(request)
        self.plan = {}

    # -- 1. displacement ----------------------------------------------------------------------------------------

    def displace(self) -> None:
        """Let the head of the line take the places of running requests, as often as that makes room for it."""
        while self.waiting:
            head = self.head_of_line()
            hit = self.cache.find_hit(head)
            if self.never_fits(len(head.tokens)) or self.has_room(head, hit, self.running):
                return
            victims = sorted([r for r in self.running if self.displaces(head, r)], key=self.urgency, reverse=True)
            for count in range(1, len(victims) + 1):
                others = [request for request in self.running if request not in victims[:count]]
                if self.has_room(head, hit, others) and self.has_budget(head, hit, others):
                    break
            else:
                return
            for victim in victims[:count]:
                self.preempt(victim)
            self.admit(head, hit)

    def displaces(self, waiting: ReferenceRequest, running: ReferenceRequest) -> bool:
        """Say whether a waiting request may take the place of a running one."""
        return waiting.priority < running.priority and self.urgency(waiting) < self.urgency(running)

    # -- 2. and 3. the running requests -------------------------------------------------------------------------

    def serve_generating_and_prompts(self) -> None:
        """Give generating requests their token, in order of admission, and prompts their share, by urgency."""
        generating = [request for request in self.running if request.behind == 1]
        prompts = sorted([request for request in self.running if request.behind >= 2], key=self.urgency)
        for request in generating:
            if request in self.running and self.rest:
                self.serve(request, 1)
        for place, request in enumerate(prompts, 1):
            if request in self.running:
                num_new = self.chunk(request, request.behind, len(prompts) - place + len(self.waiting))
                if num_new == 0:
                    # What must run whole and cannot this time is not to be passed by others for ever.
                    self.rest = 0
                    return
                self.serve(request, num_new)

    def serve(self, request: ReferenceRequest, num_new: int) -> None:
        """Plan tokens of a running request, taking the blocks of the least urgent ones where there are none."""
        self.cache.give_back_unread(request, request.computed)
        while sum(self.cache.lacking(request, request.computed + num_new)) > len(self.pool.free):
            if self.running == [request]:
                self.end(request, "length", "kv_cache_full")
                return
            victim = max(self.running, key=self.urgency)
            self.preempt(victim)
            if victim is request:
                return
        self.compute(request, num_new)

    def chunk(self, request: ReferenceRequest, num_missing: int, num_others: int) -> int:
        """Return how many of its missing tokens a prompt gets, with so many others behind it; 0 where it waits."""
        if self.must_run_whole(request):
            return num_missing if num_missing <= self.rest else 0
        if not self.enable_chunked_prefill:
            return min(num_missing, self.rest)
        limit = max((self.rest + 1) // 2, self.max_num_batched_tokens // 8) if num_others else self.rest
        return min(num_missing, limit, self.rest, self.long_prefill_token_threshold or self.rest)

    # -- 4. the waiting requests --------------------------------------------------------------------------------

    def admit_waiting(self) -> None:
        """Admit requests in the order of the line while there are slots, budget and memory."""
        line = sorted(self.waiting, key=self.urgency)
        # Those at the front that wait for a step alone may be passed; slots and blocks are kept for them.
        num_passed = num_kept = 0
        for num_seen, request in enumerate(line, 1):
            if not self.rest or len(self.running) + num_passed >= self.max_num_seqs or num_passed == MOST_PASSED:
                return
            hit = self.cache.find_hit(request)
            if self.never_fits(len(request.tokens)):
                self.counters["never_fitted"] += 1
                self.end(request, "length", "kv_cache_full")
                continue
            prompt = self.prompt_under_way(request)
            if prompt is not None or self.finds_what_this_step_fills(hit):
                num_shared = 0 if prompt is None else self.cache.num_shared(prompt, request)
                if prompt is not None:
                    prompt.findable.add(num_shared)
                self.counters["waits_for_step"] += 1
                num_passed += 1
                num_kept += self.cache.num_behind(request, num_shared)
                continue
            if not self.has_room(request, hit, self.running, num_kept):
                self.counters["waits_for_memory"] += 1
                return
            num_missing = len(request.tokens) - hit.num_tokens
            num_new = self.chunk(request, num_missing, len(line) - num_seen)
            if not num_new:
                return
            self.admit(request, hit)
            self.compute(request, num_new)

    def finds_what_this_step_fills(self, hit: ReferenceHit) -> bool:
        """Say whether a hit is filled in this step, and may not be read in it."""
        found = {block for table in hit.tables for block in table}
        return not self.shares_within_a_step and any(found & request.provisional_blocks for request in self.running)

    def prompt_under_way(self, request: ReferenceRequest) -> ReferenceRequest | None:
        """Return who is about to compute what a waiting request needs next; None where nobody is."""
        if not self.pool.caching or request.skips_reading:
            return None
        return next((other for other in self.running if self.cache.computes_next_for(other, request)), None)

    # -- 5. the rest of the budget ------------------------------------------------------------------------------

    def share_out_the_rest(self) -> None:
        """Let prompts of this step that are still behind have what is left, in the order in which they got some."""
        for request, num_given in list(self.plan.items()):
            limit = self.long_prefill_token_threshold - num_given if self.long_prefill_token_threshold else self.rest
            num_new = min(request.behind, self.rest, limit)
            if num_new <= 0:
                continue
            self.cache.give_back_unread(request, request.computed - num_given)
            if sum(self.cache.lacking(request, request.computed + num_new)) <= len(self.pool.free):
                self.compute(request, num_new)

    # -- what there is room for ---------------------------------------------------------------------------------

    def never_fits(self, num_tokens: int) -> bool:
        """Say whether a request of so many tokens is more than an empty pool could hold."""
        return sum(self.cache.most_blocks(num_tokens)) > len(self.pool.references)

    def has_room(
        self, head: ReferenceRequest, hit: ReferenceHit, running: list[ReferenceRequest], num_kept: int = 0
    ) -> bool:
        """Say whether there were a slot and memory for a request if these were running, and no others."""
        held = {block for request in running for block in request.blocks}
        needed = self.cache.num_needed(head, hit, held)
        owed = sum(self.cache.num_owed(request) for request in running)
        watermark = self.num_watermark_blocks if running else 0
        num_free = len(self.pool.references) - len(held)
        return len(running) < self.max_num_seqs and needed + owed + num_kept + watermark <= num_free

    def has_budget(self, head: ReferenceRequest, hit: ReferenceHit, running: list[ReferenceRequest]) -> bool:
        """Say whether a request could begin in this step if these were running, and each of them caught up."""
        num_missing = len(head.tokens) - hit.num_tokens
        others = sum(request.behind for request in running)
        return not self.must_run_whole(head) or num_missing + others <= self.max_num_batched_tokens

    def must_run_whole(self, request: ReferenceRequest) -> bool:
        """Say whether a request is computed in one step or not at all. One that has outgrown the budget is not."""
        return not self.enable_chunked_prefill and len(request.tokens) <= self.max_num_batched_tokens

    def urgency(self, request: ReferenceRequest) -> tuple[int, int]:
        """Return what orders requests, in line and out of it: the smallest is the most urgent."""
        if self.ageing is None:
            return request.priority, request.arrival
        return request.priority * self.ageing + request.arrival, request.arrival

    def head_of_line(self) -> ReferenceRequest:
        return min(self.waiting, key=self.urgency)

    # -- what happens to a request ------------------------------------------------------------------------------

    def admit(self, request: ReferenceRequest, hit: ReferenceHit) -> None:
        """Let a waiting request run, with the blocks that were found for it."""
        self.waiting.remove(request)
        self.running.append(request)
        self.cache.adopt(request, hit)
        if request.num_cached is None:
            request.num_cached = request.computed
            self.counters["prompt_tokens"] += len(request.tokens)
            self.counters["queried_tokens"] += len(request.tokens) * (self.pool.caching and not request.skips_reading)
            self.counters["hit_tokens"] += request.computed
        else:
            self.counters["recomputed_tokens"] += max(request.num_lost - request.computed, 0)
            self.counters["found_tokens"] += max(request.computed - request.num_lost, 0)

    def compute(self, request: ReferenceRequest, num_new: int) -> None:
        """Plan tokens of a running request. There are blocks for them."""
        self.cache.extend(request, num_new)
        self.plan[request] = self.plan.get(request, 0) + num_new
        self.rest -= num_new

    def preempt(self, request: ReferenceRequest) -> None:
        """Take a running request's blocks for another one. Tokens that it was to have in this step are free again."""
        self.has_preempted = True
        request.num_preemptions += 1
        self.counters["preemptions"] += 1
        self.put_back_in_line(request)

    def put_back_in_line(self, request: ReferenceRequest) -> None:
        num_planned = self.plan.pop(request, 0)
        self.rest += num_planned
        request.num_lost = request.computed - num_planned
        self.leave_running(request)
        self.waiting.append(request)

    def finish(
        self, request: ReferenceRequest, finish_reason: str, token: int, stop_reason: int | str | None = None
    ) -> None:
        """End a request that has its last token. What goes on from there is to find what it needs."""
        if self.pool.caching:
            self.cache.register(request)
            self.cache.give_back_unread(request, len(request.tokens) - 1)
        self.end(request, finish_reason, stop_reason, token)

    def end(
        self,
        request: ReferenceRequest,
        finish_reason: str,
        stop_reason: int | str | None = None,
        token: int | None = None,
    ) -> None:
        self.report(request, finish_reason, stop_reason, token)
        self.counters["ended_requests"] += 1
        if request in self.waiting:
            self.waiting.remove(request)
        else:
            self.leave_running(request)

    def leave_running(self, request: ReferenceRequest) -> None:
        self.running.remove(request)
        self.cache.release(request)

    def report(
        self, request: ReferenceRequest, finish_reason: str | None, stop_reason: int | str | None, token: int | None
    ) -> None:
        num_cached = request.num_cached or 0
        self.news.append(
            News(request.request_id, token, finish_reason, stop_reason, num_cached, request.num_preemptions)
        )
