"""The reference attention backend against attention by its definition, and what it promises besides numbers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.attention_backends.torch_sdpa import TorchSDPABackend
from octavo.core.interfaces.attention import AttentionSpec
from octavo.core.interfaces.kv_cache_spec import FullAttentionSpec
from octavo.errors import ConfigError, PluginUnsuitable
from octavo.testing.attention_oracle import (
    PagedCase,
    attend_by_definition,
    make_batch,
    make_case,
    random_case,
    replace_rows,
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

# Largest error of an output number: the output's own rounding, and that of the weights.
OUTPUT_TOLERANCE = {"float64": 1e-12, "float32": 5e-6, "float16": 4e-3, "bfloat16": 3e-2}
LSE_TOLERANCE = 1e-5

ABILITIES = {
    "plain": {},
    "multi_head": {"num_kv_heads": 6},
    "multi_query": {"num_kv_heads": 1},
    "window": {"window": 9},
    "window_of_one": {"window": 1},
    "chunk": {"chunk": 8},
    "chunk_of_one": {"chunk": 1},
    "window_and_keep_first": {"window": 9, "keep_first": 5},
    "chunk_and_keep_first": {"chunk": 8, "keep_first": 11},
    "window_and_chunk": {"window": 9, "chunk": 12},
    "window_and_chunk_and_keep_first": {"window": 5, "chunk": 16, "keep_first": 2},
    "keep_first_alone": {"keep_first": 4},
    "soft_cap": {"soft_cap": 0.7},
    "sinks": {"sinks": True},
    "everything": {"window": 9, "chunk": 20, "keep_first": 3, "soft_cap": 1.5, "sinks": True},
}


def assert_matches_the_definition(case: PagedCase) -> None:
    output, lse = case.run(TorchSDPABackend(case.spec))
    wanted_output, wanted_lse = case.expected()
    assert output.dtype == getattr(torch, case.spec.dtype)
    assert lse.dtype == torch.float32
    tolerance = OUTPUT_TOLERANCE[case.spec.dtype]
    np.testing.assert_allclose(output.double().numpy(), wanted_output, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(lse.double().numpy(), wanted_lse, rtol=LSE_TOLERANCE, atol=LSE_TOLERANCE)
    with_lse, _ = case.attend(
        backend := TorchSDPABackend(case.spec), case.filled_cache(backend), backend.plan(case.batch())
    )
    np.testing.assert_allclose(with_lse.double().numpy(), wanted_output, rtol=tolerance, atol=tolerance)


def ordinary_rows(seed: int = 0, spec: AttentionSpec = PLAIN) -> PagedCase:
    return random_case(np.random.default_rng(seed), spec)


@pytest.mark.parametrize("ability", ABILITIES)
@pytest.mark.parametrize("layout", [PLAIN, MLA], ids=["keys_and_values", "value_is_key_prefix"])
def test_every_ability_matches_the_definition(layout: AttentionSpec, ability: str) -> None:
    changes = ABILITIES[ability]
    if layout is MLA:
        changes = {name: value for name, value in changes.items() if name != "num_kv_heads"}
    for seed in range(3):
        assert_matches_the_definition(ordinary_rows(seed, replace(layout, **changes)))


@pytest.mark.parametrize(
    ("rule", "mistake"),
    [
        ({"window": 9}, {"window": 10}),
        ({"window": 9}, {"window": 8}),
        ({"window": 9}, {"window": None}),
        ({"chunk": 8}, {"chunk": 9}),
        ({"chunk": 8}, {"chunk": 7}),
        ({"chunk": 8}, {"chunk": None}),
        ({"window": 9, "keep_first": 5}, {"keep_first": 4}),
        ({"window": 9, "keep_first": 5}, {"keep_first": 6}),
        ({"window": 9, "chunk": 12}, {"chunk": None}),
        ({"window": 9, "chunk": 12}, {"window": None}),
        ({"soft_cap": 0.7}, {"soft_cap": None}),
        ({"soft_cap": 0.7}, {"soft_cap": 0.71}),
        ({"sinks": True}, {"sinks": False}),
        ({}, {"scale": 0.26}),
    ],
    ids=str,
)
def test_a_rule_that_is_off_by_one_gives_something_else(rule: dict[str, object], mistake: dict[str, object]) -> None:
    """What keeps the other tests honest: decode rows and prefill rows alike can tell the rule from its neighbours."""
    spec = replace(PLAIN, **rule)
    case = make_case(np.random.default_rng(3), spec, [(1, 67), (1, 72), (33, 60)])
    output, _ = case.run(TorchSDPABackend(spec))
    right, _ = case.expected()
    wrong, _ = case.expected(replace(spec, **mistake))
    for tokens in (slice(0, 2), slice(2, None)):
        error = np.abs(output[tokens].double().numpy() - right[tokens]).max()
        assert np.abs(right[tokens] - wrong[tokens]).max() > 50 * max(error, 1e-7)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("head_dim", [7, 40, 80, 96, 256])
@pytest.mark.parametrize("block_size", [1, 7, 16, 32])
def test_any_head_size_block_size_and_dtype(dtype: str, head_dim: int, block_size: int) -> None:
    windowed = replace(
        PLAIN,
        dtype=dtype,
        kv_dtype=dtype,
        head_dim=head_dim,
        head_dim_v=head_dim,
        block_size=block_size,
        scale=head_dim**-0.5,
        window=20,
    )
    for spec in (windowed, replace(windowed, window=None)):
        assert_matches_the_definition(
            random_case(np.random.default_rng(head_dim), spec, num_decode=3, num_prefill=2, max_context=50)
        )


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"), [("float32", "bfloat16"), ("float32", "float16"), ("bfloat16", "float32")]
)
def test_keys_may_be_stored_in_another_dtype(dtype: str, kv_dtype: str) -> None:
    assert_matches_the_definition(ordinary_rows(1, replace(PLAIN, dtype=dtype, kv_dtype=kv_dtype)))
    assert_matches_the_definition(ordinary_rows(1, replace(MLA, dtype=dtype, kv_dtype=kv_dtype, soft_cap=2.0)))


def test_float64_keeps_its_precision() -> None:
    assert_matches_the_definition(ordinary_rows(2, replace(PLAIN, dtype="float64", kv_dtype="float64", window=9)))
    assert_matches_the_definition(ordinary_rows(2, replace(PLAIN, dtype="float64", kv_dtype="float64", sinks=True)))


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
        kv_dtype="float32",
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


@pytest.mark.parametrize("ability", ["plain", "window", "everything"])
def test_limits_on_memory_change_no_result(monkeypatch: pytest.MonkeyPatch, ability: str) -> None:
    """Small enough that every bucket holds one row, every tile three queries, every softmax a few of these."""
    monkeypatch.setattr("octavo.attention_backends.torch_sdpa_plan.SCRATCH_BYTES_CPU", 1)
    monkeypatch.setattr("octavo.attention_backends.torch_sdpa_plan.QUERIES_PER_TILE", 3)
    monkeypatch.setattr("octavo.attention_backends.torch_sdpa.EXPLICIT_SCORES", 600)
    for spec in (PLAIN, MLA):
        assert_matches_the_definition(ordinary_rows(24, replace(spec, **ABILITIES[ability])))


@pytest.mark.parametrize("ability", ["plain", "window_and_keep_first", "everything"])
def test_a_row_alone_gets_what_it_gets_among_others(ability: str) -> None:
    case = ordinary_rows(4, replace(PLAIN, **ABILITIES[ability]))
    backend = TorchSDPABackend(case.spec)
    together, _ = case.run(backend)
    start = 0
    for r, row in enumerate(case.rows):
        alone, _ = case.only(r).run(backend)
        torch.testing.assert_close(alone, together[start : start + row.num_queries], rtol=2e-6, atol=2e-6)
        start += row.num_queries


@pytest.mark.parametrize("changes", [*ABILITIES.values()], ids=[*ABILITIES])
def test_a_chunked_prefill_equals_an_unchunked_one(changes: dict[str, object]) -> None:
    spec = replace(PLAIN, **changes)
    backend = TorchSDPABackend(spec)
    whole = make_case(np.random.default_rng(7), spec, [(50, 50)])
    wanted, wanted_lse = whole.run(backend)
    row = whole.rows[0]
    kv_cache = backend.bind(whole.empty_rows(), whole.kv_cache_spec)
    pieces = []
    for start, end in [(0, 17), (17, 18), (18, 45), (45, 49), (49, 50)]:
        step = replace(
            whole,
            rows=[
                replace(
                    row,
                    keys=row.keys[:end],
                    values=row.values[:end],
                    queries=row.queries[start:end],
                    blocks=row.blocks[: -(-end // spec.block_size)],
                )
            ],
        )
        step.write_new_tokens(backend, kv_cache)
        pieces.append(step.attend(backend, kv_cache, backend.plan(step.batch())))
    torch.testing.assert_close(torch.cat([output for output, _ in pieces]), wanted, rtol=5e-6, atol=5e-6)
    torch.testing.assert_close(torch.cat([lse for _, lse in pieces]), wanted_lse, rtol=5e-6, atol=5e-6)


def test_one_plan_serves_every_layer_of_a_step() -> None:
    first = ordinary_rows(8)
    second = replace(first, rows=[replace(row, keys=row.keys.flip(0), values=-row.values) for row in first.rows])
    backend = TorchSDPABackend(PLAIN)
    caches = [case.filled_cache(backend) for case in (first, second)]
    plan = backend.plan(first.batch())
    for case, kv_cache in [*zip((first, second), caches, strict=True)] * 2:
        output = case.attend_without_lse(backend, kv_cache, plan)
        np.testing.assert_allclose(output.double().numpy(), case.expected()[0], rtol=5e-6, atol=5e-6)


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


def test_the_definition_by_hand() -> None:
    spec = replace(PLAIN, num_query_heads=1, num_kv_heads=1, head_dim=1, head_dim_v=1, scale=1.0)
    keys, values = np.array([[[0.0]], [[np.log(3)]]]), np.array([[[10.0]], [[2.0]]])
    output, lse = attend_by_definition(spec, np.array([[[1.0]]]), keys, values)
    assert output.item() == pytest.approx(0.25 * 10 + 0.75 * 2)
    assert lse.item() == pytest.approx(np.log(4))
    output, lse = attend_by_definition(
        replace(spec, sinks=True), np.array([[[1.0]]]), keys, values, np.array([np.log(4)])
    )
    assert output.item() == pytest.approx(0.125 * 10 + 0.375 * 2)
    assert lse.item() == pytest.approx(np.log(8))
    output, _ = attend_by_definition(replace(spec, window=1), np.array([[[1.0]]]), keys, values)
    assert output.item() == pytest.approx(2)


def test_what_nobody_sees_is_not_read() -> None:
    """Every other slot holds NaN or infinity: the null block, blocks of nobody, tails, what a window has left."""
    for ability in ABILITIES.values():
        case = ordinary_rows(11, replace(PLAIN, **ability))
        backend = TorchSDPABackend(case.spec)
        kv_cache = case.filled_cache(backend)
        assert kv_cache[0].isnan().all()
        plan = backend.plan(case.batch())
        assert case.attend_without_lse(backend, kv_cache, plan).isfinite().all()
        output, lse = case.attend(backend, kv_cache, plan)
        assert output.isfinite().all()
        assert lse.isfinite().all()


@pytest.mark.parametrize("soft_cap", [None, 2.0])
def test_one_rows_nan_stays_in_the_row(soft_cap: float | None) -> None:
    spec = replace(PLAIN, soft_cap=soft_cap)
    case = make_case(np.random.default_rng(12), spec, [(1, 30), (1, 33), (1, 31), (4, 32)])
    backend = TorchSDPABackend(spec)
    healthy, _ = case.run(backend)
    kv_cache = case.filled_cache(backend)
    kv_cache[int(case.rows[1].blocks[0])] = torch.nan
    output = case.attend_without_lse(backend, kv_cache, backend.plan(case.batch()))
    assert output[1].isnan().all()
    assert torch.equal(output[[0, 2, 3, 4, 5, 6]], healthy[[0, 2, 3, 4, 5, 6]])


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


@pytest.mark.parametrize("limit", [{"window": 20}, {"chunk": 20}], ids=str)
@pytest.mark.parametrize("context_len", [19, 20, 21, 22])
def test_a_fresh_prompt_about_as_long_as_what_a_query_sees(limit: dict[str, int], context_len: int) -> None:
    spec = replace(PLAIN, **limit)
    assert_matches_the_definition(make_case(np.random.default_rng(26), spec, [(context_len, context_len)]))


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


@pytest.mark.parametrize("num_tokens", [0, 1, 4])
def test_slot_minus_one_writes_nothing_even_when_all_are(num_tokens: int) -> None:
    case = ordinary_rows(17)
    backend = TorchSDPABackend(PLAIN)
    rows = torch.arange(case.num_blocks).to(torch.uint8)[:, None].repeat(1, case.kv_cache_spec.page_bytes)
    before = rows.clone()
    new = torch.randn(num_tokens, 2, 16)
    slots = torch.full((num_tokens,), -1)
    backend.write(new, new, backend.bind(rows, case.kv_cache_spec), slots)
    assert torch.equal(rows, before)


@pytest.mark.parametrize("spec", [PLAIN, replace(PLAIN, dtype="bfloat16", kv_dtype="bfloat16"), MLA], ids=str)
def test_pages_may_lie_apart_and_what_lies_between_stays_as_it_was(spec: AttentionSpec) -> None:
    """Rows longer than the page, inside a buffer whose stride is longer than the rows."""
    case = random_case(np.random.default_rng(18), spec, page_padding_bytes=12)
    page_bytes = case.kv_cache_spec.page_bytes
    buffer = torch.full((case.num_blocks, page_bytes + 100), 0xFF, dtype=torch.uint8)
    rows = buffer[:, 8 : 8 + page_bytes + 12]
    backend = TorchSDPABackend(spec)
    kv_cache = backend.bind(rows, case.kv_cache_spec)
    assert kv_cache.data_ptr() == rows.data_ptr()
    case.write_history(backend, kv_cache)
    case.write_new_tokens(backend, kv_cache)
    output = case.attend_without_lse(backend, kv_cache, backend.plan(case.batch()))
    tolerance = OUTPUT_TOLERANCE[spec.dtype]
    np.testing.assert_allclose(output.double().numpy(), case.expected()[0], rtol=tolerance, atol=tolerance)
    assert (buffer[:, :8] == 0xFF).all()
    assert (buffer[:, 8 + page_bytes :] == 0xFF).all()
    assert_matches_the_definition(case)


def test_two_layers_of_different_dtype_share_one_buffer() -> None:
    wide = random_case(np.random.default_rng(19), PLAIN)
    narrow = random_case(np.random.default_rng(20), replace(PLAIN, dtype="bfloat16", kv_dtype="bfloat16"))
    num_blocks = wide.num_blocks + narrow.num_blocks
    buffer = torch.full((num_blocks, wide.kv_cache_spec.page_bytes), 0xFF, dtype=torch.uint8)
    # The narrow layer's blocks come after the wide one's: one pool, two groups.
    narrow = replace(
        narrow,
        rows=[
            replace(row, blocks=np.where(row.blocks == 0, 0, row.blocks + wide.num_blocks).astype(np.int32))
            for row in narrow.rows
        ],
    )
    backends = [TorchSDPABackend(case.spec) for case in (wide, narrow)]
    caches = [backend.bind(buffer, case.kv_cache_spec) for backend, case in zip(backends, (wide, narrow), strict=True)]
    for write in (PagedCase.write_history, PagedCase.write_new_tokens):
        for case, backend, kv_cache in zip((wide, narrow), backends, caches, strict=True):
            write(case, backend, kv_cache)
    for case, backend, kv_cache in zip((wide, narrow), backends, caches, strict=True):
        output = case.attend_without_lse(backend, kv_cache, backend.plan(case.batch()))
        tolerance = OUTPUT_TOLERANCE[case.spec.dtype]
        np.testing.assert_allclose(output.double().numpy(), case.expected()[0], rtol=tolerance, atol=tolerance)


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
        ({"num_query_heads": 7}, "7 query heads are not a multiple of 2 KV heads."),
        ({"dtype": "int8"}, "dtype 'int8' is not one of float32, float16, bfloat16, float64."),
        ({"kv_dtype": "fp8"}, "kv_dtype 'fp8' is not one of float32, float16, bfloat16, float64."),
        ({"device": "abacus:0"}, "device 'abacus:0' is not a device that torch knows."),
        ({"value_is_key_prefix": True}, "value_is_key_prefix needs 1 KV head, and there are 2."),
        (
            {"head_dim_v": 8},
            "head_dim_v 8 differs from head_dim 16, which is served only with value_is_key_prefix.",
        ),
        (
            {"value_is_key_prefix": True, "num_kv_heads": 1, "head_dim_v": 17},
            "A value of 17 numbers is no prefix of a key of 16.",
        ),
        ({"window": 0}, "window is 0; it must be at least 1, or None."),
        ({"chunk": -8}, "chunk is -8; it must be at least 1, or None."),
        ({"keep_first": -1}, "keep_first is -1; it must not be negative."),
        ({"soft_cap": 0.0}, "soft_cap is 0.0; it must be finite and above 0, or None."),
        ({"scale": float("nan")}, "scale nan is not a finite number."),
        ({"num_kv_heads": 0}, "num_kv_heads is 0; it must be at least 1."),
        ({"block_size": 0}, "block_size is 0; it must be at least 1."),
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
    spec = replace(PLAIN, num_query_heads=5, dtype="int4", window=0, chunk=0, soft_cap=-1.0)
    assert len(TorchSDPABackend.cannot_serve(spec)) == 5
    for ability in ABILITIES.values():
        assert TorchSDPABackend.cannot_serve(replace(PLAIN, **ability)) == []


def test_rows_keep_their_pages_when_the_batch_is_reordered() -> None:
    case = ordinary_rows(23)
    backend = TorchSDPABackend(PLAIN)
    kv_cache = case.filled_cache(backend)
    reordered = replace_rows(case, [4, 2, 0, 1, 3])
    output = reordered.attend_without_lse(backend, kv_cache, backend.plan(reordered.batch()))
    np.testing.assert_allclose(output.double().numpy(), reordered.expected()[0], rtol=5e-6, atol=5e-6)
