"""The product with few rows is the same product."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from octavo.models.linear import FEW_ROWS, linear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("num_rows", [0, 1, 2, 3, FEW_ROWS, FEW_ROWS + 1, 40])
def test_any_number_of_rows_gives_what_torch_gives(num_rows: int, has_bias: bool, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    rows = torch.randn(num_rows, 70, generator=generator).to(dtype)
    weight = torch.randn(90, 70, generator=generator).to(dtype)
    bias = torch.randn(90, generator=generator).to(dtype) if has_bias else None
    product = linear(rows, weight, bias)
    assert product.is_contiguous()
    torch.testing.assert_close(product, F.linear(rows, weight, bias))


@pytest.mark.parametrize("num_rows", [1, 4])
def test_rows_need_not_lie_back_to_back(num_rows: int) -> None:
    rows = torch.randn(num_rows, 140, generator=torch.Generator().manual_seed(0))[:, ::2]
    weight = torch.randn(90, 70, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(linear(rows, weight), F.linear(rows, weight))
