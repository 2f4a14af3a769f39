"""Takes the output of a step in: tokens are appended, and requests that have their last one end."""

from __future__ import annotations

import logging

import numpy as np

from octavo.core.outputs import NON_FINITE_LOGITS, EngineOutput, TokenLogprobs
from octavo.core.request import Request, RequestStatus
from octavo.core.roster import Roster
from octavo.core.scheduled import Entries
from octavo.core.step_plan import StepPlan, StepResult

logger = logging.getLogger(__name__)


class Intake:
    """Takes steps in.

    Args:
        roster: The requests under way.
    """

    def __init__(self, roster: Roster) -> None:
        self._roster = roster

    def take_in_all(self, plan: StepPlan, entries: Entries, result: StepResult, output: EngineOutput) -> bool:
        """Take in a token for each entry: the same as `take_in_one_by_one`, in columns.

        Returns:
            Whether it was done; it is not where an entry brought no token.
        """
        if not plan.samples.all() or True in result.failed:
            return False
        self._roster.counters.computed_tokens += plan.num_tokens
        self._roster.counters.generated_tokens += plan.num_entries
        rows, table = entries.rows, self._roster.table
        table.num_tokens[rows] += 1
        table.last_token_ids[rows] = result.token_ids
        for request, token_id in zip(entries.requests, result.token_ids, strict=True):
            request.token_ids.append(token_id)
        first = len(output)
        output.add_column(
            entries.request_ids,
            result.token_ids,
            result.logprobs,
            entries.num_cached_tokens,
            entries.num_preemptions,
        )
        is_ended = table.num_tokens[rows] >= table.max_total_tokens[rows]
        if not entries.stop_token_ids.isdisjoint(result.token_ids):
            is_ended |= np.isin(result.token_ids, list(entries.stop_token_ids))
        for entry in np.flatnonzero(is_ended).tolist():
            request = entries.requests[entry]
            # A stop id of one request may be any other id to the next.
            finish_reason, stop_reason = request.end_with(result.token_ids[entry])
            if finish_reason is not None:
                output.finish_reasons[first + entry] = finish_reason
                output.stop_reasons[first + entry] = stop_reason
                self._roster.finish(request)
        return True

    def take_in_one_by_one(self, plan: StepPlan, result: StepResult, output: EngineOutput) -> None:
        """Take in what each entry of a plan brought, if its request is still under way."""
        sampled = zip(result.token_ids, result.failed, result.logprobs, strict=True)
        for entry, (samples, num_new_tokens) in enumerate(
            zip(plan.samples.tolist(), plan.num_new_tokens.tolist(), strict=True)
        ):
            token_id, has_failed, logprobs = next(sampled) if samples else (0, False, None)
            request = self._roster.owner(plan, entry)
            if request is None:
                # Ended while the step ran, or before it did.
                continue
            self._roster.counters.computed_tokens += num_new_tokens
            if has_failed:
                self._fail(request, output)
            elif samples:
                self._take_in(request, token_id, logprobs, output)

    def _take_in(self, request: Request, token_id: int, logprobs: TokenLogprobs | None, output: EngineOutput) -> None:
        roster = self._roster
        roster.counters.generated_tokens += 1
        if request.status is RequestStatus.RUNNING:
            roster.table.num_tokens[request.row] += 1
            roster.table.last_token_ids[request.row] = token_id
            finish_reason, stop_reason = request.append_token(token_id)
        else:
            # Preempted while the step ran. A queue may order by the number of tokens.
            roster.line.remove(request)
            finish_reason, stop_reason = request.append_token(token_id)
            roster.line.add_back(request)
        roster.report(output, request, [token_id], finish_reason, stop_reason, logprobs)
        if finish_reason is not None:
            roster.finish(request)

    def _fail(self, request: Request, output: EngineOutput) -> None:
        """End a request whose logits were not finite; nobody may start from its keys and values.

        One that began with what another request left behind is first computed anew: the fault may be the other's.
        """
        if request.status is RequestStatus.RUNNING:
            self._roster.kv_cache_manager.forget_blocks(request)
            # A step that is planned already takes part in what was found.
            is_ahead = self._roster.table.num_awaited_tokens[request.row] > 0
            if request.num_hit_tokens and not is_ahead:
                logger.warning(
                    "the logits of %r are not finite; it is computed anew without the prefix cache, where it had found "
                    "%d tokens",
                    request.request_id,
                    request.num_hit_tokens,
                )
                self._roster.compute_anew(request)
                return
        self._roster.end(request, "error", NON_FINITE_LOGITS, output)
