"""The suite for request queues passes what is right, and says what is wrong with the rest."""

import random
import weakref
from collections import deque
from typing import ClassVar

import pytest
from pydantic import BaseModel

from octavo.core.interfaces import CONTRACT_VERSION, RequestQueue
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.request_queues import FCFSQueue
from octavo.testing import RequestQueueSuite, conformance, queue_displacement, queue_world
from octavo.testing.conformance import RuleBroken, SuiteMisusedError


class SortedQueue(RequestQueue):
    """Requests in the order of a key, which is fixed when they come."""

    contract_version = 1

    def __init__(self):
        self._entries = []

    def key(self, request, has_run):
        raise NotImplementedError

    def _insert(self, request, has_run):
        self._entries.append((self.key(request, has_run), request))
        self._entries.sort(key=lambda entry: entry[0])

    def add_request(self, request):
        self._insert(request, False)

    def prepend_request(self, request):
        self._insert(request, True)

    def peek_request(self):
        return self._entries[0][1]

    def pop_request(self):
        return self._entries.pop(0)[1]

    def remove_request(self, request):
        self._entries.pop([entry[1] for entry in self._entries].index(request))

    def __len__(self):
        return len(self._entries)

    def __iter__(self):
        return iter([request for _, request in self._entries])


class PriorityQueue(SortedQueue):
    """The lowest value first, then the first to arrive."""

    heeds_priority: ClassVar[bool] = True

    def key(self, request, has_run):
        return request.priority, request.arrival


class ShortestFirstQueue(SortedQueue):
    """The fewest tokens first; whoever ran before goes before all that did not."""

    def key(self, request, has_run):
        return not has_run, 0 if has_run else request.num_tokens, request.arrival


class TestPriority(RequestQueueSuite):
    queue = PriorityQueue


class TestShortestFirst(RequestQueueSuite):
    queue = ShortestFirstQueue


class ShortestOfAllQueue(SortedQueue):
    """The fewest tokens first, whether they ran or not."""

    def key(self, request, has_run):
        return request.num_tokens, request.arrival


class TestShortestOfAll(RequestQueueSuite):
    queue = ShortestOfAllQueue

    def goes_before(self, preempted, never_ran):
        return preempted.num_tokens <= never_ran.num_tokens and preempted.arrival < never_ran.arrival


class OldestDisplacesQueue(FCFSQueue):
    """Gives a request that was preempted its place back, whoever has it."""

    contract_version = 1

    def displaces(self, waiting, running):
        return waiting.arrival < running.arrival


class TestOldestDisplaces(RequestQueueSuite):
    queue = OldestDisplacesQueue


class StepsOfSixQueue(SortedQueue):
    """Priorities in steps of six. Within a step the first to arrive goes first."""

    heeds_priority: ClassVar[bool] = True

    def key(self, request, has_run):
        return request.priority // 6, request.arrival


class TestStepsOfSix(RequestQueueSuite):
    queue = StepsOfSixQueue

    def outranks(self, one, other):
        return one.priority + 5 < other.priority


# -- queues with one fault each ---------------------------------------------------------------------------------

MUTANTS = []


class Fifo(FCFSQueue):
    """Right, to be broken."""

    contract_version = 1


def breaks(rule):
    def register(queue):
        MUTANTS.append(pytest.param(queue, rule, id=queue.__name__))
        return queue

    return register


@breaks(queue_world.COMES_OUT_ONCE)
class LosesTheFourth(Fifo):
    def add_request(self, request):
        if len(self) != 3:
            super().add_request(request)

    def __len__(self):
        return len(self._requests)


@breaks(queue_world.COMES_OUT_ONCE)
class LosesOnPrepend(Fifo):
    def prepend_request(self, request):
        super().prepend_request(request)
        self._requests.pop()
        self._requests.append(request)


@breaks(queue_world.LENGTH_IS_RIGHT)
class CountsThePopped(Fifo):
    popped = 0

    def pop_request(self):
        self.popped += 1
        return super().pop_request()

    def __len__(self):
        return super().__len__() + self.popped


@breaks(queue_world.LENGTH_IS_RIGHT)
class IsAlwaysTrue(Fifo):
    def __bool__(self):
        return True


@breaks(queue_world.PEEK_IS_POP)
class PopsTheLast(Fifo):
    def pop_request(self):
        return self._requests.pop()


