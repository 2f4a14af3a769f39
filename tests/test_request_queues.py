"""Octavo's own request queues."""

from dataclasses import dataclass

import pytest

from octavo.request_queues import FCFSQueue
from octavo.testing import RequestQueueSuite


class TestFCFS(RequestQueueSuite):
    queue = "fcfs"


@dataclass(frozen=True)
class Waiting:
    request_id: str
    arrival: int
    priority: int = 0
    num_tokens: int = 1


def ids(queue):
    return [request.request_id for request in queue]


def test_requests_come_out_in_order_of_arrival():
    queue = FCFSQueue()
    for number in range(3):
        queue.add_request(Waiting(f"r{number}", number))
    assert [queue.pop_request().request_id for _ in range(3)] == ["r0", "r1", "r2"]


@pytest.mark.parametrize("returning", [[2, 1, 0], [0, 1, 2], [1, 2, 0]])
def test_preempted_requests_take_back_their_places_whatever_the_order_of_their_return(returning):
    queue = FCFSQueue()
    queue.add_request(Waiting("new", 9))
    for number in returning:
        queue.prepend_request(Waiting(f"r{number}", number))
    assert ids(queue) == ["r0", "r1", "r2", "new"]
