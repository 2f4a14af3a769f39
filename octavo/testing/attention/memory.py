"""What an attention backend does to memory: the cache, which core owns, and the tensors that it is given."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from octavo.core.interfaces.attention import AttentionSpec
from octavo.testing.attention.abilities import QUANTISED
from octavo.testing.attention.exercise import AttentionExercise, over, own
from octavo.testing.attention.numbers import FEW
from octavo.testing.attention.oracle import NAN_BYTE, PagedCase, make_batch, move_blocks
from octavo.testing.attention.trial import Trial, Wanted, batch_tensors

LAYOUTS = (
    "plain",
    "value_is_key_prefix",
    "bfloat16",
    "float16",
    "bfloat16_cache",
    "block_size_1",
    "block_size_7",
    "int8_cache",
    "fp8_e4m3_per_token_head_cache",
    "fp8_e4m3_cache+value_is_key_prefix",
    "int8_per_token_head_cache+value_is_key_prefix",
    "int8_per_token_head_cache+multi_query+head_dim_7+block_size_7",
)
# What a second group of layers may be like that shares the buffer of the first.
SECOND_GROUPS = (
    "bfloat16",
    "float16",
    "float32",
    "bfloat16_cache",
    "block_size_32",
    "block_size_7",
    "window",
    "value_is_key_prefix",
    "fp8_e4m3_cache",
    "int8_per_token_head_cache",
)


@own
class MemoryTests(AttentionExercise):
    """Nothing is written but the slots, nothing read but the contexts, and nothing kept but what `plan` returns."""

    @over(LAYOUTS)
    def test_slot_minus_one_writes_nothing(self, trial: Trial) -> None:
        case = trial.rows([(6, 6)]).case
        backend = trial.make_backend(trial.spec)
        keys, values = case.new_keys_and_values()
        for num_tokens in (1, 6):
            rows = _noise(case, trial.seed)
            before = rows.clone()
            slots = torch.full((num_tokens,), -1, device=rows.device)
            kv_cache = backend.bind(rows, case.kv_cache_spec)
            backend.write(keys[:num_tokens], None if values is None else values[:num_tokens], kv_cache, slots)
            _require_untouched(trial, before, rows, written=set(), why="every slot was -1")

    @over(LAYOUTS)
    def test_a_write_touches_no_other_block(self, trial: Trial) -> None:
        """Some slots -1, pages that lie apart: other blocks, the null block and what lies between stay as they were."""
        case = replace(trial.mixed().case, page_padding_bytes=48)
        buffer, rows = _inside_a_buffer(case, trial.seed)
        before = buffer.clone()
        backend = trial.make_backend(trial.spec)
        slots = torch.from_numpy(case.new_slots().copy()).to(rows.device)
        slots[::3] = -1
        keys, values = case.new_keys_and_values()
        backend.write(keys, values, backend.bind(rows, case.kv_cache_spec), slots)
        written = {slot // trial.spec.block_size for slot in slots.tolist() if slot >= 0}
        _require_untouched(trial, before, buffer, written, "no slot is in it")
        _require_margins(trial, case, before, buffer)
        if torch.equal(before, buffer):
            raise trial.fault("write stored nothing in the rows that bind was given; the cache must be a view of them.")

    @over(LAYOUTS)
    def test_a_write_takes_any_number_of_tokens(self, trial: Trial) -> None:
        wanted = trial.rows([(1, 700), (1, 651), (2, 30)])
        backend = trial.make_backend(trial.spec)
        kv_cache = backend.bind(wanted.case.empty_rows(), wanted.case.kv_cache_spec)
        wanted.case.write_at_once(backend, kv_cache)
        wanted.case.write_new_tokens(backend, kv_cache)
        trial.attend(backend, wanted, kv_cache, backend.plan(wanted.case.batch()))

    @over(LAYOUTS)
    def test_pages_may_lie_apart(self, trial: Trial) -> None:
        """Rows longer than the page, in a buffer whose stride is longer than the rows."""
        wanted = trial.mixed()
        case = replace(wanted.case, page_padding_bytes=48)
        buffer, rows = _inside_a_buffer(case, trial.seed)
        before = buffer.clone()
        backend = trial.make_backend(trial.spec)
        kv_cache = trial.fill(backend, case, rows)
        trial.attend(backend, Wanted(case, wanted.output, wanted.lse), kv_cache, backend.plan(case.batch()))
        _require_margins(trial, case, before, buffer)

    @over(("plain", "window", "value_is_key_prefix", "bfloat16"))
    def test_two_groups_share_one_buffer(self, trial: Trial) -> None:
        """Another dtype, block size or rule in the blocks behind: both write, both plan, both attend, in turns."""
        partners = [replace(trial, spec=spec) for spec in self._second_specs(trial)]
        if not partners:
            pytest.skip(f"{self.backend_class().__name__} serves no second kind of layer beside {trial.ability!r}.")
        for partner in partners:
            first, second = trial.mixed(), _behind(partner.mixed(1), trial.mixed().case.num_blocks)
            backends = [trial.make_backend(wanted.case.spec) for wanted in (first, second)]
            page_bytes = max(wanted.case.kv_cache_spec.page_bytes for wanted in (first, second))
            buffer = torch.full(
                (second.case.num_blocks, page_bytes), NAN_BYTE, dtype=torch.uint8, device=trial.spec.device
            )
            pairs = list(zip(backends, (first, second), strict=True))
            caches = [backend.bind(buffer, wanted.case.kv_cache_spec) for backend, wanted in pairs]
            complainers = (trial, partner)
            for write in (PagedCase.write_history, PagedCase.write_new_tokens):
                for i, (backend, wanted) in enumerate(pairs):
                    before = buffer.clone()
                    write(wanted.case, backend, caches[i])
                    why = "it belongs to no row of the group that wrote"
                    _require_untouched(complainers[i], before, buffer, _blocks(wanted.case), why)
            plans = [backend.plan(wanted.case.batch()) for backend, wanted in pairs]
            for i in (0, 1, 0):
                complainers[i].attend(pairs[i][0], pairs[i][1], caches[i], plans[i])

    @over(FEW)
    def test_blocks_are_used_again_by_other_rows(self, trial: Trial) -> None:
        """What a request leaves behind is neither seen nor in the way."""
        wanted, stale = trial.mixed(), trial.mixed(1)
        backend = trial.make_backend(trial.spec)
        num_blocks = max(wanted.case.num_blocks, stale.case.num_blocks)
        rows = replace(wanted.case, num_blocks=num_blocks).empty_rows()
        for each in (stale, wanted):
            kv_cache = trial.fill(backend, each.case, rows)
            trial.attend(backend, each, kv_cache, backend.plan(each.case.batch()))

    @over(FEW)
    def test_one_plan_serves_all_layers_of_a_step(self, trial: Trial) -> None:
        first = trial.mixed()
        rows = [replace(row, keys=row.keys.flip(0), values=row.values.flip(0)) for row in first.case.rows]
        case = replace(first.case, rows=rows)
        layers = (first, Wanted(case, *case.expected()))
        backend = trial.make_backend(trial.spec)
        caches = [trial.fill(backend, layer.case) for layer in layers]
        plan = backend.plan(first.case.batch())
        for i in (0, 1, 1, 0):
            trial.attend(backend, layers[i], caches[i], plan)

    @over(FEW)
    def test_plans_of_two_batches_live_side_by_side(self, trial: Trial) -> None:
        steps = (trial.mixed(), trial.mixed(1))
        backend = trial.make_backend(trial.spec)
        caches = [trial.fill(backend, step.case) for step in steps]
        plans = [backend.plan(step.case.batch()) for step in steps]
        for i in (0, 1, 0):
            trial.attend(backend, steps[i], caches[i], plans[i])

    @over(FEW)
    def test_steps_of_equal_lengths_may_have_other_blocks(self, trial: Trial) -> None:
        """One after another: lengths, the first slot or the last one say nothing about the rest."""
        wanted = trial.mixed()
        backend = trial.make_backend(trial.spec)
        rows = wanted.case.rows
        for kept in (None, rows[0], rows[-1]):
            held = np.unique(np.concatenate([row.blocks for row in rows if row is not kept]))
            ids = held[held != 0]
            step = wanted if kept is None else replace(wanted, case=move_blocks(wanted.case, ids, np.roll(ids, 1)))
            kv_cache = trial.fill(backend, step.case)
            trial.attend(backend, step, kv_cache, backend.plan(step.case.batch()))

    @over(FEW)
    def test_plans_of_many_groups_and_steps_do_not_mix(self, trial: Trial) -> None:
        """Eight groups with equal specs share a backend: each has a plan in every step."""
        backend = trial.make_backend(trial.spec)
        for first in (3, 2, 4):
            lengths = [[(1, first + number), (2 + number, 9 + 2 * number)] for number in range(8)]
            groups = [trial.rows(each, variant=first) for each in lengths]
            caches = [trial.fill(backend, group.case) for group in groups]
            plans = [backend.plan(group.case.batch()) for group in groups]
            for group, kv_cache, plan in zip(groups, caches, plans, strict=True):
                trial.attend(backend, group, kv_cache, plan)

    @over(FEW)
    def test_a_later_call_leaves_earlier_results_as_they_were(self, trial: Trial) -> None:
        """A result belongs to the caller: no call attends into the memory of one before."""
        step, other = trial.mixed(), trial.mixed(1)
        backend = trial.make_backend(trial.spec)
        kv_cache, sinks, queries = trial.fill(backend, step.case), step.case.sinks, step.case.queries()
        plan = backend.plan(step.case.batch())
        results = [
            trial.output_of(backend, queries, kv_cache, plan, sinks),
            *trial.output_and_lse_of(backend, queries, kv_cache, plan, sinks),
        ]
        before = [result.clone() for result in results]
        for each, cache in ((step, kv_cache), (other, trial.fill(backend, other.case))):
            later = backend.plan(each.case.batch())
            trial.output_of(backend, -each.case.queries(), cache, later, each.case.sinks)
            trial.output_and_lse_of(backend, -each.case.queries(), cache, later, each.case.sinks)
        if not all(torch.equal(one, copy) for one, copy in zip(results, before, strict=True)):
            raise trial.fault(
                "a later attend changed what an earlier one returned; the result belongs to the caller, so return new "
                "tensors each time."
            )

    @over(FEW)
    def test_rows_without_tokens_disturb_no_row(self, trial: Trial) -> None:
        """A batch filled up to a fixed number of rows, with empty ones between the others and behind them."""
        trial.run(trial.rows([(1, 20), (1, 33), (0, 0), (6, 26), (0, 0), (0, 0), (5, 5), (0, 0), (0, 0)]))

    @over(FEW)
    def test_tokens_of_padding_rows_disturb_no_row(self, trial: Trial) -> None:
        """Decode rows, filled up to a fixed number with rows of one token, no context and slot -1."""
        wanted = trial.rows([(1, 20), (1, 33), (1, 7)])
        case = wanted.case
        batch = case.batch()
        padded = make_batch(
            query_starts=np.arange(6, dtype=np.int32),
            context_lens=np.pad(batch.context_lens_host, (0, 2)),
            block_table=np.pad(batch.block_table_host, ((0, 2), (0, 0))),
            slots=np.pad(case.new_slots(), (0, 2), constant_values=-1),
            device=trial.spec.device,
        )
        backend = trial.make_backend(trial.spec)
        kv_cache = backend.bind(case.empty_rows(), case.kv_cache_spec)
        case.write_history(backend, kv_cache)
        keys, values = (None if part is None else _with_noise(part, 2) for part in case.new_keys_and_values())
        assert keys is not None
        backend.write(keys, values, kv_cache, padded.slots)
        output = trial.output_of(backend, _with_noise(case.queries(), 2), kv_cache, backend.plan(padded), case.sinks)
        trial.compare(output[:3], wanted.output, case, "the output beside padding")

    @over(("plain", "sinks", "window", "value_is_key_prefix", "float16", "bfloat16_cache", *QUANTISED))
    def test_what_it_is_given_is_left_as_it_was(self, trial: Trial) -> None:
        """Queries, keys, values, sinks, batch; and attending leaves the cache as it was."""
        case = trial.mixed().case
        backend = trial.make_backend(trial.spec)
        rows = case.empty_rows()
        kv_cache = backend.bind(rows, case.kv_cache_spec)
        case.write_history(backend, kv_cache)
        batch = case.batch()
        keys, values = case.new_keys_and_values()
        tensors = {"key": keys, "value": values, "query": case.queries(), "sinks": case.sinks}
        given = {name: tensor.clone() for name, tensor in tensors.items() if tensor is not None}
        before = {name: tensor.clone() for name, tensor in given.items()}
        batch_before = batch_tensors(batch)

        backend.write(given["key"], given.get("value"), kv_cache, batch.slots)
        stored = rows.clone()
        plan = backend.plan(batch)
        backend.attend(given["query"], kv_cache, plan, sinks=given.get("sinks"))
        backend.attend(given["query"], kv_cache, plan, sinks=given.get("sinks"), return_lse=True)
        changed = [name for name, tensor in given.items() if not torch.equal(tensor, before[name])]
        changed += [
            f"batch.{name}"
            for name, array in batch_tensors(batch).items()
            if not np.array_equal(array, batch_before[name])
        ]
        if changed:
            raise trial.fault(f"the backend changed {', '.join(changed)} in place; it must leave them as they were.")
        _require_untouched(trial, stored, rows, written=set(), why="plan and attend write nothing")

    @over(FEW)
    def test_the_same_call_gives_the_same_bits(self, trial: Trial) -> None:
        wanted = trial.mixed()
        backend = trial.make_backend(trial.spec)
        kv_cache = trial.fill(backend, wanted.case)
        plans = [backend.plan(wanted.case.batch()) for _ in range(2)]
        queries, sinks = wanted.case.queries(), wanted.case.sinks
        outputs, lses = [], []
        for plan in (*plans, plans[0]):
            outputs.append(trial.output_of(backend, queries, kv_cache, plan, sinks).clone())
            with_lse, lse = trial.output_and_lse_of(backend, queries, kv_cache, plan, sinks)
            lses.append((with_lse.clone(), lse.clone()))
        same = all(torch.equal(outputs[0], other) for other in outputs)
        same &= all(torch.equal(a, b) for other in lses for a, b in zip(lses[0], other, strict=True))
        if not same:
            raise trial.fault("the same call gave other bits the second time; results must be deterministic.")

    @over(("plain", "value_is_key_prefix", "float16", "bfloat16"))
    def test_tensors_may_be_views_of_a_fused_projection(self, trial: Trial) -> None:
        """Queries, keys and values side by side in one matrix, as one projection makes them."""
        wanted = trial.mixed()
        case = wanted.case
        backend = trial.make_backend(trial.spec)
        kv_cache = backend.bind(case.empty_rows(), case.kv_cache_spec)
        case.write_history(backend, kv_cache)
        keys, values = case.new_keys_and_values()
        parts = [case.queries(), keys] + ([] if values is None else [values])
        fused = torch.cat([part.flatten(1) for part in parts], dim=1)
        cut = torch.split(fused, [part[0].numel() for part in parts], dim=1)
        query, key, *value = (torch.unflatten(view, 1, part.shape[1:]) for view, part in zip(cut, parts, strict=True))
        batch = case.batch()
        backend.write(key, value[0] if value else None, kv_cache, batch.slots)
        output = trial.output_of(backend, query, kv_cache, backend.plan(batch), case.sinks)
        trial.compare(output, wanted.output, case, "given views of a fused projection, the output")

    def _second_specs(self, trial: Trial) -> list[AttentionSpec]:
        specs = []
        for ability in SECOND_GROUPS:
            spec = self.served_spec(ability, trial.plain)
            if spec is not None and spec != trial.spec:
                specs.append(spec)
        return specs


def _noise(case: PagedCase, seed: int) -> Tensor:
    """Return rows of random bytes. [num_blocks, page bytes and padding]"""
    return _random_bytes(case.empty_rows().shape, case.spec.device, seed)


def _inside_a_buffer(case: PagedCase, seed: int) -> tuple[Tensor, Tensor]:
    """Return a buffer of random bytes, and its part that is a case's rows: 64 bytes in, and 80 from the end."""
    num_blocks, row_bytes = case.empty_rows().shape
    buffer = _random_bytes((num_blocks, 64 + row_bytes + 80), case.spec.device, seed)
    rows = buffer[:, 64 : 64 + row_bytes]
    rows.copy_(case.empty_rows())
    return buffer, rows


