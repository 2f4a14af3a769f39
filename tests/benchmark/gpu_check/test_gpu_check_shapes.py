"""The arithmetic of what a step must read and compute, against numbers worked out by hand and by counting."""

from dataclasses import replace

import numpy as np
import pytest
from gpu_check.shapes import Shape, decode_shapes, num_seen, prefill_shapes
from gpu_check.sizes import FULL, SMALL

from octavo.testing.attention.definition import sees

PLAIN = decode_shapes(FULL, "cpu")[0].spec


def test_a_decode_batch_of_64_rows_of_4096_tokens():
    shape = decode_shapes(FULL, "cuda:0")[0]
    assert shape.name == "64 x 4096, 32/8 heads of 128, bfloat16"
    assert shape.is_decode
    assert shape.num_blocks == 1 + 64 * 256
    # Keys and values of 8 heads of 128 numbers, 2 bytes each; then queries and outputs of 32 heads.
    assert shape.read_bytes == 64 * 4096 * 2 * 8 * 128 * 2 + 64 * 2 * 32 * 128 * 2
    # Each of 32 heads multiplies 128 numbers with each key, and 128 with each value.
    assert shape.flops == 64 * 4096 * 32 * 2 * (128 + 128)


def test_a_latent_batch_reads_one_vector_a_token():
    shape = decode_shapes(FULL, "cuda:0")[1]
    assert shape.name == "64 x 4096, MLA, 128 heads of 576/512, bfloat16"
    assert shape.read_bytes == 64 * 4096 * 576 * 2 + 64 * 128 * (576 + 512) * 2
    assert shape.flops == 64 * 4096 * 128 * 2 * (576 + 512)


@pytest.mark.parametrize(
    ("kv_dtype", "vector_bytes"),
    [("fp8_e4m3", 128), ("int8", 128), ("int8_per_token_head", 128 + 4), ("fp8_e4m3_per_token_head", 128 + 4)],
)
def test_a_quantised_batch_reads_a_byte_a_number_and_its_scales(kv_dtype, vector_bytes):
    (shape,) = [shape for shape in decode_shapes(FULL, "cuda:0") if shape.spec.kv_dtype == kv_dtype]
    assert shape.read_bytes == 64 * 4096 * 2 * 8 * vector_bytes + 64 * 2 * 32 * 128 * 2


def test_a_window_of_1024_reads_1024_tokens_of_4096():
    shape = decode_shapes(FULL, "cuda:0")[-1]
    assert shape.name.endswith("bfloat16, window 1024")
    assert shape.num_read_tokens == 64 * 1024
    assert shape.flops == 64 * 1024 * 32 * 2 * 256


def test_a_causal_prompt_has_half_of_the_square_and_half_of_the_diagonal():
    one, several, with_window = prefill_shapes(FULL, "cuda:0")
    assert one.num_pairs == 8192 * 8193 // 2
    assert several.num_pairs == 8 * (2048 * 2049 // 2)
    # The first 1024 queries see 1 to 1024 keys, all others 1024.
    assert with_window.num_pairs == 1024 * 1025 // 2 + (8192 - 1024) * 1024
    assert one.flops == 8192 * 8193 // 2 * 32 * 2 * 256
    # Of a whole prompt every token is seen by some query, window or not.
    assert one.read_bytes == with_window.read_bytes == 8192 * (2 * 8 * 128 * 2 + 2 * 32 * 128 * 2)
    assert not one.is_decode


@pytest.mark.parametrize(
    "rules",
    [
        {},
        {"window": 1},
        {"window": 5},
        {"chunk": 4},
        {"window": 5, "keep_first": 3},
        {"chunk": 4, "keep_first": 6},
        {"window": 3, "chunk": 4, "keep_first": 2},
        {"window": 100},
    ],
)
@pytest.mark.parametrize("row", [(1, 1), (1, 17), (6, 6), (5, 19)])
def test_what_is_seen_is_what_the_definition_says(rules, row):
    spec, (num_queries, context_len) = replace(PLAIN, **rules), row
    positions = np.arange(context_len - num_queries, context_len)
    is_seen = sees(spec, positions, np.arange(context_len))
    shape = Shape("it", (row,), spec)
    assert num_seen(spec, positions).tolist() == is_seen.sum(axis=1).tolist()
    assert shape.num_pairs == is_seen.sum()
    assert shape.num_read_tokens == is_seen.any(axis=0).sum()


def test_rows_add_up():
    rows = ((1, 30), (1, 7), (4, 20))
    alone = [Shape("one", (row,), PLAIN) for row in rows]
    together = Shape("all", rows, PLAIN)
    assert together.flops == sum(shape.flops for shape in alone)
    assert together.read_bytes == sum(shape.read_bytes for shape in alone)
    assert together.num_blocks == 1 + 2 + 1 + 2


@pytest.mark.parametrize("sizes", [FULL, SMALL])
def test_names_tell_shapes_apart(sizes):
    names = [shape.name for shape in [*decode_shapes(sizes, "cpu"), *prefill_shapes(sizes, "cpu")]]
    assert len(set(names)) == len(names)
