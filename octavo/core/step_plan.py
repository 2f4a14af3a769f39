"""What one step computes, as columns. Made by the scheduler, read by the model runner; knows no request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from octavo.core.outputs import TokenLogprobs

Int32Array = np.ndarray[Any, np.dtype[np.int32]]
BoolArray = np.ndarray[Any, np.dtype[np.bool_]]

# Stands in a plan for a token that the step before it samples.
AWAITED = -1


@dataclass(frozen=True)
class RowSampling:
    """How the request that a row now belongs to samples. Told once, when it is admitted.

    Attributes:
        num_prompt_tokens: A token at position p is output number p - num_prompt_tokens.
        masked_before_min_tokens: Ids that would stop the request, not to be chosen before `min_tokens` outputs.
    """

    row: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    choice: int
    num_prompt_tokens: int
    min_tokens: int
    masked_before_min_tokens: tuple[int, ...]
    num_logprobs: int | None


@dataclass(frozen=True)
class StepPlan:
    """The entries of one step, those with exactly one new token first.

    Attributes:
        request_ids: Who owns each entry, for whoever takes in the output.
        arrivals: The same as a number that is never given twice.
        rows: Each entry's row, int32. [num_entries]
        num_new_tokens: int32. [num_entries]
        first_positions: Position of the first new token, that is, tokens computed before, int32. [num_entries]
        token_ids: The new tokens, back to back, int32; AWAITED where the step before samples it. [sum(num_new_tokens)]
        samples: Whether the entry's last token is the last one known, so that a next one is sampled. [num_entries]
        num_decode_entries: How many entries, all at the front, have exactly one new token.
        block_tables: A matrix for each KV-cache group, int32, null behind a row's last block. [num_entries, width]
        new_rows: Rows that changed hands since the last plan.
    """

    request_ids: list[str]
    arrivals: list[int]
    rows: Int32Array
    num_new_tokens: Int32Array
    first_positions: Int32Array
    token_ids: Int32Array
    samples: BoolArray
    num_decode_entries: int
    block_tables: tuple[Int32Array, ...]
    new_rows: list[RowSampling]

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_entries(self) -> int:
        return len(self.request_ids)


@dataclass
class StepResult:
    """What came out of a step, with one entry for each plan entry that samples, in their order.

    Attributes:
        token_ids: The sampled tokens; meaningless where `failed`.
        failed: Whether the logits were not finite, so that no token could be chosen.
        logprobs: For entries that asked for them.
    """

    token_ids: list[int] = field(default_factory=list)
    failed: list[bool] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)


class LatestTokens:
    """Remembers what the latest step sampled, and fills it in where the next plan awaits it."""

    def __init__(self) -> None:
        self._plan: StepPlan | None = None
        self._result = StepResult()

    def keep(self, plan: StepPlan, result: StepResult) -> None:
        """Remember a step's tokens. Until the next plan awaits some, nothing is done with them."""
        self._plan, self._result = plan, result

    def fill_in(self, plan: StepPlan) -> None:
        """Put tokens in place of AWAITED. Each is the only new one of its entry."""
        awaiting = np.flatnonzero(plan.token_ids[: plan.num_decode_entries] == AWAITED)
        if not len(awaiting):
            return
        if self._plan is None:
            raise ValueError("the plan awaits tokens of a step before it, and none was run")
        rows = self._plan.rows[self._plan.samples].tolist()
        # Where there is no token the request is about to end, and what follows is dropped.
        tokens = [
            0 if failed else token for token, failed in zip(self._result.token_ids, self._result.failed, strict=True)
        ]
        by_row = dict(zip(rows, tokens, strict=True))
        plan.token_ids[awaiting] = [by_row[row] for row in plan.rows[awaiting].tolist()]
