"""A runner without a model, whose tokens are right exactly when the paged KV cache is.

It stores each new token in its slots, reads through a request's block tables what attention would read, and answers
with a hash of the whole context. A stale block, a wrong slot, a token computed twice or not at all: each changes the
answer, or is noticed where a group does not keep the whole context.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from octavo.core.interfaces import FullAttentionSpec, KVCacheSpec
from octavo.core.step_plan import Int32Array, LatestTokens, RowSampling, StepPlan, StepResult

UNWRITTEN = -1


def next_token(context: Sequence[int], vocab_size: int) -> int:
    """Return the token that follows a context. Every token and every position matters."""
    digest = hashlib.blake2b(np.asarray(context, np.int32).tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % vocab_size


def expected_tokens(prompt: Sequence[int], num_tokens: int, vocab_size: int) -> list[int]:
    """Return what a request generates when it runs alone and nothing is cached."""
    context = list(prompt)
    for _ in range(num_tokens):
        context.append(next_token(context, vocab_size))
    return context[len(prompt) :]


class HashingRunner:
    """Executes plans on a KV cache of token ids.

    All groups lie in the same memory, as they do in an engine: what one group writes to a block overwrites the whole of
    what another one had there, and that may not be read any more.

    Args:
        num_blocks: Blocks in the pool.
        specs: What each KV-cache group keeps. A number stands for one group of full attention with blocks of so many
            tokens.
        vocab_size: Tokens are below it.
        tokens_of: Returns the tokens of a request, or none where it has ended. Needed where no group keeps all of a
            request, to know what stood in a prefix hit.

    Attributes:
        plans: Every plan that was run, for tests to look at.
        fail_next: Raise this, after half of the writes, instead of finishing the next step.
        failing_request_ids: Requests whose logits are to count as not finite.
    """

    def __init__(
        self,
        num_blocks: int,
        specs: int | Sequence[KVCacheSpec],
        vocab_size: int = 1000,
        tokens_of: Callable[[str], Sequence[int]] | None = None,
    ) -> None:
        if isinstance(specs, int):
            specs = [FullAttentionSpec(specs, num_kv_heads=1, head_dim=1, dtype="float32")]
        self.specs = list(specs)
        self.vocab_size = vocab_size
        self.plans: list[StepPlan] = []
        self.fail_next: Exception | None = None
        self.failing_request_ids: set[str] = set()
        self._tokens_of = tokens_of
        # The group that reads all of a request, if there is one.
        self._whole_group = next((group for group, spec in enumerate(specs) if _first_read(spec, 1 << 30) == 0), None)
        if self._whole_group is None and tokens_of is None:
            raise ValueError("no group keeps all tokens of a request, so tokens_of must say what they are")
        self._cells = np.full((num_blocks, max(spec.block_size for spec in specs)), UNWRITTEN, np.int32)
        # The group that wrote to a block last.
        self._writers = np.zeros(num_blocks, np.int32)
        self._rows: dict[int, RowSampling] = {}
        # By row, where no group has all of it.
        self._contexts: dict[int, list[int]] = {}
        self._latest = LatestTokens()

    def run(self, plan: StepPlan) -> StepResult:
        """Write every new token, then read what each of them reads."""
        self.plans.append(plan)
        for row in plan.new_rows:
            self._rows[row.row] = row
            self._contexts.pop(row.row, None)
        self._latest.fill_in(plan)
        for entry in range(plan.num_entries):
            if self.fail_next is not None and entry >= plan.num_entries // 2:
                error, self.fail_next = self.fail_next, None
                raise error
            self._write(plan, entry)
        result = StepResult()
        for entry, samples in enumerate(plan.samples.tolist()):
            context = self._context(plan, entry)
            for group in range(len(self.specs)):
                self._check_what_is_read(plan, entry, group, context)
            if not samples:
                continue
            sampling = self._rows[int(plan.rows[entry])]
            assert sampling.num_prompt_tokens <= len(context), "the row is known with another request's prompt"
            result.token_ids.append(next_token(context, self.vocab_size))
            result.failed.append(plan.request_ids[entry] in self.failing_request_ids)
            result.logprobs.append(None)
        self._latest.keep(plan, result)
        return result

    def fill_kv_cache(self, plan: StepPlan) -> None:
        """Write every new token, and nothing else. Such plans are not among `plans`."""
        for entry in range(plan.num_entries):
            self._write(plan, entry)

    def block_differences(
        self, group_id: int, block_ids: Sequence[int], other_block_ids: Sequence[int]
    ) -> dict[int, float]:
        """Return 0 where blocks hold the same tokens, else 1, for the group's only layer, which has its number."""
        blocks = self._cells[:, : self.specs[group_id].block_size]
        return {group_id: float((blocks[list(block_ids)] != blocks[list(other_block_ids)]).any())}

    def tokens_in(self, block_id: int) -> list[int]:
        """Return the tokens that a block holds."""
        block_size = self.specs[self._writers[block_id]].block_size
        return list(map(int, self._cells[block_id, :block_size]))

    def corrupt(self, block_id: int) -> None:
        """Put other tokens into a block, as a stray write would."""
        self._cells[block_id] ^= 1

    def _write(self, plan: StepPlan, entry: int) -> None:
        first, _ = _positions(plan, entry)
        for group in range(len(self.specs)):
            blocks, offsets = self._slots(plan, entry, group, first)
            others = np.unique(blocks[self._writers[blocks] != group])
            self._writers[others] = group
            self._cells[others] = UNWRITTEN
            self._cells[blocks, offsets] = _new_tokens(plan, entry)

    def _context(self, plan: StepPlan, entry: int) -> list[int]:
        """Return a request's tokens up to the last new one."""
        if self._whole_group is not None:
            context: list[int] = self._read(plan, entry, self._whole_group, 0).tolist()
            return context
        assert self._tokens_of is not None
        first, row = int(plan.first_positions[entry]), int(plan.rows[entry])
        known = self._contexts.get(row)
        if known is None:
            known = list(self._tokens_of(plan.request_ids[entry])[:first])
            # Where the request has ended, nobody asks for its next token.
            known += [UNWRITTEN] * (first - len(known))
        self._contexts[row] = known[:first] + _new_tokens(plan, entry).tolist()
        return self._contexts[row]

    def _check_what_is_read(self, plan: StepPlan, entry: int, group: int, context: list[int]) -> None:
        if group == self._whole_group or UNWRITTEN in context:
            return
        # The first of the new tokens reads the furthest back.
        first = _first_read(self.specs[group], _positions(plan, entry)[0])
        read = self._read(plan, entry, group, first).tolist()
        assert read == context[first:], f"group {group} has other tokens at {first} and behind: {read}"

    def _read(self, plan: StepPlan, entry: int, group: int, first: int) -> Int32Array:
        """Return what a group has of a request from a position on."""
        blocks, offsets = self._slots(plan, entry, group, first)
        assert (self._writers[blocks] == group).all(), f"group {group} reads what another one wrote"
        tokens: Int32Array = self._cells[blocks, offsets]
        assert (tokens != UNWRITTEN).all(), "a context holds a slot that nobody wrote"
        return tokens

    def _slots(self, plan: StepPlan, entry: int, group: int, first: int) -> tuple[np.ndarray[Any, Any], Int32Array]:
        """Return the blocks of a request's positions from one on, and the places in them."""
        positions = np.arange(first, _positions(plan, entry)[1], dtype=np.int32)
        block_size = self.specs[group].block_size
        blocks = plan.block_tables[group][entry, positions // block_size]
        assert (blocks > 0).all(), f"a context reaches into the null block of group {group}"
        return blocks, positions % block_size


def _positions(plan: StepPlan, entry: int) -> tuple[int, int]:
    """Return the position of an entry's first new token, and the one behind its last."""
    first = int(plan.first_positions[entry])
    return first, first + int(plan.num_new_tokens[entry])


def _new_tokens(plan: StepPlan, entry: int) -> Int32Array:
    end = int(plan.num_new_tokens[: entry + 1].sum())
    return plan.token_ids[end - int(plan.num_new_tokens[entry]) : end]


def _first_read(spec: KVCacheSpec, position: int) -> int:
    """Return the first position that a query at `position` reads."""
    window, chunk = getattr(spec, "window", None), getattr(spec, "chunk", None)
    if chunk is not None:
        return int(position - position % chunk)
    return 0 if window is None else max(position - int(window) + 1, 0)
