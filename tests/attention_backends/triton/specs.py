"""Specs, batches and runs that the tests of the triton backend share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from octavo.attention_backends.triton.backend import TritonBackend
from octavo.attention_backends.triton.options import TritonOptions
from octavo.core.interfaces.attention import AttentionSpec
from octavo.testing.attention.abilities import tolerance_of
from octavo.testing.attention.oracle import PagedCase, make_case

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

PLAIN = AttentionSpec(
    num_query_heads=6,
    num_kv_heads=2,
    head_dim=16,
    head_dim_v=16,
    scale=0.25,
    block_size=16,
    dtype="float32",
    kv_dtype="float32",
    device=DEVICE,
)
MLA = replace(PLAIN, num_kv_heads=1, head_dim=24, head_dim_v=16, value_is_key_prefix=True)


def case_of(spec: AttentionSpec, *lengths: tuple[int, int], seed: int = 0) -> PagedCase:
    """Draw rows of the given numbers of (new tokens, context)."""
    return make_case(np.random.default_rng(seed), spec, lengths)


def run(case: PagedCase, **options: Any) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp of a batch, from a new backend with options and a new cache."""
    backend = TritonBackend(case.spec, TritonOptions(**options))
    return case.attend(backend, case.filled_cache(backend), backend.plan(case.batch()))


def assert_by_definition(case: PagedCase, output: Tensor, lse: Tensor) -> None:
    """Compare with attention by its definition, as closely as the suite does."""
    tolerance = tolerance_of(case.spec.dtype)
    for got, wanted in zip((output, lse), case.expected(), strict=True):
        np.testing.assert_allclose(got.double().cpu().numpy(), wanted, rtol=tolerance, atol=tolerance)
