"""The FlashAttention backend, over stand-ins of the functions that it calls, since there is no GPU."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import flash_attention_stand_ins as stand_ins
import numpy as np
import pytest
import torch
from flash_attention_on_cpu import (
    MIXED,
    ON_CPU,
    ThroughCopies,
    ThroughFlashAttn,
    ThroughFlashAttn3,
    ThroughTorch,
    assert_right,
    case_of,
)

from octavo.errors import ConfigError
from octavo.testing import AttentionBackendSuite
from octavo.testing.attention.oracle import PagedCase


class TestThroughTorch(AttentionBackendSuite):
    backend = ThroughTorch


class TestThroughCopies(AttentionBackendSuite):
    backend = ThroughCopies
    seeds = (0,)


@pytest.mark.slow
class TestThroughFlashAttn3(AttentionBackendSuite):
    backend = ThroughFlashAttn3


@pytest.mark.slow
class TestThroughFlashAttn(AttentionBackendSuite):
    backend = ThroughFlashAttn


# -- what is called, and with what ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backend", "called"),
    [
        (ThroughTorch, "torch, paged"),
        (ThroughFlashAttn3, "flash_attn_3"),
        (ThroughFlashAttn, "flash_attn"),
        (ThroughCopies, "torch, copied"),
    ],
)
@pytest.mark.parametrize("window", [None, 9])
def test_each_provider_attends_to_a_mixed_batch_in_one_call(backend, called, window):
    spec = replace(ON_CPU, block_size=256 if backend is ThroughFlashAttn else 16, window=window)
    # The second call is the one for the log-sum-exp.
    stand_ins.calls.clear()
    assert_right(backend(spec), case_of(MIXED, spec))
    assert stand_ins.calls == [called, called]


@dataclass
class Call:
    positional: tuple
    named: dict


def call_of(lengths, backend=ThroughTorch, spec=ON_CPU) -> tuple[Call, torch.Tensor]:
    """Attend to a batch; return what the provider's function was given, and the cache."""
    calls = []

    class Recorded(type(backend.auto_providers[0])):
        def load(self):
            function = super().load()

            def record(*positional, **named):
                calls.append(Call(positional, named))
                return function(*positional, **named)

            return record

    class Recording(backend):
        auto_providers = (Recorded(),)

    made, case = Recording(spec), case_of(lengths, spec, page_padding_bytes=64)
    kv_cache = case.filled_cache(made)
    made.attend(case.queries(), kv_cache, made.plan(case.batch()))
    (call,) = calls
    return call, kv_cache


def test_torch_gets_views_of_the_pages_with_the_batchs_own_tables():
    call, kv_cache = call_of(MIXED)
    batch = case_of(MIXED).batch()
    _, keys, values, query_starts, key_starts, max_queries, max_keys = call.positional
    for part, view in enumerate((keys, values)):
        assert view.shape == (kv_cache.shape[0], 16, 2, 16)
        assert view.stride() == (kv_cache.stride(0), *kv_cache.stride()[2:])
        assert view.data_ptr() == kv_cache[0, part].data_ptr()
    assert query_starts.tolist() == [0, 1, 2, 8, 13]
    assert key_starts is None
    assert (max_queries, max_keys) == (6, 16 * batch.block_table.shape[1])
    assert call.named["seqused_k"].tolist() == [20, 33, 26, 5]
    assert torch.equal(call.named["block_table"], batch.block_table)
    assert (call.named["scale"], call.named["window_size"], call.named["enable_gqa"]) == (0.3, (-1, 0), True)


def test_flash_attn_gets_lengths_as_offsets_beside_the_table():
    call, _ = call_of(MIXED, ThroughFlashAttn, replace(ON_CPU, block_size=256, soft_cap=0.5))
    assert call.positional[4].tolist() == [0, 20, 53, 79, 84]
    assert call.positional[4].dtype == torch.int32
    assert (call.named["causal"], call.named["window_size"], call.named["softcap"]) == (True, (-1, -1), 0.5)


