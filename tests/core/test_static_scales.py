"""Scales of a layer are folded into what a backend is given and gives back: it knows nothing of them."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from octavo.attention_backends.torch_sdpa import TorchSDPABackend
from octavo.core.interfaces import AttentionSpec, FullAttentionSpec, MLASpec
from octavo.core.interfaces.kv_format import KV_FORMATS
from octavo.core.interfaces.kv_scales import LayerScales
from octavo.core.kv_cache_config import KVCacheConfig, KVCacheGroup
from octavo.core.model_runner import ModelRunner
from octavo.core.static_scales import StaticScales, static_scales
from octavo.core.step_plan import StepPlan

PER_HEAD = LayerScales((0.25, 3.0), (0.7, 0.125))
PER_TENSOR = LayerScales((0.3,), (5.0,))
NUM_TOKENS = 9


def attention(**fields: Any) -> AttentionSpec:
    plain: dict[str, Any] = {"num_query_heads": 6, "num_kv_heads": 2, "head_dim": 8, "head_dim_v": 8, "scale": 0.3}
    plain |= {"block_size": 4, "dtype": "float32", "kv_dtype": "float32", "device": "cpu"}
    return AttentionSpec(**plain | fields)


LATENT = attention(num_kv_heads=1, head_dim=12, head_dim_v=8, value_is_key_prefix=True)


class RecordingBackend(TorchSDPABackend):
    """Remembers what it was given to write."""

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        self.written: list[tuple[Tensor, Tensor | None]] = []

    def write(self, key: Tensor, value: Tensor | None, kv_cache: Any, slots: Tensor) -> None:
        self.written.append((key, value))
        super().write(key, value, kv_cache, slots)


class OneLayer:
    """A model of one attention layer, which is given its queries, keys and values."""

    def __init__(self, query: Tensor, key: Tensor, value: Tensor | None, sinks: Tensor | None) -> None:
        self.given = query, key, value
        self.sinks = sinks
        self.output = torch.empty(0)

    def forward(self, batch: Any) -> Tensor:
        query, key, value = (None if part is None else part[batch.positions] for part in self.given)
        self.output = batch.attention(0, query, key, value, sinks=self.sinks)
        return torch.zeros(len(batch.positions), 1)


@dataclasses.dataclass
class Attended:
    output: Tensor
    backend: RecordingBackend
    buffer: Tensor


def attend(spec: AttentionSpec, scales: LayerScales | None, *, factor: Tensor | float = 1.0) -> Attended:
    """Attend from some tokens to themselves, in a prompt of two pieces; `factor` makes keys and values larger."""
    torch.manual_seed(0)
    dtype = getattr(torch, spec.dtype)
    query = torch.randn(NUM_TOKENS, spec.num_query_heads, spec.head_dim).to(dtype)
    key = (torch.randn(NUM_TOKENS, spec.num_kv_heads, spec.head_dim) * factor).to(dtype)
    value = (torch.randn(NUM_TOKENS, spec.num_kv_heads, spec.head_dim_v) * factor).to(dtype)
    sinks = torch.randn(spec.num_query_heads) if spec.sinks else None
    model: Any = OneLayer(query, key, None if spec.value_is_key_prefix else value, sinks)
    backend = RecordingBackend(spec)
    kept: Any = FullAttentionSpec(4, spec.num_kv_heads, spec.head_dim, spec.kv_dtype)
    if spec.value_is_key_prefix:
        kept = MLASpec(4, spec.head_dim_v, spec.head_dim - spec.head_dim_v, spec.kv_dtype)
    layout = KVCacheConfig(5, (KVCacheGroup(kept, (0,)),))
    runner = ModelRunner(model, [backend], layout, "cpu", [scales])
    outputs = []
    for first, end in ((0, 5), (5, NUM_TOKENS)):
        runner.fill_kv_cache(
            StepPlan(
                request_ids=["r"],
                arrivals=[0],
                rows=np.zeros(1, np.int32),
                num_new_tokens=np.array([end - first], np.int32),
                first_positions=np.array([first], np.int32),
                token_ids=np.zeros(end - first, np.int32),
                samples=np.zeros(1, np.bool_),
                num_decode_entries=0,
                block_tables=(np.array([[3, 1, 4]], np.int32),),
                new_rows=[],
            )
        )
        outputs.append(model.output)
    return Attended(torch.cat(outputs).float(), backend, runner.kv_cache_buffers[0])


# -- the sums ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scales", [PER_HEAD, PER_TENSOR, LayerScales((2.0,), (1.0, 1.0)), LayerScales((1.0,), (3.0,))])
@pytest.mark.parametrize(
    "spec", [attention(), attention(soft_cap=1.5), attention(sinks=True), attention(window=3, num_query_heads=2)]
)
def test_what_is_attended_is_the_same_whatever_the_scales(spec, scales):
    torch.testing.assert_close(attend(spec, scales).output, attend(spec, None).output, rtol=1e-5, atol=1e-6)


def test_latents_are_keys_and_values_of_one_scale():
    plain = attend(LATENT, None)
    # What it says of values is never used: a value is a part of what was divided by the key's scale.
    for scales in (LayerScales((0.3,), (0.3,)), LayerScales((0.3,), (77.0,))):
        torch.testing.assert_close(attend(LATENT, scales).output, plain.output, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_stays_and_loses_two_roundings_at_most(dtype):
    spec = attention(dtype=dtype, kv_dtype=dtype)
    scaled, plain = attend(spec, PER_HEAD), attend(spec, None)
    assert all(key.dtype == value.dtype == getattr(torch, dtype) for key, value in scaled.backend.written)
    tolerance = 6 * torch.finfo(getattr(torch, dtype)).eps
    torch.testing.assert_close(scaled.output, plain.output, rtol=tolerance, atol=tolerance)


def test_a_backend_is_given_keys_and_values_over_their_heads_scale():
    plain, scaled = attend(attention(), None), attend(attention(), PER_HEAD)
    for (key, value), (scaled_key, scaled_value) in zip(plain.backend.written, scaled.backend.written, strict=True):
        for head in range(2):
            assert torch.equal(scaled_key[:, head], key[:, head] / PER_HEAD.key[head])
            assert torch.equal(scaled_value[:, head], value[:, head] / torch.tensor(PER_HEAD.value[head]))


def test_gathered_latents_are_what_they_were():
    scales = StaticScales(LayerScales((0.3,), (9.0,)), LATENT, "cpu")
    latents = torch.randn(5, 1, 12)
    torch.testing.assert_close(scales.gathered(scales.stored_key(latents)[:, 0]), latents[:, 0])
    assert scales.stored_value(None) is None


def test_scales_of_1_cost_nothing():
    assert static_scales(None, attention(), "cpu") is None
    assert static_scales(LayerScales((1.0,), (1.0, 1.0)), attention(), "cpu") is None
    assert static_scales(LayerScales((1.0,), (1.0, 2.0)), attention(), "cpu") is not None
    plain, scaled = attend(attention(), None), attend(attention(), LayerScales((1.0, 1.0), (1.0,)))
    assert torch.equal(plain.output, scaled.output)


# -- with codes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_dtype", ["fp8_e4m3", "int8"])
@pytest.mark.parametrize("spec", [attention(), LATENT])
def test_bytes_in_the_pool_are_codes_of_the_quotients(spec, kv_dtype):
    spec = dataclasses.replace(spec, kv_dtype=kv_dtype)
    half = attend(spec, LayerScales((0.5,), (0.5,)))
    one = attend(spec, None)
    assert not torch.equal(half.buffer, one.buffer)
    kv_format = KV_FORMATS[kv_dtype]
    (key, _), *_ = half.backend.written
    codes, _ = kv_format.quantise(key)
    page = half.buffer[3].view(kv_format.torch_dtype)
    stored = page.view(*((4, 12) if spec.value_is_key_prefix else (2, 4, 2, 8)))
    keys = stored[:, None] if spec.value_is_key_prefix else stored[0]
    assert torch.equal(keys[:4].view(torch.uint8), codes[:4].view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_codes_of_int8_are_the_nearest_whatever_the_dtype(dtype):
    scales = StaticScales(LayerScales((0.037, 0.011), (0.037,)), attention(kv_dtype="int8"), "cpu")
    vectors = torch.linspace(-5, 5, 20000).view(-1, 2, 8).to(dtype)
    factors = torch.tensor([0.037, 0.011])[:, None]
    for stored, factor in ((scales.stored_key(vectors), factors), (scales.stored_value(vectors), factors[:1])):
        assert stored is not None
        assert stored.dtype == dtype
        codes, _ = KV_FORMATS["int8"].quantise(stored)
        # With both ends cut off: the smaller scale reaches as far as 1.4.
        assert torch.equal(codes.float(), (vectors.float() / factor).round().clamp(-127, 127))


def test_whole_numbers_keep_nan_and_cut_off_what_is_too_large():
    scales = StaticScales(LayerScales((1e-6,), (1e-6,)), attention(kv_dtype="int8"), "cpu")
    vectors = torch.tensor([math.nan, math.inf, -math.inf, 60000.0, -60000.0, 0.0, 1.6e-6, -1.6e-6])
    codes, _ = KV_FORMATS["int8"].quantise(scales.stored_key(vectors.half().expand(1, 2, 8)))
    assert codes[0, 0].tolist() == [-128, 127, -127, 127, -127, 0, 2, -2]


def error_of(kv_dtype: str, scales: LayerScales | None, factor: Tensor | float = 1.0) -> float:
    exact = attend(attention(), None, factor=factor).output
    found = attend(attention(kv_dtype=kv_dtype), scales, factor=factor).output
    assert found.isfinite().all()
    return float((found - exact).abs().mean() / exact.abs().mean())


def test_scales_that_fit_lower_the_error():
    # int8: steps of 1, of a half, and as fine as the largest number allows.
    errors = [error_of("int8", scales) for scales in (None, LayerScales((0.5,), (0.5,)), LayerScales((0.03,), (0.03,)))]
    assert errors[1] < 0.75 * errors[0]
    assert errors[2] < 0.2 * errors[1]
    # fp8: numbers so large that scale 1 cuts them off, and so small that it has no code for them.
    for factor in (3000.0, 0.001):
        fitting = LayerScales((factor / 100,), (factor / 100,))
        assert error_of("fp8_e4m3", fitting, factor) < 0.1 < error_of("fp8_e4m3", None, factor)


def test_one_large_token_spoils_the_others_where_codes_have_equal_steps_and_one_scale():
    factor = torch.ones(NUM_TOKENS, 1, 1)
    factor[4] = 1000.0
    errors = {}
    for kv_dtype in ("int8", "fp8_e4m3"):
        scale = 3500.0 / (KV_FORMATS[kv_dtype].largest or math.nan)
        errors[kv_dtype] = tokens_before(kv_dtype, LayerScales((scale,), (scale,)), factor)
        errors[f"{kv_dtype}_per_token_head"] = tokens_before(f"{kv_dtype}_per_token_head", None, factor)
    # Every ordinary number is less than half a step, so all of it is lost.
    assert errors.pop("int8") == pytest.approx(1.0)
    assert max(errors.values()) < 0.05


def tokens_before(kv_dtype: str, scales: LayerScales | None, factor: Tensor) -> float:
    """Return the error of the tokens in front of the large one, which do not see it."""
    exact = attend(attention(), None, factor=factor).output[:4]
    found = attend(attention(kv_dtype=kv_dtype), scales, factor=factor).output[:4]
    return float((found - exact).abs().mean() / exact.abs().mean())
