"""The request queue as the scheduler uses it: what a queue shows and hands out is looked at before it is believed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice

from octavo.core.interfaces.request_queue import QueuedRequest, RequestQueue
from octavo.core.request import Request, RequestStatus
from octavo.errors import PluginBroken, PluginContractError, describe


class WaitingLine:
    """A request queue, which may be somebody else's code.

    Args:
        queue: Orders the requests that hold no blocks.
        requests: All that are under way, by id; the scheduler keeps it.
    """

    def __init__(self, queue: RequestQueue, requests: Mapping[str, Request]) -> None:
        self._queue = queue
        self._requests = requests

    @property
    def name(self) -> str:
        return type(self._queue).__qualname__

    @property
    def may_displace(self) -> bool:
        """Whether the queue says for itself who displaces whom."""
        return type(self._queue).displaces is not RequestQueue.displaces

    def displaces(self, waiting: Request, running: Request) -> bool:
        """Say whether a running request gives up its place for a waiting one."""
        return self._queue.displaces(waiting, running)

    def urgency(self, request: Request) -> tuple[int, ...]:
        """Return what orders requests from the most urgent to the least."""
        return self._queue.urgency(request)

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Request]:
        return iter([request for request in self._queue if isinstance(request, Request)])

    def add(self, request: Request) -> None:
        """Take in a request that has just arrived.

        Raises:
            PluginBroken: The queue raised, whatever it was.
        """
        try:
            self._queue.add_request(request)
        except KeyboardInterrupt:
            raise
        except BaseException as cause:
            raise PluginBroken(
                f"The request queue {self.name} raised {describe(cause)} when it was given the request "
                f"{request.request_id!r}, which was not added."
            ) from cause

    def add_back(self, request: Request) -> None:
        """Take back a request that was preempted."""
        self._queue.prepend_request(request)

    def first(self) -> Request:
        """Return the next request.

        Raises:
            PluginContractError: The queue shows something else than a request that waits.
        """
        return self._checked(self._queue.peek_request(), "peek_request")

    def behind(self, num_passed: int) -> Request | None:
        """Return the request with `num_passed` others before it; None where there are not so many.

        Raises:
            PluginContractError: As `first`.
        """
        request = next(islice(iter(self._queue), num_passed, None), None)
        return None if request is None else self._checked(request, "iteration")

    def take_first(self, request: Request) -> None:
        """Take out the request that `first` returned.

        Raises:
            PluginContractError: The queue hands out another one.
        """
        popped = self._queue.pop_request()
        if popped is not request:
            raise PluginContractError(
                f"The request queue {self.name} showed {request.request_id!r} with peek_request, and pop_request took "
                f"out {getattr(popped, 'request_id', popped)!r}; the two must be the same."
            )

    def remove(self, request: Request) -> None:
        """Take out a request, wherever it stands."""
        self._queue.remove_request(request)

    def _checked(self, shown: QueuedRequest, method: str) -> Request:
        if (
            not isinstance(shown, Request)
            or self._requests.get(shown.request_id) is not shown
            or shown.status is RequestStatus.RUNNING
        ):
            raise PluginContractError(
                f"The request queue {self.name} shows {getattr(shown, 'request_id', shown)!r} with {method}, which is "
                "not waiting; it must be a request that was added and not taken out since."
            )
        return shown
