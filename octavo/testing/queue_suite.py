"""The conformance suite of request queues.

    from octavo.testing import RequestQueueSuite

    class TestFair(RequestQueueSuite):
        queue = "fair"

What it holds a queue to is the bookkeeping, whatever the order: everything comes out once, looking changes nothing,
the iteration is the order, what the class says about priorities is so, and nobody is displaced in a circle.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import Any, ClassVar

from octavo.core.interfaces import RequestQueue
from octavo.plugins.families import REQUEST_QUEUES
from octavo.testing.conformance import (
    ConformanceSuite,
    RuleBroken,
    check_contract_version,
    check_trace,
    one_liner,
    reproducible,
)
from octavo.testing.queue_world import (
    COMES_OUT_ONCE,
    FIRST_LONG_SEED,
    LENGTH_IS_RIGHT,
    LONG_TRACE_LENGTH,
    NOTHING_IS_KEPT,
    NUM_LONG_TRACES,
    NUM_REFILLS,
    QUEUES_ARE_APART,
    STATES_PRIORITY,
    TRACE_LENGTH,
    QueueWorld,
    WaitingRequest,
)


class RequestQueueSuite(ConformanceSuite):
    """Holds a request queue to its contract.

    Attributes:
        queue: The class, or the name that it is registered under.
        num_traces: Random traces.
    """

    queue: ClassVar[str | type[RequestQueue]]
    num_traces: ClassVar[int] = 40

    # -- what the author says -----------------------------------------------------------------------------------

    def goes_before(self, preempted: Any, never_ran: Any) -> bool:
        """Say whether a preempted request has to stand before one that never ran.

        By default before those that arrived later and, where the queue heeds priorities, have none that is lower. A
        queue whose order allows less says so here, and in its docs.
        """
        is_urgent = not self._queue_class().heeds_priority or bool(preempted.priority <= never_ran.priority)
        return is_urgent and bool(preempted.arrival < never_ran.arrival)

    def outranks(self, one: Any, other: Any) -> bool:
        """Say whether a request has to stand before another one for its priority, where the queue heeds priorities.

        By default where its number is lower. A queue in which something else counts too, such as the time that a
        request has waited, says less here, and says so in its docs.
        """
        return bool(one.priority < other.priority)

    # -- the class ----------------------------------------------------------------------------------------------

    @reproducible
    def test_the_class_states_its_contract_version_and_whether_it_heeds_priorities(self) -> None:
        queue = self._queue_class()
        check_contract_version(queue, RequestQueue)
        if type(queue.heeds_priority) is not bool:
            raise RuleBroken(STATES_PRIORITY, f"{queue.__name__}.heeds_priority is {queue.heeds_priority!r}")

    @reproducible
    def test_an_empty_queue_has_nothing_to_show(self) -> None:
        self.reproduce(seed=0, keep=[])

    # -- whole lives --------------------------------------------------------------------------------------------

    @reproducible
    def test_random_requests_come_out_once_and_in_order(self) -> None:
        for seed in (*range(self.num_traces), *range(FIRST_LONG_SEED, FIRST_LONG_SEED + NUM_LONG_TRACES)):
            self.reproduce(seed=seed)

    @reproducible
    def test_priorities_play_the_part_that_the_class_states(self) -> None:
        # Apart from the traces above, which show whether the order can be compared at all.
        for seed in (*range(-1, -1 - self.num_traces, -1), -FIRST_LONG_SEED):
            self.reproduce(seed=seed)

    @reproducible
    def test_queues_do_not_share_what_waits_in_them(self) -> None:
        first, second = self._make(), self._make()
        request = WaitingRequest("r0", 0, 0, 1)
        first.add_request(request)
        if len(second) or list(second):
            raise RuleBroken(QUEUES_ARE_APART, f"a request was added to one, and the other has {list(second)}")
        first.remove_request(request)

    @reproducible
    def test_a_queue_can_be_emptied_and_filled_again(self) -> None:
        queue, arrival = self._make(), 0
        for _ in range(NUM_REFILLS):
            requests = [WaitingRequest(f"r{number}", 0, number, 5) for number in range(arrival, arrival + 3)]
            arrival += len(requests)
            for request in requests:
                queue.add_request(request)
            popped = [queue.pop_request()]
            queue.prepend_request(popped.pop())
            while queue:
                popped.append(queue.pop_request())
                if len(queue) != len(requests) - len(popped) or len(list(queue)) != len(queue):
                    raise RuleBroken(LENGTH_IS_RIGHT, f"len is {len(queue)} after {popped} of {requests} came out")
            if sorted(map(id, popped)) != sorted(map(id, requests)):
                raise RuleBroken(COMES_OUT_ONCE, f"{requests} were added, and {popped} came out")

    @reproducible
    def test_requests_that_left_are_not_kept(self) -> None:
        queue = self._make()
        requests = [WaitingRequest(f"r{number}", 0, number, 5) for number in range(20)]
        left = {request.request_id: weakref.ref(request) for request in requests}
        for request in requests:
            queue.add_request(request)
            queue.displaces(request, requests[0])
        for request in requests[::3]:
            queue.remove_request(request)
        preempted = queue.pop_request()
        queue.prepend_request(preempted)
        while queue:
            queue.pop_request()
        # A queue may clear away what was removed when it is next used.
        other = WaitingRequest("other", 0, len(requests), 5)
        queue.add_request(other)
        queue.pop_request()
        del request, requests, preempted
        gc.collect()
        kept = [request_id for request_id, reference in left.items() if reference() is not None]
        if kept:
            raise RuleBroken(NOTHING_IS_KEPT, f"{', '.join(kept)} left the queue, and are still held")

    def reproduce(self, *, seed: int, keep: Sequence[int] | None = None) -> None:
        """Run one random trace again.

        Args:
            seed: As a failure gave it; below zero a queue that ignores priorities is compared with one that is given
                none, and from 1000 on, or up to -1000, the trace is long and many wait.
            keep: The operations to do, all by default.

        Raises:
            RuleBroken: As the first time, if nothing was mended since.
        """
        queue = self._queue_class()
        is_long = abs(seed) >= FIRST_LONG_SEED
        check_trace(
            lambda: QueueWorld(
                self._make,
                self.goes_before,
                self.outranks,
                heeds_priority=bool(queue.heeds_priority),
                has_third=seed < 0 and not queue.heeds_priority,
                is_long=is_long,
            ),
            seed,
            range(LONG_TRACE_LENGTH if is_long else TRACE_LENGTH) if keep is None else keep,
            lambda operations: one_liner(type(self), f"reproduce(seed={seed}, keep={[*operations]})"),
            queue.__name__,
        )

    def _queue_class(self) -> type[RequestQueue]:
        return self._load(REQUEST_QUEUES, "queue", RequestQueue)

    def _make(self) -> RequestQueue:
        queue = self._queue_class()
        made: RequestQueue = queue(**self._options_for(queue))
        return made
