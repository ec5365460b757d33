"""``packed_gemm``: the op and its reference. ``gemm.py`` is the front end."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from opkiln.ops.checks import KERNEL_TYPES, NATIVE, check_all, dtype_name
from opkiln.ops.fp_quantizer.functions import FORMATS as FP_FORMATS
from opkiln.ops.fp_quantizer.functions import fp_dequantize
from opkiln.ops.mixed_gemm.op import ACTIVATIONS, FORMATS, kit
from opkiln.ops.quantizer.functions import dequantize


@kit.op()
def packed_gemm(
    x: Tensor,
    codes: Tensor,
    scales: Tensor | None,
    offsets: Tensor | None,
    bias: Tensor | None,
    outputs: int,
    group_size: int,
    form: int,
    activation: int,
) -> Tensor:
    """``activation(x @ w.T + bias)``, with ``w`` of ``codes`` and ``scales``.

    ``form`` is an index of ``FORMATS``. ``codes`` are those of a matrix [outputs, inputs], as the
    quantizers pack them, or numbers of the dtype of ``x`` if ``form`` is plain. ``offsets`` is as
    in ``moe_gemm``: then there is a matrix for each expert, one after the other. ``activation`` is
    an index of ``ACTIVATIONS``.
    """
    experts = 1 if offsets is None else offsets.numel()
    size = (experts, outputs, x.shape[1])
    weight = _weights(codes, scales, size, group_size, FORMATS[form].name, x.dtype)
    return multiply(x, weight if offsets is not None else weight[0], offsets, bias, activation)


@packed_gemm.fake
def _(x: Tensor, *rest: Any) -> Tensor:
    return x.new_empty((x.shape[0], rest[4]))


@packed_gemm.variant
def _(x: Tensor, *rest: Any) -> dict[str, str]:
    return {"CODES": FORMATS[rest[6]].kind, "T": KERNEL_TYPES.get(x.dtype) or dtype_name(x.dtype)}


def multiply(
    x: Tensor, weight: Tensor, offsets: Tensor | None, bias: Tensor | None, activation: int
) -> Tensor:
    """The product with weights in the dtype of ``x``, [outputs, inputs] or, with ``offsets``,
    [experts, outputs, inputs]; plus ``bias``, with the activation. By torch."""
    if offsets is None:
        out = functional.linear(x, weight, bias)
    else:
        ends = torch.nn.functional.pad(offsets, (1, 0))
        rising = (ends[1:] >= ends[:-1]) & (offsets <= x.shape[0])
        check_all(rising, f"offsets do not rise from 0 to at most {x.shape[0]}, the rows of x")
        out = multiply_groups(x, weight, offsets)
        if bias is not None:
            out = out + bias.view(len(weight), -1)[_experts(x, offsets)]
    match ACTIVATIONS[activation]:
        case "gelu":
            return functional.gelu(out, approximate="tanh")
        case "relu":
            return functional.relu(out)
        case "silu":
            return functional.silu(out)
    return out


def multiply_groups(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """Each row of ``x`` times the transposed matrix of its expert. ``weight`` may be transposed.

    torch's ``grouped_mm`` has a kernel for bf16 on GPUs of compute capability 9.0 and later.
    Elsewhere it is a loop over the experts, for which the host waits for ``offsets``. In a graph
    torch traces it for bf16 alone: other dtypes are multiplied with all matrices there.
    """
    if x.shape[0] == 0:
        return x.new_empty(0, weight.shape[1])
    traced = torch.compiler.is_compiling() and x.dtype != torch.bfloat16
    if traced or x.dtype not in NATIVE:  # grouped_mm takes no others
        out, experts = x.new_zeros(x.shape[0], weight.shape[1]), _experts(x, offsets)
        for expert, each in enumerate(weight.unbind()):
            out = torch.where((experts == expert)[:, None], x @ each.T, out)
        return out
    sixteen = 16 // x.element_size()  # rows begin at multiples of 16 bytes
    missing = -x.shape[1] % sixteen
    transposed = weight.transpose(1, 2).is_contiguous() and weight.shape[1] % sixteen == 0
    if missing or not (weight.is_contiguous() or transposed):
        weight = functional.pad(weight, (0, missing)).contiguous()
        x = functional.pad(x, (0, missing))
    return functional.grouped_mm(x.contiguous(), weight.transpose(1, 2), offs=offsets)


def _experts(x: Tensor, offsets: Tensor) -> Tensor:
    """The expert of each row; the last for rows behind all offsets."""
    rows = torch.arange(x.shape[0], device=x.device, dtype=offsets.dtype)
    return torch.searchsorted(offsets, rows, right=True).clamp(max=offsets.numel() - 1)


def _weights(
    codes: Tensor,
    scales: Tensor | None,
    size: tuple[int, int, int],
    group_size: int,
    form: str,
    dtype: torch.dtype,
) -> Tensor:
    if scales is None:
        return codes.view(size)
    narrow = torch.float32 if dtype == torch.float64 else dtype
    if form.startswith("int"):
        bits, none = int(form.removeprefix("int")), scales.new_empty(0)
        values, numel = codes.reshape(-1), math.prod(size)
        in_order = (True, 1, 1, 1)  # symmetric, and not swizzled
        flat: Tensor = dequantize.reference(
            values, scales, none, numel, narrow, bits, group_size, *in_order
        )
        return flat.view(size).to(dtype)
    found = FP_FORMATS[form]
    out: Tensor = fp_dequantize.reference(
        codes, scales, list(size), group_size, found.bits, found.mantissa_bits, narrow
    )
    return out.to(dtype)
