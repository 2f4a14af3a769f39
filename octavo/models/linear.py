"""Matrix products with a model's weights."""

import torch.nn.functional as F
from torch import Tensor, float32

# Up to so many rows, a float32 product on a CPU is done the other way round. Measured with the weights of the demo
# model on two cores of an AMD EPYC (torch 2.13.0, its MKL), milliseconds for all of them, F.linear against this:
#   1 row 45 : 17    2 rows 80 : 19    4 rows 63 : 27    8 rows 56 : 44    16 rows 66 : 61    64 rows 135 : 138
FEW_ROWS = 8


def linear(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `rows @ weight.T + bias`.

    Args:
        rows: [num_rows, in_features]
        weight: [out_features, in_features]
        bias: [out_features]

    Returns:
        [num_rows, out_features]
    """
    num_rows = rows.shape[0]
    if not 0 < num_rows <= FEW_ROWS or rows.dtype != float32 or rows.device.type != "cpu":
        return F.linear(rows, weight, bias)
    # With the weights on the left the product reads them once, at the speed of memory. A single row is done twice,
    # which costs nothing next to that; alone it would be a matrix-vector product, which one core does.
    columns = rows.expand(2, -1).contiguous().t() if num_rows == 1 else rows.t()
    product = (weight @ columns).t()[:num_rows].contiguous()
    return product if bias is None else product + bias
