"""The request queue as the scheduler uses it: what a queue shows and hands out is looked at before it is believed."""

from __future__ import annotations

from collections.abc import Mapping

from octavo.core.interfaces.request_queue import RequestQueue
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

    def __len__(self) -> int:
        return len(self._queue)

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
        request = self._queue.peek_request()
        if (
            not isinstance(request, Request)
            or self._requests.get(request.request_id) is not request
            or request.status is RequestStatus.RUNNING
        ):
            raise PluginContractError(
                f"The request queue {self.name} shows {getattr(request, 'request_id', request)!r} with peek_request, "
                "which is not waiting; it must be a request that was added and not taken out since."
            )
        return request

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
