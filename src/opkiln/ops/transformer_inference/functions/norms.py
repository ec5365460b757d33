"""Layer norm and rms norm of rows, also of the sum with a residual.

A row is what the last dimension counts. 16-bit rows are normalized in fp32 and rounded once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from opkiln.ops.checks import check_rows, check_same, widen
from opkiln.ops.transformer_inference.op import norms as kit


@kit.op()
def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """Each row divided by the root of its mean square, times ``weight``.

    ``x`` is fp32, bf16 or fp16 with at least one dimension; ``weight`` has its dtype and an element
    for each column. Raises RuntimeError, naming the argument.
    """
    return _normalize(x.contiguous(), weight, None, eps, centred=False)


@kit.op()
def layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """Each row less its mean, divided by its standard deviation, times ``weight``, plus ``bias``.
    Arguments are as for ``rms_norm``."""
    return _normalize(x.contiguous(), weight, bias, eps, centred=True)


@kit.op()
def pre_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    input_bias: Tensor | None = None,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    """The norm of ``x + input_bias + residual``, and that sum: the residual of the next block.

    The sum is computed in fp32 and rounded to the dtype of ``x``; the norm is that of the rounded
    sum. ``residual`` has the shape of ``x``; the other arguments are as for ``rms_norm``.
    """
    total = _total(x, residual, input_bias)
    return _normalize(total, weight, None, eps, centred=False), total


@kit.op()
def pre_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    input_bias: Tensor | None = None,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor]:
    """The layer norm of ``x + input_bias + residual``, and that sum, as in ``pre_rms_norm``."""
    total = _total(x, residual, input_bias)
    return _normalize(total, weight, bias, eps, centred=True), total


@kit.op()
def post_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    input_bias: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """The first result of ``pre_rms_norm``, where nobody needs the sum."""
    return _normalize(_total(x, residual, input_bias), weight, None, eps, centred=False)


@kit.op()
def post_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    input_bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """The first result of ``pre_layer_norm``, where nobody needs the sum."""
    return _normalize(_total(x, residual, input_bias), weight, bias, eps, centred=True)


def _total(x: Tensor, residual: Tensor, input_bias: Tensor | None) -> Tensor:
    """What is normalized: the sum, rounded to the dtype of ``x``."""
    check_rows(x, input_bias=input_bias)
    check_same(x, residual=residual)
    total = widen(x.contiguous())
    if input_bias is not None:
        total = total + widen(input_bias)
    return (total + widen(residual.contiguous())).to(x.dtype)


def _normalize(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, *, centred: bool
) -> Tensor:
    check_rows(x, weight=weight, bias=bias)
    wide = widen(x)
    if centred:
        wide = wide - wide.mean(-1, keepdim=True)
    out = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        out = out * widen(weight)
    if bias is not None:
        out = out + widen(bias)
    return out.to(x.dtype)
