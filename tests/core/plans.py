"""Random plans, and what follows from them one token at a time."""

import numpy as np

from octavo.core.step_plan import StepPlan


def random_plan(rng, block_sizes, *, new_tokens=None, num_rows=12):
    """Return a plan of some rows, those of one token first, each with blocks of its own up to its context."""
    if new_tokens is None:
        num_decodes, num_others = int(rng.integers(0, 5)), int(rng.integers(0, 4))
        num_decodes += num_decodes + num_others == 0
        new_tokens = [1] * num_decodes + rng.integers(2, 20, num_others).tolist()
    first_positions = rng.integers(0, 40, len(new_tokens)).astype(np.int32)
    rows = rng.permutation(num_rows)[: len(new_tokens)].astype(np.int32)
    lengths = first_positions + np.array(new_tokens, np.int32)
    return StepPlan(
        request_ids=[str(row) for row in rows],
        arrivals=rows.tolist(),
        rows=rows,
        num_new_tokens=np.array(new_tokens, np.int32),
        first_positions=first_positions,
        token_ids=rng.integers(0, 100, sum(new_tokens)).astype(np.int32),
        samples=rng.random(len(new_tokens)) < 0.7,
        num_decode_entries=new_tokens.count(1),
        block_tables=tuple(random_table(rng, -(-lengths // block_size)) for block_size in block_sizes),
        new_rows=[],
    )


def random_table(rng, num_blocks):
    """Return a block table of rows with so many blocks, null behind them."""
    table = np.zeros((len(num_blocks), num_blocks.max(initial=0)), np.int32)
    for row, count in enumerate(num_blocks):
        table[row, :count] = rng.integers(1, 1000, count)
    return table


def slots_by_definition(plan, group_id, block_size):
    """Return each token's position and slot, as lists."""
    positions, slots = [], []
    for entry, count in enumerate(plan.num_new_tokens.tolist()):
        for offset in range(count):
            position = int(plan.first_positions[entry]) + offset
            block = int(plan.block_tables[group_id][entry, position // block_size])
            positions.append(position)
            slots.append(block * block_size + position % block_size)
    return positions, slots
