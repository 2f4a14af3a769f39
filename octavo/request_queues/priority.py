"""The most urgent first."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import ClassVar

from pydantic import BaseModel, ConfigDict, Field

from octavo.core.interfaces import QueuedRequest, RequestQueue


class PriorityOptions(BaseModel):
    """What the priority queue can be told."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)

    ageing: int | None = Field(default=None, ge=1)
    """Requests that must have arrived after another one for it to count as more urgent by a priority of 1. None
    lets nobody age: while more urgent requests come, others wait."""


# Priority, or priority and age together; then arrival; then id. No two requests have the same.
_Place = tuple[int, int, str]


class PriorityQueue(RequestQueue):
    """The lowest priority number first, then the first to arrive. Preempted requests are ordered like all others.

    Args:
        options: Whether waiting makes a request more urgent.
    """

    contract_version = 1
    Options: ClassVar[type[PriorityOptions]] = PriorityOptions
    heeds_priority: ClassVar[bool] = True

    def __init__(self, options: PriorityOptions | None = None) -> None:
        self._ageing = None if options is None else options.ageing
        # In order. A place is unique, so that requests themselves are never compared.
        self._requests: list[tuple[_Place, QueuedRequest]] = []

    def add_request(self, request: QueuedRequest) -> None:
        insort(self._requests, (self._place(request), request))

    def prepend_request(self, request: QueuedRequest) -> None:
        self.add_request(request)

    def peek_request(self) -> QueuedRequest:
        return self._requests[0][1]

    def pop_request(self) -> QueuedRequest:
        return self._requests.pop(0)[1]

    def remove_request(self, request: QueuedRequest) -> None:
        index = bisect_left(self._requests, self._place(request), key=lambda entry: entry[0])
        if index == len(self._requests) or self._requests[index][1] is not request:
            raise ValueError(f"the request {request.request_id!r} does not wait here")
        del self._requests[index]

    def displaces(self, waiting: QueuedRequest, running: QueuedRequest) -> bool:
        return waiting.priority < running.priority and self._place(waiting) < self._place(running)

    def urgency(self, request: QueuedRequest) -> tuple[int, ...]:
        # As in line: one that has waited long is not to be the first to be preempted.
        return self._place(request)[:2]

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[QueuedRequest]:
        return (request for _, request in self._requests)

    def _place(self, request: QueuedRequest) -> _Place:
        if self._ageing is None:
            return request.priority, request.arrival, request.request_id
        # All that wait grow older alike, so what one has gained on another never changes.
        return request.priority * self._ageing + request.arrival, request.arrival, request.request_id
