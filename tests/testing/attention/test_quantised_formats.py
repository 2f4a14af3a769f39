"""The suite for attention backends and quantised caches: a right one passes, and each mistake is found."""

from __future__ import annotations

import pytest
import torch
from eager_backends import Eager, QuantisedEager
from torch import Tensor

from octavo.core.interfaces.attention import AttentionSpec
from octavo.core.interfaces.kv_format import KV_FORMATS
from octavo.testing import AttentionBackendSuite
from octavo.testing.attention.abilities import ABILITIES, COMBINATIONS, QUANTISED, SIZES, specs_of
from octavo.testing.attention.suite import list_tests, reproduce
from octavo.testing.attention.trial import Fault

DEFINITION = "test_output_and_lse_equal_the_definition"
OUTLIERS = "test_outliers_are_cut_off_or_scaled"
NAN_KEPT = "test_a_nan_among_the_keys_or_values_is_not_lost"
NAN_GATHERED = "test_nan_is_gathered_as_nan"


def quantised_abilities() -> dict[str, list[str]]:
    """Return the tests that try a quantised format, and with which abilities."""
    tried = {name: abilities or () for name, abilities in list_tests(AttentionBackendSuite).items()}
    return {
        name: found
        for name, abilities in tried.items()
        if (found := [ability for ability in abilities if "int8" in ability or "fp8" in ability])
    }


@pytest.mark.parametrize("test", quantised_abilities())
def test_a_right_backend_passes(test: str) -> None:
    for ability in quantised_abilities()[test]:
        reproduce(QuantisedEager, ability, test=test)


def test_every_format_is_tried_alone_and_beside_what_it_meets() -> None:
    plain = AttentionSpec(6, 2, 16, 16, 0.25, 16, "float32", "float32", "cpu")
    specs = [spec for name in (*ABILITIES, *SIZES, *COMBINATIONS) for spec in specs_of(name, plain)[:1]]
    for kv_format in KV_FORMATS.values():
        tried = [spec for spec in specs if spec.kv_dtype == kv_format.name]
        assert tried
        if kv_format.is_quantised:
            assert any(spec.value_is_key_prefix for spec in tried)
            assert any(spec.window for spec in tried)
            assert any(spec.dtype != "float32" for spec in tried)
            assert any(spec.block_size % 2 for spec in tried)


# --- Mistakes.


class RoundsTowardsZero(QuantisedEager):
    def quantise(self, vectors: Tensor) -> tuple[Tensor, Tensor | None]:
        if self.format.element != "int8" or self.format.has_page_scales:
            return super().quantise(vectors)
        return vectors.float().clamp(-127, 127).trunc().nan_to_num(nan=-128).to(torch.int8), None


class RoundsHalvesAway(QuantisedEager):
    def quantise(self, vectors: Tensor) -> tuple[Tensor, Tensor | None]:
        codes, scales = super().quantise(vectors)
        if self.format.element == "int8":
            numbers = vectors.float() if scales is None else vectors.float() / scales[..., None]
            away = (numbers.abs() + 0.5).floor().copysign(numbers).clamp(-127, 127)
            codes = away.nan_to_num(nan=-128).to(torch.int8)
        return codes, scales


class TakesMinus128ForANumber(QuantisedEager):
    def quantise(self, vectors: Tensor) -> tuple[Tensor, Tensor | None]:
        codes, scales = super().quantise(vectors)
        return torch.where(vectors < -127.5, torch.tensor(-128, dtype=codes.dtype), codes), scales

    def dequantise(self, codes: Tensor, scales: Tensor | None) -> Tensor:
        return codes.float()


class ReadsInt8NaNAsANumber(QuantisedEager):
    def dequantise(self, codes: Tensor, scales: Tensor | None) -> Tensor:
        return codes.float() if scales is None else codes.float() * scales[..., None]


class NaNBecomesZero(QuantisedEager):
    def quantise(self, vectors: Tensor) -> tuple[Tensor, Tensor | None]:
        return super().quantise(vectors.nan_to_num(nan=0))


class OutliersBecomeNaN(QuantisedEager):
    def quantise(self, vectors: Tensor) -> tuple[Tensor, Tensor | None]:
        codes, scales = super().quantise(vectors)
        is_too_large = vectors.abs() > 464
        return torch.where(is_too_large, torch.tensor(torch.nan).to(codes.dtype), codes), scales


class ScalesInBfloat16(QuantisedEager):
    def store_scales(self, scales: Tensor, pages: Tensor, slots: Tensor) -> None:
        super().store_scales(scales.bfloat16().float(), pages, slots)


class OneScaleForAllHeads(QuantisedEager):
    def quantise(self, vectors: Tensor) -> tuple[Tensor, Tensor | None]:
        _, scales = super().quantise(vectors)
        if scales is None:
            return super().quantise(vectors)
        scales = scales.amax(dim=-1, keepdim=True).expand_as(scales)
        codes, _ = KV_FORMATS[self.spec.kv_dtype.removesuffix("_per_token_head")].quantise(vectors / scales[..., None])
        return codes, scales


