"""The numbers of the running requests, as columns with an entry for each row.

Kept as columns so that a question about all requests ("who is one token behind?") is one array operation.
"""

import heapq
from collections.abc import Sequence

import numpy as np

from octavo.core.request import NO_ROW, Request
from octavo.core.step_plan import Int32Array


class RequestTable:
    """Hands out rows and keeps each row's numbers.

    Attributes:
        num_tokens: Tokens known, int32. Mirrors `len(request.token_ids)`. [num_rows]
        num_computed_tokens: Tokens whose keys and values are stored or planned to be, int32. [num_rows]
        max_total_tokens: The request ends when it has this many tokens, int32. [num_rows]
        num_awaited_tokens: Tokens that steps under way will sample, int32. Kept while a step is planned. [num_rows]
        awaits_tokens: Whether there are any.
        last_token_ids: The token known last, int32. [num_rows]
        quiet_until: While no more tokens than this are computed, nothing changes about the row's blocks, int32.
            [num_rows]
    """

    def __init__(self, num_rows: int) -> None:
        self.num_tokens: Int32Array = np.zeros(num_rows, np.int32)
        self.num_computed_tokens: Int32Array = np.zeros(num_rows, np.int32)
        self.max_total_tokens: Int32Array = np.zeros(num_rows, np.int32)
        self.num_awaited_tokens: Int32Array = np.zeros(num_rows, np.int32)
        self.awaits_tokens = False
        self.last_token_ids: Int32Array = np.zeros(num_rows, np.int32)
        self.quiet_until: Int32Array = np.zeros(num_rows, np.int32)
        # The lowest free row first, so that the rows in use stay close together.
        self._free_rows = list(range(num_rows))

    def add(self, request: Request, num_computed_tokens: int) -> None:
        """Give the request a row."""
        row = heapq.heappop(self._free_rows)
        request.row = row
        self.num_tokens[row] = request.num_tokens
        self.num_computed_tokens[row] = num_computed_tokens
        self.max_total_tokens[row] = request.max_total_tokens
        self.num_awaited_tokens[row] = 0
        self.last_token_ids[row] = request.token_ids[-1]
        self.quiet_until[row] = 0

    def expect_tokens(self, rows: Sequence[int]) -> None:
        """Say for which rows steps under way will sample a token: for these and no others."""
        if self.awaits_tokens or len(rows):
            self.num_awaited_tokens[:] = 0
            self.num_awaited_tokens[list(rows)] = 1
            self.awaits_tokens = len(rows) > 0

    def remove(self, request: Request) -> None:
        """Take the request's row back."""
        heapq.heappush(self._free_rows, request.row)
        request.row = NO_ROW

    def num_tokens_behind(self, request: Request) -> int:
        """Return how many known tokens of the request are neither computed nor planned."""
        return int(self.num_tokens[request.row] - self.num_computed_tokens[request.row])
