"""The suite for attention backends: a right one passes, and each mistake is caught under the right name."""

from __future__ import annotations

import itertools
import math
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from eager_backends import Eager
from pydantic import BaseModel
from torch import Tensor

import octavo.testing
from octavo.core.interfaces.attention import AttentionBackend, AttentionBatch, AttentionSpec
from octavo.testing import AttentionBackendSuite
from octavo.testing.attention.abilities import ABILITIES, COMBINATIONS
from octavo.testing.attention.suite import list_tests, reproduce
from octavo.testing.attention.trial import Fault

pytest_plugins = ["pytester"]

DEFINITION = "test_output_and_lse_equal_the_definition"
NAN_KEPT = "test_a_nan_among_the_keys_or_values_is_not_lost"


class TestEager(AttentionBackendSuite):
    backend = Eager
    seeds = (0,)


def complaint_about(backend: type[AttentionBackend], ability: str, test: str) -> str:
    """Return what the suite says about a faulty backend."""
    with pytest.raises(Fault) as fault:
        reproduce(backend, ability, test=test)
    return str(fault.value)


# --- Mistakes about who sees whom, and about how scores become weights: each is found in exactly the abilities that
# --- it spoils, and in no other.


class WindowTooWide(Eager):
    def is_in_window(self, query: Tensor, key: Tensor, window: int) -> Tensor:
        return key >= query - window


class WindowTooNarrow(Eager):
    def is_in_window(self, query: Tensor, key: Tensor, window: int) -> Tensor:
        return (key > query - window + 1) | (key == query)


class ChunkTooLong(Eager):
    def is_in_chunk(self, query: Tensor, key: Tensor, chunk: int) -> Tensor:
        return key >= query - query % chunk - 1


class ChunkNotAligned(Eager):
    def is_in_chunk(self, query: Tensor, key: Tensor, chunk: int) -> Tensor:
        return key > query - chunk


class IgnoresKeepFirst(Eager):
    def is_kept(self, key: Tensor) -> Tensor:
        return key < 0


class KeepsOneLess(Eager):
    def is_kept(self, key: Tensor) -> Tensor:
        return key < self.spec.keep_first - 1


class IgnoresSoftCap(Eager):
    def cap(self, scores: Tensor) -> Tensor:
        return scores


class NoSinksInTheDenominator(Eager):
    def with_sinks(self, denominator: Tensor, sinks: Tensor) -> Tensor:
        return denominator


class OneSinkForAllHeads(Eager):
    def with_sinks(self, denominator: Tensor, sinks: Tensor) -> Tensor:
        return torch.logaddexp(denominator, sinks.double().mean())


class HeadsInterleaved(Eager):
    def kv_heads(self) -> Tensor:
        return torch.arange(self.spec.num_query_heads) % self.spec.num_kv_heads


class ValueIsKeySuffix(Eager):
    def fetch(self, kv_cache: Tensor, table: Tensor, context_len: int) -> tuple[Tensor, Tensor]:
        keys, values = super().fetch(kv_cache, table, context_len)
        return (keys, keys[..., -self.spec.head_dim_v :]) if self.spec.value_is_key_prefix else (keys, values)


