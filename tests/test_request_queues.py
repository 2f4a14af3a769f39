"""Octavo's own request queues."""

from dataclasses import dataclass

import pytest

from octavo.request_queues import FCFSQueue


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
    assert len(queue) == 3
    assert ids(queue) == ["r0", "r1", "r2"]
    assert queue.peek_request().request_id == "r0"
    assert [queue.pop_request().request_id for _ in range(3)] == ["r0", "r1", "r2"]
    assert len(queue) == 0


@pytest.mark.parametrize("returning", [[2, 1, 0], [0, 1, 2], [1, 2, 0]])
def test_preempted_requests_take_back_their_places_whatever_the_order_of_their_return(returning):
    queue = FCFSQueue()
    queue.add_request(Waiting("new", 9))
    for number in returning:
        queue.prepend_request(Waiting(f"r{number}", number))
    assert ids(queue) == ["r0", "r1", "r2", "new"]


def test_a_request_can_leave_from_the_middle():
    queue = FCFSQueue()
    requests = [Waiting(f"r{number}", number) for number in range(3)]
    for request in requests:
        queue.add_request(request)
    queue.remove_request(requests[1])
    assert ids(queue) == ["r0", "r2"]
    with pytest.raises(ValueError, match="not in deque"):
        queue.remove_request(requests[1])


def test_an_empty_queue_has_nothing_to_show():
    with pytest.raises(IndexError):
        FCFSQueue().peek_request()
    with pytest.raises(IndexError):
        FCFSQueue().pop_request()
