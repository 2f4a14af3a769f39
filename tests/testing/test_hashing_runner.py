"""The runner without a model notices what a model would only answer wrongly to."""

import numpy as np
import pytest

from octavo.core.interfaces import ChunkedLocalSpec, FullAttentionSpec, SlidingWindowSpec
from octavo.core.step_plan import RowSampling, StepPlan
from octavo.testing.hashing_runner import HashingRunner, next_token

FULL = FullAttentionSpec(2, 1, 1, "float32")
WINDOW = SlidingWindowSpec(2, 1, 1, "float32", window=3)
WIDE_WINDOW = SlidingWindowSpec(4, 1, 1, "float32", window=3)
CHUNK = ChunkedLocalSpec(2, 1, 1, "float32", chunk=4)


def plan_of(tables: list[list[int]], first: int, token_ids: list[int], *, is_new: bool = False) -> StepPlan:
    """A plan of one request, which is told of at first."""
    row = RowSampling(0, 0.0, 1.0, 0, 0.0, 0, 0, 1, 0, (), None)
    return StepPlan(
        ["r"],
        [0],
        np.array([0], np.int32),
        np.array([len(token_ids)], np.int32),
        np.array([first], np.int32),
        np.array(token_ids, np.int32),
        np.array([True]),
        int(len(token_ids) == 1),
        tuple(np.array([table], np.int32) for table in tables),
        [row] if is_new else [],
    )


def answer(runner: HashingRunner, plan: StepPlan) -> int:
    (token_id,) = runner.run(plan).token_ids
    return token_id


def test_the_answer_is_that_of_the_whole_context_whatever_a_window_keeps():
    runner = HashingRunner(10, [FULL, WINDOW])
    assert answer(runner, plan_of([[1, 2, 3], [4, 5, 6]], 0, [7, 8, 9, 10, 11], is_new=True)) == next_token(
        [7, 8, 9, 10, 11], 1000
    )
    # The token at 5 reads from 3 on, which is in the second block.
    assert answer(runner, plan_of([[1, 2, 3], [0, 5, 6]], 5, [12])) == next_token([7, 8, 9, 10, 11, 12], 1000)


@pytest.mark.parametrize(("spec", "needed"), [(FULL, 0), (WINDOW, 1), (CHUNK, 2)])
def test_a_null_entry_in_what_is_read_is_noticed(spec, needed):
    runner = HashingRunner(10, [FULL, spec])
    tables = [[1, 2, 3], [4, 5, 6]]
    answer(runner, plan_of(tables, 0, [7, 8, 9, 10, 11], is_new=True))
    answer(runner, plan_of([tables[0], [0] * needed + tables[1][needed:]], 5, [12]))
    with pytest.raises(AssertionError, match="reaches into the null block of group 1"):
        answer(runner, plan_of([tables[0], [0] * (needed + 1) + tables[1][needed + 1 :]], 5, [12]))


def test_a_block_that_another_group_wrote_to_meanwhile_is_not_read():
    runner = HashingRunner(10, [FULL, WIDE_WINDOW])
    answer(runner, plan_of([[1, 2], [4, 5]], 0, [7, 8, 9, 10], is_new=True))
    # Block 4 is the first group's, for one token. That is all it takes.
    answer(runner, plan_of([[4], [6]], 0, [1], is_new=True))
    with pytest.raises(AssertionError, match="group 1 reads what another one wrote"):
        answer(runner, plan_of([[1, 2, 3], [4, 5]], 4, [11]))


def test_a_slot_that_nobody_wrote_is_not_read():
    runner = HashingRunner(10, [FULL, WINDOW])
    with pytest.raises(AssertionError, match="a slot that nobody wrote"):
        answer(runner, plan_of([[1, 2], [4, 5]], 2, [9], is_new=True))


def test_another_token_in_a_window_is_noticed():
    runner = HashingRunner(10, [FULL, WINDOW])
    answer(runner, plan_of([[1, 2], [4, 5]], 0, [7, 8, 9], is_new=True))
    runner.corrupt(4)
    with pytest.raises(AssertionError, match=r"group 1 has other tokens at 1 and behind: \[9, 9, 10\]"):
        answer(runner, plan_of([[1, 2], [4, 5]], 3, [10]))


def test_where_no_group_keeps_all_the_runner_is_told_what_a_hit_stands_for():
    runner = HashingRunner(10, [CHUNK], tokens_of=lambda request_id: [7, 8, 9, 10, 11, 12])
    assert answer(runner, plan_of([[0, 0, 1]], 4, [11], is_new=True)) == next_token([7, 8, 9, 10, 11], 1000)
    assert answer(runner, plan_of([[0, 0, 1]], 5, [12])) == next_token([7, 8, 9, 10, 11, 12], 1000)
    with pytest.raises(ValueError, match="no group keeps all tokens of a request, so tokens_of must say what they are"):
        HashingRunner(10, [CHUNK])
