"""How layers are sorted into groups that share one pool, with the numbers worked out by hand."""

import random
from dataclasses import dataclass
from typing import ClassVar

import pytest

from octavo.core.block_pool import BlockPool
from octavo.core.interfaces import ChunkedLocalSpec, FullAttentionSpec, MLASpec, SlidingWindowSpec
from octavo.core.kv_cache_config import (
    KVCacheConfig,
    RequestCost,
    bytes_per_block,
    describe_groups,
    hit_alignment,
    make_groups,
    num_slots,
    padding_of,
    padding_warning,
    page_bytes,
)
from octavo.core.kv_cache_coordinator import hash_unit_of, make_coordinator
from octavo.core.model_runner import allocate_kv_cache
from octavo.errors import ConfigError
from octavo.kv_managers.chunked_local import ChunkedLocalManager
from octavo.kv_managers.full_attention import FullAttentionManager
from octavo.kv_managers.mla import MLAManager
from octavo.kv_managers.sliding_window import SlidingWindowManager

# 32 layers, 8 KV heads, head_dim 128, fp16.
LARGE = FullAttentionSpec(16, num_kv_heads=8, head_dim=128, dtype="float16")
# 24 layers, 2 KV heads, head_dim 64, bf16.
SMALL = FullAttentionSpec(16, num_kv_heads=2, head_dim=64, dtype="bfloat16")


@dataclass(frozen=True)
class OtherSpec(FullAttentionSpec):
    kind: ClassVar[str] = "other"


def test_layers_that_keep_the_same_form_one_group_in_the_models_order():
    (group,) = make_groups([SMALL, FullAttentionSpec(16, num_kv_heads=2, head_dim=64, dtype="bfloat16"), SMALL])
    assert group.spec == SMALL
    assert group.layers == (0, 1, 2)


def test_specs_of_different_classes_are_different_even_with_the_same_numbers():
    groups = make_groups([SMALL, OtherSpec(16, num_kv_heads=2, head_dim=64, dtype="bfloat16")])
    assert [(type(group.spec), group.layers) for group in groups] == [(FullAttentionSpec, (0,)), (OtherSpec, (1,))]


# Gemma 3 270M: 18 layers with one KV head of 256 numbers, every sixth of them full, the rest with a window of 512.
GEMMA_FULL = FullAttentionSpec(16, num_kv_heads=1, head_dim=256, dtype="bfloat16")
GEMMA_WINDOW = SlidingWindowSpec(16, num_kv_heads=1, head_dim=256, dtype="bfloat16", window=512)
SMALL_WINDOW = SlidingWindowSpec(16, num_kv_heads=2, head_dim=64, dtype="bfloat16", window=128)


def sizes_of(groups):
    return [(group.spec.kind, len(group.layers)) for group in groups]


def test_ten_full_layers_and_twenty_with_a_window_form_three_groups_of_ten():
    specs = [SMALL if layer % 3 == 0 else SMALL_WINDOW for layer in range(30)]
    groups = make_groups(specs)
    assert sizes_of(groups) == [("full_attention", 10), ("sliding_window", 10), ("sliding_window", 10)]
    # Of the layers with a window each group has every second one.
    window_layers = [layer for layer in range(30) if layer % 3]
    assert [group.layers for group in groups[1:]] == [tuple(window_layers[::2]), tuple(window_layers[1::2])]
    assert bytes_per_block(groups) == 10 * 8192


def test_twelve_and_thirteen_layers_form_two_groups_with_one_idle_page():
    groups = make_groups([SMALL_WINDOW] * 12 + [SMALL] * 13)
    assert sizes_of(groups) == [("sliding_window", 12), ("full_attention", 13)]
    assert num_slots(groups) == 13
    assert bytes_per_block(groups) == 13 * 8192


@pytest.mark.parametrize(
    ("num_window", "num_full", "sizes"),
    [
        # Where the larger number is below one and a half times the smaller, there is one group each.
        (14, 10, [14, 10]),
        (15, 10, [8, 7, 10]),
        (10, 15, [10, 8, 7]),
        (3, 1, [1, 1, 1, 1]),
        (7, 3, [3, 2, 2, 3]),
    ],
)
def test_a_group_has_as_many_layers_as_the_rarest_spec(num_window, num_full, sizes):
    groups = make_groups([SMALL_WINDOW] * num_window + [SMALL] * num_full)
    assert [len(group.layers) for group in groups] == sizes


