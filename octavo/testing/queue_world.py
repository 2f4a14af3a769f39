"""Request queues under random operations: the rules that hold whatever the order, and the requests to try them with."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import combinations, product

from octavo.core.interfaces import QueuedRequest, RequestQueue
from octavo.testing.conformance import RuleBroken
from octavo.testing.queue_displacement import Displacements, Urgencies, check_line

COMES_OUT_ONCE = "What is added comes out exactly once, and nothing else does."
LENGTH_IS_RIGHT = "len is the number of requests that wait, and a queue is true exactly when one does."
PEEK_IS_POP = "pop_request takes out the request that peek_request shows."
ITERATION_IS_THE_ORDER = "Iterating gives the requests in the order in which they would be popped."
LOOKING_CHANGES_NOTHING = "peek_request, displaces, urgency, iterating and len change nothing."
EMPTY_IS_AN_INDEX_ERROR = "peek_request and pop_request raise IndexError when nothing waits."
ABSENT_IS_A_VALUE_ERROR = "remove_request raises ValueError for a request that is not here, and changes nothing."
PREEMPTED_GOES_FIRST = "A preempted request goes before those that never ran and arrived later, as the order allows."
PRIORITY_IS_HEEDED = "With heeds_priority, a lower value is never behind a higher one, as the order allows."
PRIORITY_IS_IGNORED = "Without heeds_priority, priorities change nothing of the order, or of who displaces whom."
STATES_PRIORITY = "heeds_priority is True or False."
REQUESTS_STAY_AS_THEY_ARE = "A queue changes nothing of a request."
QUEUES_ARE_APART = "Two queues that are given the same requests in the same way order and displace alike."
NOTHING_IS_KEPT = "A queue lets go of the requests that left it."

TRACE_LENGTH = 80
# Long traces, in which many wait at a time: the first has this seed, as has, below zero, the first with priorities.
FIRST_LONG_SEED = 1000
NUM_LONG_TRACES = 2
LONG_TRACE_LENGTH = 600
# Where more wait than this, the order as a whole is looked at now and then only.
MANY = 40
# How many requests at a time a queue is asked about, each with each.
NUM_ASKED = 4
NUM_REFILLS = 120

_FIELDS = ("_arrival", "_num_tokens", "_priority", "_request_id")


class WaitingRequest:
    """A request as a queue sees it. Equal to itself only, like those of the engine."""

    __slots__ = (*_FIELDS, "__weakref__")
    _arrival: int
    _num_tokens: int
    _priority: int
    _request_id: str

    def __init__(self, request_id: str, priority: int, arrival: int, num_tokens: int) -> None:
        for name, value in zip(_FIELDS, (arrival, num_tokens, priority, request_id), strict=True):
            object.__setattr__(self, name, value)

    @property
    def request_id(self) -> str:
        return self._request_id

    @property
    def priority(self) -> int:
        return self._priority

    @property
    def arrival(self) -> int:
        return self._arrival

    @property
    def num_tokens(self) -> int:
        return self._num_tokens

    def twin(self) -> WaitingRequest:
        """Return another request with the same numbers."""
        return WaitingRequest(self.request_id, self.priority, self.arrival, self.num_tokens)

    def become(self, other: WaitingRequest) -> WaitingRequest:
        """Take over the numbers of another request, and return itself."""
        for name in _FIELDS:
            object.__setattr__(self, name, getattr(other, name))
        return self

    def grow(self, num_tokens: int) -> None:
        """Get further tokens, which happens while it runs."""
        object.__setattr__(self, "_num_tokens", self.num_tokens + num_tokens)

    def __setattr__(self, name: str, value: object) -> None:
        raise RuleBroken(REQUESTS_STAY_AS_THEY_ARE, f"{name} of {self} was to become {value!r}")

    def __delattr__(self, name: str) -> None:
        raise RuleBroken(REQUESTS_STAY_AS_THEY_ARE, f"{name} of {self} was to be deleted")

    def __repr__(self) -> str:
        return self.request_id


class QueueWorld:
    """Queues that are given the same requests in the same way.

    The first is the one that is checked. The second has to agree with it; and so has a third, if there is one, whose
    requests have no priorities.

    Args:
        make_queue: Returns a new queue.
        goes_before: Says whether a preempted request has to go before one that never ran.
        outranks: Says whether a request has to go before another one for its priority.
        heeds_priority: What the class says.
        has_third: Whether there is a third queue.
        is_long: Whether far more requests come than go, for a long trace.
    """

    def __init__(
        self,
        make_queue: Callable[[], RequestQueue],
        goes_before: Callable[[QueuedRequest, QueuedRequest], bool],
        outranks: Callable[[QueuedRequest, QueuedRequest], bool],
        *,
        heeds_priority: bool,
        has_third: bool,
        is_long: bool = False,
    ) -> None:
        self.log: list[str] = []
        self.queue, self.other = make_queue(), make_queue()
        self.without_priorities = make_queue() if has_third else None
        self._goes_before, self._outranks = goes_before, outranks
        self._heeds_priority = heeds_priority
        self._weights = (12, 3, 3, 1, 1, 1, 1, 1) if is_long else (8, 6, 4, 2, 1, 1, 2, 1)
        self._waiting: list[WaitingRequest] = []
        self._running: list[WaitingRequest] = []
        # Those that were removed, and those that never were here.
        self._elsewhere: list[WaitingRequest] = []
        self._displacements = Displacements()
        self._urgencies = Urgencies()
        self._has_run: set[WaitingRequest] = set()
        # The same request as the second queue, and the third, know it.
        self._twins: dict[WaitingRequest, tuple[WaitingRequest, WaitingRequest]] = {}
        self._num_arrivals = 0
        # Handed out from the end: an order that goes by addresses differs between the queues.
        self._blank_twins = [WaitingRequest("", 0, 0, 0) for _ in range(LONG_TRACE_LENGTH if is_long else TRACE_LENGTH)]

    def do(self, rng: random.Random) -> None:
        """Do one operation, as the random numbers say, and check everything."""
        operations: Sequence[Callable[[random.Random], None]] = (
            self._add,
            self._pop,
            self._prepend,
            self._remove,
            self._remove_absent,
            self._look,
            self._ask,
            self._grow,
        )
        (operation,) = rng.choices(operations, self._weights)
        operation(rng)
        if len(self._waiting) <= MANY or rng.random() < 0.05:
            self._check()

    def end(self) -> None:
        """Pop everything, and check that nothing is left."""
        while self._waiting:
            self._take_next()
            if len(self._waiting) <= MANY or not len(self._waiting) % 20:
                self._check()
        for method in (self.queue.peek_request, self.queue.pop_request):
            try:
                found = method()
            except IndexError:
                continue
            raise RuleBroken(EMPTY_IS_AN_INDEX_ERROR, f"{method.__name__} returned {found!r}")
        self._check()

    # -- operations ---------------------------------------------------------------------------------------------

    def _add(self, rng: random.Random) -> None:
        request = self._new_request(rng)
        self.log.append(f"add {request}, priority {request.priority}, {request.num_tokens} tokens")
        self._tell("add_request", request)
        self._waiting.append(request)

    def _pop(self, rng: random.Random) -> None:
        if self._waiting:
            self._running.append(self._take_next())

    def _prepend(self, rng: random.Random) -> None:
        if not self._running:
            return
        request = self._running.pop(rng.randrange(len(self._running)))
        num_more = rng.randint(0, 9)
        for known in (request, *self._twins[request]):
            known.grow(num_more)
        self.log.append(f"prepend {request}, {request.num_tokens} tokens")
        self._has_run.add(request)
        self._tell("prepend_request", request)
        self._waiting.append(request)

    def _remove(self, rng: random.Random) -> None:
        if not self._waiting:
            return
        request = self._waiting.pop(rng.randrange(len(self._waiting)))
        self.log.append(f"remove {request}")
        self._tell("remove_request", request)
        self._elsewhere.append(request)

    def _remove_absent(self, rng: random.Random) -> None:
        absent = [*self._running, *(request.twin() for request in self._waiting)]
        if not absent:
            return
        request = rng.choice(absent)
        where = "which runs" if request in self._running else "another one with the numbers of one that waits"
        self.log.append(f"remove {request}, {where}")
        before = list(self.queue)
        try:
            self.queue.remove_request(request)
        except ValueError:
            if not _are_same(before, list(self.queue)):
                raise RuleBroken(ABSENT_IS_A_VALUE_ERROR, f"{before} became {list(self.queue)}") from None
            return
        raise RuleBroken(ABSENT_IS_A_VALUE_ERROR, f"nothing was raised for {request}, {where}")

    def _look(self, rng: random.Random) -> None:
        before = list(self.queue)
        # A loop that ends early, two at a time, and a question in the middle.
        iterators = iter(self.queue), iter(self.queue)
        seen: list[list[QueuedRequest]] = [[], []]
        for _ in range(rng.randint(0, len(before))):
            for iterator, part in zip(iterators, seen, strict=True):
                part.append(next(iterator))
            self.queue.peek_request()
            len(self.queue)
        self.log.append(f"look at the first {len(seen[0])}")
        if not all(_are_same(part, before[: len(part)]) for part in (*seen, list(self.queue))):
            raise RuleBroken(LOOKING_CHANGES_NOTHING, f"{before} became {list(self.queue)}; seen on the way: {seen}")

    def _ask(self, rng: random.Random) -> None:
        request = self._new_request(rng)
        self._elsewhere.append(request)
        known = [*self._waiting, *self._running, *self._elsewhere]
        asked = rng.sample(known, min(NUM_ASKED, len(known)))
        newcomer = f"{request}, priority {request.priority}, {request.num_tokens} tokens, was not added"
        self.log.append(f"ask which of {asked} displaces which, and how urgent each is; {newcomer}")
        before = list(self.queue)
        displacing = [(one, other) for one, other in product(asked, repeat=2) if self._displaces(one, other)]
        check_line(displacing, before)
        for one in asked:
            self._urgencies.take_in(one, self.queue.urgency(one))
        if not _are_same(before, list(self.queue)):
            raise RuleBroken(LOOKING_CHANGES_NOTHING, f"{before} became {list(self.queue)}")

    def _grow(self, rng: random.Random) -> None:
        # A request may be preempted while its next token is on the way.
        preempted = [request for request in self._waiting if request in self._has_run]
        if not preempted:
            return
        request = rng.choice(preempted)
        self.log.append(f"remove {request}, and prepend it with {request.num_tokens + 1} tokens")
        self._tell("remove_request", request)
        for known in (request, *self._twins[request]):
            known.grow(1)
        self._tell("prepend_request", request)

    # -- smaller steps ------------------------------------------------------------------------------------------

    def _new_request(self, rng: random.Random) -> WaitingRequest:
        arrival = self._num_arrivals
        self._num_arrivals += 1
        # Many alike, and some that are far from all others.
        priority = rng.choice((-1, 0, 0, 3, rng.randint(-1000, 1000)))
        numbers = priority, arrival, rng.choice((1, 5, 5, 40, rng.randint(1, 5000)))
        request = WaitingRequest(f"r{arrival}", *numbers)
        self._twins[request] = (self._blank_twins.pop().become(request), WaitingRequest(f"r{arrival}", 0, *numbers[1:]))
        return request

    def _tell(self, method: str, request: WaitingRequest) -> None:
        twin, without_priority = self._twins[request]
        getattr(self.queue, method)(request)
        getattr(self.other, method)(twin)
        if self.without_priorities is not None:
            getattr(self.without_priorities, method)(without_priority)

    def _take_next(self) -> WaitingRequest:
        order = list(self.queue)
        shown = self.queue.peek_request()
        popped = self.queue.pop_request()
        self.log.append(f"pop: {popped}")
        if popped is not shown:
            raise RuleBroken(PEEK_IS_POP, f"{shown} was shown and {popped} came")
        if not any(popped is request for request in self._waiting):
            raise RuleBroken(COMES_OUT_ONCE, f"{popped!r} came out, and waiting were {self._waiting}")
        if not order or popped is not order[0] or not _are_same(order[1:], list(self.queue)):
            raise RuleBroken(ITERATION_IS_THE_ORDER, f"{order} waited, {popped} came, and {list(self.queue)} are left")
        self.other.pop_request()
        if self.without_priorities is not None:
            self.without_priorities.pop_request()
        assert isinstance(popped, WaitingRequest)
        self._waiting.remove(popped)
        return popped

    # -- checks -------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        length, order = len(self.queue), list(self.queue)
        if sorted(map(id, order)) != sorted(map(id, self._waiting)):
            raise RuleBroken(COMES_OUT_ONCE, f"{self._waiting} wait, and the queue has {order}")
        if length != len(self._waiting) or bool(self.queue) != bool(self._waiting):
            raise RuleBroken(LENGTH_IS_RIGHT, f"len is {length}, and {self._waiting} wait")
        if not _are_same(order, list(self.queue)) or len(self.queue) != length:
            raise RuleBroken(LOOKING_CHANGES_NOTHING, f"{order}, and the second time {list(self.queue)}")
        if order and self.queue.peek_request() is not order[0]:
            raise RuleBroken(ITERATION_IS_THE_ORDER, f"{self.queue.peek_request()} is shown, and {order} is the order")
        ids = [request.request_id for request in order]
        if ids != [request.request_id for request in self.other]:
            raise RuleBroken(QUEUES_ARE_APART, f"one has {order}, and the other {list(self.other)}")
        self._check_priorities(order)
        self._check_preempted(order)

    def _check_preempted(self, order: Sequence[QueuedRequest]) -> None:
        never_ran: list[QueuedRequest] = []
        for request in order:
            if request not in self._has_run:
                never_ran.append(request)
                continue
            for earlier in never_ran:
                if self._goes_before(request, earlier):
                    raise RuleBroken(
                        PREEMPTED_GOES_FIRST, f"{request} was preempted and stands behind {earlier}: {list(order)}"
                    )

    def _displaces(self, one: WaitingRequest, other: WaitingRequest) -> bool:
        answer = self.queue.displaces(one, other)
        self._displacements.take_in(one, other, answer)
        twins, without_priorities = zip(self._twins[one], self._twins[other], strict=True)
        if self.other.displaces(*twins) != answer:
            raise RuleBroken(QUEUES_ARE_APART, f"whether {one} displaces {other} is {answer}, and {not answer}")
        if self.without_priorities is not None and self.without_priorities.displaces(*without_priorities) != answer:
            found = f"with priorities {one.priority} and {other.priority} it is {answer}, with zeros {not answer}"
            raise RuleBroken(PRIORITY_IS_IGNORED, f"whether {one} displaces {other}: {found}")
        return answer

    def _check_priorities(self, order: Sequence[QueuedRequest]) -> None:
        priorities = [request.priority for request in order]
        if self._heeds_priority:
            for front, behind in combinations(order, 2):
                if self._outranks(behind, front):
                    found = f"{behind} stands behind {front}: {list(order)}, of priorities {priorities}"
                    raise RuleBroken(PRIORITY_IS_HEEDED, found)
        if self.without_priorities is None:
            return
        with_zeros = list(self.without_priorities)
        if [request.request_id for request in order] != [request.request_id for request in with_zeros]:
            raise RuleBroken(
                PRIORITY_IS_IGNORED,
                f"with priorities {priorities} the order is {list(order)}, with zeros {with_zeros}",
            )


def _are_same(requests: Sequence[QueuedRequest], others: Sequence[QueuedRequest]) -> bool:
    """Say whether two lists hold the same objects in the same order."""
    return len(requests) == len(others) and all(one is other for one, other in zip(requests, others, strict=True))
