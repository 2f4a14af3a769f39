"""Bit for bit, the triton backend stores what `KVFormat.quantise` says, and reads what `dequantise` says."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from specs import DEVICE, MLA, PLAIN
from torch import Tensor

from octavo.attention_backends.triton.backend import TritonBackend
from octavo.core.interfaces.attention import AttentionSpec
from octavo.core.interfaces.kv_format import KV_FORMATS, ScaledPages
from octavo.testing.attention.oracle import kv_cache_spec_for

QUANTISED = [name for name, kv_format in KV_FORMATS.items() if kv_format.is_quantised]
FLOATS = ["float32", "float16", "bfloat16"]
DIM = 24


def vectors(dtype: str) -> Tensor:
    """Return vectors of all kinds of numbers. [num_vectors, DIM]"""
    rng = np.random.default_rng(5)
    info = torch.finfo(getattr(torch, dtype))
    kinds = [rng.standard_normal(DIM) * size for size in (1.0, 1e-3, 30.0, 300.0, 1e-6, 1e-7, info.max / 5, info.tiny)]
    # All codes of fp8, and what lies halfway between two of them, and next to that.
    codes = torch.arange(0, 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).double().numpy()
    halves = (codes[1:] + codes[:-1]) / 2
    edges = np.concatenate((codes, halves, np.nextafter(np.float32(halves), np.float32(0)), -halves, -codes))
    # What int8 rounds: halves, to even.
    edges = np.concatenate(
        (edges, np.arange(-130, 131) / 2, [447.9, 448.0, 463.9, 464.0, 464.1, 1e4, -1e4, 126.5, 127.6])
    )
    edges = np.pad(edges, (0, -len(edges) % DIM)).reshape(-1, DIM)
    special = np.zeros((9, DIM))
    special[1, 3] = np.nan
    special[2, 3] = np.inf
    special[3, :2] = -np.inf, np.nan
    special[4] = -0.0
    special[5, 1] = info.smallest_normal / 2
    special[6, 1] = info.max
    special[7] = info.max
    special[8] = np.nan
    with np.errstate(over="ignore"):
        drawn = np.concatenate((*([kind[None] for kind in kinds]), edges, special))
        return torch.from_numpy(drawn).to(getattr(torch, dtype))


def stored(spec: AttentionSpec, numbers: Tensor) -> tuple[Tensor, Tensor | None]:
    """Write vectors as keys, one a token, and as values where there are any; return what the pages hold then."""
    kept = kv_cache_spec_for(spec)
    num_blocks = 2 + len(numbers) // spec.block_size
    rows = torch.zeros((num_blocks, kept.page_bytes), dtype=torch.uint8, device=DEVICE)
    backend = TritonBackend(spec)
    slots = torch.arange(len(numbers), device=DEVICE) + spec.block_size
    heads = numbers[:, None].to(DEVICE)
    values = None if spec.value_is_key_prefix else heads.flip(0)
    backend.write(heads, values, backend.bind(rows, kept), slots)
    pages = KV_FORMATS[spec.kv_dtype].view_pages(rows, backend.kv_cache_shape(kept, 1)[1:])
    codes, scales = (pages.codes, pages.scales) if isinstance(pages, ScaledPages) else (pages, None)
    if values is not None:
        # Values were written in the opposite order, so that both must agree.
        parts = [codes[1:, kind].flatten(0, 1)[: len(numbers), 0] for kind in (0, 1)]
        assert torch.equal(bits(parts[0]), bits(parts[1].flip(0)))
        codes = parts[0]
        scales = None if scales is None else scales[1:, 0].flatten(0, 1)[: len(numbers), 0]
        return codes.cpu(), None if scales is None else scales.cpu()
    codes = codes[1:].flatten(0, 1)[: len(numbers)].cpu()
    return codes, None if scales is None else scales[1:].flatten()[: len(numbers)].cpu()


def bits(numbers: Tensor) -> Tensor:
    """Return the bits, with one for all NaN: their sign and payload mean nothing."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    if numbers.dtype.is_floating_point:
        numbers = torch.where(numbers.isnan(), torch.full_like(numbers, torch.nan), numbers)
    return numbers.contiguous().view(kinds[numbers.element_size()])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kv_dtype", QUANTISED)
@pytest.mark.parametrize("plain", [PLAIN, MLA], ids=["keys_and_values", "keys_alone"])
def test_what_is_stored_is_what_quantise_says(plain: AttentionSpec, kv_dtype: str, dtype: str) -> None:
    spec = replace(plain, num_kv_heads=1, head_dim=DIM, dtype=dtype, kv_dtype=kv_dtype)
    spec = spec if spec.value_is_key_prefix else replace(spec, head_dim_v=DIM)
    numbers = vectors(dtype)
    codes, scales = stored(spec, numbers)
    wanted, wanted_scales = KV_FORMATS[kv_dtype].quantise(numbers)
    assert torch.equal(bits(codes), bits(wanted))
    assert (scales is None) == (wanted_scales is None)
    if scales is not None and wanted_scales is not None:
        assert torch.equal(bits(scales), bits(wanted_scales))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kv_dtype", FLOATS)
def test_what_is_stored_as_it_is_is_rounded_as_torch_does(kv_dtype: str, dtype: str) -> None:
    spec = replace(PLAIN, num_kv_heads=1, head_dim=DIM, head_dim_v=DIM, dtype=dtype, kv_dtype=kv_dtype)
    numbers = vectors(dtype)
    codes, _ = stored(spec, numbers)
    assert torch.equal(bits(codes), bits(numbers.to(getattr(torch, kv_dtype))))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kv_dtype", [*QUANTISED, *FLOATS])
def test_what_is_gathered_is_what_dequantise_says(kv_dtype: str, dtype: str) -> None:
    """All that a byte can be, in every format: the pages are filled from outside."""
    spec = replace(MLA, head_dim=DIM, dtype=dtype, kv_dtype=kv_dtype)
    kept, kv_format = kv_cache_spec_for(spec), KV_FORMATS[kv_dtype]
    noise = np.random.default_rng(1).integers(0, 256, size=(6, kept.page_bytes), dtype=np.uint8)
    rows = torch.from_numpy(noise).to(DEVICE)
    backend = TritonBackend(spec)
    slots = torch.randperm(6 * spec.block_size, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    gathered = backend.gather(backend.bind(rows, kept), slots)
    pages = kv_format.view_pages(rows, (spec.block_size, DIM))
    codes, scales = (pages.codes, pages.scales) if isinstance(pages, ScaledPages) else (pages, None)
    keys = codes.flatten(0, 1)[slots]
    numbers = kv_format.dequantise(keys, None if scales is None else scales.flatten()[slots])
    assert gathered.dtype == getattr(torch, dtype)
    assert torch.equal(bits(gathered), bits(numbers.to(gathered.dtype)))
