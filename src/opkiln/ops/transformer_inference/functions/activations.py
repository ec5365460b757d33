"""Activations with a bias, plain and gated. 16-bit ones are computed in fp32 and rounded once."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from opkiln.ops.checks import check_rows, widen
from opkiln.ops.transformer_inference.op import activations as kit

if TYPE_CHECKING:
    from collections.abc import Callable


@kit.op()
def bias_add(x: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x + bias``. ``x`` is fp32, bf16 or fp16 with at least one dimension; ``bias`` has its dtype
    and an element for each column. Raises RuntimeError, naming the argument."""
    return _shift(x, bias).to(x.dtype, copy=True)


@kit.op()
def bias_relu(x: Tensor, bias: Tensor | None = None) -> Tensor:
    """The relu of ``x + bias``, with the arguments of ``bias_add``."""
    return functional.relu(_shift(x, bias)).to(x.dtype)


@kit.op()
def bias_silu(x: Tensor, bias: Tensor | None = None) -> Tensor:
    """The silu of ``x + bias``, with the arguments of ``bias_add``."""
    return functional.silu(_shift(x, bias)).to(x.dtype)


@kit.op()
def bias_gelu(x: Tensor, bias: Tensor | None = None, tanh: bool = True) -> Tensor:
    """The gelu of ``x + bias``, by tanh or by erf, with the arguments of ``bias_add``."""
    return _gelu(tanh)(_shift(x, bias)).to(x.dtype)


@kit.op()
def gated_silu(
    x: Tensor, bias: Tensor | None = None, interleaved: bool = False, gate_first: bool = True
) -> Tensor:
    """``silu(gate) * value``, where gate and value are the halves of each row of ``x + bias``.

    ``interleaved``: the even elements of a row are one half and the odd ones the other.
    ``gate_first``: the first half, or the even elements, are the gate. The result has half as many
    columns as ``x``. Arguments are as for ``bias_add``, and the number of columns is even.
    """
    return _gate(x, bias, functional.silu, interleaved, gate_first)


@kit.op()
def gated_gelu(
    x: Tensor,
    bias: Tensor | None = None,
    tanh: bool = True,
    interleaved: bool = False,
    gate_first: bool = True,
) -> Tensor:
    """``gelu(gate) * value``, by tanh or by erf, as in ``gated_silu``."""
    return _gate(x, bias, _gelu(tanh), interleaved, gate_first)


def _gelu(tanh: bool) -> Callable[[Tensor], Tensor]:
    # Not torch's gelu: its value at large numbers depends on the CPU. At infinity the exact form is
    # NaN with AVX-512, and at 3e38 the other form is infinity on aarch64.
    if tanh:
        slope = math.sqrt(2 / math.pi)
        return lambda x: 0.5 * x * (1.0 + torch.tanh(slope * (x + 0.044715 * x**3)))
    return lambda x: 0.5 * x * (1.0 + torch.erf(x * math.sqrt(0.5)))


def _shift(x: Tensor, bias: Tensor | None) -> Tensor:
    """``x + bias``, as what arithmetic is done in."""
    check_rows(x, bias=bias)
    wide = widen(x.contiguous())
    return wide if bias is None else wide + widen(bias)


def _gate(
    x: Tensor,
    bias: Tensor | None,
    activation: Callable[[Tensor], Tensor],
    interleaved: bool,
    gate_first: bool,
) -> Tensor:
    wide = _shift(x, bias)
    width = x.shape[-1]
    if width % 2 != 0:
        raise RuntimeError(f"x has {width} columns, expected an even number")
    if interleaved:
        first, second = wide[..., 0::2], wide[..., 1::2]
    else:
        first, second = wide[..., : width // 2], wide[..., width // 2 :]
    gate, value = (first, second) if gate_first else (second, first)
    return (activation(gate) * value).to(x.dtype).contiguous()
