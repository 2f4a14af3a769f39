"""What an attention backend may or may not be able to do, as changes to a plain spec.

PLAIN ──────► the first of many ordinary specs that the backend serves
ABILITIES ──► "window": {window: 9}, "float16": {dtype: float16, kv_dtype: float16}, ...
"window+float16" ──► both changes at once

A backend declares an ability by `cannot_serve(spec) == []`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from types import MappingProxyType
from typing import Any

import torch

from octavo.core.interfaces.attention import AttentionSpec

Changes = Mapping[str, Any]

# What the search for something plain tries, the first of each list first: many small blocks in float32 show most.
PLAIN_HEADS = ((6, 2), (8, 2), (4, 4))
PLAIN_HEAD_DIMS = (16, 64, 128)
PLAIN_BLOCK_SIZES = (16, 32, 64, 128, 256)
PLAIN_DTYPES = ("float32", "bfloat16", "float16")


def _one_size(head_dim: int) -> Changes:
    return {"head_dim": head_dim, "head_dim_v": head_dim, "scale": head_dim**-0.5}


def _one_dtype(dtype: str) -> Changes:
    return {"dtype": dtype, "kv_dtype": dtype}


def _heads(num_query_heads: int, num_kv_heads: int) -> Changes:
    return {"num_query_heads": num_query_heads, "num_kv_heads": num_kv_heads}


def _key_prefix(head_dim: int, head_dim_v: int) -> Changes:
    shape: dict[str, Any] = {"num_kv_heads": 1, "head_dim": head_dim, "head_dim_v": head_dim_v, "scale": head_dim**-0.5}
    return {**shape, "value_is_key_prefix": True}


# Each ability alone: the ways to ask for it, of which the first that the backend serves is used. Sizes are such that
# their edges fall inside blocks and, where the name says so, on the edges of blocks of 16.
ABILITIES: Mapping[str, tuple[Changes, ...]] = MappingProxyType(
    {
        "plain": ({},),
        "grouped_query": ({"num_query_heads": 8, "num_kv_heads": 2},),
        "multi_head": ({"num_query_heads": 4, "num_kv_heads": 4},),
        "multi_query": ({"num_query_heads": 4, "num_kv_heads": 1},),
        "scale": ({"scale": 0.37},),
        "window": ({"window": 9},),
        "window_of_one": ({"window": 1},),
        "window_of_blocks": ({"window": 32},),
        "chunk": ({"chunk": 12},),
        "chunk_of_one": ({"chunk": 1},),
        "chunk_of_blocks": ({"chunk": 32},),
        "keep_first": ({"keep_first": 5},),
        "keep_first_blocks": ({"keep_first": 19},),
        "soft_cap": ({"soft_cap": 0.7},),
        "sinks": ({"sinks": True},),
        "value_is_key_prefix": (_key_prefix(24, 16), _key_prefix(576, 512), _key_prefix(320, 256)),
        "narrow_values": ({"head_dim_v": 8},),
        **{f"head_dim_{size}": (_one_size(size),) for size in (7, 40, 64, 80, 96, 128, 256)},
        **{f"block_size_{size}": ({"block_size": size},) for size in (1, 7, 16, 32, 64)},
        **{dtype: (_one_dtype(dtype),) for dtype in ("float32", "float16", "bfloat16", "float64")},
        "float16_cache": ({"dtype": "float32", "kv_dtype": "float16"},),
        "bfloat16_cache": ({"dtype": "float32", "kv_dtype": "bfloat16"},),
        "float32_cache": ({"dtype": "bfloat16", "kv_dtype": "float32"},),
    }
)

# Quantised formats of the cache: a scale for the whole layer, which core applies, or one in the page for each vector.
QUANTISED: Mapping[str, tuple[Changes, ...]] = MappingProxyType(
    {
        f"{kv_dtype}_cache": ({"dtype": "float32", "kv_dtype": kv_dtype},)
        for kv_dtype in ("fp8_e4m3", "int8", "fp8_e4m3_per_token_head", "int8_per_token_head")
    }
)

# Sizes and formats that code is often written for one by one: each is tried alone, and some of them in COMBINATIONS,
# but not in pairs with everything else.
SIZES: Mapping[str, tuple[Changes, ...]] = MappingProxyType(
    {
        **{
            f"heads_{query_heads}_{kv_heads}": (_heads(query_heads, kv_heads),)
            for query_heads, kv_heads in (
                (1, 1),
                (3, 3),
                (9, 3),
                (10, 5),
                (14, 2),
                (12, 12),
                (16, 8),
                (16, 2),
                (32, 2),
                (40, 8),
                (71, 1),
            )
        },
        **{
            f"value_is_key_prefix_{heads}_heads": tuple(
                {**_key_prefix(*dims), "num_query_heads": heads} for dims in ((24, 16), (576, 512), (320, 256))
            )
            for heads in (16, 40, 128)
        },
        **{f"head_dim_{size}": (_one_size(size),) for size in (8, 32, 48, 72, 112, 160, 192, 512)},
        **{f"block_size_{size}": ({"block_size": size},) for size in (2, 3, 8, 48, 128, 256)},
        "large_window": ({"window": 200},),
        "large_chunk": ({"chunk": 240},),
        "large_keep_first": ({"keep_first": 70},),
        "large_soft_cap": ({"soft_cap": 30.0, "scale": 1.0},),
        # Far above the scores, where it changes nothing, so that a formula must not lose their digits.
        "huge_soft_cap": ({"soft_cap": 5000.0},),
        "small_scale": ({"scale": 0.002},),
        "float16_and_bfloat16_cache": ({"dtype": "float16", "kv_dtype": "bfloat16"},),
        "bfloat16_and_float16_cache": ({"dtype": "bfloat16", "kv_dtype": "float16"},),
        **QUANTISED,
        **{
            f"{dtype}_and_{kv_dtype}_cache": ({"dtype": dtype, "kv_dtype": kv_dtype},)
            for dtype, kv_dtype in (
                ("bfloat16", "fp8_e4m3"),
                ("float16", "int8"),
                ("float16", "fp8_e4m3_per_token_head"),
                ("bfloat16", "int8_per_token_head"),
            )
        },
    }
)

# What changes who sees whom, how scores become weights, or what is stored.
RULES = (
    "plain",
    "window",
    "chunk",
    "window+keep_first",
    "chunk+keep_first",
    "window+chunk",
    "window+chunk+keep_first+soft_cap+sinks",
    "soft_cap",
    "sinks",
    "value_is_key_prefix",
    "value_is_key_prefix+window+sinks",
)

# Abilities together whose code paths meet. Pairs are tried besides, each with each.
COMBINATIONS = (
    *(name for name in RULES if "+" in name),
    "window+keep_first_blocks",
    "window_of_one+keep_first",
    "chunk_of_blocks+keep_first_blocks",
    "window+chunk_of_blocks+keep_first",
    "window_of_blocks+keep_first",
    "soft_cap+sinks",
    "window+soft_cap+sinks",
    "multi_head+window+sinks",
    "multi_query+chunk+soft_cap",
    "block_size_7+window+chunk+keep_first",
    "float16+window+sinks",
    "bfloat16+window+chunk+keep_first+soft_cap+sinks",
    "value_is_key_prefix+bfloat16",
    "value_is_key_prefix+bfloat16_cache+soft_cap",
    "value_is_key_prefix+window+chunk+keep_first+soft_cap+sinks",
    "window+large_keep_first",
    "chunk+large_keep_first",
    "large_window+large_chunk",
    "large_window+sinks",
    "large_chunk+large_keep_first+soft_cap",
    "large_soft_cap+window",
    "heads_9_3+bfloat16",
    "heads_9_3+head_dim_64+window+sinks",
    "heads_14_2+head_dim_48+chunk+keep_first",
    "heads_16_2+window+soft_cap+sinks",
    "heads_16_8+block_size_3",
    "value_is_key_prefix_40_heads+window+sinks",
    "value_is_key_prefix_16_heads+bfloat16+block_size_3",
    "fp8_e4m3_cache+value_is_key_prefix",
    "fp8_e4m3_cache+window+chunk+keep_first+soft_cap+sinks",
    "fp8_e4m3_cache+head_dim_80+block_size_7",
    "int8_cache+value_is_key_prefix+block_size_7",
    "int8_cache+multi_query+window+keep_first",
    "fp8_e4m3_per_token_head_cache+value_is_key_prefix+window+sinks",
    "fp8_e4m3_per_token_head_cache+multi_head+chunk+soft_cap",
    # Scales that do not begin right behind the codes.
    "fp8_e4m3_per_token_head_cache+multi_query+head_dim_7+block_size_7",
    "int8_per_token_head_cache+value_is_key_prefix",
    "int8_per_token_head_cache+window+keep_first+block_size_7",
    "bfloat16_and_fp8_e4m3_cache+heads_9_3+head_dim_64+window+sinks",
    "bfloat16_and_int8_per_token_head_cache+value_is_key_prefix_16_heads+block_size_3",
    "float16_and_fp8_e4m3_per_token_head_cache+heads_14_2+head_dim_48+chunk+keep_first",
)

# What hardly any backend can do: cannot_serve must have an answer, if possible a reason.
IMPOSSIBLE: Mapping[str, tuple[Changes, ...]] = MappingProxyType(
    {
        "no_such_dtype": (_one_dtype("float3"),),
        "no_such_device": ({"device": "abacus:0"},),
    }
)

# Fields that a reason may speak of together: asked for at once, what is wrong with them may be one thing or another.
INTERTWINED = (
    {"dtype", "kv_dtype"},
    {"window", "keep_first"},
    {"chunk", "keep_first"},
    {"num_query_heads", "num_kv_heads", "head_dim", "head_dim_v", "scale", "value_is_key_prefix"},
)


def plain_specs(device: str, changes: Changes) -> Iterator[AttentionSpec]:
    """Yield ordinary specs, the most telling first, all with the given `changes`."""
    seen = set()
    for dtype, head_dim, (num_query_heads, num_kv_heads), block_size in itertools.product(
        PLAIN_DTYPES, PLAIN_HEAD_DIMS, PLAIN_HEADS, PLAIN_BLOCK_SIZES
    ):
        fields: dict[str, Any] = {
            "num_query_heads": num_query_heads,
            "num_kv_heads": num_kv_heads,
            **_one_size(head_dim),
            "block_size": block_size,
            **_one_dtype(dtype),
            "device": device,
        }
        spec = AttentionSpec(**{**fields, **changes})
        if spec not in seen:
            seen.add(spec)
            yield spec


def find_plain(can_serve: Callable[[AttentionSpec], bool], device: str, changes: Changes) -> AttentionSpec:
    """Return the most telling plain spec that can be served; the first of all when none can."""
    served = (spec for spec in plain_specs(device, changes) if can_serve(spec))
    return next(served, None) or next(plain_specs(device, changes))


def changes_of(ability: str, known: Mapping[str, tuple[Changes, ...]]) -> list[Changes]:
    """Return the ways to ask for an ability, or for several joined by "+".

    Raises:
        ValueError: The name is not known.
    """
    ways: list[Changes] = [{}]
    for name in ability.split("+"):
        if name not in known:
            raise ValueError(f"No ability is called {name!r}. There are: {', '.join(known)}; join several with '+'.")
        ways = [{**way, **changes} for way in ways for changes in known[name]]
    return ways


def specs_of(
    ability: str,
    plain: AttentionSpec,
    known: Mapping[str, tuple[Changes, ...]] = MappingProxyType({**ABILITIES, **SIZES}),
) -> list[AttentionSpec]:
    """Return the specs that ask for an ability; none when it makes no sense beside what `plain` says."""
    specs = []
    for changes in changes_of(ability, known):
        try:
            specs.append(replace(plain, **changes))
        except ValueError:
            continue
    return specs


def are_independent(first: str, second: str, known: Mapping[str, tuple[Changes, ...]]) -> bool:
    """Whether reasons against one of two abilities cannot depend on whether the other is asked for."""
    fields, others = _fields_of(first, known), _fields_of(second, known)
    reach = others.union(*(together for together in INTERTWINED if others & together))
    return bool(fields and others) and not fields & reach


def can_combine(first: str, second: str, known: Mapping[str, tuple[Changes, ...]] = ABILITIES) -> bool:
    """Whether the two abilities change different fields, so that one spec can ask for both."""
    fields, others = _fields_of(first, known), _fields_of(second, known)
    return bool(fields and others) and not fields & others


def differing_fields(spec: AttentionSpec, other: AttentionSpec) -> dict[str, Any]:
    """Return the fields of `spec` that `other` has otherwise."""
    others = asdict(other)
    return {name: value for name, value in asdict(spec).items() if value != others[name]}


def tolerance_of(dtype: str) -> float:
    """Return the largest error of an output number or log-sum-exp, relative and absolute, for numbers of size 1.

    An output in half precision is rounded itself and may have been summed from rounded weights: some 4 units. In
    float32 and float64, where sums are no more precise than their terms, many more add up.
    """
    info = torch.finfo(getattr(torch, dtype))
    return float(info.eps) * (4 if info.bits < 32 else 42 if info.bits == 32 else 4500)


def _fields_of(ability: str, known: Mapping[str, tuple[Changes, ...]]) -> set[str]:
    return {name for changes in changes_of(ability, known) for name in changes}
