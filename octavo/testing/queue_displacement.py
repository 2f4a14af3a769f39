"""Who gives way to whom: what a request queue may answer in the course of a trace."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.core.interfaces import QueuedRequest
from octavo.testing.conformance import RuleBroken

ANSWERS_YES_OR_NO = "displaces returns True or False."
NOT_ITSELF = "No request displaces itself."
NOT_IN_TURN = "Of two requests at most one displaces the other, now or later."
NOT_IN_A_CIRCLE = "Requests do not displace each other in a circle."
URGENCY_ORDERS = "urgency returns a tuple of numbers, of one length for all requests, and no two have the same."
URGENCY_STAYS = "A request's urgency stays the same, whatever becomes of it."
DISPLACES_WHO_STANDS_BEHIND = "A request stands before those that it displaces, when all of them wait."


class Displacements:
    """Every displacement that a queue ever said yes to. They must not lead in a circle, however much time is between.

    Requests get more tokens while they run, and a queue knows others at another time; neither may turn an answer
    round, or two requests would displace each other in turn.
    """

    def __init__(self) -> None:
        # Request -> those that it displaces. Without a circle, always.
        self._displaced_by: dict[QueuedRequest, list[QueuedRequest]] = {}

    def take_in(self, one: QueuedRequest, other: QueuedRequest, answer: object) -> None:
        """Take in whether one request displaces another.

        Args:
            one: Who would displace.
            other: Who would be displaced.
            answer: What the queue said.

        Raises:
            RuleBroken: The answer, or what it comes to with earlier ones, is no strict order.
        """
        if not isinstance(answer, bool):
            raise RuleBroken(ANSWERS_YES_OR_NO, f"asked whether {one} displaces {other}, it returned {answer!r}")
        if not answer:
            return
        if one is other:
            raise RuleBroken(NOT_ITSELF, f"{one} displaces {other}")
        way_back = self._way(other, one)
        if way_back:
            rule = NOT_IN_TURN if len(way_back) == 2 else NOT_IN_A_CIRCLE
            earlier = ", which displaced ".join(map(str, way_back))
            raise RuleBroken(rule, f"{one} displaces {earlier}")
        self._displaced_by.setdefault(one, []).append(other)

    def _way(self, start: QueuedRequest, end: QueuedRequest) -> list[QueuedRequest]:
        """Return the shortest chain of displacements between two requests, both included; empty where none leads."""
        ways: list[list[QueuedRequest]] = [[start]]
        reached = {start}
        for way in ways:
            if way[-1] is end:
                return way
            nearest = [request for request in self._displaced_by.get(way[-1], ()) if request not in reached]
            ways += [[*way, request] for request in nearest]
            reached.update(nearest)
        return []


class Urgencies:
    """Every answer of a queue about a request's urgency."""

    def __init__(self) -> None:
        self._answers: dict[QueuedRequest, tuple[int, ...]] = {}

    def take_in(self, request: QueuedRequest, answer: object) -> None:
        """Take in how urgent a request is.

        Raises:
            RuleBroken: The answer orders nothing, or is another one than before.
        """
        is_tuple = isinstance(answer, tuple) and all(isinstance(number, int) for number in answer)
        if not is_tuple or len({len(known) for known in self._answers.values()} | {len(answer)}) > 1:  # type: ignore[arg-type]
            raise RuleBroken(URGENCY_ORDERS, f"the urgency of {request} is {answer!r}")
        for known, urgency in self._answers.items():
            if known is not request and urgency == answer:
                raise RuleBroken(URGENCY_ORDERS, f"{request} and {known} have the urgency {answer!r}")
        before = self._answers.setdefault(request, answer)  # type: ignore[arg-type]
        if before != answer:
            raise RuleBroken(URGENCY_STAYS, f"the urgency of {request} was {before!r}, and is {answer!r}")


def check_line(displacing: Sequence[tuple[QueuedRequest, QueuedRequest]], line: Sequence[QueuedRequest]) -> None:
    """Check that nobody stands in line before one that displaces it.

    Args:
        displacing: Pairs of which the first displaces the second.
        line: Those that wait, in order.

    Raises:
        RuleBroken: One does. It would be admitted again before the one that it made room for.
    """
    places = {id(request): place for place, request in enumerate(line)}
    for one, other in displacing:
        if places.get(id(one), -1) > places.get(id(other), len(line)):
            raise RuleBroken(DISPLACES_WHO_STANDS_BEHIND, f"{one} displaces {other} and is behind it: {[*line]}")
