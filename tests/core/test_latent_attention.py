"""Which rows of an MLA layer are expanded, and what expanding them computes."""

import numpy as np
import pytest
import torch

from octavo.core import latent_attention
from octavo.core.interfaces import AttentionBackend, AttentionSpec
from octavo.core.latent_attention import (
    LatentDims,
    absorbed_products,
    attend_expanded,
    divide_rows,
    expanded_products,
    offers_expansion,
    rows_to_expand,
)
from octavo.testing.attention.oracle import make_batch

# Of DeepSeek V2 and V3: https://huggingface.co/deepseek-ai/DeepSeek-V3/blob/main/config.json
DEEPSEEK = LatentDims(latent=512, rope=64, key=192, value=128)
BLOCK_SIZE = 4


def batch_of(*lengths):
    """Return a step of rows of (new tokens, context), each with blocks of its own."""
    num_blocks = [-(-context_len // BLOCK_SIZE) for _, context_len in lengths]
    table = np.zeros((len(lengths), max(num_blocks)), np.int32)
    starts = np.cumsum([1, *num_blocks])
    for row, count in enumerate(num_blocks):
        # Backwards, so that blocks are no ranges of slots.
        table[row, :count] = np.arange(starts[row], starts[row + 1])[::-1]
    slots = [
        table[row, position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
        for row, (num_new, context_len) in enumerate(lengths)
        for position in range(context_len - num_new, context_len)
    ]
    return make_batch(
        np.cumsum([0, *(num_new for num_new, _ in lengths)]).astype(np.int32),
        np.array([context_len for _, context_len in lengths], np.int32),
        table,
        np.array(slots, np.int64),
    )


# -- which way ----------------------------------------------------------------------------------------------------


def products(count, num_new_tokens, context_len):
    (number,) = count(DEEPSEEK, np.array([num_new_tokens]), np.array([context_len])).tolist()
    return number


def test_products_are_those_of_pairs_and_of_what_goes_through_the_matrices():
    # Two new tokens after one see 2 and 3 keys: five pairs.
    assert products(absorbed_products, 2, 3) == 5 * (2 * 512 + 64) + 2 * 512 * (128 + 128)
    assert products(expanded_products, 2, 3) == 5 * (192 + 128) + 3 * 512 * (128 + 128)
    # A whole prompt of a hundred thousand tokens: more than 32 bits.
    pairs = 100_000 * 100_001 // 2
    assert products(absorbed_products, 100_000, 100_000) == pairs * 1088 + 100_000 * 512 * 256
    assert products(expanded_products, 100_000, 100_000) == pairs * 320 + 100_000 * 512 * 256


def test_a_prompt_from_its_start_is_expanded_and_a_few_tokens_after_a_long_context_are_not():
    batch = batch_of((1, 1), (1, 5000), (2, 2), (500, 500), (5, 2000), (1000, 2000))
    assert rows_to_expand(DEEPSEEK, batch).tolist() == [2, 3, 5]


@pytest.mark.parametrize(("num_new_tokens", "is_expanded"), [(2, False), (167, False), (168, True)])
def test_beside_a_long_context_168_tokens_pay_for_expanding_it(num_new_tokens, is_expanded):
    # Worked out: n * 4000 - n (n - 1) / 2 pairs save 768 each, and 4000 - n tokens more go through the matrices.
    pairs = num_new_tokens * 4000 - num_new_tokens * (num_new_tokens - 1) // 2
    assert (pairs * 768 > (4000 - num_new_tokens) * 131072) == is_expanded
    assert (len(rows_to_expand(DEEPSEEK, batch_of((num_new_tokens, 4000)))) == 1) == is_expanded


def test_latents_that_are_shorter_than_a_key_and_a_value_are_never_expanded():
    narrow = LatentDims(latent=8, rope=8, key=24, value=16)
    assert rows_to_expand(narrow, batch_of((2, 2), (500, 500), (100, 5000))).tolist() == []


def spec(**changes):
    fields = {"num_query_heads": 4, "num_kv_heads": 1, "head_dim": 12, "head_dim_v": 8, "scale": 0.3, "block_size": 4}
    fields |= {"dtype": "float32", "kv_dtype": "float32", "device": "cpu", "value_is_key_prefix": True}
    return AttentionSpec(**fields | changes)


class Gathering(AttentionBackend):
    contract_version = 1
    can_gather = True
    cannot_serve = classmethod(lambda cls, spec: [])
    plan = write = attend = None


class NotGathering(Gathering):
    can_gather = False


def test_only_a_backend_that_gathers_is_asked_to():
    assert offers_expansion(Gathering(spec()))
    assert not offers_expansion(NotGathering(spec()))


@pytest.mark.parametrize("limit", [{"window": 9}, {"chunk": 8}, {"soft_cap": 30.0}, {"sinks": True}])
def test_layers_with_rules_of_their_own_are_not_expanded(limit):
    assert not offers_expansion(Gathering(spec(**limit)))


# -- dividing a step ----------------------------------------------------------------------------------------------


def test_a_step_with_nothing_to_expand_stays_as_it_is():
    batch = batch_of((1, 5), (3, 3))
    rows = divide_rows(batch, np.empty(0, np.intp), BLOCK_SIZE)
    assert rows.absorbed is batch
    assert rows.expanded == ()


def test_a_step_in_which_all_is_expanded_leaves_nothing():
    rows = divide_rows(batch_of((2, 2), (3, 6)), np.array([0, 1]), BLOCK_SIZE)
    assert rows.absorbed is None
    assert [row.tokens for row in rows.expanded] == [slice(0, 2), slice(2, 5)]
    # Row 0 has block 1; row 1 has block 3, then block 2.
    assert [row.slots.tolist() for row in rows.expanded] == [[4, 5], [12, 13, 14, 15, 8, 9]]


def test_what_is_not_expanded_is_a_batch_of_its_own():
    batch = batch_of((1, 5), (1, 2), (4, 6), (3, 9), (2, 2))
    rows = divide_rows(batch, np.array([2]), BLOCK_SIZE)
    assert rows.absorbed_tokens.tolist() == [0, 1, 6, 7, 8, 9, 10]
    absorbed = rows.absorbed
    assert absorbed.num_decode_rows == 2
    assert absorbed.query_starts.tolist() == absorbed.query_starts_host.tolist() == [0, 1, 2, 5, 7]
    assert absorbed.context_lens.tolist() == absorbed.context_lens_host.tolist() == [5, 2, 9, 2]
    assert absorbed.block_table.tolist() == absorbed.block_table_host.tolist()
    assert absorbed.block_table.tolist() == batch.block_table[[0, 1, 3, 4]].tolist()
    assert absorbed.slots.tolist() == batch.slots[rows.absorbed_tokens].tolist()
    for tensor in (absorbed.query_starts, absorbed.context_lens, absorbed.block_table):
        assert tensor.dtype == torch.int32
    (row,) = rows.expanded
    assert row.tokens == slice(2, 6)
    assert row.slots[-4:].tolist() == batch.slots[2:6].tolist()


# -- attending ----------------------------------------------------------------------------------------------------


class RandomProjection:
    """A layer of random matrices, which notes how many heads' keys and values it made at a time."""

    def __init__(self, num_heads, dims):
        random = torch.Generator().manual_seed(0)
        self.key_dim, self.value_dim, self.rope_dim = dims.key, dims.value, dims.rope
        self.keys = torch.randn(num_heads, dims.key - dims.rope, dims.latent, generator=random)
        self.values = torch.randn(num_heads, dims.value, dims.latent, generator=random)
        self.heads_at_a_time = []

    def expand(self, latents, heads):
        latent, rope = latents.split([latents.shape[1] - self.rope_dim, self.rope_dim], dim=1)
        keys = torch.einsum("cl,hkl->chk", latent, self.keys[heads])
        self.heads_at_a_time.append(keys.shape[1])
        keys = torch.cat((keys, rope[:, None].expand(-1, keys.shape[1], -1)), dim=2)
        return keys, torch.einsum("cl,hvl->chv", latent, self.values[heads])


def by_definition(query, latents, projection, scale):
    keys, values = projection.expand(latents, slice(None))
    scores = torch.einsum("qhd,khd->hqk", query.double(), keys.double()) * scale
    positions = torch.arange(len(keys))
    is_later = positions > positions[len(keys) - len(query) :, None]
    weights = scores.masked_fill(is_later, -torch.inf).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, values.double()).float()


@pytest.mark.parametrize("value_dim", [3, 7, 11])
@pytest.mark.parametrize(("num_tokens", "context_len"), [(1, 1), (1, 9), (30, 30), (13, 30), (300, 301), (300, 700)])
def test_each_query_sees_its_context_and_what_is_new_before_it(num_tokens, context_len, value_dim):
    dims = LatentDims(latent=8, rope=4, key=7, value=value_dim)
    random = torch.Generator().manual_seed(1)
    projection = RandomProjection(5, dims)
    query = torch.randn(num_tokens, 5, dims.key, generator=random)
    latents = torch.randn(context_len, dims.latent + dims.rope, generator=random)
    attended = attend_expanded(query, latents, projection, 0.2)
    assert attended.shape == (num_tokens, 5, value_dim)
    torch.testing.assert_close(attended, by_definition(query, latents, projection, 0.2), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(("scratch_heads", "heads_at_a_time"), [(0, [1] * 5), (2, [2, 2, 1]), (9, [5])])
def test_keys_and_values_are_made_for_as_many_heads_as_the_scratch_holds(scratch_heads, heads_at_a_time, monkeypatch):
    dims = LatentDims(latent=8, rope=4, key=7, value=6)
    bytes_per_head = 2 * 50 * (7 + 6) * 4
    monkeypatch.setattr(latent_attention, "SCRATCH_BYTES_CPU", scratch_heads * bytes_per_head)
    projection = RandomProjection(5, dims)
    query, latents = torch.randn(20, 5, 7), torch.randn(50, 12)
    attended = attend_expanded(query, latents, projection, 0.2)
    assert projection.heads_at_a_time == heads_at_a_time
    torch.testing.assert_close(attended, by_definition(query, latents, projection, 0.2), atol=2e-5, rtol=2e-5)