@breaks(queue_world.ITERATION_IS_THE_ORDER)
class IteratesBackwards(Fifo):
    def __iter__(self):
        return reversed(self._requests)


@breaks(queue_world.ITERATION_IS_THE_ORDER)
class IteratesInOrderOfArrival(PriorityQueue):
    heeds_priority: ClassVar[bool] = False

    def key(self, request, has_run):
        return request.num_tokens, request.arrival

    def __iter__(self):
        return iter(sorted(super().__iter__(), key=lambda request: request.arrival))


@breaks(queue_world.LOOKING_CHANGES_NOTHING)
class RotatesWhenLookedAt(Fifo):
    def __iter__(self):
        order = list(self._requests)
        self._requests.rotate(1)
        return iter(order)


@breaks(queue_world.LOOKING_CHANGES_NOTHING)
class HasOneIterator(Fifo):
    def __iter__(self):
        self._place = -1
        return self

    def __next__(self):
        self._place += 1
        if self._place >= len(self):
            raise StopIteration
        return self._requests[self._place]


@breaks(queue_world.COMES_OUT_ONCE)
class HoldsAHundredAtMost(Fifo):
    def add_request(self, request):
        if len(self) < 100:
            super().add_request(request)


@breaks(queue_world.PRIORITY_IS_HEEDED)
class ClampsPriorities(PriorityQueue):
    def key(self, request, has_run):
        return max(-100, min(request.priority, 100)), request.arrival


@breaks(queue_world.LENGTH_IS_RIGHT)
class MiscountsAfterManyRefills(Fifo):
    num_refills = 0

    def pop_request(self):
        request = super().pop_request()
        self.num_refills += not self._requests
        return request

    def __len__(self):
        return super().__len__() + (self.num_refills > 100 and super().__len__() == 1)


@breaks(queue_world.NOTHING_IS_KEPT)
class KeepsAHistory(Fifo):
    def __init__(self):
        super().__init__()
        self._history = []

    def pop_request(self):
        self._history.append(super().pop_request())
        return self._history[-1]


@breaks(queue_world.NOTHING_IS_KEPT)
class KeepsTheRemoved(Fifo):
    def __init__(self):
        super().__init__()
        self._removed = []

    def remove_request(self, request):
        super().remove_request(request)
        self._removed.append(request)


@breaks(queue_world.EMPTY_IS_AN_INDEX_ERROR)
class ShowsNone(Fifo):
    def peek_request(self):
        return self._requests[0] if self._requests else None


@breaks(queue_world.EMPTY_IS_AN_INDEX_ERROR)
class PopsNone(Fifo):
    def pop_request(self):
        return self._requests.popleft() if self._requests else None


@breaks(queue_world.ABSENT_IS_A_VALUE_ERROR)
class RemovesById(Fifo):
    def remove_request(self, request):
        ids = [waiting.request_id for waiting in self._requests]
        del self._requests[ids.index(request.request_id)]


@breaks(queue_world.ABSENT_IS_A_VALUE_ERROR)
class RemovesSilently(Fifo):
    def remove_request(self, request):
        self._requests = deque(waiting for waiting in self._requests if waiting is not request)


@breaks(conformance.RAISES_NOTHING)
class RaisesKeyErrors(Fifo):
    def remove_request(self, request):
        if request not in self._requests:
            raise KeyError(request.request_id)
        super().remove_request(request)


@breaks(queue_world.PREEMPTED_GOES_FIRST)
class SendsThePreemptedToTheEnd(Fifo):
    def prepend_request(self, request):
        self.add_request(request)


@breaks(queue_world.PREEMPTED_GOES_FIRST)
class LetsShortOnesOvertake(ShortestOfAllQueue):
    pass


@breaks(queue_world.PRIORITY_IS_HEEDED)
class TakesPrioritiesInSteps(StepsOfSixQueue):
    pass


@breaks(queue_world.PRIORITY_IS_HEEDED)
class ClaimsToHeed(Fifo):
    heeds_priority: ClassVar[bool] = True


@breaks(queue_world.PRIORITY_IS_HEEDED)
class TakesTheHighest(PriorityQueue):
    def key(self, request, has_run):
        return -request.priority, request.arrival


