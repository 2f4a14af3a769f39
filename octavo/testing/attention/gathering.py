"""What `gather` returns, of backends that offer it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from octavo.testing.attention.exercise import AttentionExercise, over, own
from octavo.testing.attention.oracle import PagedCase
from octavo.testing.attention.stored_numbers import stored_numbers
from octavo.testing.attention.trial import Trial

KEYS_ALONE = (
    "value_is_key_prefix",
    "value_is_key_prefix_16_heads",
    "value_is_key_prefix+bfloat16",
    "value_is_key_prefix+float16",
    "value_is_key_prefix+bfloat16_cache",
    "value_is_key_prefix+float32_cache",
    "value_is_key_prefix+block_size_1",
    "value_is_key_prefix+block_size_7",
    "value_is_key_prefix+fp8_e4m3_cache",
    "value_is_key_prefix+bfloat16_and_int8_per_token_head_cache",
    "value_is_key_prefix+float16_and_fp8_e4m3_per_token_head_cache+block_size_7",
)


@own
class GatherTests(AttentionExercise):
    """The keys that were stored, in the order of the slots. Skipped where `can_gather` is False."""

    @over(KEYS_ALONE)
    def test_gathered_keys_are_those_that_were_written(self, trial: Trial) -> None:
        """Each row's context, all rows at once, slots in any order, one of them twice, and none at all."""
        self._require_gather()
        case = replace(trial.mixed().case, page_padding_bytes=48)
        backend = trial.make_backend(trial.spec)
        kv_cache = trial.fill(backend, case)
        slots, keys = _stored(case)
        rng = np.random.default_rng(trial.seed)
        for order in (
            np.arange(len(slots)),
            rng.permutation(len(slots)),
            np.zeros(2, np.int64),
            np.empty(0, np.int64),
            *np.split(np.arange(len(slots)), np.cumsum([row.context_len for row in case.rows])[:-1]),
        ):
            gathered = backend.gather(kv_cache, _on(case, slots[order]))
            _require_equal(trial, gathered, keys[torch.from_numpy(order)])

    @over(KEYS_ALONE[:1])
    def test_many_keys_are_gathered_from_far_back_in_a_large_cache(self, trial: Trial) -> None:
        self._require_gather()
        case = replace(trial.rows([(1, 1500), (3, 700)]).case, num_blocks=70_000 // trial.spec.block_size)
        backend = trial.make_backend(trial.spec)
        kv_cache = backend.bind(case.empty_rows(), case.kv_cache_spec)
        slots = np.arange((case.num_blocks - 200) * trial.spec.block_size, case.num_blocks * trial.spec.block_size)
        keys = case.rows[0].keys[: len(slots)]
        backend.write(keys.to(trial.spec.device), None, kv_cache, _on(case, slots[: len(keys)]))
        _require_equal(trial, backend.gather(kv_cache, _on(case, slots[: len(keys)])), keys[:, 0])

    @over(KEYS_ALONE[:2])
    def test_what_was_gathered_is_the_callers(self, trial: Trial) -> None:
        """Changing it changes no page, and a later call does not change it."""
        self._require_gather()
        case = trial.mixed().case
        backend = trial.make_backend(trial.spec)
        rows = case.empty_rows()
        kv_cache = trial.fill(backend, case, rows)
        slots, keys = _stored(case)
        before, given = rows.clone(), _on(case, slots)
        first = backend.gather(kv_cache, given)
        backend.gather(kv_cache, _on(case, slots[::-1].copy()))
        _require_equal(trial, first, keys)
        first.zero_()
        if not torch.equal(before, rows):
            raise trial.fault("what gather returned is a view of the cache; it must be a copy.")
        if given.tolist() != slots.tolist():
            raise trial.fault("gather changed the slots that it was given.")

    @over((KEYS_ALONE[0], *(name for name in KEYS_ALONE if "fp8" in name or "int8" in name)))
    def test_nan_is_gathered_as_nan(self, trial: Trial) -> None:
        self._require_gather()
        drawn = trial.rows([(1, 20), (3, 9)]).case
        keys = drawn.rows[1].keys.clone()
        keys[4, 0, 5] = torch.nan
        case = replace(drawn, rows=[drawn.rows[0], replace(drawn.rows[1], keys=keys)])
        backend = trial.make_backend(trial.spec)
        slots, stored = _stored(case)
        gathered = backend.gather(trial.fill(backend, case), _on(case, slots))
        _require_equal(trial, gathered, stored)

    def _require_gather(self) -> None:
        if not self.backend_class().can_gather:
            pytest.skip(f"{self.backend_class().__name__} sets can_gather to False.")


def _stored(case: PagedCase) -> tuple[np.ndarray[tuple[int], np.dtype[np.int64]], Tensor]:
    """Return every slot of the rows' contexts, and the keys that are to be found there, in the spec's dtype."""
    slots = np.concatenate([row.slots(0, row.context_len, case.spec.block_size) for row in case.rows])
    keys = torch.cat([row.keys[:, 0] for row in case.rows])
    return slots, keys


def _on(case: PagedCase, slots: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Tensor:
    return torch.from_numpy(slots).to(case.spec.device)


def _require_equal(trial: Trial, gathered: Tensor, keys: Tensor) -> None:
    """Complain unless these are the keys, as they are after having been stored."""
    dtype = getattr(torch, trial.spec.dtype)
    wanted = torch.from_numpy(stored_numbers(keys, trial.spec.kv_dtype)).to(dtype)
    if not isinstance(gathered, Tensor) or gathered.shape != wanted.shape or gathered.dtype != dtype:
        kind = f"{gathered.dtype} {tuple(gathered.shape)}" if isinstance(gathered, Tensor) else type(gathered).__name__
        raise trial.fault(f"gather returned {kind}; it must return {dtype} {tuple(wanted.shape)}.")
    got = gathered.cpu()
    is_wrong = ((got != wanted) & ~(got.isnan() & wanted.isnan())).any(dim=1)
    if is_wrong.any():
        first = int(is_wrong.nonzero()[0])
        raise trial.fault(
            f"{int(is_wrong.sum())} of {len(wanted)} gathered keys are not those that were written to their slots, "
            f"number {first} the first."
        )
