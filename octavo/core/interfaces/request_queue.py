"""The contract of the queue of waiting requests."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar, Protocol


class QueuedRequest(Protocol):
    """What a queue may read to decide an order. It changes none of it."""

    @property
    def request_id(self) -> str: ...

    @property
    def priority(self) -> int:
        """Lower is served earlier, where the queue heeds priorities."""

    @property
    def arrival(self) -> int:
        """Position in the order of arrival, counted from 0 by the engine."""

    @property
    def num_tokens(self) -> int:
        """Tokens known so far: the prompt, and what was generated before a preemption."""


class RequestQueue(ABC):
    """Keeps the waiting requests. Its one decision is their order."""

    # Each registered class states these: the contract version it was built for, as a number; and, if it takes options,
    # a pydantic model of them, of which its constructor then gets an instance as the keyword argument `options`.
    contract_version: ClassVar[int]
    Options: ClassVar[type[Any] | None] = None
    # Whether `QueuedRequest.priority` plays a part in the order. Where it does not, a request with a priority other
    # than 0 is refused rather than served as if it had none.
    heeds_priority: ClassVar[bool] = False

    @abstractmethod
    def add_request(self, request: QueuedRequest) -> None:
        """Take in a request that has just arrived."""

    @abstractmethod
    def prepend_request(self, request: QueuedRequest) -> None:
        """Take back a request that was preempted; it goes before those that never ran, as the order allows."""

    @abstractmethod
    def peek_request(self) -> QueuedRequest:
        """Return the next request without taking it out. IndexError when empty."""

    @abstractmethod
    def pop_request(self) -> QueuedRequest:
        """Take out and return the request that `peek_request` shows. IndexError when empty."""

    @abstractmethod
    def remove_request(self, request: QueuedRequest) -> None:
        """Take out one request, wherever it stands. ValueError when it is not here."""

    def displaces(self, waiting: QueuedRequest, running: QueuedRequest) -> bool:
        """Say whether a running request gives up its place for a waiting one, where slots or memory are short.

        It must be a strict order: if the first displaces the second, then never the other way round, or the two would
        displace each other in turn. When both wait, the first stands before the second, or that would be admitted again
        in its stead. Without an answer of its own a queue lets nobody be displaced.
        """
        return False

    def urgency(self, request: QueuedRequest) -> tuple[int, ...]:
        """Return what orders running requests: the smallest is the most urgent.

        When memory runs out the least urgent one is preempted, and of several prompts under way the most urgent gets
        its share first. It must stay the same while a request is under way, and no two may have the same.
        """
        return request.priority, request.arrival

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __iter__(self) -> Iterator[QueuedRequest]:
        """Iterate in the order in which requests would be popped, changing nothing."""