@breaks(queue_world.PRIORITY_IS_HEEDED)
class PutsThePreemptedBeforeAll(PriorityQueue):
    def key(self, request, has_run):
        return not has_run, request.priority, request.arrival


@breaks(queue_world.PRIORITY_IS_IGNORED)
class HeedsInSecret(PriorityQueue):
    heeds_priority: ClassVar[bool] = False


@breaks(queue_world.STATES_PRIORITY)
class SaysPerhaps(Fifo):
    heeds_priority = None


@breaks(queue_world.REQUESTS_STAY_AS_THEY_ARE)
class WritesOnRequests(Fifo):
    def add_request(self, request):
        request.place = len(self)
        super().add_request(request)


@breaks(queue_world.QUEUES_ARE_APART)
class SharesItsList(Fifo):
    shared: ClassVar[deque] = deque()

    def __init__(self):
        self._requests = self.shared


@breaks(queue_world.QUEUES_ARE_APART)
class ThrowsDice(Fifo):
    def add_request(self, request):
        self._requests.insert(random.randint(0, len(self)), request)


@breaks(queue_world.QUEUES_ARE_APART)
class OrdersByAddress(SortedQueue):
    def key(self, request, has_run):
        return not has_run, id(request)


@breaks(queue_displacement.ANSWERS_YES_OR_NO)
class AnswersWithANumber(PriorityQueue):
    def displaces(self, waiting, running):
        return max(running.priority - waiting.priority, 0)


@breaks(queue_displacement.ANSWERS_YES_OR_NO)
class DoesNotAnswer(PriorityQueue):
    def displaces(self, waiting, running):
        if waiting.priority < running.priority:
            return True


@breaks(queue_displacement.NOT_ITSELF)
class DisplacesItself(PriorityQueue):
    def displaces(self, waiting, running):
        return self.key(waiting, False) <= self.key(running, False)


@breaks(queue_displacement.NOT_IN_TURN)
class DisplacesEquals(PriorityQueue):
    def displaces(self, waiting, running):
        return waiting is not running and waiting.priority <= running.priority


@breaks(queue_displacement.NOT_IN_TURN)
class DisplacesTheLonger(Fifo):
    def displaces(self, waiting, running):
        return running not in self._requests and waiting.num_tokens < running.num_tokens


@breaks(queue_displacement.NOT_IN_TURN)
class DisplacesMoreWhenManyWait(PriorityQueue):
    def displaces(self, waiting, running):
        if len(self) % 2:
            return waiting.arrival > running.arrival and running not in list(self)
        return waiting.arrival < running.arrival and running not in list(self)


@breaks(queue_displacement.NOT_IN_A_CIRCLE)
class DisplacesEveryThird(Fifo):
    def displaces(self, waiting, running):
        return running not in self._requests and (running.arrival - waiting.arrival) % 3 == 1


@breaks(queue_displacement.DISPLACES_WHO_STANDS_BEHIND)
class DisplacesThoseBeforeIt(Fifo):
    def displaces(self, waiting, running):
        return waiting.arrival > running.arrival


@breaks(queue_world.PRIORITY_IS_IGNORED)
class DisplacesByPriorityInSecret(Fifo):
    def displaces(self, waiting, running):
        return waiting.priority < running.priority and waiting.arrival < running.arrival


@breaks(queue_world.LOOKING_CHANGES_NOTHING)
class ReordersWhenAsked(Fifo):
    def displaces(self, waiting, running):
        self._requests.rotate(1)
        return False


@breaks(queue_world.REQUESTS_STAY_AS_THEY_ARE)
class MarksTheDisplaced(PriorityQueue):
    def displaces(self, waiting, running):
        running.is_displaced = waiting.priority < running.priority
        return running.is_displaced


@breaks(queue_world.NOTHING_IS_KEPT)
class RemembersTheDisplaced(PriorityQueue):
    def __init__(self):
        super().__init__()
        self._answers = {}

    def displaces(self, waiting, running):
        return self._answers.setdefault((waiting, running), waiting.priority < running.priority)


@breaks(conformance.RAISES_NOTHING)
class AnswersForThoseThatWaitOnly(Fifo):
    def displaces(self, waiting, running):
        return self._requests.index(waiting) < 0


@breaks(queue_world.QUEUES_ARE_APART)
class DisplacesByAddress(Fifo):
    def displaces(self, waiting, running):
        return id(waiting) < id(running) and waiting.arrival < running.arrival


