"""Attention by its definition, checked by hand, and whether random batches can tell a rule from its neighbours."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from octavo.core.interfaces.attention import AttentionSpec
from octavo.core.interfaces.kv_format import KV_FORMATS, ScaledPages
from octavo.testing.attention.abilities import tolerance_of
from octavo.testing.attention.definition import attend_by_definition
from octavo.testing.attention.oracle import make_case, stored_keys_and_values

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


@pytest.mark.parametrize("kv_dtype", KV_FORMATS)
def test_what_nobody_wrote_is_nan_in_every_format(kv_dtype: str) -> None:
    case = make_case(np.random.default_rng(0), replace(PLAIN, kv_dtype=kv_dtype), [(1, 20)])
    kv_format = KV_FORMATS[kv_dtype]
    pages = kv_format.view_pages(case.empty_rows(), (2, 7, 2, 16))
    if isinstance(pages, ScaledPages):
        assert pages.scales.isnan().all()
        assert kv_format.dequantise(pages.codes, pages.scales).isnan().all()
    else:
        assert (kv_format.dequantise(pages, None) if kv_format.is_quantised else pages).isnan().all()


@pytest.mark.parametrize("kv_dtype", [name for name in KV_FORMATS if KV_FORMATS[name].is_quantised])
def test_drawn_numbers_use_the_range_of_a_format(kv_dtype: str) -> None:
    """Or else rounding to the nearest code could not be told from rounding to the one below."""
    (row,) = make_case(np.random.default_rng(0), replace(PLAIN, kv_dtype=kv_dtype), [(1, 500)]).rows
    codes, _ = KV_FORMATS[kv_dtype].quantise(row.keys)
    assert len(codes.view(torch.uint8).unique()) > 120
    keys, values = stored_keys_and_values(row, replace(PLAIN, kv_dtype=kv_dtype))
    for stored, drawn in ((keys, row.keys), (values, row.values)):
        error = np.linalg.norm(stored - drawn.numpy()) / np.linalg.norm(drawn.numpy())
        assert 0.004 < error < 0.04


def test_a_value_that_is_a_part_of_its_key_is_scaled_with_it() -> None:
    spec = replace(
        PLAIN, num_kv_heads=1, head_dim=4, head_dim_v=2, value_is_key_prefix=True, kv_dtype="int8_per_token_head"
    )
    (row,) = make_case(np.random.default_rng(0), spec, [(1, 1)]).rows
    keys, values = stored_keys_and_values(replace(row, keys=torch.tensor([[[1.2, -2.6, 127.0, 0.0]]])), spec)
    assert keys.tolist() == [[[1.0, -3.0, 127.0, 0.0]]]
    assert values.tolist() == [[[1.0, -3.0]]]


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
    """What keeps comparisons honest: decode rows and prefill rows alike can tell the rule from its neighbours."""
    spec = replace(PLAIN, **rule)
    case = make_case(np.random.default_rng(3), spec, [(1, 67), (1, 72), (33, 60)])
    right, _ = case.expected()
    wrong, _ = case.expected(replace(spec, **mistake))
    for tokens in (slice(0, 2), slice(2, None)):
        assert np.abs(right[tokens] - wrong[tokens]).max() > 50 * tolerance_of("float32")