class ScaleFromTheMean(QuantisedEager):
    def quantise(self, vectors: Tensor) -> tuple[Tensor, Tensor | None]:
        _, scales = super().quantise(vectors)
        if scales is None:
            return super().quantise(vectors)
        scales = vectors.float().abs().mean(dim=-1) * 3 / (self.format.largest or 1)
        codes, _ = KV_FORMATS[self.spec.kv_dtype.removesuffix("_per_token_head")].quantise(vectors / scales[..., None])
        return codes, scales


class ZerosHaveNoScale(QuantisedEager):
    def quantise(self, vectors: Tensor) -> tuple[Tensor, Tensor | None]:
        scales = vectors.float().abs().amax(dim=-1) / (self.format.largest or 1)
        codes, _ = KV_FORMATS[self.spec.kv_dtype.removesuffix("_per_token_head")].quantise(vectors / scales[..., None])
        return codes, scales


class WritesTheScaleOfSlotMinusOne(QuantisedEager):
    def store_scales(self, scales: Tensor, pages: Tensor, slots: Tensor) -> None:
        super().store_scales(scales, pages, slots.clamp(min=0))


class ClearsTheScalesOfTheNextBlock(QuantisedEager):
    def store_scales(self, scales: Tensor, pages: Tensor, slots: Tensor) -> None:
        pages[(slots[slots >= 0] // self.spec.block_size + 1) % len(pages)] = 0
        super().store_scales(scales, pages, slots)


class ClearsCodesButNotScales(QuantisedEager):
    def without_garbage(self, numbers: Tensor, is_seen: Tensor) -> Tensor:
        cleared = super().without_garbage(numbers, is_seen)
        return torch.where(is_seen[:, None, None] | numbers.isfinite(), cleared, numbers)


class GathersCodes(QuantisedEager):
    def gather(self, kv_cache: object, slots: Tensor) -> Tensor:
        index = (slots // self.spec.block_size, slots % self.spec.block_size)
        return getattr(kv_cache, "codes", kv_cache)[index].to(getattr(torch, self.spec.dtype))


@pytest.mark.parametrize(
    ("mutant", "ability", "test", "words"),
    [
        (RoundsTowardsZero, "int8_cache", DEFINITION, "the output differs"),
        (RoundsHalvesAway, "float16_and_int8_cache", DEFINITION, "the output differs"),
        (TakesMinus128ForANumber, "int8_cache", OUTLIERS, "the output differs"),
        (ReadsInt8NaNAsANumber, "int8_cache", NAN_KEPT, "NaN among the keys that a query sees is lost"),
        (NaNBecomesZero, "int8_cache", NAN_KEPT, "NaN among the keys that a query sees is lost"),
        (NaNBecomesZero, "fp8_e4m3_cache", NAN_KEPT, "NaN among the keys that a query sees is lost"),
        (NaNBecomesZero, "int8_per_token_head_cache", NAN_KEPT, "NaN among the keys that a query sees is lost"),
        (NaNBecomesZero, "value_is_key_prefix+fp8_e4m3_cache", NAN_GATHERED, "gathered keys are not those"),
        (OutliersBecomeNaN, "fp8_e4m3_cache", OUTLIERS, "nan instead of"),
        (ScalesInBfloat16, "fp8_e4m3_per_token_head_cache", DEFINITION, "the output differs"),
        (OneScaleForAllHeads, "int8_per_token_head_cache", DEFINITION, "the output differs"),
        (ScaleFromTheMean, "fp8_e4m3_per_token_head_cache", OUTLIERS, "the output differs"),
        (ZerosHaveNoScale, "int8_per_token_head_cache", OUTLIERS, "nan instead of"),
        (
            WritesTheScaleOfSlotMinusOne,
            "fp8_e4m3_per_token_head_cache",
            "test_slot_minus_one_writes_nothing",
            "the null block, 0, changed",
        ),
        (
            ClearsTheScalesOfTheNextBlock,
            "int8_per_token_head_cache+value_is_key_prefix",
            "test_a_write_touches_no_other_block",
            "though no slot is in it",
        ),
        (
            ClearsCodesButNotScales,
            "int8_per_token_head_cache+window+keep_first+block_size_7",
            DEFINITION,
            "0 * NaN is NaN",
        ),
        (
            GathersCodes,
            "value_is_key_prefix+bfloat16_and_int8_per_token_head_cache",
            "test_gathered_keys_are_those_that_were_written",
            "gathered keys are not those that were written",
        ),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_a_mistake_is_found(mutant: type[QuantisedEager], ability: str, test: str, words: str) -> None:
    with pytest.raises(Fault) as fault:
        reproduce(mutant, ability, test=test)
    complaint = str(fault.value)
    assert complaint.startswith(f"{ability}: {test.removeprefix('test_').replace('_', ' ')}: ")
    assert words in complaint


@pytest.mark.parametrize("ability", QUANTISED)
def test_a_backend_that_knows_nothing_of_a_format_is_not_tried_with_it(ability: str) -> None:
    kv_dtype = ability.removesuffix("_cache")
    with pytest.raises(pytest.skip.Exception, match=f"Eager does not declare {ability!r}: kv_dtype {kv_dtype} is"):
        reproduce(Eager, ability, test=DEFINITION)
