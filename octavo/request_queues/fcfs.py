"""First come, first served."""

from collections import deque
from collections.abc import Iterator

from octavo.core.interfaces import QueuedRequest, RequestQueue


class FCFSQueue(RequestQueue):
    """First come, first served. A preempted request keeps the place that its arrival gave it."""

    contract_version = 1

    def __init__(self) -> None:
        # Always in order of arrival.
        self._requests: deque[QueuedRequest] = deque()

    def add_request(self, request: QueuedRequest) -> None:
        self._requests.append(request)

    def prepend_request(self, request: QueuedRequest) -> None:
        place = 0
        for waiting in self._requests:
            if waiting.arrival > request.arrival:
                break
            place += 1
        self._requests.insert(place, request)

    def peek_request(self) -> QueuedRequest:
        return self._requests[0]

    def pop_request(self) -> QueuedRequest:
        return self._requests.popleft()

    def remove_request(self, request: QueuedRequest) -> None:
        self._requests.remove(request)

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[QueuedRequest]:
        return iter(self._requests)
