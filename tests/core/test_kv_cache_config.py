"""Sizes of the KV cache, with the numbers worked out by hand."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from octavo.core.interfaces import FullAttentionSpec
from octavo.core.kv_cache_config import (
    SHORTEST_REQUEST,
    KVCacheConfig,
    RequestCost,
    bytes_per_block,
    format_bytes,
    make_groups,
    num_blocks_from_memory,
    num_blocks_in,
)
from octavo.core.model_runner import allocate_kv_cache
from octavo.errors import NotEnoughMemoryError
from octavo.kv_managers.full_attention import FullAttentionManager

# 32 layers, 8 KV heads, head_dim 128, fp16.
LARGE = FullAttentionSpec(16, num_kv_heads=8, head_dim=128, dtype="float16")
# 24 layers, 2 KV heads, head_dim 64, bf16.
SMALL = FullAttentionSpec(16, num_kv_heads=2, head_dim=64, dtype="bfloat16")


def cost_of(spec, num_layers, manager=FullAttentionManager, max_tokens_in_flight=2048):
    return RequestCost(make_groups([spec] * num_layers), (manager,), max_tokens_in_flight)


class LastTokensManager(FullAttentionManager):
    """Holds no more than the blocks of the last 32 tokens and of those in flight."""

    @classmethod
    def max_blocks_per_request(cls, spec, max_model_len, max_tokens_in_flight):
        return -(-min(max_model_len, 32 + max_tokens_in_flight) // spec.block_size)


# -- worked numbers -----------------------------------------------------------------------------------------------


def test_bytes_of_a_token_and_of_a_request():
    assert LARGE.bytes_per_token == 4096
    assert LARGE.page_bytes == 65536
    groups = make_groups([LARGE] * 32)
    assert bytes_per_block(groups) == 16 * 131072
    assert cost_of(LARGE, 32).num_bytes(4096) == 512 * 2**20


def test_bytes_of_a_page_and_of_one_layers_tensor():
    assert SMALL.page_bytes == 8192
    config = KVCacheConfig(131928, make_groups([SMALL] * 24))
    assert config.bytes_per_block == 24 * 8192
    # The meta device counts bytes and allocates none.
    buffers = allocate_kv_cache(config, "meta")
    assert len(buffers) == 24
    assert {buffer.nbytes for buffer in buffers} == {1080754176}
    assert config.total_bytes == sum(buffer.nbytes for buffer in buffers)


def test_a_block_is_there_when_its_last_byte_is():
    groups = make_groups([SMALL] * 24)
    available = 131928 * 8192 * 24
    assert num_blocks_in(available, groups) == 131928
    assert num_blocks_in(available - 1, groups) == 131927
    assert num_blocks_in(available + 24 * 8192 - 1, groups) == 131928
    assert num_blocks_in(available, groups) == available // 8192 // 24


def test_float32_takes_twice_the_bytes_of_half_precision():
    full = FullAttentionSpec(16, num_kv_heads=2, head_dim=64, dtype="float32")
    assert full.page_bytes == 2 * SMALL.page_bytes


# -- the longest request ------------------------------------------------------------------------------------------


@given(
    block_size=st.integers(1, 40),
    num_usable_blocks=st.integers(-2, 12),
    limit=st.integers(2, 200),
    manager=st.sampled_from([FullAttentionManager, LastTokensManager]),
    in_flight=st.integers(1, 64),
)
def test_the_longest_request_is_what_counting_up_finds(block_size, num_usable_blocks, limit, manager, in_flight):
    spec = FullAttentionSpec(block_size, num_kv_heads=1, head_dim=1, dtype="float32")
    cost = cost_of(spec, 1, manager, in_flight)
    fitting = [length for length in range(2, limit + 1) if cost.num_blocks(length) <= num_usable_blocks]
    assert cost.longest_request(num_usable_blocks, limit) == max(fitting, default=0)


def test_a_manager_that_drops_blocks_is_asked_what_a_request_takes():
    assert cost_of(LARGE, 1, LastTokensManager, 16).num_blocks(4096) == 3
    assert cost_of(LARGE, 1).num_blocks(4096) == 256


# -- from memory --------------------------------------------------------------------------------------------------


def test_memory_for_a_hundred_tokens_does_not_hold_a_request_of_4096_and_the_error_says_what_would_do():
    cost = cost_of(LARGE, 32)
    available = 100 * 131072
    with pytest.raises(NotEnoughMemoryError) as caught:
        num_blocks_from_memory(available, cost, 4096)
    # 256 blocks and the null block are needed; six fit, one of them the null block.
    assert str(caught.value) == (
        "One request of max_model_len=4096 tokens needs 538968064 bytes of KV cache (514.00 MiB, one spare block of "
        "2097152 bytes included), and 13107200 bytes (12.50 MiB) are there, which hold requests of up to 80 tokens. "
        "Set max_model_len=80 or max_model_len='auto', raise kv_cache_memory_bytes, gpu_memory_utilization or "
        "cpu_memory_share, or free memory."
    )
    assert caught.value.max_model_len_that_fits == 80
    assert num_blocks_from_memory(available, cost, 80) == 6
    with pytest.raises(NotEnoughMemoryError):
        num_blocks_from_memory(available, cost, 81)


def test_where_blocks_are_given_back_a_smaller_step_is_a_way_out():
    cost = cost_of(SMALL, 1, LastTokensManager, max_tokens_in_flight=512)
    with pytest.raises(
        NotEnoughMemoryError, match=r"'auto', lower max_num_batched_tokens \(what is given back on the "
    ):
        num_blocks_from_memory(20 * SMALL.page_bytes, cost, 4096)
    smaller = cost_of(SMALL, 1, LastTokensManager, max_tokens_in_flight=64)
    assert num_blocks_from_memory(20 * SMALL.page_bytes, smaller, 4096) == 20


def test_the_bytes_that_the_error_asks_for_are_enough_and_one_less_is_not():
    cost = cost_of(LARGE, 32)
    assert num_blocks_from_memory(538968064, cost, 4096) == 257
    with pytest.raises(NotEnoughMemoryError) as caught:
        num_blocks_from_memory(538968063, cost, 4096)
    assert caught.value.max_model_len_that_fits == 4080


@pytest.mark.parametrize("available", [-5 * 2**30, 0, 2097152])
def test_where_not_even_one_token_fits_no_length_is_suggested(available):
    with pytest.raises(NotEnoughMemoryError) as caught:
        num_blocks_from_memory(available, cost_of(LARGE, 32), 4096)
    there = {2097152: "2097152 bytes (2.00 MiB)"}.get(available, "0 bytes (0 bytes)")
    assert str(caught.value).endswith(
        f"and {there} are there, which hold requests of up to 0 tokens. Lower block_size, raise "
        "kv_cache_memory_bytes, gpu_memory_utilization or cpu_memory_share, or free memory."
    )
    assert caught.value.max_model_len_that_fits == 0


@given(available=st.integers(0, 40), max_model_len=st.integers(SHORTEST_REQUEST, 80), block_size=st.integers(1, 9))
# A block for one token and no more: no request fits, although a single token would.
@example(available=2, max_model_len=2, block_size=1)
def test_whatever_is_suggested_works_and_one_token_more_does_not(available, max_model_len, block_size):
    spec = FullAttentionSpec(block_size, num_kv_heads=1, head_dim=1, dtype="float16")
    cost = cost_of(spec, 1)
    available *= spec.page_bytes
    try:
        num_blocks = num_blocks_from_memory(available, cost, max_model_len)
    except NotEnoughMemoryError as error:
        fits = error.max_model_len_that_fits
        assert fits < max_model_len
        with pytest.raises(NotEnoughMemoryError):
            num_blocks_from_memory(available, cost, max(fits + 1, SHORTEST_REQUEST))
        if not fits:
            return
        num_blocks = num_blocks_from_memory(available, cost, fits)
        assert cost.num_blocks(fits) <= num_blocks - 1
    else:
        assert cost.num_blocks(max_model_len) <= num_blocks - 1
    assert num_blocks * cost.num_bytes(1) <= available


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (2**20, "1.00 MiB"),
        (512 * 2**20, "512.00 MiB"),
        (3 * 2**29, "1.50 GiB"),
        (2**20 - 1, "1.00 MiB"),
        (2**30 - 1, "1.00 GiB"),
        (1023 * 2**30, "1023.00 GiB"),
        (2**40, "1.00 TiB"),
        (3 * 2**39, "1.50 TiB"),
        (99999 * 2**40, "99999.00 TiB"),
    ],
)
def test_sizes_are_written_as_people_read_them(num_bytes, text):
    assert format_bytes(num_bytes) == text