def test_gemma_3_270m_has_six_groups_of_three_layers():
    groups = make_groups([GEMMA_FULL if layer % 6 == 5 else GEMMA_WINDOW for layer in range(18)])
    assert sizes_of(groups) == [("sliding_window", 3)] * 5 + [("full_attention", 3)]
    assert groups[-1].layers == (5, 11, 17)
    assert groups[0].layers == (0, 6, 12)
    assert sorted(layer for group in groups for layer in group.layers) == list(range(18))
    assert bytes_per_block(groups) == 3 * 16384
    cost = RequestCost(groups, (SlidingWindowManager,) * 5 + (FullAttentionManager,), max_tokens_in_flight=512)
    # ceil(511 / 16) blocks before the last full one, ceil((15 + 512) / 16) from there on.
    assert cost.num_blocks_by_group(8192) == [32 + 33] * 5 + [512]


# -- pages of different sizes -------------------------------------------------------------------------------------


def test_a_smaller_page_gets_as_many_more_tokens_as_make_it_as_large():
    narrow = SlidingWindowSpec(16, num_kv_heads=1, head_dim=64, dtype="bfloat16", window=128)
    assert (narrow.page_bytes, SMALL.page_bytes) == (4096, 8192)
    of_narrow, of_full = make_groups([narrow, SMALL])
    assert of_narrow.spec == narrow.with_block_size(32)
    assert of_full.spec == SMALL
    assert {group.spec.page_bytes for group in (of_narrow, of_full)} == {8192}
    assert hit_alignment(group.spec for group in (of_narrow, of_full)) == 32
    assert bytes_per_block((of_narrow, of_full)) == 8192


def test_specs_that_are_the_same_but_for_the_page_stay_groups_of_their_own():
    # head_dim 256 in one layer and 64 in the other.
    wide, narrow = (FullAttentionSpec(16, num_kv_heads=1, head_dim=dim, dtype="bfloat16") for dim in (256, 64))
    assert [group.spec.block_size for group in make_groups([wide, narrow, narrow])] == [16, 64, 64]


def test_a_page_that_is_no_whole_part_of_the_largest_is_padded():
    odd = SlidingWindowSpec(16, num_kv_heads=3, head_dim=64, dtype="bfloat16", window=128)
    large = FullAttentionSpec(16, num_kv_heads=8, head_dim=64, dtype="bfloat16")
    assert (odd.page_bytes, large.page_bytes) == (12288, 32768)
    groups = make_groups([odd, large])
    assert [group.spec for group in groups] == [odd, large]
    assert page_bytes(groups) == bytes_per_block(groups) == 32768
    config = KVCacheConfig(7, groups)
    assert config.total_bytes == sum(buffer.nbytes for buffer in allocate_kv_cache(config, "meta")) == 7 * 32768


def test_latents_and_keys_and_values_share_a_pool():
    # A latent of 448 + 64 numbers: 16384 bytes a page, a quarter of what 8 heads of 128 take.
    latent = MLASpec(16, latent_dim=448, rope_dim=64, dtype="bfloat16")
    keys_and_values = FullAttentionSpec(16, num_kv_heads=8, head_dim=128, dtype="bfloat16")
    groups = make_groups([latent, keys_and_values])
    assert [group.spec.block_size for group in groups] == [64, 16]
    assert [group.spec.page_bytes for group in groups] == [65536, 65536]
    # 512 + 64 numbers, as most models have them, are no whole part of that.
    latent = MLASpec(16, latent_dim=512, rope_dim=64, dtype="bfloat16")
    groups = make_groups([latent, keys_and_values])
    assert [group.spec.block_size for group in groups] == [16, 16]
    assert [group.spec.page_bytes for group in groups] == [18432, 65536]
    assert bytes_per_block(groups) == 65536


