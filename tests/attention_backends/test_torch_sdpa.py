"""The reference attention backend: the contract of every backend, and what it promises besides."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from octavo.attention_backends.torch_sdpa import TorchSDPABackend
from octavo.core.interfaces.attention import AttentionSpec
from octavo.core.interfaces.kv_cache_spec import FullAttentionSpec
from octavo.core.interfaces.kv_format import KV_FORMATS, ScaledPages
from octavo.errors import ConfigError, PluginUnsuitable
from octavo.testing import AttentionBackendSuite
from octavo.testing.attention.oracle import (
    PagedCase,
    make_batch,
    make_case,
    number_size,
    random_case,
)

PLAIN = AttentionSpec(
    num_query_heads=6,
    num_kv_heads=2,
    head_dim=16,
    head_dim_v=16,
    scale=0.25,
    block_size=7,
    dtype="float32",
    kv_dtype="float32",
    device="cpu",
)
MLA = replace(PLAIN, num_kv_heads=1, head_dim=24, head_dim_v=16, value_is_key_prefix=True)

# Largest error of an output number or log-sum-exp in float32.
TOLERANCE = 5e-6

QUANTISED = [kv_format.name for kv_format in KV_FORMATS.values() if kv_format.is_quantised]

ABILITIES = {
    "plain": {},
    "window": {"window": 9},
    "everything": {"window": 9, "chunk": 20, "keep_first": 3, "soft_cap": 1.5, "sinks": True},
}


class TestTorchSDPA(AttentionBackendSuite):
    backend = "torch_sdpa"


def assert_matches_the_definition(case: PagedCase) -> None:
    output, lse = case.run(TorchSDPABackend(case.spec))
    wanted_output, wanted_lse = case.expected()
    atol = TOLERANCE * number_size(case.spec)
    np.testing.assert_allclose(output.double().numpy(), wanted_output, rtol=TOLERANCE, atol=atol)
    np.testing.assert_allclose(lse.double().numpy(), wanted_lse, rtol=TOLERANCE, atol=TOLERANCE)
    with_lse, _ = case.attend(
        backend := TorchSDPABackend(case.spec), case.filled_cache(backend), backend.plan(case.batch())
    )
    np.testing.assert_allclose(with_lse.double().numpy(), wanted_output, rtol=TOLERANCE, atol=atol)


def ordinary_rows(seed: int = 0, spec: AttentionSpec = PLAIN) -> PagedCase:
    return random_case(np.random.default_rng(seed), spec)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 1 << 20),
    group_size=st.integers(1, 4),
    num_kv_heads=st.integers(1, 3),
    block_size=st.sampled_from([1, 3, 16]),
    window=st.none() | st.integers(1, 40),
    chunk=st.none() | st.integers(1, 40),
    keep_first=st.integers(0, 20),
    soft_cap=st.none() | st.just(1.5),
    sinks=st.booleans(),
    is_mla=st.booleans(),
    kv_dtype=st.sampled_from(["float32", "float32", *QUANTISED]),
    num_decode=st.integers(0, 6),
    num_prefill=st.integers(0, 3),
    num_padding=st.integers(0, 2),
)
def test_any_mixture_of_rows_and_abilities(
    seed: int,
    group_size: int,
    num_kv_heads: int,
    block_size: int,
    window: int | None,
    chunk: int | None,
    keep_first: int,
    soft_cap: float | None,
    sinks: bool,
    is_mla: bool,
    kv_dtype: str,
    num_decode: int,
    num_prefill: int,
    num_padding: int,
) -> None:
    num_kv_heads = 1 if is_mla else num_kv_heads
    spec = AttentionSpec(
        num_query_heads=group_size * num_kv_heads,
        num_kv_heads=num_kv_heads,
        head_dim=12,
        head_dim_v=8 if is_mla else 12,
        scale=0.3,
        block_size=block_size,
        dtype="float32",
        kv_dtype=kv_dtype,
        device="cpu",
        window=window,
        chunk=chunk,
        keep_first=keep_first,
        soft_cap=soft_cap,
        sinks=sinks,
        value_is_key_prefix=is_mla,
    )
    rows = num_decode + num_prefill + num_padding
    case = random_case(
        np.random.default_rng(seed),
        spec,
        num_decode=num_decode if rows else 1,
        num_prefill=num_prefill,
        num_padding=num_padding,
        max_context=60,
    )
    assert_matches_the_definition(case)


@pytest.mark.parametrize(
    "changes", [{}, {"window": 100}, {"window": 100, "keep_first": 20}, {"chunk": 300}, {"soft_cap": 1.0}], ids=str
)
def test_long_rows_are_cut_into_tiles_without_a_seam(changes: dict[str, object]) -> None:
    spec = replace(PLAIN, num_query_heads=2, num_kv_heads=1, **changes)
    assert_matches_the_definition(make_case(np.random.default_rng(5), spec, [(1, 700), (530, 700), (300, 300)]))


def test_many_decode_rows_of_any_length_are_bucketed_and_put_back_in_order() -> None:
    rng = np.random.default_rng(6)
    lengths = [(1, int(n)) for n in rng.integers(1, 900, size=48)]
    case = make_case(rng, replace(PLAIN, num_kv_heads=3, head_dim=64, head_dim_v=64), lengths)
    assert_matches_the_definition(case)


@pytest.mark.parametrize("kv_dtype", ["float32", "int8", "fp8_e4m3_per_token_head"])
@pytest.mark.parametrize("ability", ["plain", "window", "everything"])
def test_limits_on_memory_change_no_result(monkeypatch: pytest.MonkeyPatch, ability: str, kv_dtype: str) -> None:
    """Small enough that every bucket holds one row, every tile three queries, every softmax a few of these."""
    monkeypatch.setattr("octavo.attention_backends.torch_sdpa_plan.SCRATCH_BYTES_CPU", 1)
    monkeypatch.setattr("octavo.attention_backends.torch_sdpa_plan.QUERIES_PER_TILE", 3)
    monkeypatch.setattr("octavo.attention_backends.torch_sdpa.EXPLICIT_SCORES", 600)
    for spec in (PLAIN, MLA):
        assert_matches_the_definition(ordinary_rows(24, replace(spec, kv_dtype=kv_dtype, **ABILITIES[ability])))


def test_a_plan_made_in_inference_mode_serves_outside_of_it() -> None:
    case = ordinary_rows(9)
    backend = TorchSDPABackend(PLAIN)
    kv_cache = case.filled_cache(backend)
    with torch.inference_mode():
        plan = backend.plan(case.batch())
        inside = case.attend_without_lse(backend, kv_cache, plan)
    assert torch.equal(case.attend_without_lse(backend, kv_cache, plan), inside)


def test_worked_numbers() -> None:
    """One decode row and one fresh prompt: 254 new tokens of which the first sees itself only."""
    case = make_case(np.random.default_rng(10), replace(PLAIN, block_size=16), [(1, 755), (254, 254)])
    batch = case.batch()
    assert batch.query_starts_host.tolist() == [0, 1, 255]
    assert batch.context_lens_host.tolist() == [755, 254]
    assert (batch.num_decode_rows, batch.num_rows, batch.num_tokens) == (1, 2, 255)
    assert batch.slots[0] == batch.block_table_host[0, 47] * 16 + 2  # position 754
    output, _ = case.run(TorchSDPABackend(case.spec))
    first_token_value = case.rows[1].values[0].repeat_interleave(3, dim=0)
    torch.testing.assert_close(output[1], first_token_value)
    assert_matches_the_definition(case)


@pytest.mark.parametrize("spec", [PLAIN, replace(PLAIN, sinks=True)], ids=["plain", "sinks"])
def test_padding_produces_nothing_and_breaks_nothing(spec: AttentionSpec) -> None:
    """Rows without tokens, and decode rows without context, as a fixed-size batch is filled up with."""
    case = make_case(np.random.default_rng(13), spec, [(1, 20), (1, 9)])
    backend = TorchSDPABackend(spec)
    wanted, _ = case.run(backend)
    table = np.zeros((5, case.max_blocks), dtype=np.int32)
    table[:2] = case.batch().block_table_host
    slots = np.concatenate([case.batch().slots.numpy(), [-1, -1]])
    batch = make_batch(
        np.array([0, 1, 2, 3, 4, 4], dtype=np.int32), np.array([20, 9, 0, 0, 0], dtype=np.int32), table, slots
    )
    kv_cache = case.filled_cache(backend)
    queries = torch.cat([case.queries(), torch.full((2, 6, 16), torch.nan)])
    plan = backend.plan(batch)
    output, lse = backend.attend(queries, kv_cache, plan, sinks=case.sinks, return_lse=True)
    torch.testing.assert_close(output[:2], wanted, rtol=2e-6, atol=2e-6)
    assert (output[2:] == 0).all()
    nothing_but_sinks = torch.full((6,), -torch.inf) if case.sinks is None else case.sinks
    assert torch.equal(lse[2:], nothing_but_sinks.expand(2, 6))
    assert (backend.attend(queries, kv_cache, plan, sinks=case.sinks)[2:] == 0).all()


def test_a_batch_of_padding_alone_is_fine() -> None:
    backend = TorchSDPABackend(PLAIN)
    case = make_case(np.random.default_rng(14), PLAIN, [(0, 0), (0, 0)])
    output, lse = case.attend(backend, case.filled_cache(backend), backend.plan(case.batch()))
    assert output.shape == (0, 6, 16)
    assert lse.shape == (0, 6)


@pytest.mark.parametrize("sinks", [False, True])
def test_a_null_entry_is_never_read_even_inside_the_context(sinks: bool) -> None:
    """As in a trial run, where no row has blocks: such positions count as not seen."""
    spec = replace(PLAIN, sinks=sinks)
    case = make_case(np.random.default_rng(15), spec, [(1, 20), (5, 5), (3, 20)])
    backend = TorchSDPABackend(spec)
    kv_cache = case.filled_cache(backend)
    rows = [replace(row, blocks=np.zeros_like(row.blocks)) for row in case.rows]
    blank = replace(case, rows=rows)
    assert (blank.batch().slots == -1).all()
    output, lse = blank.attend(backend, kv_cache, backend.plan(blank.batch()))
    assert (output == 0).all()
    assert torch.equal(lse, (torch.full((6,), -torch.inf) if case.sinks is None else case.sinks).expand(9, 6))
    assert (blank.attend_without_lse(backend, kv_cache, backend.plan(blank.batch())) == 0).all()


@pytest.mark.parametrize("sinks", [False, True])
def test_a_query_that_sees_nothing_gets_zeros_beside_queries_that_see(sinks: bool) -> None:
    spec = replace(PLAIN, sinks=sinks)
    case = make_case(np.random.default_rng(25), spec, [(20, 20)])
    backend = TorchSDPABackend(spec)
    kv_cache = case.filled_cache(backend)
    row = case.rows[0]
    blank = replace(case, rows=[replace(row, blocks=np.where(np.arange(3) == 0, 0, row.blocks).astype(np.int32))])
    plan = backend.plan(blank.batch())
    output, lse = blank.attend(backend, kv_cache, plan)
    assert (output[:7] == 0).all()
    assert torch.equal(lse[:7], (torch.full((6,), -torch.inf) if case.sinks is None else case.sinks).expand(7, 6))
    assert output[7:].isfinite().all()
    assert (output[7:] != 0).any()
    torch.testing.assert_close(blank.attend_without_lse(backend, kv_cache, plan), output, rtol=5e-6, atol=5e-6)


@pytest.mark.parametrize("spec", [PLAIN, MLA, replace(PLAIN, kv_dtype="bfloat16")], ids=["plain", "mla", "converted"])
def test_write_stores_each_token_in_its_slot_and_touches_nothing_else(spec: AttentionSpec) -> None:
    case = ordinary_rows(16, spec)
    backend = TorchSDPABackend(spec)
    rng = torch.Generator().manual_seed(0)
    rows = torch.randint(0, 256, case.empty_rows().shape, dtype=torch.uint8, generator=rng)
    before = rows.clone()
    kv_cache = backend.bind(rows, case.kv_cache_spec)
    key = torch.randn(5, spec.num_kv_heads, spec.head_dim)
    value = None if spec.value_is_key_prefix else torch.randn(5, spec.num_kv_heads, spec.head_dim)
    slots = torch.tensor([3 * 7 + 6, -1, 1 * 7, -1, 3 * 7 + 5])
    backend.write(key, value, kv_cache, slots)
    wanted = backend.bind(before, case.kv_cache_spec)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0 and value is None:
            wanted[slot // 7, slot % 7] = key[token, 0]
        elif slot >= 0:
            wanted[slot // 7, 0, slot % 7] = key[token]
            wanted[slot // 7, 1, slot % 7] = value[token]
    assert torch.equal(rows, before)


@pytest.mark.parametrize("spec", [PLAIN, MLA], ids=["plain", "mla"])
@pytest.mark.parametrize("kv_dtype", QUANTISED)
def test_write_stores_the_codes_and_scales_of_the_format(spec: AttentionSpec, kv_dtype: str) -> None:
    """As the default `bind` lays them out, which any backend may read: a slot of -1 changes neither."""
    spec = replace(spec, kv_dtype=kv_dtype)
    case = ordinary_rows(16, spec)
    backend = TorchSDPABackend(spec)
    rows = torch.randint(0, 256, case.empty_rows().shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    wanted = rows.clone()
    key = torch.randn(3, spec.num_kv_heads, spec.head_dim)
    value = None if spec.value_is_key_prefix else torch.randn(3, spec.num_kv_heads, spec.head_dim)
    backend.write(key, value, backend.bind(rows, case.kv_cache_spec), torch.tensor([3 * 7 + 6, -1, 1 * 7]))

    kv_format = KV_FORMATS[kv_dtype]
    pages = kv_format.view_pages(wanted, backend.kv_cache_shape(case.kv_cache_spec, len(rows))[1:])
    vectors = key[:, 0] if value is None else torch.stack((key, value), dim=1)
    for stored, made in zip(_parts(pages), kv_format.quantise(vectors), strict=False):
        assert made is not None
        for token, (block, offset) in ((0, (3, 6)), (2, (1, 0))):
            place = stored[block, offset] if value is None else stored[block, :, offset]
            place.copy_(made[token])
    assert torch.equal(rows, wanted)


def _parts(pages: Tensor | ScaledPages) -> tuple[Tensor, ...]:
    return (pages.codes, pages.scales) if isinstance(pages, ScaledPages) else (pages,)


def test_pages_with_scales_begin_where_a_scale_may_stand() -> None:
    backend = TorchSDPABackend(replace(PLAIN, kv_dtype="int8_per_token_head"))
    kept = FullAttentionSpec(7, 2, 16, "int8_per_token_head")
    assert kept.page_bytes == 448 + 28 * 4
    with pytest.raises(ConfigError) as stride:
        backend.bind(torch.zeros(4, kept.page_bytes + 6, dtype=torch.uint8), kept)
    assert str(stride.value) == (
        "Rows with strides (566, 1) from byte 0 on cannot be viewed as int8_per_token_head. Let them start at "
        "multiples of 4 bytes, their bytes in a row."
    )
    with pytest.raises(ConfigError, match="from byte 2 on cannot be viewed as int8_per_token_head"):
        backend.bind(torch.zeros(4, kept.page_bytes + 4, dtype=torch.uint8)[:, 2:], kept)
    with pytest.raises(ConfigError, match=r"takes 560 bytes; the KV-cache spec's page has 448"):
        backend.bind(torch.zeros(4, 560, dtype=torch.uint8), replace(kept, dtype="int8"))
    pages = backend.bind(torch.zeros(4, kept.page_bytes + 8, dtype=torch.uint8)[:, 4:], kept)
    assert isinstance(pages, ScaledPages)
    # A byte may stand anywhere.
    static = TorchSDPABackend(replace(PLAIN, kv_dtype="fp8_e4m3"))
    pages = static.bind(torch.zeros(4, 448 + 3, dtype=torch.uint8)[:, 3:], replace(kept, dtype="fp8_e4m3"))
    assert isinstance(pages, Tensor)
    assert (pages.dtype, pages.stride()[0]) == (torch.float8_e4m3fn, 451)


def test_bind_says_why_bytes_do_not_fit() -> None:
    backend = TorchSDPABackend(PLAIN)
    kept = FullAttentionSpec(7, 2, 16, "float32")
    buffer = torch.zeros(4, kept.page_bytes + 9, dtype=torch.uint8)
    with pytest.raises(ConfigError, match="Let them start at multiples of 4 bytes"):
        backend.bind(buffer, kept)
    with pytest.raises(ConfigError, match="from byte 1 on cannot be viewed as float32"):
        backend.bind(torch.zeros(4, kept.page_bytes + 4, dtype=torch.uint8)[:, 1:], kept)
    with pytest.raises(ConfigError, match="blocks of 8 tokens and the attention blocks of 7"):
        backend.bind(buffer, replace(kept, block_size=8))
    with pytest.raises(ConfigError, match=r"takes 1792 bytes; the KV-cache spec's page has 896"):
        backend.bind(buffer, replace(kept, dtype="bfloat16"))
    with pytest.raises(ConfigError, match="matrix of uint8, not 2 dimensions of"):
        backend.bind(buffer.float(), kept)


def test_sinks_go_where_the_spec_says() -> None:
    with_sinks = ordinary_rows(21, replace(PLAIN, sinks=True))
    backend = TorchSDPABackend(with_sinks.spec)
    kv_cache, plan = with_sinks.filled_cache(backend), backend.plan(with_sinks.batch())
    with pytest.raises(ValueError, match="The spec says sinks=True, and attend got sinks=False"):
        backend.attend(with_sinks.queries(), kv_cache, plan)
    with pytest.raises(ValueError, match="The spec says sinks=False, and attend got sinks=True"):
        TorchSDPABackend(PLAIN).attend(with_sinks.queries(), kv_cache, plan, sinks=with_sinks.sinks)


def test_writing_keys_alone_needs_a_layer_that_keeps_keys_alone() -> None:
    case = ordinary_rows(22)
    backend = TorchSDPABackend(PLAIN)
    kv_cache = backend.bind(case.empty_rows(), case.kv_cache_spec)
    with pytest.raises(ValueError, match="write got no values"):
        backend.write(torch.zeros(1, 2, 16), None, kv_cache, torch.tensor([7]))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": "int8"}, "dtype 'int8' is not one of float32, float16, bfloat16, float64."),
        (
            {"kv_dtype": "fp8"},
            "kv_dtype 'fp8' is not one of float32, float16, bfloat16, float64, fp8_e4m3, int8, "
            "fp8_e4m3_per_token_head, int8_per_token_head.",
        ),
        ({"device": "abacus:0"}, "device 'abacus:0' is not a device that torch knows."),
        (
            {"head_dim_v": 8},
            "head_dim_v 8 differs from head_dim 16, which is served only with value_is_key_prefix.",
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_a_spec_that_cannot_be_served_is_refused_with_the_reason(changes: dict[str, object], reason: str) -> None:
    spec = replace(PLAIN, **changes)
    assert TorchSDPABackend.cannot_serve(spec) == [reason]
    with pytest.raises(PluginUnsuitable) as refusal:
        TorchSDPABackend(spec)
    assert reason in str(refusal.value)


def test_all_reasons_are_named_at_once() -> None:
    spec = replace(PLAIN, dtype="int4", kv_dtype="fp8", device="abacus:0", head_dim_v=8)
    assert len(TorchSDPABackend.cannot_serve(spec)) == 4


def test_what_a_spec_says_beyond_the_contract_is_not_passed_over():
    @dataclass(frozen=True)
    class StripedSpec(AttentionSpec):
        every: int = 2

    spec = StripedSpec(
        num_query_heads=1,
        num_kv_heads=1,
        head_dim=8,
        head_dim_v=8,
        scale=1.0,
        block_size=4,
        dtype="float32",
        kv_dtype="float32",
        device="cpu",
    )
    assert TorchSDPABackend.cannot_serve(spec) == ["StripedSpec has every, which this backend knows nothing of."]