@breaks(queue_displacement.URGENCY_ORDERS)
class CountsPriorityAlone(PriorityQueue):
    def urgency(self, request):
        return (request.priority,)


@breaks(queue_displacement.URGENCY_ORDERS)
class IsUrgentByName(Fifo):
    def urgency(self, request):
        return (request.request_id,)


@breaks(queue_displacement.URGENCY_ORDERS)
class IsUrgentAsANumber(Fifo):
    def urgency(self, request):
        return request.arrival


@breaks(queue_displacement.URGENCY_STAYS)
class IsUrgentByLength(Fifo):
    def urgency(self, request):
        return request.num_tokens, request.arrival


@breaks(conformance.STATES_ITS_VERSION)
class FollowsTheInstalledVersion(Fifo):
    contract_version = CONTRACT_VERSION


@breaks(conformance.STATES_ITS_VERSION)
class InheritsOctavosVersion(FCFSQueue):
    pass


def failures_of(queue):
    suite = type("Suite", (RequestQueueSuite,), {"queue": queue})()
    failures = []
    for name in dir(suite):
        if name.startswith("test_"):
            try:
                getattr(suite, name)()
            except RuleBroken as broken:
                failures.append(broken)
    return failures


@pytest.mark.parametrize(("queue", "rule"), MUTANTS)
def test_a_fault_is_caught_and_its_rule_is_named(queue, rule):
    SharesItsList.shared.clear()
    failures = failures_of(queue)
    assert rule in {broken.rule for broken in failures}
    for broken in failures:
        assert str(broken).startswith(f"Rule broken: {broken.rule}\nFound: ")
        assert "Again: Suite()." in str(broken)


def test_a_trace_is_as_short_as_the_fault_allows_and_can_be_run_again():
    broken = next(broken for broken in failures_of(SendsThePreemptedToTheEnd) if "prepend" in str(broken))
    operations = [line.strip().split(". ")[1].split(",")[0] for line in broken.context[2:-1]]
    assert operations == ["add r0", "pop: r0", "add r1", "prepend r0"]
    call = broken.context[-1].removeprefix("Again: ")
    suite = type("Suite", (RequestQueueSuite,), {"queue": SendsThePreemptedToTheEnd})
    with pytest.raises(RuleBroken) as again:
        eval(call, {"Suite": suite})  # noqa: S307
    assert (again.value.rule, again.value.found) == (broken.rule, broken.found)


def test_a_queue_can_be_given_by_name_with_options():
    class Limited(FCFSQueue):
        contract_version = 1

        class Options(BaseModel):
            limit: int = 8

        def __init__(self, *, options):
            super().__init__()
            assert options.limit == 3

    suite = type("Suite", (RequestQueueSuite,), {"queue": Limited, "options": {"limit": 3}})()
    suite.test_random_requests_come_out_once_and_in_order()
    suite.queue = "fcfs"
    with pytest.raises(SuiteMisusedError) as caught:
        suite.test_random_requests_come_out_once_and_in_order()
    assert str(caught.value) == "Suite.options: The class FCFSQueue takes no options, and was given 'limit'."
    suite.options = {}
    suite.test_random_requests_come_out_once_and_in_order()
    with pytest.raises(SuiteMisusedError, match=r"RequestQueueSuite\.queue is None"):
        RequestQueueSuite().test_an_empty_queue_has_nothing_to_show()


def test_requests_of_the_suite_and_of_the_engine_can_be_referred_to_weakly():
    for request in (
        queue_world.WaitingRequest("r0", 0, 0, 1),
        Request("r0", [1, 2], SamplingParams(), max_model_len=8),
    ):
        assert weakref.WeakKeyDictionary({request: 1})[request] == 1


def never(one, other):
    return False


def test_a_long_trace_has_more_than_a_hundred_waiting():
    most = 0
    for seed in (queue_world.FIRST_LONG_SEED, queue_world.FIRST_LONG_SEED + 1):
        world = queue_world.QueueWorld(Fifo, never, never, heeds_priority=False, has_third=False, is_long=True)
        for operation in range(queue_world.LONG_TRACE_LENGTH):
            world.do(random.Random(f"{seed}.{operation}"))
            most = max(most, len(world.queue))
    assert most > 150