def test_where_every_row_has_one_query_the_kernel_may_pack_heads():
    assert call_of([(1, 20), (1, 33)])[0].named["window_size"] == (-1, -1)
    assert call_of([(1, 20), (1, 33)])[0].positional[5] == 1
    named = call_of([(1, 20), (1, 33)], ThroughFlashAttn3)[0].named
    assert (named["causal"], named["window_size"], named["max_seqlen_q"]) == (False, (-1, -1), 1)


def test_a_row_without_tokens_keeps_the_kernel_from_taking_one_for_granted():
    lengths = [(1, 20), (1, 33), (0, 0)]
    call, _ = call_of(lengths)
    assert (call.named["window_size"], call.positional[5]) == ((-1, 0), 2)
    for backend in (ThroughTorch, ThroughFlashAttn3, ThroughCopies):
        assert_right(backend(ON_CPU), case_of(lengths))


@pytest.mark.parametrize("lengths", [[(1, 40)], [(7, 40), (2, 2)]])
def test_a_window_is_one_less_to_the_kernel_which_does_not_count_the_query_itself(lengths):
    for backend in (ThroughTorch, ThroughFlashAttn3, ThroughCopies):
        assert call_of(lengths, backend, replace(ON_CPU, window=9))[0].named["window_size"] == (8, 0)
        assert call_of(lengths, backend, replace(ON_CPU, window=1))[0].named["window_size"] == (0, 0)


def test_copies_hold_no_more_than_what_some_query_of_the_row_sees():
    lengths = [(1, 20), (1, 5), (6, 26), (0, 0), (5, 5)]
    call, _ = call_of(lengths, ThroughCopies)
    assert call.positional[1].shape == (56, 2, 16)
    call, _ = call_of(lengths, ThroughCopies, replace(ON_CPU, window=9))
    assert call.positional[1].is_contiguous()
    assert call.positional[4].tolist() == [0, 9, 14, 28, 28, 33]
    assert call.positional[6] == 14
    assert "block_table" not in call.named


def test_a_batch_without_tokens_calls_nothing():
    stand_ins.calls.clear()
    for backend in (ThroughTorch, ThroughCopies):
        made, case = backend(ON_CPU), case_of([(0, 0), (0, 0)])
        output, lse = case.attend(made, case.filled_cache(made), made.plan(case.batch()))
        assert (output.shape, lse.shape) == ((0, 4, 16), (0, 4))
    assert stand_ins.calls == []


def test_blocks_that_begin_where_no_kernel_can_load_are_refused():
    case = case_of(MIXED)
    rows = torch.zeros((4, case.kv_cache_spec.page_bytes + 8), dtype=torch.uint8)
    with pytest.raises(ConfigError) as caught:
        ThroughTorch(ON_CPU).bind(rows, case.kv_cache_spec)
    assert str(caught.value) == (
        "FlashAttention loads 16 bytes at a time, and the blocks of this layer lie 4104 bytes apart, from byte 0 of 16 "
        "on: pages of other layers are of odd sizes. Choose another backend in attention_backends for this kind."
    )


# -- the log-sum-exp --------------------------------------------------------------------------------------------


def with_lse(change):
    """Return a backend whose provider's log-sum-exp, [num_query_heads, num_tokens], is changed."""

    class Changed(type(ThroughTorch.auto_providers[0])):
        def attend(self, *arguments):
            output, lse = super().attend(*arguments)
            return output, change(lse)

    class Changing(ThroughTorch):
        auto_providers = (Changed(),)

    return Changing(ON_CPU)


def test_a_log_sum_exp_may_be_laid_out_as_the_kernels_do_or_as_torchs_docstring_says():
    for lengths in (MIXED, [(1, 3), (1, 4), (1, 5), (1, 6)]):
        assert_right(with_lse(lambda lse: lse), case_of(lengths))
    assert_right(with_lse(lambda lse: lse.t().contiguous()), case_of(MIXED))


def test_a_log_sum_exp_of_another_shape_is_refused():
    case, backend = case_of(MIXED), with_lse(lambda lse: lse[None])
    with pytest.raises(ValueError, match=r"returned a log-sum-exp of shape \(1, 4, 13\) for 13 tokens and 4 query"):
        case.run(backend)


