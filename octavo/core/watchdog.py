"""Ends requests that can never go on, because a part does not keep its contract, and says what it saw."""

from __future__ import annotations

import json
import logging
from typing import Any

from octavo.core.outputs import LOST, STUCK
from octavo.core.request import Request, RequestStatus
from octavo.core.roster import Roster

logger = logging.getLogger(__name__)


class Watchdog:
    """Watches over the requests under way.

    Args:
        roster: The requests under way.
    """

    def __init__(self, roster: Roster) -> None:
        self._roster = roster

    def end_the_lost(self) -> None:
        """End the requests that neither run nor wait: the request queue has not kept them."""
        roster = self._roster
        if len(roster.line) + len(roster.running) == len(roster.requests):
            return
        in_line = {id(request) for request in roster.line}
        lost = [
            request
            for request in roster.requests.values()
            if request.status is not RequestStatus.RUNNING and id(request) not in in_line
        ]
        for request in lost:
            logger.error(
                "the request queue %s has lost the request %r, which is ended: %s",
                roster.line.name,
                request.request_id,
                self.describe_state(),
            )
            roster.report(roster.ended, request, [], "error", LOST, None)
            roster.forget(request)

    def end_the_stuck(self) -> None:
        """End the request that keeps the others from going on, where none can."""
        roster = self._roster
        # Whoever runs would have been computed, preempted or ended; so it is the head of the line.
        request = next(iter(roster.line), None) or roster.running[0]
        logger.error(
            "nothing can go on, and the request %r is ended for it; the request queue %s or a KV-cache manager does "
            "not keep its contract: %s",
            request.request_id,
            roster.line.name,
            self.describe_state(),
        )
        roster.end(request, "error", STUCK)

    def describe_state(self) -> str:
        """Return the state of the requests and the pool as a line of JSON."""
        roster, pool = self._roster, self._roster.kv_cache_manager.pool
        return json.dumps(
            {
                "free_blocks": pool.num_free_blocks,
                "used_blocks": pool.num_used_blocks,
                "cached_blocks": pool.num_cached_blocks,
                "counters": vars(roster.counters),
                "line": [request.request_id for request in roster.line],
                "requests": [self._describe(request) for request in roster.requests.values()],
            }
        )

    def _describe(self, request: Request) -> dict[str, Any]:
        roster = self._roster
        is_running = request.status is RequestStatus.RUNNING
        return {
            "request_id": request.request_id,
            "status": request.status.name,
            "priority": request.priority,
            "arrival": request.arrival,
            "num_prompt_tokens": request.num_prompt_tokens,
            "num_tokens": request.num_tokens,
            "num_computed_tokens": roster.num_computed(request) if is_running else 0,
            "num_blocks": roster.kv_cache_manager.num_blocks_held(request) if is_running else 0,
            "num_preemptions": request.num_preemptions,
        }
