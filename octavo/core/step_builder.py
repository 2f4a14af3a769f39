"""A step while it is planned: who takes part with how many tokens, and what is left of the budget."""

from __future__ import annotations

import numpy as np

from octavo.core.request import Request
from octavo.core.scheduled import Entries, Scheduled


class StepBuilder:
    """Collects the tokens of a step.

    Args:
        budget: Tokens that the step may compute.

    Attributes:
        rest: What is left of the budget.
        admitted: Requests that were admitted in this step; one may have no tokens in it yet.
        preempted: Requests that lost their blocks in this step.
    """

    def __init__(self, budget: int) -> None:
        self.rest = budget
        self.admitted: list[Request] = []
        self.preempted: list[Request] = []
        # Those that were planned together come first, as columns; they are taken apart only if one of them is given up.
        self._together = Scheduled(Entries(()), np.zeros(0, np.int32))
        self._one_by_one: dict[Request, int] = {}

    def __len__(self) -> int:
        return len(self._together.entries) + len(self._one_by_one)

    def add_all(self, scheduled: Scheduled) -> None:
        """Add requests before all others."""
        self._together = scheduled
        self.rest -= int(scheduled.num_new_tokens.sum())

    def add(self, request: Request, num_new_tokens: int) -> None:
        """Add tokens of a request; it may have some in this step already."""
        self._one_by_one[request] = self._one_by_one.get(request, 0) + num_new_tokens
        self.rest -= num_new_tokens

    def remove(self, request: Request) -> int:
        """Give a request up; return how many tokens it had in this step, which go back to the budget."""
        if request in self._together.entries.requests:
            together = zip(self._together.entries.requests, self._together.num_new_tokens.tolist(), strict=True)
            self._one_by_one = dict(together) | self._one_by_one
            self._together = Scheduled(Entries(()), np.zeros(0, np.int32))
        num_new_tokens = self._one_by_one.pop(request, 0)
        self.rest += num_new_tokens
        return num_new_tokens

    def num_new_tokens(self, request: Request) -> int:
        """Return how many tokens a request that was added by itself has in this step."""
        return self._one_by_one.get(request, 0)

    def scheduled(self) -> Scheduled:
        """Return who takes part, in the order in which they were added."""
        if not self._one_by_one:
            return self._together
        return self._together.with_more(self._one_by_one)
