"""What a KV cache of some size holds, with the numbers worked out by hand."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.interfaces import FullAttentionSpec, KVCacheSpec, SlidingWindowSpec
from octavo.core.kv_cache_config import KVCacheGroup, RequestCost, make_groups
from octavo.core.kv_cache_plan import RequestLimits, plan_from_blocks, plan_from_memory
from octavo.errors import ConfigError, NotEnoughMemoryError
from octavo.kv_managers.full_attention import FullAttentionManager
from octavo.kv_managers.sliding_window import SlidingWindowManager

# 32 layers, 8 KV heads, head_dim 128, fp16: 131072 bytes a token, 2 MiB a block of 16.
LARGE = FullAttentionSpec(16, num_kv_heads=8, head_dim=128, dtype="float16")
# 24 layers, 2 KV heads, head_dim 64, bf16: pages of 8192 bytes.
SMALL = FullAttentionSpec(16, num_kv_heads=2, head_dim=64, dtype="bfloat16")
MIB = 2**20


@dataclass(frozen=True)
class WindowSpec(FullAttentionSpec):
    kind: ClassVar[str] = "window"
    window: int


class WindowManager(FullAttentionManager):
    """Holds no more than the blocks of a window and of the tokens in flight."""

    serves: ClassVar[type[KVCacheSpec]] = WindowSpec

    @classmethod
    def max_blocks_per_request(cls, spec, max_model_len, max_tokens_in_flight):
        return -(-min(max_model_len, spec.window + max_tokens_in_flight) // spec.block_size)


def cost_of(spec, num_layers, manager=FullAttentionManager):
    return RequestCost(make_groups([spec] * num_layers), (manager,), max_tokens_in_flight=64)


def large_plan(available_bytes, max_position=8192, max_model_len="auto"):
    return plan_from_memory(available_bytes, cost_of(LARGE, 32), RequestLimits(max_position, max_model_len))


def rows_of(plan):
    return [(row.num_tokens, row.blocks_per_request, row.num_requests) for row in plan.concurrency_by_length()]


# -- worked numbers ---------------------------------------------------------------------------------------------


def test_bytes_of_a_token_and_of_a_long_request():
    plan = large_plan(8 * 1024 * MIB, max_position=4096)
    (group,) = plan.groups
    assert group.bytes_per_token == plan.bytes_per_token == 131072
    assert group.page_bytes == 65536
    assert group.bytes_per_block == 2 * MIB
    assert (group.blocks_per_request, group.bytes_per_request) == (256, 512 * MIB)


def test_memory_is_cut_into_blocks_of_a_page_in_each_layer():
    plan = plan_from_memory(131928 * 8192 * 24 + 5, cost_of(SMALL, 24), RequestLimits(32768))
    (group,) = plan.groups
    assert group.page_bytes == 8192
    assert (plan.num_blocks, plan.num_usable_blocks, plan.unused_bytes) == (131928, 131927, 5)
    assert plan.kv_cache_config.total_bytes == 24 * 1080754176


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(2000, 125), (2050, 129), (2350, 147)])
def test_a_request_holds_the_blocks_that_its_tokens_fill_or_begin(num_tokens, num_blocks):
    plan = large_plan((2 * 147 + 1) * 2 * MIB)
    row = plan.concurrency_at(num_tokens)
    assert row.blocks_per_request == num_blocks
    assert row.num_requests == 2
    assert row.exact == 294 / num_blocks


def test_the_null_block_is_no_requests():
    assert large_plan(257 * 2 * MIB).concurrency_at(4096).num_requests == 1
    assert large_plan(257 * 2 * MIB - 1).concurrency_at(4096).num_requests == 0
    assert large_plan(257 * 2 * MIB - 1).concurrency_at(4096).exact == 255 / 256


# -- lengths ----------------------------------------------------------------------------------------------------


def test_the_longest_request_is_as_long_as_the_positions_or_the_memory_allow():
    plan = large_plan(601 * 2 * MIB)
    assert (plan.longest_request, plan.max_model_len) == (8192, 8192)
    plan = large_plan(6 * 2 * MIB)
    assert (plan.longest_request, plan.max_model_len) == (80, 80)


def test_a_length_that_was_asked_for_is_the_longest_accepted_and_more_may_fit():
    plan = large_plan(601 * 2 * MIB, max_model_len=100)
    assert (plan.longest_request, plan.max_model_len) == (8192, 100)
    assert rows_of(plan) == [(100, 7, 85)]
    assert plan.groups[0].blocks_per_request == 7


def test_concurrency_is_told_for_doubling_lengths_up_to_the_longest():
    assert rows_of(large_plan(1025 * 2 * MIB, max_position=5000)) == [
        (512, 32, 32),
        (1024, 64, 16),
        (2048, 128, 8),
        (4096, 256, 4),
        (5000, 313, 3),
    ]


def test_concurrency_is_told_for_the_longest_request_that_fits_and_for_those_that_do_not():
    assert rows_of(large_plan(101 * 2 * MIB, max_position=4096)) == [
        (512, 32, 3),
        (1024, 64, 1),
        (1600, 100, 1),
        (2048, 128, 0),
        (4096, 256, 0),
    ]


def test_a_model_of_short_sequences_has_one_length():
    assert rows_of(large_plan(101 * 2 * MIB, max_position=512)) == [(512, 32, 3)]


@pytest.mark.parametrize("max_model_len", [0, 1, -5, 8193])
def test_a_length_past_the_positions_is_refused_as_by_an_engine(max_model_len):
    with pytest.raises(ConfigError) as caught:
        RequestLimits(8192, max_model_len)
    assert str(caught.value) == (
        f"max_model_len is {max_model_len}; it must be from 2 (a prompt token and a new one) to 8192, the longest "
        "sequence that the model's positions are made for."
    )


# -- several groups, and managers that drop blocks ----------------------------------------------------------------


def test_a_manager_that_drops_blocks_is_asked_what_a_request_takes():
    spec = WindowSpec(16, num_kv_heads=8, head_dim=128, dtype="float16", window=128)
    plan = plan_from_memory(121 * 2 * MIB, cost_of(spec, 32, WindowManager), RequestLimits(100_000))
    (group,) = plan.groups
    # A window of 128 tokens and 64 in flight are 12 blocks, however long the request is.
    assert (plan.longest_request, group.blocks_per_request) == (100_000, 12)
    assert group.bytes_per_request == 24 * MIB
    assert group.bytes_per_token == 131072
    assert [row.num_requests for row in plan.concurrency_by_length()] == [10] * 9


def test_groups_share_one_pool_whose_blocks_are_as_large_as_the_largest_needs():
    # 10 full layers and 20 with a window: blocks of 20 pages, of which the full layers use 10.
    full = KVCacheGroup(SMALL, tuple(range(10)))
    window = KVCacheGroup(WindowSpec(16, 2, 64, "bfloat16", window=64), tuple(range(10, 30)))
    cost = RequestCost((full, window), (FullAttentionManager, WindowManager), max_tokens_in_flight=64)
    plan = plan_from_memory(101 * 20 * 8192, cost, RequestLimits(1024))
    of_full, of_window = plan.groups
    assert (of_full.bytes_per_token, of_window.bytes_per_token) == (10 * 512, 20 * 512)
    assert plan.bytes_per_token == 30 * 512
    assert (of_full.unused_bytes_per_block, of_window.unused_bytes_per_block) == (10 * 8192, 0)
    assert (of_full.blocks_per_request, of_window.blocks_per_request) == (64, 8)
    assert (of_full.bytes_per_request, of_window.bytes_per_request) == (64 * 20 * 8192, 8 * 20 * 8192)
    assert rows_of(plan) == [(512, 40, 2), (1024, 72, 1)]


def test_a_plan_counts_what_an_engine_counts_with_windows_and_pages_of_different_sizes():
    narrow = SlidingWindowSpec(16, num_kv_heads=1, head_dim=64, dtype="bfloat16", window=128)
    groups = make_groups([narrow, SMALL, narrow, SMALL])
    cost = RequestCost(groups, (SlidingWindowManager, FullAttentionManager), max_tokens_in_flight=64)
    plan = plan_from_memory(101 * 2 * 8192, cost, RequestLimits(2048))
    of_window, of_full = plan.groups
    # Blocks of 32 tokens for the window: ceil(127 / 32) and ceil((31 + 64) / 32).
    assert (of_window.blocks_per_request, of_full.blocks_per_request) == (4 + 3, 93)
    assert (of_window.page_bytes, of_full.page_bytes) == (8192, 8192)
    assert (of_window.unused_bytes_per_block, of_full.unused_bytes_per_block) == (0, 0)
    assert (of_window.bytes_per_token, of_full.bytes_per_token) == (2 * 256, 2 * 512)
    # Beside the null block and the window's seven, 93 blocks of 16 tokens are left.
    assert plan.max_model_len == plan.longest_request == 93 * 16
    assert cost.num_blocks(93 * 16 + 1) == 101


def test_what_is_padded_is_told():
    odd = SlidingWindowSpec(16, num_kv_heads=3, head_dim=64, dtype="bfloat16", window=128)
    large = FullAttentionSpec(16, num_kv_heads=8, head_dim=64, dtype="bfloat16")
    cost = RequestCost(make_groups([odd, odd, large]), (SlidingWindowManager,) * 2 + (FullAttentionManager,), 64)
    plan = plan_from_memory(50 * 32768, cost, RequestLimits(512))
    assert [group.unused_bytes_per_block for group in plan.groups] == [20480, 20480, 0]


# -- sizes that do not do ---------------------------------------------------------------------------------------


def test_memory_for_no_request_is_refused_with_what_would_do():
    with pytest.raises(NotEnoughMemoryError) as caught:
        large_plan(2 * MIB + 7)
    assert str(caught.value) == (
        "A request of 2 tokens takes 1 block of 2097152 bytes (2.00 MiB) beside the null block, and there is room "
        "for 1 in 2097159 bytes (2.00 MiB), the null block included. Give the KV cache 4194304 bytes (4.00 MiB) or "
        "more, or lower block_size."
    )
    assert caught.value.max_model_len_that_fits == 0
    assert large_plan(4194304).max_model_len == 16


def test_memory_for_shorter_requests_than_were_asked_for_is_refused_with_the_length_that_fits():
    with pytest.raises(NotEnoughMemoryError) as caught:
        large_plan(6 * 2 * MIB, max_model_len=4096)
    assert str(caught.value) == (
        "A request of 4096 tokens takes 256 blocks of 2097152 bytes (2.00 MiB) beside the null block, and there is "
        "room for 6 in 12582912 bytes (12.00 MiB), the null block included. Give the KV cache 538968064 bytes (514.00 "
        "MiB) or more, or set max_model_len=80 or max_model_len='auto'."
    )
    assert caught.value.max_model_len_that_fits == 80
    assert large_plan(538968064, max_model_len=4096).concurrency_at(4096).num_requests == 1


def test_a_number_of_blocks_is_taken_as_it_is_and_a_length_may_exceed_it():
    plan = plan_from_blocks(6, cost_of(LARGE, 32), RequestLimits(8192, 4096))
    assert (plan.num_blocks, plan.available_bytes, plan.unused_bytes) == (6, 6 * 2 * MIB, 0)
    assert (plan.longest_request, plan.max_model_len) == (80, 4096)
    assert plan.concurrency_at(4096).num_requests == 0


def test_blocks_for_no_request_are_refused():
    cost = cost_of(FullAttentionSpec(1, num_kv_heads=1, head_dim=8, dtype="float32"), 1)
    with pytest.raises(NotEnoughMemoryError) as caught:
        plan_from_blocks(2, cost, RequestLimits(64))
    assert str(caught.value) == (
        "A request of 2 tokens takes 2 blocks beside the null block, and num_kv_blocks is 2, the null block included. "
        "Raise it to 3 or more."
    )
    assert plan_from_blocks(3, cost, RequestLimits(64)).max_model_len == 2


def test_more_memory_than_there_is_anywhere_is_refused():
    sentence = "The KV cache would have {} bytes, which is more than any machine has. Give a smaller size."
    with pytest.raises(ConfigError) as caught:
        large_plan(2**63)
    assert str(caught.value) == sentence.format(2**63)
    assert large_plan(2**63 - 1).num_blocks == 2**42 - 1
    with pytest.raises(ConfigError) as caught:
        plan_from_blocks(2**42, cost_of(LARGE, 32), RequestLimits(8192))
    assert str(caught.value) == sentence.format(2**63)


@given(
    num_bytes=st.integers(0, 400_000),
    block_size=st.integers(1, 20),
    num_layers=st.integers(1, 3),
    max_position=st.integers(2, 2000),
)
def test_what_fits_fits_and_one_token_or_request_more_does_not(num_bytes, block_size, num_layers, max_position):
    cost = cost_of(FullAttentionSpec(block_size, num_kv_heads=1, head_dim=4, dtype="float16"), num_layers)
    try:
        plan = plan_from_memory(num_bytes, cost, RequestLimits(max_position))
    except NotEnoughMemoryError:
        assert num_bytes < (1 + cost.num_blocks(2)) * cost.num_bytes(1)
        return
    block_bytes = cost.num_bytes(1)
    assert 0 <= plan.unused_bytes < block_bytes
    assert cost.num_blocks(plan.max_model_len) <= plan.num_usable_blocks
    assert plan.max_model_len == max_position or cost.num_blocks(plan.max_model_len + 1) > plan.num_usable_blocks
    for row in plan.concurrency_by_length():
        assert (row.num_requests * row.blocks_per_request + 1) * block_bytes <= num_bytes
        assert ((row.num_requests + 1) * row.blocks_per_request + 1) * block_bytes > num_bytes
        assert row.num_requests <= row.exact < row.num_requests + 1
