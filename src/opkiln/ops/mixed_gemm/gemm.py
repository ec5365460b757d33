"""The front end of ``mixed_gemm``: ``opkiln.nn.inference``'s products with packed weights, and of
tokens that are grouped by expert.

Few rows go to the kernel, which reads the weights as they are packed. For more rows the weights are
dequantized and torch multiplies.
"""

from __future__ import annotations

import torch
from torch import Tensor

from opkiln.errors import ArgumentError
from opkiln.ops.checks import call_checked, check, check_native, runs_cuda_kernels
from opkiln.ops.fp_quantizer.quantizer import FPQuantized, FPQuantizer
from opkiln.ops.mixed_gemm.functions import multiply, packed_gemm
from opkiln.ops.mixed_gemm.op import ACTIVATIONS, FORMATS, NUMBERS
from opkiln.ops.quantizer.quantize import Quantized, dequantize

# Rows for each matrix, up to which the kernel is called: it reads a matrix once for each 16 rows,
# and after the first time from the GPU's cache. Dequantized, packed weights are read three times.
MOST_ROWS, MOST_PLAIN_ROWS = 32, 16


def mixed_gemm(
    x: Tensor,
    weight: Quantized | FPQuantized,
    bias: Tensor | None = None,
    *,
    activation: str = "identity",
) -> Tensor:
    """``activation(x @ w.T + bias)``, where ``w``, [outputs, inputs], is ``weight`` dequantized.

    ``x`` is [..., inputs] in fp32, bf16 or fp16, ``bias`` is [outputs]. ``activation`` is
    ``identity``, ``gelu`` (by tanh), ``relu`` or ``silu``. ``x`` and ``bias`` may have gradients,
    weights have none. Raises UsageError, naming the argument.
    """
    call_checked(_check, x, weight.shape, bias, 2)
    flat = x.reshape(-1, x.shape[-1])
    out = _pack(flat, weight, None, bias, _number(activation))
    return out.view(*x.shape[:-1], weight.shape[0])


def mixed_moe_gemm(
    x: Tensor,
    weight: Quantized | FPQuantized,
    offsets: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str = "identity",
) -> Tensor:
    """As ``moe_gemm``, with a quantized ``weight`` of the shape [experts, outputs, inputs]."""
    call_checked(_check_grouped, x, weight.shape, offsets, bias)
    return _pack(x, weight, offsets, bias, _number(activation))


def moe_gemm(
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str = "identity",
) -> Tensor:
    """``activation(x @ w.T + bias)`` with the matrix and the bias of each row's expert.

    ``x`` is [rows, inputs], sorted by expert, in fp32, bf16 or fp16, ``weight`` is [experts,
    outputs, inputs], ``bias`` [experts, outputs]. ``offsets``, int32 [experts], says where the rows
    of each expert end, as ``opkiln.nn.ragged.top_k_gating`` gives them. Rows behind the last offset
    are not computed: what they hold is undefined. ``activation`` is as in ``mixed_gemm``.
    All but ``offsets`` may have gradients. Raises UsageError, naming the argument.
    """
    call_checked(_check_grouped, x, weight.shape, offsets, bias)
    call_checked(check, "weight", weight, like=x)
    number = _number(activation)
    few = x.shape[0] <= MOST_PLAIN_ROWS * weight.shape[0]
    if few and _is_served(x, (weight, bias), "plain", 0) and weight.is_contiguous():
        outputs, form = weight.shape[1], NUMBERS["plain"]
        x, bias = x.contiguous(), _contiguous(bias)
        return packed_gemm(x, weight, None, offsets, bias, outputs, 0, form, number)
    return multiply(x, weight, offsets, bias, number)


def _pack(
    x: Tensor,
    weight: Quantized | FPQuantized,
    offsets: Tensor | None,
    bias: Tensor | None,
    activation: int,
) -> Tensor:
    experts = 1 if offsets is None else weight.shape[0]
    if isinstance(weight, FPQuantized):
        form, codes = weight.format, weight.codes
        plain = form in NUMBERS
    else:
        form, codes = f"int{weight.bits}", weight.values
        plain = weight.symmetric and weight.swizzle is None
    few = x.shape[0] <= MOST_ROWS * experts
    if few and plain and _is_served(x, (codes, bias), form, weight.group_size):
        return packed_gemm(
            x.contiguous(), codes, weight.scales.detach(), offsets, _contiguous(bias),
            weight.shape[-2], weight.group_size, NUMBERS[form], activation,
        )  # fmt: skip
    if isinstance(weight, FPQuantized):
        quantizer = FPQuantizer(weight.format, group_size=weight.group_size)
        wide = quantizer.dequantize(weight, dtype=x.dtype)
    else:
        wide = dequantize(weight, dtype=x.dtype)
    return multiply(x, wide, offsets, bias, activation)


def _is_served(x: Tensor, others: tuple[Tensor | None, ...], form: str, group_size: int) -> bool:
    """Whether the kernel takes it: on a GPU, in 16 bits, without gradients, in whole chunks."""
    if not runs_cuda_kernels(x, packed_gemm.builder) or x.dtype == torch.float32:
        return False
    tensors = [x, *(each for each in others if each is not None)]
    if torch.is_grad_enabled() and any(each.requires_grad for each in tensors):
        return False
    return fits(form, x.shape[-1], group_size)


def fits(form: str, columns: int, group_size: int) -> bool:
    """Whether the kernel takes rows of so many columns, in groups of this size (0: no groups).

    A row has whole loads of 16 bytes. A group is whole rows, or a part of a row that is a multiple
    of what a warp takes at a time.
    """
    found = FORMATS[NUMBERS[form]]
    if columns == 0 or columns % found.step:
        return False
    in_rows = group_size % found.chunk == 0 and group_size > 0 and columns % group_size == 0
    return in_rows or group_size % columns == 0


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _number(activation: str) -> int:
    if activation not in ACTIVATIONS:
        expected = ", ".join(ACTIVATIONS)
        raise ArgumentError(f"activation is {activation!r}, expected one of {expected}")
    return ACTIVATIONS.index(activation)


def _check_grouped(x: Tensor, shape: tuple[int, ...], offsets: Tensor, bias: Tensor | None) -> None:
    check("x", x, dims=2)
    _check(x, shape, bias, 3)
    check("offsets", offsets, torch.int32, at=x, shape=[shape[0]])


def _check(x: Tensor, shape: tuple[int, ...], bias: Tensor | None, dims: int) -> None:
    """``shape`` is that of the weights. Raises RuntimeError."""
    if len(shape) != dims:
        raise RuntimeError(f"weight has shape {list(shape)}, expected {dims} dimensions")
    check_native("x has dtype", x.dtype)
    if x.dim() == 0 or x.shape[-1] != shape[-1]:
        raise RuntimeError(f"x has shape {list(x.shape)}, weight has {list(shape)}")
    if bias is not None:
        check("bias", bias, like=x, shape=[*shape[:-1]])