def test_a_token_of_a_row_without_context_has_seen_nothing():
    case, backend = case_of([(1, 20), (1, 33)]), ThroughTorch(ON_CPU)
    kv_cache, batch = case.filled_cache(backend), case.batch()
    batch = replace(batch, context_lens=torch.tensor([20, 0], dtype=torch.int32))
    output, lse = case.attend(backend, kv_cache, backend.plan(batch))
    assert output[1].abs().max() == 0
    assert lse[1].tolist() == [-math.inf] * 4
    assert lse[0].isfinite().all()


def test_sinks_are_no_part_of_the_call():
    case, backend = case_of(MIXED), ThroughTorch(ON_CPU)
    with pytest.raises(ValueError, match="The spec says sinks=False, and attend got some"):
        backend.attend(case.queries(), case.filled_cache(backend), backend.plan(case.batch()), sinks=torch.zeros(4))


# -- slots that nobody sees -------------------------------------------------------------------------------------


def stale_cache(backend, case: PagedCase):
    """Return a cache as an engine has it: zeros at first, then used by others, among them one that made infinities."""
    kv_cache = backend.bind(torch.zeros_like(case.empty_rows()), case.kv_cache_spec)
    slots = torch.arange(case.spec.block_size, case.num_blocks * case.spec.block_size)
    noise = torch.randn(len(slots), case.spec.num_kv_heads, case.spec.head_dim)
    values = noise.clone()
    values[::3, 0, 5], values[1::3, 1, 2] = math.inf, math.nan
    backend.write(noise, values, kv_cache, slots)
    case.write_history(backend, kv_cache)
    case.write_new_tokens(backend, kv_cache)
    return kv_cache


@pytest.mark.parametrize("loads_behind", [False, True])
@pytest.mark.parametrize("window", [None, 9])
def test_kernels_that_load_whole_tiles_find_nothing_in_them_that_times_0_is_not_0(window, loads_behind):
    spec = replace(ON_CPU, window=window)
    backend, case = ThroughTorch(spec), case_of([(1, 70), (1, 33), (6, 90), (5, 5)], spec)
    assert (window is None) == all(row.blocks.all() for row in case.rows)
    with stand_ins.loading(tile=64, loads_behind=loads_behind):
        output, _ = case.attend(backend, stale_cache(backend, case), backend.plan(case.batch()))
    np.testing.assert_allclose(output.double().numpy(), case.expected()[0], rtol=5e-6, atol=5e-6)


def test_such_a_kernel_does_read_what_is_behind_the_context():
    """The stand-in is as careless as the kernel: in a cache that was never zeros it fails."""
    backend, case = ThroughTorch(ON_CPU), case_of([(1, 33)])
    with stand_ins.loading(tile=64, loads_behind=True):
        output, _ = case.attend(backend, case.filled_cache(backend), backend.plan(case.batch()))
    assert output.isnan().any()


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_value_that_is_not_finite_makes_nan_for_whoever_sees_it_and_for_nobody_else(broken):
    backend, case = ThroughTorch(ON_CPU), case_of([(1, 20), (8, 20)])
    case.rows[1].values[15, 0, 3] = broken
    with stand_ins.loading(tile=64):
        output, _ = case.attend(backend, case.filled_cache(backend), backend.plan(case.batch()))
    # The second row's queries are at the positions 12 to 19, and two query heads read each KV head.
    sees_it = [[False] * 4] * 4 + [[True, True, False, False]] * 5
    assert output.isnan().any(-1).tolist() == sees_it


def test_a_batch_without_values_is_refused():
    backend, case = ThroughTorch(ON_CPU), case_of(MIXED)
    keys, _ = case.new_keys_and_values()
    with pytest.raises(ValueError, match="write got no values, and value_is_key_prefix is off"):
        backend.write(keys, None, backend.bind(case.empty_rows(), case.kv_cache_spec), case.batch().slots)
