"""The requests of a step side by side, and the plan that is made of them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from octavo.core.interfaces import SingleTypeKVCacheManager
from octavo.core.request import Request
from octavo.core.request_table import RequestTable
from octavo.core.step_plan import AWAITED, Int32Array, RowSampling, StepPlan


class Entries:
    """Requests that hold rows, in the order of a plan, as columns.

    Most steps have the same requests as the one before, so the columns are made once, when they are first asked for,
    and kept for as long as nobody comes or goes.

    Args:
        requests: Each holds a row.
    """

    def __init__(self, requests: Sequence[Request]) -> None:
        self.requests = tuple(requests)

    def __len__(self) -> int:
        return len(self.requests)

    @cached_property
    def rows(self) -> Int32Array:
        """int32. [num_entries]"""
        return np.fromiter((request.row for request in self.requests), np.int32, len(self.requests))

    @cached_property
    def request_ids(self) -> list[str]:
        return [request.request_id for request in self.requests]

    @cached_property
    def arrivals(self) -> list[int]:
        return [request.arrival for request in self.requests]

    @cached_property
    def num_cached_tokens(self) -> list[int]:
        return [request.num_cached_tokens or 0 for request in self.requests]

    @cached_property
    def num_preemptions(self) -> list[int]:
        return [request.num_preemptions for request in self.requests]

    @cached_property
    def stop_token_ids(self) -> frozenset[int]:
        """Ids that end at least one of the requests."""
        distinct = {request.eos_token_ids for request in self.requests}
        distinct |= {request.stop_token_ids for request in self.requests}
        return frozenset().union(*distinct)


@dataclass(frozen=True)
class Scheduled:
    """Who takes part in a step, and with how many tokens.

    Attributes:
        entries: In the order of scheduling.
        num_new_tokens: int32. [num_entries]
    """

    entries: Entries
    num_new_tokens: Int32Array

    def with_more(self, requests: dict[Request, int]) -> Scheduled:
        """Return the same with requests and their new tokens added behind."""
        more = np.fromiter(requests.values(), np.int32, len(requests))
        return Scheduled(Entries((*self.entries.requests, *requests)), np.concatenate([self.num_new_tokens, more]))

    def decodes_first(self) -> tuple[Entries, Int32Array]:
        """Return entries and numbers with those of one new token in front, each part in its order."""
        is_other = self.num_new_tokens != 1
        if not is_other.any() or (np.diff(is_other.astype(np.int8)) >= 0).all():
            return self.entries, self.num_new_tokens
        order = np.argsort(is_other, kind="stable")
        return Entries([self.entries.requests[i] for i in order.tolist()]), self.num_new_tokens[order]


def make_plan(
    scheduled: Scheduled,
    table: RequestTable,
    managers: Sequence[SingleTypeKVCacheManager],
    new_rows: list[RowSampling],
) -> tuple[Entries, StepPlan]:
    """Return the step that computes what is scheduled, and who owns its entries.

    Args:
        scheduled: Each request's new tokens are counted in `table.num_computed_tokens` already.
        table: The requests' numbers.
        managers: Keep their block tables, one for each KV-cache group.
        new_rows: Rows that changed hands since the last plan.
    """
    # Attention backends want rows with one new token first; among equals the order of scheduling stays.
    entries, num_new_tokens = scheduled.decodes_first()
    rows = entries.rows
    num_computed = table.num_computed_tokens[rows]
    first_positions = num_computed - num_new_tokens
    samples = num_computed == table.num_tokens[rows] + (table.num_awaited_tokens[rows] if table.awaits_tokens else 0)
    num_decode_entries = int((num_new_tokens == 1).sum())

    decode_token_ids = table.last_token_ids[rows[:num_decode_entries]]
    if table.awaits_tokens:
        decode_token_ids[table.num_awaited_tokens[rows[:num_decode_entries]] > 0] = AWAITED
    # One new token may also be a piece of a prompt.
    for entry in np.flatnonzero(~samples[:num_decode_entries]).tolist():
        decode_token_ids[entry] = entries.requests[entry].token_ids[first_positions[entry]]
    others = array("i")
    for entry in range(num_decode_entries, len(entries)):
        first = int(first_positions[entry])
        others.extend(entries.requests[entry].token_ids[first : first + int(num_new_tokens[entry])])
    plan = StepPlan(
        request_ids=entries.request_ids,
        arrivals=entries.arrivals,
        rows=rows,
        num_new_tokens=num_new_tokens,
        first_positions=first_positions,
        token_ids=np.concatenate([decode_token_ids, np.frombuffer(others, np.int32)]),
        samples=samples,
        num_decode_entries=num_decode_entries,
        block_tables=tuple(m.block_tables[rows, : m.num_blocks[rows].max(initial=0)] for m in managers),
        new_rows=new_rows,
    )
    return entries, plan


def row_sampling(request: Request) -> RowSampling:
    """Return how a request samples, for its row."""
    params = request.params
    return RowSampling(
        row=request.row,
        temperature=0.0 if params.is_greedy else params.temperature,
        top_p=params.top_p,
        top_k=max(params.top_k, 0),
        min_p=params.min_p,
        seed=request.seed,
        choice=request.choice,
        num_prompt_tokens=request.num_prompt_tokens,
        min_tokens=params.min_tokens,
        masked_before_min_tokens=tuple(sorted(request.eos_token_ids | request.stop_token_ids)),
        num_logprobs=params.logprobs,
    )
