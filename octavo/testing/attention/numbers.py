"""Whether an attention backend computes attention, whatever the batch looks like."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from octavo.testing.attention.abilities import ABILITIES, COMBINATIONS, QUANTISED, RULES, SIZES, can_combine
from octavo.testing.attention.exercise import AttentionExercise, over, own, with_abilities
from octavo.testing.attention.oracle import (
    PagedCase,
    RowHistory,
    move_blocks,
    number_size,
    replace_rows,
    stored_keys_and_values,
)
from octavo.testing.attention.trial import Trial, Wanted, wanted_of

# The unquantised layouts and all quantised formats, for what depends on how numbers are stored.
FORMATS = ("plain", "value_is_key_prefix", *QUANTISED)

# One of each kind, for what depends little on the rule.
FEW = ("plain", "window", "sinks", "value_is_key_prefix", "window+chunk+keep_first+soft_cap+sinks")

# Abilities that can be asked for together with one that comes after them in the list.
HAVING_A_LATER_PARTNER = tuple(
    ability
    for number, ability in enumerate(ABILITIES)
    if any(can_combine(ability, other) for other in [*ABILITIES][number + 1 :])
)


@own
class NumberTests(AttentionExercise):
    """Output and log-sum-exp against the definition in float64."""

    @over((*ABILITIES, *SIZES, *COMBINATIONS))
    def test_output_and_lse_equal_the_definition(self, trial: Trial) -> None:
        """Decode rows, prefill rows with and without a prefix, and empty rows, in scattered pages full of NaN."""
        trial.run(trial.mixed())

    @with_abilities(HAVING_A_LATER_PARTNER)
    def test_abilities_work_together(self, ability: str) -> None:
        """Each ability with each of those that come after it, where the backend declares the pair."""
        names = [*ABILITIES, *self.specs]
        pairs = [ability]
        if "+" not in ability:
            self.require_declared(ability)
            later = names[names.index(ability) + 1 :]
            pairs = [f"{ability}+{other}" for other in later if can_combine(ability, other, self.abilities())]
            plain = self.find_plain()
            pairs = [pair for pair in pairs if self.served_spec(pair, plain) is not None]
        if not pairs:
            pytest.skip(f"{self.backend_class().__name__} declares {ability!r} together with nothing that comes later.")
        for pair in pairs:
            self.exercise("test_abilities_work_together", pair, _run_small)

    @over((*RULES, "large_window", "large_chunk", "window+large_keep_first", "block_size_3"))
    def test_contexts_around_the_edges_of_blocks_and_rules(self, trial: Trial) -> None:
        trial.run(trial.rows(trial.edge_lengths()))

    @over(FEW)
    def test_long_rows_have_no_seam(self, trial: Trial) -> None:
        trial.run(trial.rows([(1, 1100), (1, 90), (40, 600), (260, 260), (330, 340)]))

    @over(FEW)
    def test_many_rows_have_no_seam(self, trial: Trial) -> None:
        decode = [(1, 1 + number * 37 % 61) for number in range(72)]
        trial.run(trial.rows([*decode, *((2 + number, 2 + 3 * number) for number in range(8))]))

    @over(FEW)
    def test_any_number_of_rows_of_any_kind(self, trial: Trial) -> None:
        """Decode rows alone, prefill rows alone, one row alone, one token alone."""
        for lengths in ([(1, 1)], [(1, 40)], [(2, 2)], [(7, 40)], [(1, n) for n in range(3, 60, 4)], [(9, 9), (5, 33)]):
            trial.run(trial.rows(lengths))

    @over(RULES)
    def test_each_row_alone_gets_what_it_gets_among_others(self, trial: Trial) -> None:
        wanted = trial.mixed()
        start = 0
        for r, row in enumerate(wanted.case.rows):
            tokens = slice(start, start + row.num_queries)
            start = tokens.stop
            if row.num_queries:
                trial.run(Wanted(wanted.case.only(r), wanted.output[tokens], wanted.lse[tokens]))

    @over(FEW)
    def test_the_order_of_rows_makes_no_difference(self, trial: Trial) -> None:
        """Each row keeps its pages; only its place in the batch changes."""
        wanted = trial.mixed()
        backend = trial.make_backend(trial.spec)
        kv_cache = trial.fill(backend, wanted.case)
        is_decode = [row.num_queries == 1 for row in wanted.case.rows]
        rng = np.random.default_rng(trial.seed)
        order = sorted(rng.permutation(len(is_decode)).tolist(), key=lambda r: not is_decode[r])
        starts = np.cumsum([0, *(row.num_queries for row in wanted.case.rows)])
        tokens = np.concatenate([np.arange(starts[r], starts[r + 1]) for r in order])
        reordered = Wanted(replace_rows(wanted.case, order), wanted.output[tokens], wanted.lse[tokens])
        trial.attend(backend, reordered, kv_cache, backend.plan(reordered.case.batch()))

    @over(FEW)
    def test_pages_may_lie_in_any_order(self, trial: Trial) -> None:
        wanted = trial.mixed()
        ids = np.unique(np.concatenate([row.blocks for row in wanted.case.rows]))
        ids = ids[ids != 0]
        for places in (np.arange(1, len(ids) + 1), np.arange(len(ids), 0, -1)):
            trial.run(replace(wanted, case=move_blocks(wanted.case, ids, places)))

    @over(FEW)
    def test_pages_may_lie_far_back_in_a_large_cache(self, trial: Trial) -> None:
        """Hundreds of blocks, and slots that 16 bits do not hold."""
        wanted = trial.mixed()
        ids = np.unique(np.concatenate([row.blocks for row in wanted.case.rows]))
        ids = ids[ids != 0]
        num_blocks = max(600, 70_000 // trial.spec.block_size)
        # From the front to the back, the last block included.
        places = np.linspace(1, num_blocks - 1, len(ids)).astype(np.int32)
        case = replace(move_blocks(wanted.case, ids, places), num_blocks=num_blocks)
        trial.run(replace(wanted, case=case))

    @over(FEW)
    def test_table_entries_past_the_context_may_hold_anything(self, trial: Trial) -> None:
        wanted = trial.mixed()
        for entry in (0, -1, 1, wanted.case.num_blocks + 1000, np.iinfo(np.int32).max):
            filler = np.full_like(wanted.case.table_filler, entry)
            trial.run(Wanted(replace(wanted.case, table_filler=filler), wanted.output, wanted.lse))

    @over(RULES)
    def test_what_no_query_sees_makes_no_difference(self, trial: Trial) -> None:
        """Unread slots full of NaN, of zeros, and of large numbers."""
        for fill in (0xFF, 0x00, 0x7B):
            trial.run(trial.mixed(), fill=fill)

    @over((*FEW, *QUANTISED))
    def test_one_rows_nan_stays_in_the_row(self, trial: Trial) -> None:
        healthy = trial.rows([(1, 30), (1, 33), (1, 31), (4, 32), (5, 36)])
        rows = list(healthy.case.rows)
        for sick in (1, 3):
            nan = torch.full_like(rows[sick].keys, torch.nan)
            rows[sick] = replace(rows[sick], keys=nan, values=nan[..., :1].expand_as(rows[sick].values).clone())
        case = replace(healthy.case, rows=rows)
        backend = trial.make_backend(trial.spec)
        kv_cache = trial.fill(backend, case)
        output = trial.output_of(backend, case.queries(), kv_cache, backend.plan(case.batch()), case.sinks)
        others = [0, 2, 7, 8, 9, 10, 11]
        part = replace_rows(case, [0, 2, 4])
        trial.cases.append(part)
        trial.compare(output[others], healthy.output[others], part, "beside rows whose keys are NaN, the output")

    @over(FORMATS)
    def test_a_nan_among_the_keys_or_values_is_not_lost(self, trial: Trial) -> None:
        """One number of one head, in what the last query of each row stores: a model gone wrong must not look right."""
        drawn = trial.rows([(1, 1), (1, 30), (5, 36)]).case
        group_size = trial.spec.num_query_heads // trial.spec.num_kv_heads
        for name in ("keys",) if trial.spec.value_is_key_prefix else ("keys", "values"):
            rows = []
            for row in drawn.rows:
                sick = getattr(row, name).clone()
                sick[-1, -1, 3] = torch.nan
                rows.append(replace(row, **{name: sick}))
            case = replace(drawn, rows=rows)
            trial.cases.append(case)
            backend = trial.make_backend(trial.spec)
            output = trial.output_of(
                backend, case.queries(), trial.fill(backend, case), backend.plan(case.batch()), case.sinks
            )
            # A NaN key makes its score NaN and so every weight; a NaN value spoils at least its own place.
            is_nan = output[[0, 1, 6], -group_size:].isnan()
            if not (is_nan.all() if name == "keys" else is_nan[..., 3].all()):
                raise trial.fault(f"NaN among the {name} that a query sees is lost: its output is finite.")

    @over(FORMATS)
    def test_scores_of_nan_alone_are_not_lost(self, trial: Trial) -> None:
        """A NaN query, and keys that all are NaN, make all scores NaN, which is not the same as seeing nothing."""
        drawn = trial.rows([(1, 1), (1, 30), (5, 5), (5, 36)]).case
        for name in ("queries", "keys"):
            sick: list[dict[str, Any]] = [{name: torch.full_like(getattr(row, name), torch.nan)} for row in drawn.rows]
            case = replace(drawn, rows=[replace(row, **nan) for row, nan in zip(drawn.rows, sick, strict=True)])
            trial.cases.append(case)
            backend = trial.make_backend(trial.spec)
            output = trial.output_of(
                backend, case.queries(), trial.fill(backend, case), backend.plan(case.batch()), case.sinks
            )
            if not output.isnan().all():
                raise trial.fault(f"All {name} are NaN, and the output has finite numbers.")

    @over(tuple(QUANTISED))
    def test_outliers_are_cut_off_or_scaled(self, trial: Trial) -> None:
        """Numbers far beyond the codes, which some layers of most models have, and vectors of zeros alone."""
        drawn = trial.rows([(1, 20), (1, 41), (20, 40)], score_size=0.002).case
        rng = np.random.default_rng(trial.seed)
        rows = []
        for row in drawn.rows:
            parts = {}
            for name in ("keys", "values"):
                numbers = getattr(row, name).clone()
                numbers[torch.from_numpy(rng.random(numbers.shape) < 0.02)] *= 3000
                numbers[torch.from_numpy(rng.random(numbers.shape[:-1]) < 0.1)] = 0
                parts[name] = numbers
            rows.append(replace(row, **parts))
        case = replace(drawn, rows=rows)
        # Sums have errors of the size of the largest value in them.
        largest = max(np.abs(stored_keys_and_values(row, trial.spec)[1]).max() for row in rows)
        trial.run(wanted_of(case), slack=float(largest) / number_size(trial.spec))

    @over(RULES)
    def test_a_prefill_in_pieces_equals_a_whole_one(self, trial: Trial) -> None:
        """Every step through one backend: what an earlier step planned must not matter."""
        wanted = trial.rows([(50, 50)])
        backend = trial.make_backend(trial.spec)
        kv_cache = backend.bind(wanted.case.empty_rows(), wanted.case.kv_cache_spec)
        row, block_size = wanted.case.rows[0], trial.spec.block_size
        for start, end in ((0, 17), (17, 18), (18, 45), (45, 49), (49, 50)):
            piece = RowHistory(
                row.keys[:end], row.values[:end], row.queries[start:end], row.blocks[: -(-end // block_size)]
            )
            step = replace(wanted.case, rows=[piece])
            step.write_new_tokens(backend, kv_cache)
            expected = Wanted(step, wanted.output[start:end], wanted.lse[start:end])
            trial.attend(backend, expected, kv_cache, backend.plan(step.batch()))

    @over(("plain", "window", "soft_cap", "sinks", "value_is_key_prefix"))
    def test_large_scores_do_not_overflow(self, trial: Trial) -> None:
        """Scores of a hundred and more, whose exponential no float32 holds."""
        trial.run(trial.rows([(1, 20), (1, 41), (20, 40)], score_size=60.0), slack=60)

    @over(("float16+small_scale", "bfloat16+small_scale", "float16+value_is_key_prefix+small_scale"))
    def test_large_queries_do_not_overflow(self, trial: Trial) -> None:
        """Products of queries and keys that no float16 holds, before the scale makes them small."""
        trial.run(trial.rows([(1, 20), (1, 41), (20, 40)], score_size=8000.0), slack=60)

    @over(("plain", "window", "sinks", "value_is_key_prefix"))
    def test_rows_may_share_the_blocks_of_a_common_prefix(self, trial: Trial) -> None:
        block_size = trial.spec.block_size
        trial.run(wanted_of(_sharing(trial, (5, 2 * block_size + 4))))

    @over(("plain", "window", "sinks", "value_is_key_prefix"))
    def test_a_row_reads_what_another_writes_in_the_same_step(self, trial: Trial) -> None:
        if not self.backend_class().writes_before_reads:
            pytest.skip(f"{self.backend_class().__name__} sets writes_before_reads to False.")
        context_len = 2 * trial.spec.block_size + 3
        trial.run(wanted_of(_sharing(trial, (context_len, context_len))))


def _run_small(trial: Trial) -> None:
    """A decode row, one without context to speak of, and a prefill row with a prefix."""
    trial.run(trial.rows([(1, 21), (1, 1), (5, 24)]))


def _sharing(trial: Trial, leader: tuple[int, int]) -> PagedCase:
    """Return rows that all begin with the two blocks of the last one, the leader of the given lengths."""
    spec, shared = trial.spec, 2 * trial.spec.block_size
    # Drawn without a window, so that no block of the prefix is given up; blocks that no query sees may stay.
    keeps_all = replace(spec, window=None, chunk=None, keep_first=0)
    drawn = replace(trial, spec=keeps_all).rows([(1, shared + 1), (1, shared + 9), (4, shared + 4), leader]).case
    first = drawn.rows[-1]
    rows = [
        replace(
            row,
            keys=torch.cat((first.keys[:shared], row.keys[shared:])),
            values=torch.cat((first.values[:shared], row.values[shared:])),
            blocks=np.concatenate((first.blocks[:2], row.blocks[2:])),
        )
        for row in drawn.rows
    ]
    case = replace(drawn, spec=spec, rows=rows)
    trial.cases.append(case)
    return case
