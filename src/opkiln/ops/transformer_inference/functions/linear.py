"""Linear layers with int8 weights and a factor for each group of them.

``weight`` is int8 and contiguous, ``scales`` fp32. The elements of ``weight``, in the order of
memory, are as many groups of equal size as there are scales; a weight is its int8 value times the
scale of its group. That is the form of DeepSpeed's quantized weights. A scale for each row, or for
each 128 columns of a row, are special cases.

Up to 8 rows of ``x`` are multiplied with the int8 weights directly, and summed in fp32. On a GPU
with tensor cores for bf16 (compute capability 8.0) it is up to 32 rows of bf16 or fp16, if groups
are whole rows, or multiples of 64 that divide a row. For more rows the weights are dequantized to
the dtype of ``x`` and multiplied by ``torch.nn.functional.linear``. So are weights on a GPU whose
rows or groups are not multiples of 16, or whose groups are neither whole rows nor a power of two.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from opkiln.ops.checks import check, check_contiguous
from opkiln.ops.transformer_inference.op import int8_linear as kit


@kit.op()
def dequantize_int8(weight: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The weights in fp32, fp16 or bf16, rounded once. ``weight`` may have any shape."""
    check("weight", weight, torch.int8)
    check_contiguous("weight", weight)
    if scales.numel() == 0 or weight.numel() % scales.numel():
        found = f"scales has {scales.numel()} elements, which do not divide weight"
        raise RuntimeError(f"{found} with {weight.numel()}")
    groups = weight.reshape(scales.numel(), -1).to(scales.dtype) * scales.reshape(-1, 1)
    return groups.to(dtype).view(weight.shape)


@kit.op()
def int8_linear(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ w.T + bias`` with the dequantized weights ``w``, ``[outputs, inputs]``."""
    check("weight", weight, dims=2)
    if x.dim() == 0 or x.shape[-1] != weight.shape[1]:
        raise RuntimeError(f"x has shape {list(x.shape)}, weight has {list(weight.shape)}")
    if bias is not None:
        check("bias", bias, shape=[weight.shape[0]])
    return functional.linear(x, dequantize_int8.reference(weight, scales, x.dtype), bias)


@int8_linear.backward
def _int8_linear_backward(
    grad: Tensor, x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None
) -> tuple[Tensor | None, ...]:
    of_x = grad @ dequantize_int8(weight, scales, x.dtype)
    of_bias = None if bias is None else grad.sum_to_size(bias.shape)
    return of_x, None, None, of_bias