class ScaleFromHeadDim(Eager):
    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        self.factor = spec.head_dim**-0.5 / spec.scale

    def attend(self, query: Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().attend(query * self.factor, *args, **kwargs)


def all_specs() -> dict[str, AttentionSpec]:
    """Return the spec of every ability that is tried, as the suite does for `Eager`."""
    suite = TestEager()
    plain = suite.find_plain()
    specs = {ability: suite.served_spec(ability, plain) for ability in (*ABILITIES, *COMBINATIONS)}
    return {ability: spec for ability, spec in specs.items() if spec is not None}


@pytest.mark.parametrize(
    ("mutant", "is_spoiled"),
    [
        (WindowTooWide, lambda spec: spec.window),
        (WindowTooNarrow, lambda spec: (spec.window or 0) > 1),
        (ChunkTooLong, lambda spec: spec.chunk and spec.window != 1),
        (ChunkNotAligned, lambda spec: (spec.chunk or 0) > 1),
        (IgnoresKeepFirst, lambda spec: spec.keep_first and (spec.window or spec.chunk)),
        (KeepsOneLess, lambda spec: spec.keep_first and (spec.window or spec.chunk)),
        (IgnoresSoftCap, lambda spec: spec.soft_cap),
        (NoSinksInTheDenominator, lambda spec: spec.sinks),
        (OneSinkForAllHeads, lambda spec: spec.sinks),
        (HeadsInterleaved, lambda spec: 1 < spec.num_kv_heads < spec.num_query_heads),
        (ValueIsKeySuffix, lambda spec: spec.value_is_key_prefix),
        (ScaleFromHeadDim, lambda spec: spec.scale != spec.head_dim**-0.5),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_a_wrong_rule_is_found_in_the_abilities_that_it_spoils(
    mutant: type[Eager], is_spoiled: Callable[[AttentionSpec], object]
) -> None:
    found, complaints = [], []
    for ability in all_specs():
        try:
            reproduce(mutant, ability, test=DEFINITION)
        except Fault as fault:
            found.append(ability)
            complaints.append(str(fault).partition(": output and lse equal the definition: ")[0])
    assert found
    assert complaints == found
    assert found == [ability for ability, spec in all_specs().items() if is_spoiled(spec)]


# --- Mistakes about numbers and memory.


class LseInBaseTwo(Eager):
    def attend(self, *args: Any, **kwargs: Any) -> Any:
        result = super().attend(*args, **kwargs)
        return (result[0], result[1] / math.log(2)) if isinstance(result, tuple) else result


class LseInQueryDtype(Eager):
    def attend(self, query: Tensor, *args: Any, **kwargs: Any) -> Any:
        result = super().attend(query, *args, **kwargs)
        return (result[0], result[1].to(query.dtype)) if isinstance(result, tuple) else result


class LseAlone(Eager):
    def attend(self, *args: Any, **kwargs: Any) -> Any:
        result = super().attend(*args, **kwargs)
        return result[1] if isinstance(result, tuple) else result


class OutputInFloat32(Eager):
    def attend(self, *args: Any, **kwargs: Any) -> Any:
        result = super().attend(*args, **kwargs)
        return (result[0].float(), result[1]) if isinstance(result, tuple) else result.float()


class WritesSlotMinusOne(Eager):
    def is_stored(self, slots: Tensor) -> Tensor:
        return torch.full_like(slots, True, dtype=torch.bool)


class SendsMinusOneToTheNullBlock(Eager):
    def write(self, key: Tensor, value: Tensor | None, kv_cache: Tensor, slots: Tensor) -> None:
        super().write(key, value, kv_cache, slots.clamp(min=0))


class ClearsTheNextBlock(Eager):
    def write(self, key: Tensor, value: Tensor | None, kv_cache: Tensor, slots: Tensor) -> None:
        for slot in slots[slots >= 0].tolist():
            kv_cache[(slot // self.spec.block_size + 1) % len(kv_cache)] = 0
        super().write(key, value, kv_cache, slots)


class PagesBackToBack(Eager):
    def bind(self, rows: Tensor, spec: Any) -> Tensor:
        shape = self.kv_cache_shape(spec, len(rows))
        flat = torch.as_strided(rows, (len(rows) * spec.page_bytes,), (1,))
        return flat.view(getattr(torch, self.spec.kv_dtype)).view(shape)


class RowsAsLongAsPages(Eager):
    def bind(self, rows: Tensor, spec: Any) -> Tensor:
        return rows.view(getattr(torch, self.spec.kv_dtype)).view(self.kv_cache_shape(spec, len(rows)))


class BindsACopy(Eager):
    def bind(self, rows: Tensor, spec: Any) -> Any:
        return super().bind(rows, spec).clone()


class CacheInQueryDtype(Eager):
    def bind(self, rows: Tensor, spec: Any) -> Any:
        return super().bind(rows, spec).view(getattr(torch, self.spec.dtype))


class MultipliesBeforeItMasks(Eager):
    def without_garbage(self, numbers: Tensor, is_seen: Tensor) -> Tensor:
        return numbers


class ReplacesAllNaN(Eager):
    def without_garbage(self, numbers: Tensor, is_seen: Tensor) -> Tensor:
        return torch.where(numbers.isfinite(), numbers, 0)


class ReplacesNaNValues(Eager):
    def fetch(self, kv_cache: Tensor, table: Tensor, context_len: int) -> tuple[Tensor, Tensor]:
        keys, values = super().fetch(kv_cache, table, context_len)
        return keys, values.nan_to_num()


class ReadsOneBlockTooMany(Eager):
    def fetch(self, kv_cache: Tensor, table: Tensor, context_len: int) -> tuple[Tensor, Tensor]:
        num_blocks = -(-context_len // self.spec.block_size)
        kv_cache[table[num_blocks : num_blocks + 1].long()].sum()
        return super().fetch(kv_cache, table, context_len)


class ReadsOneTokenTooMany(Eager):
    def sees(self, query: Tensor, key: Tensor) -> Tensor:
        return super().sees(query + 1, key)


class KeepsTheFirstPlan(Eager):
    first: AttentionBatch | None = None

    def plan(self, batch: AttentionBatch) -> AttentionBatch:
        self.first = self.first or batch
        return self.first


class KeepsTheLastPlan(Eager):
    def plan(self, batch: AttentionBatch) -> AttentionBatch:
        self.last = batch
        return batch

    def attend(self, query: Tensor, kv_cache: Tensor, plan: AttentionBatch, **kwargs: Any) -> Any:
        return super().attend(query, kv_cache, self.last, **kwargs)


class KeepsTheFirstLayersCache(Eager):
    first: Tensor | None = None

    def attend(self, query: Tensor, kv_cache: Tensor, plan: AttentionBatch, **kwargs: Any) -> Any:
        self.first = kv_cache if self.first is None else self.first
        return super().attend(query, self.first, plan, **kwargs)


class ScalesTheQueryInPlace(Eager):
    def attend(self, query: Tensor, *args: Any, **kwargs: Any) -> Any:
        result = super().attend(query, *args, **kwargs)
        query *= self.spec.scale
        return result


class ClampsSlotsInPlace(Eager):
    def write(self, key: Tensor, value: Tensor | None, kv_cache: Tensor, slots: Tensor) -> None:
        super().write(key, value, kv_cache, slots)
        slots += 1


class ClearsTheTableInPlace(Eager):
    def plan(self, batch: AttentionBatch) -> AttentionBatch:
        for row, context_len in enumerate(batch.context_lens_host):
            batch.block_table[row, -(-context_len // self.spec.block_size) :] = 0
        return batch


class RowsInReverse(Eager):
    def attend(self, *args: Any, **kwargs: Any) -> Any:
        result = super().attend(*args, **kwargs)
        return tuple(part.flip(0) for part in result) if isinstance(result, tuple) else result.flip(0)


class AddsNoise(Eager):
    def attend(self, query: Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().attend(query + 1e-7 * torch.randn_like(query), *args, **kwargs)


class ExponentsWithoutMaximum(Eager):
    def attend(self, query: Tensor, kv_cache: Tensor, plan: AttentionBatch, **kwargs: Any) -> Any:
        output, lse = super().attend(query, kv_cache, plan, **{**kwargs, "return_lse": True})
        lse = lse.exp().log()
        output = torch.where(lse.isfinite()[..., None], output, torch.nan)
        return (output, lse) if kwargs.get("return_lse") else output


class TakesQueriesForContiguous(Eager):
    def attend(self, query: Tensor, *args: Any, **kwargs: Any) -> Any:
        width = query.shape[1] * query.shape[2]
        return super().attend(query.as_strided(query.shape, (width, query.shape[2], 1)), *args, **kwargs)


class NoSmallHeads(Eager):
    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        if spec.head_dim % 8:
            raise RuntimeError("head_dim must be a multiple of 8")


class NaNSpreads(Eager):
    def attend(self, *args: Any, **kwargs: Any) -> Any:
        result = super().attend(*args, **kwargs)
        output = result[0] if isinstance(result, tuple) else result
        output += 0 * output.sum()
        return result


# --- Mistakes that show with large numbers, odd numbers, or in the long run only.


class GroupsOfPowersOfTwo(Eager):
    def kv_heads(self) -> Tensor:
        size = self.spec.num_query_heads // self.spec.num_kv_heads
        return (torch.arange(self.spec.num_query_heads) >> size.bit_length() - 1).clamp(max=self.spec.num_kv_heads - 1)


class EightKVHeadsAtMost(Eager):
    def kv_heads(self) -> Tensor:
        return super().kv_heads() % 8


class SixteenQueryHeadsAtMost(Eager):
    def kv_heads(self) -> Tensor:
        return super().kv_heads() * (torch.arange(self.spec.num_query_heads) < 16)

    def attend(self, query: Tensor, *args: Any, **kwargs: Any) -> Any:
        query = query.clone()
        query[:, 16:] = 0
        return super().attend(query, *args, **kwargs)


class HeadDimIsCutTo256(Eager):
    def attend(self, query: Tensor, *args: Any, **kwargs: Any) -> Any:
        query = query.clone()
        query[..., 256:] = 0
        return super().attend(query, *args, **kwargs)


class HeadDimIsAMultipleOf32OrSmall(Eager):
    def attend(self, query: Tensor, *args: Any, **kwargs: Any) -> Any:
        query = query.clone()
        if self.spec.head_dim > 40:
            query[..., self.spec.head_dim // 16 * 16 - self.spec.head_dim // 16 % 2 * 16 :] = 0
        return super().attend(query, *args, **kwargs)


class WindowOf128AtMost(Eager):
    def is_in_window(self, query: Tensor, key: Tensor, window: int) -> Tensor:
        return super().is_in_window(query, key, min(window, 128))


class ChunkOf128AtMost(Eager):
    def is_in_chunk(self, query: Tensor, key: Tensor, chunk: int) -> Tensor:
        return super().is_in_chunk(query, key, min(chunk, 128))


class KeepsAtMost32(Eager):
    def is_kept(self, key: Tensor) -> Tensor:
        return key < min(self.spec.keep_first, 32)


class TakesLargeCapsForNone(Eager):
    def cap(self, scores: Tensor) -> Tensor:
        return scores if (self.spec.soft_cap or 0) > 20 else super().cap(scores)


class StoresInOneHalfPrecision(Eager):
    def bind(self, rows: Tensor, spec: Any) -> Any:
        kv_cache = super().bind(rows, spec)
        halves = {self.spec.dtype, self.spec.kv_dtype} == {"float16", "bfloat16"}
        return kv_cache.view(getattr(torch, self.spec.dtype)) if halves else kv_cache

    def fetch(self, kv_cache: Tensor, table: Tensor, context_len: int) -> tuple[Tensor, Tensor]:
        return super().fetch(kv_cache.view(getattr(torch, self.spec.kv_dtype)), table, context_len)


class SixtyFourRowsAtMost(Eager):
    def attend(self, query: Tensor, kv_cache: Tensor, plan: AttentionBatch, **kwargs: Any) -> Any:
        result = super().attend(query, kv_cache, plan, **kwargs)
        output = result[0] if isinstance(result, tuple) else result
        output[int(plan.query_starts_host[min(64, plan.num_rows)]) :] = 0
        return result


class ContextsOf1024AtMost(Eager):
    def fetch(self, kv_cache: Tensor, table: Tensor, context_len: int) -> tuple[Tensor, Tensor]:
        keys, values = super().fetch(kv_cache, table, context_len)
        keys[1024:] = 0
        return keys, values


class QueriesOf300AtMost(Eager):
    def attend(self, query: Tensor, kv_cache: Tensor, plan: AttentionBatch, **kwargs: Any) -> Any:
        query = query.clone()
        for start, end in itertools.pairwise(plan.query_starts_host.tolist()):
            query[start + 300 : max(end, start + 300)] = 0
        return super().attend(query, kv_cache, plan, **kwargs)


class StepsOf512AtMost(Eager):
    def attend(self, query: Tensor, *args: Any, **kwargs: Any) -> Any:
        query = query.clone()
        query[512:] = 0
        return super().attend(query, *args, **kwargs)


class WritesOf1024AtMost(Eager):
    def write(self, key: Tensor, value: Tensor | None, kv_cache: Tensor, slots: Tensor) -> None:
        super().write(key[:1024], None if value is None else value[:1024], kv_cache, slots[:1024])


class SlotsOf16Bits(Eager):
    def write(self, key: Tensor, value: Tensor | None, kv_cache: Tensor, slots: Tensor) -> None:
        super().write(key, value, kv_cache, torch.where(slots < 0, slots, slots % (1 << 16)))


class BlocksOf8Bits(Eager):
    def fetch(self, kv_cache: Tensor, table: Tensor, context_len: int) -> tuple[Tensor, Tensor]:
        return super().fetch(kv_cache, table % 512, context_len)


class PlansByLengths(Eager):
    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        self.plans: dict[bytes, AttentionBatch] = {}

    def plan(self, batch: AttentionBatch) -> AttentionBatch:
        lengths = batch.query_starts_host.tobytes() + batch.context_lens_host.tobytes()
        return self.plans.setdefault(lengths, batch)


class SlotsByTheFirst(Eager):
    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        self.known: dict[tuple[int, int], Tensor] = {}

    def write(self, key: Tensor, value: Tensor | None, kv_cache: Tensor, slots: Tensor) -> None:
        if len(slots):
            slots = self.known.setdefault((len(slots), int(slots[0])), slots)
        super().write(key, value, kv_cache, slots)


class ThreePlansInARing(Eager):
    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        self.ring: list[AttentionBatch | None] = [None] * 3
        self.number = 0

    def plan(self, batch: AttentionBatch) -> Any:
        self.number = (self.number + 1) % 3
        self.ring[self.number] = batch
        return self.number

    def attend(self, query: Tensor, kv_cache: Tensor, plan: Any, **kwargs: Any) -> Any:
        batch = self.ring[plan]
        assert batch is not None
        return super().attend(query, kv_cache, batch, **kwargs)


class WrongFromTheSixthPlanOn(Eager):
    number = 0

    def plan(self, batch: AttentionBatch) -> AttentionBatch:
        self.number += 1
        if self.number < 6:
            return batch
        return AttentionBatch(**{**vars(batch), "block_table": batch.block_table.flip(0)})


class AttendsIntoOneTensor(Eager):
    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        self.scratch: dict[Any, Tensor] = {}

    def attend(self, *args: Any, **kwargs: Any) -> Any:
        result = super().attend(*args, **kwargs)
        parts = result if isinstance(result, tuple) else (result,)
        kept = [self.scratch.setdefault((part.shape, part.dtype), torch.empty_like(part)) for part in parts]
        for place, part in zip(kept, parts, strict=True):
            place.copy_(part)
        return tuple(kept) if isinstance(result, tuple) else kept[0]


class ProductsInQueryDtype(Eager):
    def attend(self, query: Tensor, kv_cache: Tensor, plan: AttentionBatch, **kwargs: Any) -> Any:
        result = super().attend(query, kv_cache, plan, **kwargs)
        output = result[0] if isinstance(result, tuple) else result
        products = query.float().norm(dim=-1) * self.spec.head_dim**0.5
        output[products > torch.finfo(query.dtype).max] = torch.nan
        return result


class WritesAfterItReads(Eager):
    """What a step stores is seen by the row that stored it, and by others only in the next step."""

    def plan(self, batch: AttentionBatch) -> AttentionBatch:
        starts = batch.query_starts_host
        tokens = [batch.slots[s:e] // self.spec.block_size for s, e in itertools.pairwise(starts.tolist())]
        table = batch.block_table.clone()
        for row in range(batch.num_rows):
            for other in (tokens[o] for o in range(batch.num_rows) if o != row):
                table[row][torch.isin(table[row], other[other > 0])] = 0
        return AttentionBatch(**{**vars(batch), "block_table": table})


class GathersInTheCachesDtype(Eager):
    def gather(self, kv_cache: Tensor, slots: Tensor) -> Tensor:
        return kv_cache[slots // self.spec.block_size, slots % self.spec.block_size]


class GathersSorted(Eager):
    def gather(self, kv_cache: Tensor, slots: Tensor) -> Tensor:
        return super().gather(kv_cache, slots.sort().values)


class GathersIntoOneTensor(Eager):
    def gather(self, kv_cache: Tensor, slots: Tensor) -> Tensor:
        gathered = super().gather(kv_cache, slots)
        self.scratch = getattr(self, "scratch", torch.empty_like(gathered))
        return self.scratch[: len(gathered)].copy_(gathered)


class GathersSlotsOf16Bits(Eager):
    def gather(self, kv_cache: Tensor, slots: Tensor) -> Tensor:
        return super().gather(kv_cache, slots.to(torch.int32) & 0xFFFF)


class PromisesToGather(AttentionBackend):
    contract_version = 1
    can_gather = True
    cannot_serve = Eager.cannot_serve
    knows = Eager.knows
    plan = Eager.plan
    write = Eager.write
    is_stored = Eager.is_stored
    attend = Eager.attend


GATHERED = "test_gathered_keys_are_those_that_were_written"
FAR_BACK = "test_many_keys_are_gathered_from_far_back_in_a_large_cache"


@pytest.mark.parametrize(
    ("mutant", "ability", "test", "words"),
    [
        (LseInBaseTwo, "plain", DEFINITION, "the log-sum-exp (natural, sinks included) differs"),
        (LseInQueryDtype, "bfloat16", DEFINITION, "the log-sum-exp (natural, sinks included) has dtype torch.bfloat16"),
        (LseAlone, "plain", DEFINITION, "attend with return_lse=True returned a Tensor"),
        (OutputInFloat32, "float16", DEFINITION, "the output has dtype torch.float32; it must have torch.float16"),
        (WritesSlotMinusOne, "plain", "test_slot_minus_one_writes_nothing", "though every slot was -1"),
        (SendsMinusOneToTheNullBlock, "bfloat16", "test_slot_minus_one_writes_nothing", "the null block, 0, changed"),
        (ClearsTheNextBlock, "plain", "test_a_write_touches_no_other_block", "though no slot is in it"),
        (PagesBackToBack, "plain", "test_pages_may_lie_apart", "pages lie as far apart as the stride"),
        (
            PagesBackToBack,
            "value_is_key_prefix",
            "test_two_groups_share_one_buffer",
            "it belongs to no row of the group that wrote",
        ),
        (RowsAsLongAsPages, "plain", "test_pages_may_lie_apart", "RuntimeError: "),
        (BindsACopy, "plain", "test_a_write_touches_no_other_block", "the cache must be a view"),
        (CacheInQueryDtype, "bfloat16_cache", DEFINITION, "IndexError|RuntimeError|differs from"),
        (MultipliesBeforeItMasks, "window", "test_what_no_query_sees_makes_no_difference", "0 * NaN is NaN"),
        (ReadsOneBlockTooMany, "plain", "test_table_entries_past_the_context_may_hold_anything", "IndexError: "),
        (ReadsOneTokenTooMany, "plain", DEFINITION, "the output differs from attention by its definition"),
        (KeepsTheFirstPlan, "plain", "test_a_prefill_in_pieces_equals_a_whole_one", "Error: "),
        (KeepsTheLastPlan, "plain", "test_plans_of_two_batches_live_side_by_side", ""),
        (KeepsTheFirstLayersCache, "plain", "test_one_plan_serves_all_layers_of_a_step", "the output differs"),
        (ScalesTheQueryInPlace, "plain", "test_what_it_is_given_is_left_as_it_was", "changed query in place"),
        (ClampsSlotsInPlace, "plain", "test_what_it_is_given_is_left_as_it_was", "changed batch.slots in place"),
        (ClearsTheTableInPlace, "plain", "test_what_it_is_given_is_left_as_it_was", "changed batch.block_table"),
        (RowsInReverse, "plain", "test_the_order_of_rows_makes_no_difference", "the output differs"),
        (AddsNoise, "plain", "test_the_same_call_gives_the_same_bits", "results must be deterministic"),
        (ExponentsWithoutMaximum, "plain", "test_large_scores_do_not_overflow", "nan instead of"),
        (TakesQueriesForContiguous, "plain", "test_tensors_may_be_views_of_a_fused_projection", "fused projection"),
        (NoSmallHeads, "head_dim_7", "test_what_is_accepted_can_be_built", "head_dim must be a multiple of 8"),
        (NoSmallHeads, "window+head_dim_7", "test_abilities_work_together", "no reason against this spec"),
        (NaNSpreads, "plain", "test_one_rows_nan_stays_in_the_row", "beside rows whose keys are NaN"),
        (ReplacesAllNaN, "plain", NAN_KEPT, "NaN among the keys that a query sees is lost"),
        (ReplacesAllNaN, "value_is_key_prefix", NAN_KEPT, "NaN among the keys that a query sees is lost"),
        (ReplacesNaNValues, "plain", NAN_KEPT, "NaN among the values that a query sees is lost"),
        (GroupsOfPowersOfTwo, "heads_9_3", DEFINITION, "the output differs"),
        (GroupsOfPowersOfTwo, "heads_14_2", DEFINITION, "the output differs"),
        (EightKVHeadsAtMost, "heads_12_12", DEFINITION, "the output differs"),
        (SixteenQueryHeadsAtMost, "heads_32_2", DEFINITION, "the output differs"),
        (SixteenQueryHeadsAtMost, "value_is_key_prefix_40_heads", DEFINITION, "the output differs"),
        (HeadDimIsCutTo256, "head_dim_512", DEFINITION, "the output differs"),
        (HeadDimIsAMultipleOf32OrSmall, "head_dim_48", DEFINITION, "the output differs"),
        (HeadDimIsAMultipleOf32OrSmall, "head_dim_112", DEFINITION, "the output differs"),
        (WindowOf128AtMost, "large_window", DEFINITION, "the output differs"),
        (ChunkOf128AtMost, "large_chunk", DEFINITION, "the output differs"),
        (KeepsAtMost32, "window+large_keep_first", DEFINITION, "the output differs"),
        (TakesLargeCapsForNone, "large_soft_cap", DEFINITION, "the output differs"),
        (StoresInOneHalfPrecision, "float16_and_bfloat16_cache", DEFINITION, "the output differs"),
        (SixtyFourRowsAtMost, "plain", "test_many_rows_have_no_seam", "the output differs"),
        (ContextsOf1024AtMost, "plain", "test_long_rows_have_no_seam", "the output differs"),
        (QueriesOf300AtMost, "plain", "test_long_rows_have_no_seam", "the output differs"),
        (StepsOf512AtMost, "plain", "test_long_rows_have_no_seam", "the output differs"),
        (WritesOf1024AtMost, "plain", "test_a_write_takes_any_number_of_tokens", "the output differs"),
        (SlotsOf16Bits, "plain", "test_pages_may_lie_far_back_in_a_large_cache", "the output differs"),
        (BlocksOf8Bits, "plain", "test_pages_may_lie_far_back_in_a_large_cache", "the output differs"),
        (PlansByLengths, "plain", "test_steps_of_equal_lengths_may_have_other_blocks", "the output differs"),
        (SlotsByTheFirst, "plain", "test_steps_of_equal_lengths_may_have_other_blocks", "the output differs"),
        (ThreePlansInARing, "plain", "test_plans_of_many_groups_and_steps_do_not_mix", ""),
        (WrongFromTheSixthPlanOn, "plain", "test_plans_of_many_groups_and_steps_do_not_mix", "the output differs"),
        (AttendsIntoOneTensor, "plain", "test_a_later_call_leaves_earlier_results_as_they_were", "belongs to the"),
        (ProductsInQueryDtype, "float16+small_scale", "test_large_queries_do_not_overflow", "nan instead of"),
        (WritesAfterItReads, "plain", "test_a_row_reads_what_another_writes_in_the_same_step", "the output differs"),
        (GathersInTheCachesDtype, "value_is_key_prefix+bfloat16_cache", GATHERED, "gather returned torch.bfloat16"),
        (GathersSorted, "value_is_key_prefix", GATHERED, "gathered keys are not those that were written"),
        (GathersSlotsOf16Bits, "value_is_key_prefix", FAR_BACK, "gathered keys are not those that were written"),
        (GathersIntoOneTensor, "value_is_key_prefix", "test_what_was_gathered_is_the_callers", "gathered keys are not"),
        (PromisesToGather, "value_is_key_prefix", GATHERED, "PromisesToGather sets can_gather and has no gather"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_a_mistake_is_found_under_the_right_name(mutant: type[Eager], ability: str, test: str, words: str) -> None:
    reproduce(Eager, ability, test=test)
    complaint = complaint_about(mutant, ability, test)
    assert complaint.startswith(f"{ability}: {test.removeprefix('test_').replace('_', ' ')}: ")
    assert any(word in complaint for word in words.split("|"))
    assert "seed: 0" in complaint
    assert f'reproduce({mutant.__name__}, "{ability}", seed=0, test="{test}")' in complaint


def test_who_says_that_writes_come_later_is_not_held_to_it() -> None:
    class Honest(WritesAfterItReads):
        writes_before_reads = False

    with pytest.raises(pytest.skip.Exception, match="Honest sets writes_before_reads to False"):
        reproduce(Honest, test="test_a_row_reads_what_another_writes_in_the_same_step")


def test_who_does_not_gather_is_not_asked_to() -> None:
    class Modest(Eager):
        can_gather = False

    with pytest.raises(pytest.skip.Exception, match="Modest sets can_gather to False"):
        reproduce(Modest, "value_is_key_prefix", test=GATHERED)


# --- Mistakes in what a backend says about itself.


class ReasonsInOneString(Eager):
    @classmethod
    def cannot_serve(cls, spec: AttentionSpec) -> Any:
        return " ".join(super().cannot_serve(spec))


class OneReasonAtATime(Eager):
    @classmethod
    def cannot_serve(cls, spec: AttentionSpec) -> list[str]:
        return super().cannot_serve(spec)[:1]


class AnEmptyReason(Eager):
    @classmethod
    def cannot_serve(cls, spec: AttentionSpec) -> list[str]:
        return [""] if spec.sinks else super().cannot_serve(spec)


class RaisesInsteadOfReasons(Eager):
    @classmethod
    def cannot_serve(cls, spec: AttentionSpec) -> list[str]:
        torch.device(spec.device)
        return super().cannot_serve(spec)


class ChangesItsMind(Eager):
    answers: Iterator[list[str]] = (["Not any more."] if number > 100 else [] for number in itertools.count())

    @classmethod
    def cannot_serve(cls, spec: AttentionSpec) -> list[str]:
        return super().cannot_serve(spec) or next(cls.answers)


class OneListForAll(Eager):
    reasons: list[str] = []

    @classmethod
    def cannot_serve(cls, spec: AttentionSpec) -> list[str]:
        return super().cannot_serve(spec) or cls.reasons


class SetsDefaults(Eager):
    @classmethod
    def cannot_serve(cls, spec: AttentionSpec) -> list[str]:
        torch.set_default_dtype(torch.float64)
        return super().cannot_serve(spec)


class ServesNothing(Eager):
    @classmethod
    def cannot_serve(cls, spec: AttentionSpec) -> list[str]:
        return ["It is Sunday."]


class VersionAsText(Eager):
    contract_version = "1"  # type: ignore[assignment]


class SaysNoVersion(AttentionBackend):
    cannot_serve = Eager.cannot_serve
    plan = Eager.plan
    write = Eager.write
    attend = Eager.attend


@pytest.mark.parametrize(
    ("mutant", "test", "words"),
    [
        (
            ReasonsInOneString,
            "test_cannot_serve_returns_a_list_of_sentences",
            "returned a str, ''; it must return a list",
        ),
        (
            OneReasonAtATime,
            "test_all_reasons_are_given_at_once",
            "refuses each of the two, and for both at once gives 1 of 2",
        ),
        (OneReasonAtATime, "test_all_reasons_are_given_at_once", "Missing: ['"),
        (AnEmptyReason, "test_cannot_serve_returns_a_list_of_sentences", "returned a list with '' in it"),
        (RaisesInsteadOfReasons, "test_cannot_serve_returns_a_list_of_sentences", "cannot_serve raised RuntimeError"),
        (ChangesItsMind, "test_cannot_serve_gives_the_same_answer_whenever_it_is_asked", "and later ['Not any more.']"),
        (
            OneListForAll,
            "test_cannot_serve_gives_the_same_answer_whenever_it_is_asked",
            "gives out a list that it keeps",
        ),
        (SetsDefaults, "test_cannot_serve_changes_nothing", "changed torch's default dtype"),
        (
            ServesNothing,
            "test_something_plain_is_served",
            "It is Sunday. If it is made for something else, set `plain`",
        ),
        (VersionAsText, "test_the_class_states_its_contract_version_as_a_number", "states '1'"),
        (SaysNoVersion, "test_the_class_states_its_contract_version_as_a_number", "states None"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_a_wrong_declaration_is_named(mutant: type[AttentionBackend], test: str, words: str) -> None:
    default = torch.get_default_dtype()
    try:
        assert words in complaint_about(mutant, "plain", test)
    finally:
        torch.set_default_dtype(default)


# --- The suite as an author uses it.


def test_what_is_not_declared_is_skipped_with_the_backends_reasons() -> None:
    with pytest.raises(pytest.skip.Exception, match="Eager does not declare 'narrow_values': Keys and values must be"):
        reproduce(Eager, "narrow_values", test=DEFINITION)


def test_a_complaint_says_where_and_in_what() -> None:
    complaint = complaint_about(WindowTooWide, "window+sinks", DEFINITION)
    assert "in row " in complaint
    assert "query head " in complaint
    assert "\n  spec: window=9, sinks=True\n" in complaint
    assert "\n  rows (new tokens/context): 1/" in complaint


def test_the_line_at_the_end_tries_it_again() -> None:
    complaint = complaint_about(WindowTooWide, "window", DEFINITION)
    line = complaint.rpartition("  again: ")[2]
    python, *arguments = shlex.split(line)
    assert python == "python"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    again = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment, check=False)
    assert again.returncode == 1
    assert complaint in again.stderr


def test_a_registered_name_is_tried_again_by_its_name() -> None:
    suite = type("Registered", (AttentionBackendSuite,), {"backend": "torch_sdpa"})
    assert 'reproduce("torch_sdpa", "plain", seed=3, test="test_x")' in suite()._again("test_x", "plain", 3)
    reproduce("torch_sdpa", "window", seed=3, test=DEFINITION)


def test_a_suite_with_settings_is_tried_again_with_them() -> None:
    class Strict(AttentionBackendSuite):
        backend = Eager
        specs = {"soft_window": {"window": 3, "soft_cap": 2.0}}
        tolerances = {"float32": 1e-12}

    with pytest.raises(Fault, match=r'reproduce\(Strict, "soft_window", seed=5') as fault:
        reproduce(Strict, "soft_window", seed=5, test=DEFINITION)
    assert "where 1.19" not in str(fault.value)


class TileOptions(BaseModel):
    tile: int = 4


class TiledByOptions(Eager):
    """Serves with the tile that its options name, and no other than 8."""

    Options = TileOptions

    def __init__(self, spec: AttentionSpec, *, options: TileOptions) -> None:
        assert options.tile == 8
        super().__init__(spec)


def test_the_options_of_a_suite_reach_the_backend() -> None:
    class TiledSuite(AttentionBackendSuite):
        backend = TiledByOptions
        options = {"tile": 8}

    reproduce(TiledSuite, "window", test=DEFINITION)
    with pytest.raises(Fault, match="assert 4 == 8"):
        reproduce(TiledByOptions, "window", test=DEFINITION)
    # The suite itself is what to try again, for it knows the options.
    assert 'reproduce(TiledSuite, "plain", seed=3, test="test_x")' in TiledSuite()._again("test_x", "plain", 3)


def test_options_for_a_backend_that_takes_none_are_a_fault() -> None:
    class TiledSuite(AttentionBackendSuite):
        backend = Eager
        options = {"tile": 8, "depth": 2}

    with pytest.raises(
        Fault, match=r"TiledSuite\.options: The backend .* takes no options, and was given .tile., .depth."
    ):
        reproduce(TiledSuite, "window", test=DEFINITION)


def test_a_backend_with_options_is_built_by_the_suite() -> None:
    class Tiled(Eager):
        def __init__(self, spec: AttentionSpec, tile: int) -> None:
            super().__init__(spec)
            self.tile = tile

    class TiledSuite(AttentionBackendSuite):
        backend = Tiled

        def make_backend(self, spec: AttentionSpec) -> AttentionBackend:
            return Tiled(spec, tile=4)

    reproduce(TiledSuite, "window", test=DEFINITION)


def test_a_backend_for_something_special_says_what_is_plain_to_it() -> None:
    class OnlyKeys(Eager):
        @classmethod
        def cannot_serve(cls, spec: AttentionSpec) -> list[str]:
            return super().cannot_serve(spec) + ([] if spec.value_is_key_prefix else ["It stores keys alone."])

    class OnlyKeysSuite(AttentionBackendSuite):
        backend = OnlyKeys
        plain = {"num_kv_heads": 1, "head_dim": 24, "head_dim_v": 16, "value_is_key_prefix": True}

    reproduce(OnlyKeysSuite, "plain", test="test_something_plain_is_served")
    reproduce(OnlyKeysSuite, "window", test=DEFINITION)
    with pytest.raises(pytest.skip.Exception, match="'multi_head' makes no sense beside"):
        reproduce(OnlyKeysSuite, "multi_head", test=DEFINITION)


def test_a_suite_without_a_backend_says_what_to_set() -> None:
    suite = type("Forgetful", (AttentionBackendSuite,), {})
    with pytest.raises(Fault, match=r"Forgetful\.backend is None; it must be the registered name"):
        suite().test_something_plain_is_served()


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"No ability is called 'windw'\. There are: plain, grouped_query"):
        reproduce(Eager, "windw", test=DEFINITION)
    with pytest.raises(ValueError, match="No test is called 'test_pages'"):
        reproduce(Eager, "window", test="test_pages")


def test_every_ability_is_tried_by_name(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        from octavo.testing import AttentionBackendSuite

        class TestOne(AttentionBackendSuite):
            backend = "torch_sdpa"
            specs = {"tiny_window": {"window": 2}}
        """
    )
    result = pytester.runpytest_inprocess(
        "--collect-only", "-q", "-k", "window and definition", "-p", "no:cacheprovider"
    )
    collected = [line.partition("[")[2].rstrip("]") for line in result.outlines if "::" in line]
    names = (*list_tests(AttentionBackendSuite)[DEFINITION], "tiny_window")  # type: ignore[misc]
    assert collected == [name for name in names if "window" in name]
    result = pytester.runpytest_inprocess("-q", "-k", "tiny_window and definition", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=1, deselected=len(names) and result.parseoutcomes()["deselected"])


def test_importing_the_package_imports_neither_torch_nor_pytest() -> None:
    code = "import sys, octavo.testing; print(*{'torch', 'pytest', 'numpy'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == []
    assert "AttentionBackendSuite" in dir(octavo.testing)
