"""Layer norm and rms norm of rows, also of the sum with a residual.

A row is what the last dimension counts. 16-bit rows are normalized in fp32 and rounded once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from opkiln.ops.transformer_inference.functions.checks import check_row, check_same, widened
from opkiln.ops.transformer_inference.op import kit


@kit.op()
def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """Each row divided by the root of its mean square, times ``weight``."""
    check_row(x, "weight", weight)
    return _normalized(x.contiguous(), weight, None, eps, centred=False)


def _normalized(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, *, centred: bool
) -> Tensor:
    wide = widened(x)
    if centred:
        wide = wide - wide.mean(-1, keepdim=True)
    out = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        out = out * widened(weight)
    if bias is not None:
        out = out + widened(bias)
    return out.to(x.dtype)
