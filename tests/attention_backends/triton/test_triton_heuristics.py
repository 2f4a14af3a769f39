"""The rules by which the triton backend cuts its work."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from specs import MLA, PLAIN

from octavo.attention_backends.triton.heuristics import (
    INTERPRETER,
    MOST_SPLITS,
    Device,
    HeadDims,
    Tile,
    compute_type,
    decode_tile,
    joined_vectors_per_program,
    num_splits,
    prefill_tile,
    shared_bytes,
    smallest_tile_fits,
)
from octavo.attention_backends.triton.options import TritonOptions
from octavo.attention_backends.triton.tuning import candidates
from octavo.core.interfaces.attention import AttentionSpec

DEFAULT = TritonOptions()
A100 = Device((8, 0), 163 << 10, 108)
RTX = Device((8, 9), 99 << 10, 128)
H100 = Device((9, 0), 227 << 10, 132)
GPU_SPEC = replace(
    PLAIN, num_query_heads=32, num_kv_heads=8, head_dim=128, head_dim_v=128, dtype="bfloat16", kv_dtype="bfloat16"
)
LATENT = replace(GPU_SPEC, num_query_heads=128, num_kv_heads=1, head_dim=576, head_dim_v=512, value_is_key_prefix=True)


def heads_of(head_dim: int, **changes: Any) -> AttentionSpec:
    return replace(GPU_SPEC, head_dim=head_dim, head_dim_v=head_dim, **changes)


@pytest.mark.parametrize(
    ("spec", "dims"),
    [
        (heads_of(128), HeadDims(128, 0, 128, 0)),
        (heads_of(80), HeadDims(80, 0, 128, 0)),
        (heads_of(7), HeadDims(7, 0, 16, 0)),
        (LATENT, HeadDims(512, 64, 512, 64)),
        (replace(LATENT, head_dim=512), HeadDims(512, 0, 512, 0)),
        (replace(LATENT, head_dim=520), HeadDims(512, 8, 512, 16)),
    ],
)
def test_heads_are_padded_to_powers_of_two(spec: AttentionSpec, dims: HeadDims) -> None:
    assert HeadDims.of(spec, H100) == dims


@pytest.mark.parametrize(
    ("spec", "device", "tile"),
    [
        (heads_of(64), H100, Tile(16, 32, 4, 5)),
        (heads_of(128, num_kv_heads=1), H100, Tile(32, 32, 4, 5)),
        (heads_of(128, num_query_heads=256, num_kv_heads=1), H100, Tile(64, 32, 4, 5)),
        (heads_of(256), H100, Tile(16, 32, 4, 5)),
        (LATENT, H100, Tile(32, 32, 8, 5)),
        (replace(LATENT, kv_dtype="int8"), H100, Tile(32, 16, 8, 5)),
        (heads_of(512), H100, Tile(16, 32, 8, 5)),
        (heads_of(128, dtype="float32", kv_dtype="float32"), H100, Tile(16, 16, 8, 5)),
        (heads_of(128, kv_dtype="int8"), A100, Tile(16, 32, 4, 5)),
        (replace(MLA, num_query_heads=5), INTERPRETER, Tile(8, 128, 4, 1)),
    ],
)
def test_tiles_of_decode_rows(spec: AttentionSpec, device: Device, tile: Tile) -> None:
    assert decode_tile(spec, device, DEFAULT) == tile


@pytest.mark.parametrize(
    ("spec", "device", "tile"),
    [
        (heads_of(64), H100, Tile(128, 64, 8, 5)),
        (heads_of(128), H100, Tile(128, 64, 8, 5)),
        (heads_of(128), A100, Tile(128, 32, 8, 5)),
        (heads_of(128, kv_dtype="int8"), A100, Tile(64, 32, 8, 5)),
        (heads_of(128, kv_dtype="int8"), H100, Tile(64, 64, 8, 5)),
        (replace(LATENT, kv_dtype="int8"), H100, Tile(32, 32, 8, 3)),
        (heads_of(256), H100, Tile(64, 32, 8, 5)),
        (LATENT, H100, Tile(32, 32, 8, 5)),
        (heads_of(128, dtype="float32", kv_dtype="float32"), H100, Tile(32, 16, 8, 2)),
        (heads_of(512, dtype="float32", kv_dtype="float32"), H100, Tile(16, 16, 8, 2)),
        (PLAIN, INTERPRETER, Tile(128, 128, 4, 1)),
        (heads_of(256), INTERPRETER, Tile(128, 32, 4, 1)),
    ],
)
def test_tiles_of_other_rows(spec: AttentionSpec, device: Device, tile: Tile) -> None:
    assert prefill_tile(spec, device, DEFAULT) == tile


def test_wishes_come_before_the_rules() -> None:
    wishes = TritonOptions(tile_keys=32, num_warps=2, num_stages=1, splits=7)
    assert decode_tile(GPU_SPEC, H100, wishes) == Tile(16, 32, 2, 1)
    assert prefill_tile(GPU_SPEC, H100, wishes) == Tile(128, 32, 2, 1)
    assert num_splits(10_000, 16, H100, wishes) == 7


@pytest.mark.parametrize("head_dim", [64, 128, 256, 512])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("device", [A100, RTX, H100])
def test_tiles_fit_into_shared_memory(device: Device, dtype: str, head_dim: int) -> None:
    for spec in (heads_of(head_dim, dtype=dtype, kv_dtype=dtype), replace(LATENT, dtype=dtype, kv_dtype=dtype)):
        for tile in (decode_tile(spec, device, DEFAULT), prefill_tile(spec, device, DEFAULT)):
            assert shared_bytes(tile, spec, device) <= device.shared_bytes
            assert min(tile.lines, tile.keys) >= 16


def test_stages_go_before_keys_where_shared_memory_is_short() -> None:
    spec = heads_of(256, num_query_heads=8)
    small = Device((8, 9), 64 << 10, 128)
    assert decode_tile(spec, small, DEFAULT) == Tile(16, 32, 4, 2)
    assert decode_tile(spec, Device((8, 9), 30 << 10, 128), DEFAULT) == Tile(16, 16, 4, 1)


def test_heads_can_be_too_large() -> None:
    assert smallest_tile_fits(heads_of(1024), H100)
    assert not smallest_tile_fits(heads_of(4096), H100)
    assert smallest_tile_fits(heads_of(4096), INTERPRETER)


@pytest.mark.parametrize(
    ("num_programs", "table_tokens", "splits"),
    [
        # 64 rows of 8 KV heads on 132 multiprocessors: 2112 programs are wanted.
        (512, 4096, 5),
        (512, 1024, 2),
        # One row: as many as are allowed, and as the table has room for.
        (8, 1 << 20, MOST_SPLITS),
        (8, 8192, 16),
        # Narrow tables, and rows enough.
        (8, 512, 1),
        (8, 1023, 1),
        (8, 100, 1),
        (4000, 1 << 20, 1),
        (0, 4096, 8),
    ],
)
def test_splits_follow_from_shapes(num_programs: int, table_tokens: int, splits: int) -> None:
    assert num_splits(num_programs, table_tokens, H100, DEFAULT) == splits
    assert num_splits(num_programs, table_tokens, INTERPRETER, DEFAULT) == 1


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "computed"),
    [
        ("bfloat16", "bfloat16", "bfloat16"),
        ("float16", "int8_per_token_head", "float16"),
        ("bfloat16", "fp8_e4m3", "bfloat16"),
        ("bfloat16", "float16", "float32"),
        ("bfloat16", "float32", "float32"),
        ("float32", "bfloat16", "float32"),
    ],
)
def test_products_are_computed_in_a_type_that_holds_both(dtype: str, kv_dtype: str, computed: str) -> None:
    spec = replace(GPU_SPEC, dtype=dtype, kv_dtype=kv_dtype)
    assert compute_type(spec, H100) == computed
    assert compute_type(spec, INTERPRETER) == "float32"


def test_what_is_timed_begins_with_the_rule_and_fits() -> None:
    tile = prefill_tile(GPU_SPEC, RTX, DEFAULT)
    timed = candidates(tile, GPU_SPEC, RTX)
    assert timed[0] == tile
    assert len(timed) > 2
    assert len(set(timed)) == len(timed)
    assert all(shared_bytes(each, GPU_SPEC, RTX) <= RTX.shared_bytes for each in timed)
    assert {(each.lines, each.keys) for each in timed} == {(tile.lines, tile.keys)}
    assert candidates(tile, GPU_SPEC, INTERPRETER) == [tile]


@pytest.mark.parametrize(("main", "rest", "keys"), [(64, 32, 64), (128, 32, 32), (128, 64, 32), (512, 64, 32)])
def test_the_interpreter_takes_a_power_of_two_of_keys_whatever_a_latent_is_made_of(
    main: int, rest: int, keys: int
) -> None:
    spec = replace(MLA, head_dim=main + rest, head_dim_v=main)
    assert decode_tile(spec, INTERPRETER, DEFAULT).keys == prefill_tile(spec, INTERPRETER, DEFAULT).keys == keys


def test_splits_are_joined_by_many_small_programs() -> None:
    assert joined_vectors_per_program(128, H100) == 2
    assert joined_vectors_per_program(512, H100) == 1
