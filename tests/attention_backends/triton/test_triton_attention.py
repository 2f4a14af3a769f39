"""What the triton backend promises besides the contract: splits, skipped tiles, plans that serve later contents."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from specs import DEVICE, MLA, PLAIN, assert_by_definition, case_of, run

from octavo.attention_backends.triton.backend import TritonBackend
from octavo.attention_backends.triton.options import TritonOptions
from octavo.core.interfaces.attention import AttentionSpec
from octavo.core.interfaces.kv_cache_spec import FullAttentionSpec
from octavo.errors import ConfigError, PluginUnsuitable
from octavo.testing.attention.oracle import kv_cache_spec_for, make_batch, random_case

interpreted_only = pytest.mark.skipif(DEVICE != "cpu", reason="looks at what the interpreter does")


class ShapeAlone:
    """An array of which nobody may look at anything else."""

    def __init__(self, *shape: int) -> None:
        self.shape = shape

    def __len__(self) -> int:
        return self.shape[0]


DECODE = ((1, 200), (1, 1), (1, 77), (1, 16), (1, 130))


@pytest.mark.parametrize(
    "spec",
    [
        PLAIN,
        replace(PLAIN, sinks=True, soft_cap=2.0),
        replace(PLAIN, window=40, keep_first=5),
        replace(MLA, sinks=True),
        replace(PLAIN, kv_dtype="int8_per_token_head"),
        replace(PLAIN, dtype="bfloat16", kv_dtype="bfloat16"),
    ],
    ids=["plain", "sinks_and_cap", "window_and_first", "mla", "int8", "bfloat16"],
)
@pytest.mark.parametrize("splits", [2, 5])
def test_splits_give_what_one_pass_gives(spec: AttentionSpec, splits: int) -> None:
    case = case_of(spec, *DECODE)
    output, lse = run(case, splits=splits, tile_keys=32)
    assert_by_definition(case, output, lse)


def test_more_splits_than_tiles_change_nothing() -> None:
    """Nearly all of them see nothing."""
    case = case_of(replace(PLAIN, sinks=True), *DECODE[:3])
    assert_by_definition(case, *run(case, splits=33, tile_keys=64))


def test_rows_that_are_split_stand_beside_rows_that_are_not() -> None:
    case = case_of(PLAIN, (1, 90), (1, 33), (7, 40), (1, 20), (30, 30))
    assert_by_definition(case, *run(case, splits=3, tile_keys=16))


@pytest.mark.parametrize("tile_keys", [16, 32, 256])
def test_the_size_of_tiles_makes_no_difference(tile_keys: int) -> None:
    spec = replace(PLAIN, window=50, keep_first=20, block_size=7)
    case = case_of(spec, (1, 200), (40, 150), (9, 9))
    assert_by_definition(case, *run(case, tile_keys=tile_keys))


def test_a_group_of_more_heads_than_a_tile_has_lines_takes_several_tiles() -> None:
    case = case_of(replace(PLAIN, num_query_heads=300, num_kv_heads=1), (1, 40), (1, 3))
    assert_by_definition(case, *run(case, splits=2, tile_keys=16))


def test_what_sees_nothing_gets_zeros_and_its_sinks() -> None:
    for spec in (PLAIN, replace(PLAIN, sinks=True)):
        case = case_of(spec, (1, 40), (3, 30))
        rows = [replace(row, blocks=np.zeros_like(row.blocks)) for row in case.rows]
        for splits in (None, 2):
            output, lse = run(replace(case, rows=rows), splits=splits)
            assert (output == 0).all()
            nothing = torch.full((spec.num_query_heads,), -torch.inf, device=DEVICE)
            torch.testing.assert_close(lse, (nothing if case.sinks is None else case.sinks).expand(4, -1))


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("spec", [PLAIN, replace(PLAIN, window=30, keep_first=4), MLA], ids=["plain", "window", "mla"])
def test_a_plan_of_decode_rows_serves_later_contents_of_the_same_tensors(spec: AttentionSpec, splits: int) -> None:
    """As a captured step does: shapes stay, and nothing on the host may have been looked at."""
    first, later = (case_of(spec, *((1, n) for n in lengths), seed=n) for n, lengths in enumerate(((90, 5), (33, 80))))
    backend = TritonBackend(spec, TritonOptions(splits=splits, tile_keys=16))
    width = max(first.max_blocks, later.max_blocks)
    batches = [replace(case, table_filler=np.zeros((2, width), np.int32)).batch() for case in (first, later)]
    batch = replace(
        batches[0],
        query_starts_host=ShapeAlone(3),
        context_lens_host=ShapeAlone(2),
        block_table_host=ShapeAlone(2, width),
    )
    plan = backend.plan(batch)
    assert_by_definition(first, *first.attend(backend, first.filled_cache(backend), plan))
    batch.context_lens.copy_(batches[1].context_lens)
    batch.block_table.copy_(batches[1].block_table)
    assert_by_definition(later, *later.attend(backend, later.filled_cache(backend), plan))


@interpreted_only
@pytest.mark.parametrize(
    ("changes", "row", "most_tiles"),
    [
        # Of a context of 1100, in tiles of 16 keys: one tile, or two where an edge falls inside.
        ({"window": 16}, (1, 1100), 2),
        ({"window": 16, "keep_first": 5}, (1, 1100), 3),
        ({"chunk": 32}, (1, 1097), 1),
        ({"chunk": 32, "keep_first": 33}, (1, 1097), 4),
        ({"window": 1}, (1, 1100), 1),
        # Five tokens of three heads are one program; together they see 20 keys.
        ({"window": 16}, (5, 1100), 3),
        ({}, (1, 1100), 69),
    ],
    ids=lambda value: str(value),
)
def test_tiles_that_no_query_sees_are_skipped(
    changes: dict[str, Any], row: tuple[int, int], most_tiles: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = replace(PLAIN, num_query_heads=3, num_kv_heads=1, **changes)
    case = case_of(spec, row)
    backend = TritonBackend(spec, TritonOptions(tile_keys=16))
    kv_cache, plan = case.filled_cache(backend), backend.plan(case.batch())
    products, matmul = [], np.matmul

    def counted(*arguments: Any, **keywords: Any) -> Any:
        products.append(arguments)
        return matmul(*arguments, **keywords)

    # The interpreter's products: of queries and keys, and of weights and values.
    monkeypatch.setattr(np, "matmul", counted)
    output, lse = case.attend(backend, kv_cache, plan)
    monkeypatch.undo()
    assert_by_definition(case, output, lse)
    assert 1 <= len(products) // 2 <= most_tiles


@interpreted_only
def test_no_value_is_read_where_the_latent_is_the_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """The latent part is a product of its own, and 24 numbers are 16 and 8 instead of 32."""
    case = case_of(MLA, (1, 30))
    backend = TritonBackend(MLA)
    kv_cache, plan = case.filled_cache(backend), backend.plan(case.batch())
    shapes, matmul = [], np.matmul

    def noted(left: Any, right: Any, **keywords: Any) -> Any:
        shapes.append(left.shape[1])
        return matmul(left, right, **keywords)

    monkeypatch.setattr(np, "matmul", noted)
    case.attend(backend, kv_cache, plan)
    monkeypatch.undo()
    assert shapes == [16, 8, 128]


def test_every_kernel_is_launched() -> None:
    from octavo.attention_backends.triton.launch import launches

    case = case_of(MLA, (1, 90), (1, 20), (5, 30))
    backend = TritonBackend(MLA, TritonOptions(splits=2))
    before = launches.copy()
    kv_cache = backend.bind(case.empty_rows(), case.kv_cache_spec)
    keys, _ = case.new_keys_and_values()
    backend.write(keys, None, kv_cache, case.batch().slots)
    backend.attend(case.queries(), kv_cache, backend.plan(case.batch()))
    backend.gather(kv_cache, case.batch().slots)
    assert launches - before == {
        "write_kernel": 1,
        # Decode rows, and the others.
        "attention_kernel": 2,
        "join_splits_kernel": 1,
        "gather_kernel": 1,
    }


def test_what_there_is_nothing_to_do_for_launches_nothing() -> None:
    from octavo.attention_backends.triton.launch import launches

    backend = TritonBackend(MLA)
    kept = kv_cache_spec_for(MLA)
    kv_cache = backend.bind(torch.zeros((2, kept.page_bytes), dtype=torch.uint8, device=DEVICE), kept)
    empty = torch.empty(0, dtype=torch.int64, device=DEVICE)
    batch = make_batch(
        np.zeros(3, np.int32), np.zeros(2, np.int32), np.zeros((2, 1), np.int32), np.empty(0, np.int64), DEVICE
    )
    before = launches.copy()
    backend.write(torch.empty(0, 1, 24, device=DEVICE), None, kv_cache, empty)
    assert backend.attend(torch.empty(0, 6, 24, device=DEVICE), kv_cache, backend.plan(batch)).shape == (0, 6, 16)
    assert backend.gather(kv_cache, empty).shape == (0, 24)
    assert launches == before


def test_tokens_beyond_those_of_the_plan_get_zeros() -> None:
    case = case_of(PLAIN, (1, 20), (1, 30))
    backend = TritonBackend(PLAIN)
    kv_cache = case.filled_cache(backend)
    query = torch.cat((case.queries(), torch.full_like(case.queries(), torch.nan)))
    output, lse = backend.attend(query, kv_cache, backend.plan(case.batch()), return_lse=True)
    assert_by_definition(case, output[:2], lse[:2])
    assert (output[2:] == 0).all()
    assert (lse[2:] == -torch.inf).all()


def test_numbers_of_a_head_may_lie_apart() -> None:
    """Queries, keys and values whose last stride is not 1."""
    case = case_of(PLAIN, (1, 20), (5, 30))
    backend = TritonBackend(PLAIN)
    kv_cache = backend.bind(case.empty_rows(), case.kv_cache_spec)
    case.write_history(backend, kv_cache)
    keys, values = case.new_keys_and_values()
    apart = [each.transpose(1, 2).contiguous().transpose(1, 2) for each in (keys, values, case.queries())]
    assert apart[0].stride(-1) != 1
    backend.write(apart[0], apart[1], kv_cache, case.batch().slots)
    output, lse = backend.attend(apart[2], kv_cache, backend.plan(case.batch()), return_lse=True)
    assert_by_definition(case, output, lse)


def test_sinks_and_values_go_where_the_spec_says() -> None:
    case = case_of(replace(PLAIN, sinks=True), (1, 20))
    backend = TritonBackend(case.spec)
    kv_cache, plan = case.filled_cache(backend), backend.plan(case.batch())
    with pytest.raises(ValueError, match=r"^The spec says sinks=True, and attend got sinks=False\.$"):
        backend.attend(case.queries(), kv_cache, plan)
    keys, values = case.new_keys_and_values()
    with pytest.raises(ValueError, match=r"^write got no values, and value_is_key_prefix is off\.$"):
        backend.write(keys, None, kv_cache, case.batch().slots)
    with pytest.raises(ValueError, match=r"^write got also values, and value_is_key_prefix is on\.$"):
        TritonBackend(MLA).write(keys, values, kv_cache, case.batch().slots)


def test_bind_says_why_bytes_do_not_fit() -> None:
    spec = replace(PLAIN, kv_dtype="int8_per_token_head")
    backend, kept = TritonBackend(spec), FullAttentionSpec(16, 2, 16, "int8_per_token_head")
    # 2 * 16 * 2 vectors of 16 bytes, with 4 bytes of scale each.
    assert kept.page_bytes == 64 * 20
    buffer = torch.zeros(4, kept.page_bytes + 6, dtype=torch.uint8, device=DEVICE)
    with pytest.raises(ConfigError) as refusal:
        backend.bind(buffer, kept)
    assert str(refusal.value) == (
        "Rows with strides (1286, 1) from byte 0 on cannot be viewed as int8_per_token_head. "
        "Let them start at multiples of 4 bytes, their bytes in a row."
    )
    with pytest.raises(ConfigError) as refusal:
        backend.bind(buffer, replace(kept, block_size=8))
    assert str(refusal.value) == (
        "The KV-cache spec has blocks of 8 tokens and the attention blocks of 16. Give both the same block_size."
    )
    with pytest.raises(ConfigError) as refusal:
        backend.bind(buffer, replace(kept, dtype="int8"))
    assert str(refusal.value) == (
        "A block of this layer takes 1280 bytes; the KV-cache spec's page has 1024 and the rows have 1286. "
        "Heads, head_dim or dtype of the two specs differ."
    )
    with pytest.raises(ConfigError) as refusal:
        backend.bind(buffer.float(), kept)
    assert str(refusal.value) == "triton binds a matrix of uint8, not 2 dimensions of torch.float32."


def test_options_are_checked() -> None:
    for wrong in ({"splits": 0}, {"tile_keys": 48}, {"num_warps": 3}, {"num_stages": 0}, {"tiles": 1}):
        with pytest.raises(ValidationError):
            TritonOptions(**wrong)


def test_what_cannot_be_served_is_refused_with_the_reasons() -> None:
    with pytest.raises(PluginUnsuitable) as refusal:
        TritonBackend(replace(PLAIN, dtype="float64", head_dim_v=8))
    assert str(refusal.value) == (
        "triton cannot serve this attention: dtype 'float64' is not one of float32, float16, bfloat16. head_dim_v 8 "
        "differs from head_dim 16, which is served only with value_is_key_prefix."
    )


def test_a_window_longer_than_any_context_is_none() -> None:
    far = replace(PLAIN, window=1 << 33, chunk=1 << 40, keep_first=1 << 33)
    case = random_case(np.random.default_rng(3), PLAIN)
    wanted, _ = case.run(TritonBackend(PLAIN))
    got, _ = replace(case, spec=far).run(TritonBackend(far))
    assert torch.equal(got, wanted)


def test_tensors_of_a_batch_may_lie_apart() -> None:
    case = random_case(np.random.default_rng(4), PLAIN)
    backend, batch = TritonBackend(PLAIN), case.batch()
    kv_cache = case.filled_cache(backend)
    names = ("query_starts", "context_lens", "block_table", "slots")
    apart = replace(batch, **{name: _apart(getattr(batch, name)) for name in names})
    wanted = backend.attend(case.queries(), kv_cache, backend.plan(batch))
    keys, values = case.new_keys_and_values()
    backend.write(keys, values, kv_cache, apart.slots)
    assert torch.equal(backend.attend(case.queries(), kv_cache, backend.plan(apart)), wanted)


def _apart(tensor: torch.Tensor) -> torch.Tensor:
    """Return equal numbers, of which every other place in memory holds another one."""
    wide = torch.full((*tensor.shape, 2), 77, dtype=tensor.dtype)
    wide[..., 0] = tensor
    return wide[..., 0]