def _random_bytes(shape: tuple[int, ...], device: str, seed: int) -> Tensor:
    noise = np.random.default_rng(seed).integers(0, 256, size=shape, dtype=np.uint8)
    return torch.from_numpy(noise).to(device)


def _with_noise(tokens: Tensor, num_tokens: int) -> Tensor:
    """Return rows with some more behind them, of NaN. [num_tokens + more, ...]"""
    return torch.cat([tokens, torch.full_like(tokens[:1], torch.nan).expand(num_tokens, *tokens.shape[1:])])


def _blocks(case: PagedCase) -> set[int]:
    """Return the ids of all blocks of the rows."""
    return {int(block_id) for row in case.rows for block_id in row.blocks if block_id}


def _require_untouched(trial: Trial, before: Tensor, after: Tensor, written: set[int], why: str) -> None:
    """Complain about each block whose bytes changed although it is not among the written ones."""
    changed = (before != after).any(dim=1).nonzero()[:, 0].tolist()
    if wrong := [block_id for block_id in changed if block_id not in written]:
        name = "the null block, 0," if wrong[0] == 0 else f"block {wrong[0]}"
        raise trial.fault(f"bytes of {name} changed, though {why} (blocks changed so: {wrong[:8]}).")


def _require_margins(trial: Trial, case: PagedCase, before: Tensor, buffer: Tensor) -> None:
    """Complain about bytes that changed before or after the pages."""
    page_end = 64 + case.kv_cache_spec.page_bytes
    for part in (slice(0, 64), slice(page_end, None)):
        if not torch.equal(before[:, part], buffer[:, part]):
            raise trial.fault(
                "bytes between the pages of two blocks changed; pages lie as far apart as the stride of the rows says, "
                "which is not their length."
            )


def _behind(wanted: Wanted, num_blocks: int) -> Wanted:
    """Return a batch whose blocks come after the first `num_blocks` ones: one pool, two groups."""
    rows = [
        replace(row, blocks=np.where(row.blocks == 0, 0, row.blocks + num_blocks).astype(np.int32))
        for row in wanted.case.rows
    ]
    return replace(wanted, case=replace(wanted.case, rows=rows, num_blocks=wanted.case.num_blocks + num_blocks))
