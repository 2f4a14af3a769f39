"""A runner without a model, whose tokens are right exactly when the paged KV cache is.

It stores each new token in its slot, reads a request's whole context back through its block table, and answers with a
hash of what it read. A stale block, a wrong slot, a token computed twice or not at all: each changes the answer.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from octavo.core.step_plan import LatestTokens, RowSampling, StepPlan, StepResult

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

    Args:
        num_blocks: Blocks in the pool.
        block_size: Tokens in a block.
        vocab_size: Tokens are below it.

    Attributes:
        plans: Every plan that was run, for tests to look at.
        fail_next: Raise this, after half of the writes, instead of finishing the next step.
        failing_request_ids: Requests whose logits are to count as not finite.
    """

    def __init__(self, num_blocks: int, block_size: int, vocab_size: int = 1000) -> None:
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.plans: list[StepPlan] = []
        self.fail_next: Exception | None = None
        self.failing_request_ids: set[str] = set()
        self._slots = np.full(num_blocks * block_size, UNWRITTEN, np.int32)
        self._rows: dict[int, RowSampling] = {}
        self._latest = LatestTokens()

    def run(self, plan: StepPlan) -> StepResult:
        """Write every new token, then read every context."""
        self.plans.append(plan)
        self._rows.update({row.row: row for row in plan.new_rows})
        self._latest.fill_in(plan)
        for entry in range(plan.num_entries):
            if self.fail_next is not None and entry >= plan.num_entries // 2:
                error, self.fail_next = self.fail_next, None
                raise error
            self._write(plan, entry)
        result = StepResult()
        for entry in np.flatnonzero(plan.samples).tolist():
            context = self._slots[self._context_slots(plan, entry)]
            assert (context != UNWRITTEN).all(), "a context holds a slot that nobody wrote"
            sampling = self._rows[int(plan.rows[entry])]
            assert sampling.num_prompt_tokens <= len(context), "the row is known with another request's prompt"
            result.token_ids.append(next_token(context.tolist(), self.vocab_size))
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
        """Return 0 where blocks hold the same tokens, else 1, for the only layer."""
        blocks = self._slots.reshape(-1, self.block_size)
        return {0: float((blocks[list(block_ids)] != blocks[list(other_block_ids)]).any())}

    def tokens_in(self, block_id: int) -> list[int]:
        """Return the tokens that a block holds."""
        return list(map(int, self._slots.reshape(-1, self.block_size)[block_id]))

    def corrupt(self, block_id: int) -> None:
        """Put other tokens into a block, as a stray write would."""
        self._slots.reshape(-1, self.block_size)[block_id] ^= 1

    def _write(self, plan: StepPlan, entry: int) -> None:
        first, count = int(plan.first_positions[entry]), int(plan.num_new_tokens[entry])
        slots = self._context_slots(plan, entry)[first : first + count]
        end = int(plan.num_new_tokens[: entry + 1].sum())
        self._slots[slots] = plan.token_ids[end - count : end]

    def _context_slots(self, plan: StepPlan, entry: int) -> "np.ndarray[Any, np.dtype[np.int64]]":
        positions = np.arange(plan.first_positions[entry] + plan.num_new_tokens[entry])
        blocks = plan.block_tables[0][entry, positions // self.block_size].astype(np.int64)
        assert (blocks > 0).all(), "a context reaches into the null block"
        slots: np.ndarray[Any, np.dtype[np.int64]] = blocks * self.block_size + positions % self.block_size
        return slots