def random_specs(rng):
    """Return a spec for each of some layers, of up to four different ones."""
    heads = {"head_dim": 8, "dtype": "float16"}
    kinds = [
        FullAttentionSpec(4, num_kv_heads=rng.choice((1, 2, 3)), **heads),
        SlidingWindowSpec(4, num_kv_heads=rng.choice((1, 2, 4)), **heads, window=rng.randint(1, 30)),
        ChunkedLocalSpec(4, num_kv_heads=rng.choice((1, 2)), **heads, chunk=rng.choice((8, 12, 32))),
        MLASpec(4, latent_dim=rng.choice((12, 14)), rope_dim=4, dtype="float16"),
    ]
    chosen = rng.sample(kinds, rng.randint(1, 4))
    return [rng.choice(chosen) for _ in range(rng.randint(1, 24))]


MANAGERS = {
    "full_attention": FullAttentionManager,
    "sliding_window": SlidingWindowManager,
    "chunked_local": ChunkedLocalManager,
    "mla": MLAManager,
}


def test_every_layer_is_in_one_group_and_has_a_place_in_a_block():
    rng = random.Random(0)
    for _ in range(300):
        specs = random_specs(rng)
        groups = make_groups(specs)
        assert sorted(layer for group in groups for layer in group.layers) == list(range(len(specs)))
        largest = max(spec.page_bytes for spec in specs)
        for group in groups:
            for layer in group.layers:
                assert group.spec.with_block_size(specs[layer].block_size) == specs[layer]
            assert group.layers == tuple(sorted(group.layers))
            ratio = group.spec.block_size / specs[group.layers[0]].block_size
            is_whole = largest % specs[group.layers[0]].page_bytes == 0
            assert ratio == (largest // specs[group.layers[0]].page_bytes if is_whole else 1)
        assert bytes_per_block(groups) == largest * max(len(group.layers) for group in groups)
        # Of one spec the groups differ by one layer at most.
        for spec in {group.spec for group in groups}:
            sizes = [len(group.layers) for group in groups if group.spec == spec]
            assert max(sizes) - min(sizes) <= 1


def test_start_up_and_admission_count_the_same():
    rng = random.Random(1)
    for _ in range(200):
        groups = make_groups(random_specs(rng))
        classes = tuple(MANAGERS[group.spec.kind] for group in groups)
        in_flight, pool = rng.randint(1, 200), BlockPool(2)
        managers = [
            manager_class(group.spec, pool, group_id, 1)
            for group_id, (manager_class, group) in enumerate(zip(classes, groups, strict=True))
        ]
        for hash_unit in (None, hash_unit_of(managers)):
            coordinator = make_coordinator(managers, hash_unit)
            for num_tokens in (2, 17, 100, 1000):
                cost = RequestCost(groups, classes, in_flight)
                assert cost.num_blocks_by_group(num_tokens) == coordinator.max_blocks_by_group(num_tokens, in_flight)
                assert cost.num_blocks(num_tokens) == sum(cost.num_blocks_by_group(num_tokens))


def test_where_blocks_differ_in_size_more_is_held_than_the_manager_alone_would():
    groups = make_groups([SMALL_WINDOW, FullAttentionSpec(16, num_kv_heads=1, head_dim=64, dtype="bfloat16")])
    assert [group.spec.block_size for group in groups] == [16, 32]
    cost = RequestCost(groups, (SlidingWindowManager, FullAttentionManager), max_tokens_in_flight=1)
    # The last hit lies up to 31 tokens back: ceil(127 / 16) blocks before it, and ceil((15 + 31 + 1) / 16) behind.
    assert cost.num_blocks_by_group(4096) == [8 + 3, 128]
    assert hit_alignment(group.spec for group in groups) == 32


def test_a_model_without_attention_is_refused():
    with pytest.raises(ConfigError) as caught:
        make_groups([])
    assert str(caught.value) == "The model has no attention layer, so there is nothing to keep in a KV cache."


# -- what lies idle -----------------------------------------------------------------------------------------------


def cost_of_groups(specs, max_tokens_in_flight=64):
    groups = make_groups(specs)
    return RequestCost(groups, tuple(MANAGERS[group.spec.kind] for group in groups), max_tokens_in_flight)


def test_a_slot_without_a_layer_and_the_rest_of_a_shorter_page_lie_idle():
    odd = SlidingWindowSpec(16, num_kv_heads=3, head_dim=64, dtype="bfloat16", window=128)
    large = FullAttentionSpec(16, num_kv_heads=8, head_dim=64, dtype="bfloat16")
    groups = make_groups([odd] * 4 + [large] * 3)
    of_odd, of_large = (padding_of(group, groups) for group in groups)
    assert (of_odd.num_slots, of_odd.bytes_per_page, of_odd.num_bytes) == (0, 32768 - 12288, 4 * (32768 - 12288))
    assert (of_large.num_slots, of_large.bytes_per_page, of_large.num_bytes) == (1, 0, 32768)


def test_idle_memory_counts_as_much_as_requests_hold_of_it():
    # Five slots, of which the four full layers leave one idle.
    cost = cost_of_groups([SMALL] * 4 + [SMALL_WINDOW] * 5)
    assert cost.num_blocks_by_group(160) == [10, 10]
    assert cost.idle_share(160) == 10 / 5 / 20
    # ceil(127 / 16) and ceil((15 + 64) / 16) blocks of the window, however long it grows.
    assert cost.num_blocks_by_group(1600) == [100, 13]
    assert cost.idle_share(1600) == pytest.approx(100 / 5 / 113)


def test_a_warning_says_how_much_lies_idle_and_what():
    odd = SlidingWindowSpec(16, num_kv_heads=3, head_dim=64, dtype="bfloat16", window=128)
    large = FullAttentionSpec(16, num_kv_heads=8, head_dim=64, dtype="bfloat16")
    cost = cost_of_groups([odd] * 4 + [large] * 3)
    # 13 blocks of the window, of which 20 of 32 KiB in 4 slots lie idle, and 100 without it, with one slot of 4 idle.
    assert padding_warning(cost, 1600) == (
        "29.3% of the KV cache that a request of 1600 tokens holds lies idle, for a block is as large as the largest "
        "group needs it: pages of sliding_window have 12288 bytes of 32768, a group of full_attention has 3 layers for "
        "4 slots. `octavo plan` shows each group, and what disable_hybrid_kv_cache_manager would take instead."
    )


def test_little_that_lies_idle_is_not_worth_a_warning():
    # Gemma 3 1B: two of six groups of windows have three layers for four slots.
    cost = cost_of_groups([GEMMA_FULL if layer % 6 == 5 else GEMMA_WINDOW for layer in range(26)], 512)
    assert cost.num_blocks_by_group(8192) == [65] * 6 + [512]
    assert cost.idle_share(8192) == pytest.approx(2 * 65 / 4 / 902)
    assert padding_warning(cost, 8192) is None
    assert "7.1% of the KV cache that a request of 512 tokens" in padding_warning(cost, 512)
    assert padding_warning(cost_of_groups([SMALL] * 24), 8192) is None


def test_a_request_stops_to_grow_where_blocks_are_given_back():
    chunks = ChunkedLocalSpec(16, num_kv_heads=2, head_dim=64, dtype="bfloat16", chunk=8192)
    latents = MLASpec(16, latent_dim=192, rope_dim=64, dtype="bfloat16")
    cost = cost_of_groups([SMALL, SMALL_WINDOW, chunks, latents])
    assert cost.is_bounded_by_group() == [False, True, True, False]
    kept_whole = RequestCost(cost.groups, (FullAttentionManager,) * 4, 64)
    assert kept_whole.is_bounded_by_group() == [False] * 4


def test_groups_are_described_by_what_they_keep():
    assert describe_groups(make_groups([GEMMA_FULL if layer % 6 == 5 else GEMMA_WINDOW for layer in range(26)])) == (
        "6 groups of sliding_window (3 or 4 layers each, blocks of 16 tokens), 1 group of full_attention (4 layers, "
        "blocks of 16 tokens)"
    )
    assert describe_groups(make_groups([SMALL, LARGE])) == (
        "1 group of full_attention (1 layer, blocks of 128 tokens), 1 group of full_attention (1 layer, blocks of 16 "
        "tokens)"
    )
