"""One step's numbers as tensors: what the model and the attention backends read, before any layer has run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from octavo.core.interfaces import AttentionBatch
from octavo.core.step_plan import Int32Array, StepPlan


@dataclass(frozen=True)
class StepInputs:
    """What a step is computed from.

    Attributes:
        token_ids: int64. [num_tokens]
        positions: Each token's position in its own request, int64. [num_tokens]
        sample_rows: Rows of the hidden states from which a next token is sampled. [num_samples]
        batches: The same tokens as each KV-cache group sees them, by group id.
    """

    token_ids: Tensor
    positions: Tensor
    sample_rows: Tensor
    batches: Mapping[int, AttentionBatch]


class InputMaker(Protocol):
    """Makes a step's tensors."""

    def make(self, plan: StepPlan) -> StepInputs:
        """Return the tensors of a plan that has tokens."""


class HostInputs:
    """Makes the tensors of a step on a CPU: views of numpy arrays, of which nothing is copied.

    Args:
        block_sizes: Tokens in a block, for each KV-cache group.
    """

    def __init__(self, block_sizes: Sequence[int]) -> None:
        self._block_sizes = tuple(block_sizes)

    def make(self, plan: StepPlan) -> StepInputs:
        """See `InputMaker.make`."""
        query_starts = query_starts_of(plan)
        # Token t of entry e stands at first_positions[e] + (t - query_starts[e]).
        entry_of_token = np.repeat(np.arange(plan.num_entries), plan.num_new_tokens)
        offsets = np.arange(plan.num_tokens) - query_starts[entry_of_token]
        positions = (plan.first_positions[entry_of_token] + offsets).astype(np.int64)
        context_lens = plan.first_positions + plan.num_new_tokens
        query_starts_tensor, context_lens_tensor = torch.from_numpy(query_starts), torch.from_numpy(context_lens)
        batches = {}
        for group_id, (block_table, block_size) in enumerate(zip(plan.block_tables, self._block_sizes, strict=False)):
            blocks = block_table[entry_of_token, positions // block_size].astype(np.int64)
            batches[group_id] = AttentionBatch(
                num_decode_rows=plan.num_decode_entries,
                query_starts=query_starts_tensor,
                context_lens=context_lens_tensor,
                block_table=torch.from_numpy(block_table),
                slots=torch.from_numpy(blocks * block_size + positions % block_size),
                query_starts_host=query_starts,
                context_lens_host=context_lens,
                block_table_host=block_table,
            )
        return StepInputs(
            token_ids=torch.from_numpy(plan.token_ids.astype(np.int64)),
            positions=torch.from_numpy(positions),
            sample_rows=torch.from_numpy((query_starts[1:] - 1)[plan.samples].astype(np.int64)),
            batches=batches,
        )


def query_starts_of(plan: StepPlan) -> Int32Array:
    """Return the offsets of the entries' new tokens. [num_entries + 1]"""
    query_starts = np.zeros(plan.num_entries + 1, np.int32)
    np.cumsum(plan.num_new_tokens, out=query_starts[1:])
    return query_starts
