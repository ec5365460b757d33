"""Calls of ``packed_gemm`` and what they must give, for the emulator and for GPUs."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from opkiln import quant
from opkiln.ops.mixed_gemm.op import ACTIVATIONS, NUMBERS

UNIT = {torch.float16: 2**-10, torch.bfloat16: 2**-7}


class Case(NamedTuple):
    """A call by its sizes. ``ends``: where the rows of each expert end. ``groups``: in a row; 0: a
    group has all rows of two outputs."""

    rows: int
    outputs: int
    inputs: int
    ends: tuple[int, ...] = ()
    groups: int = 1
    bias: bool = False
    activation: str = "identity"


# Columns are a multiple of 64, the least of all formats; a chunk of a warp has up to 256. 4 tokens
# for each expert choose between the kernel's two forms, or 8 without experts.
CASES = [
    Case(1, 16, 256),
    Case(5, 33, 320, bias=True, activation="gelu"),
    Case(8, 7, 512, groups=2, activation="relu"),
    Case(9, 40, 2304, groups=9, bias=True, activation="silu"),
    Case(33, 17, 64, groups=0, bias=True),
    Case(7, 20, 256, ends=(3, 3, 7), bias=True),
    Case(30, 24, 320, ends=(0, 19, 30), activation="gelu"),
    Case(41, 16, 512, ends=(1, *range(1, 36), 35, 41), groups=2, bias=True),
]


class Call(NamedTuple):
    x: Tensor
    codes: Tensor
    scales: Tensor | None
    offsets: Tensor | None
    bias: Tensor | None
    outputs: int
    group_size: int
    form: int
    activation: int


def make(case: Case, form: str, dtype: torch.dtype, device: str = "cpu") -> tuple[Call, Tensor]:
    """The arguments of a call, and its weights in float64."""
    torch.manual_seed(case.inputs)
    experts = max(1, len(case.ends))
    size = (experts, case.outputs, case.inputs)
    weight = torch.randn(size) / 8
    group = case.inputs // case.groups if case.groups else 2 * case.inputs
    packed: Any
    codes, scales, exact = weight.to(dtype), None, weight.to(dtype).double()
    if form.startswith("int"):
        packed = quant.quantize(weight, bits=int(form[3:]), group_size=group)
        codes, scales = packed.values, packed.scales
        exact = quant.dequantize(packed).double()
    elif form != "plain":
        quantizer = quant.FPQuantizer(form, group_size=group)
        packed = quantizer.quantize(weight)
        codes, scales = packed.codes, packed.scales
        exact = quantizer.dequantize(packed).double()
    offsets = torch.tensor(case.ends, dtype=torch.int32) if case.ends else None
    shape = (experts, case.outputs) if case.ends else (case.outputs,)
    bias = torch.randn(shape).to(dtype) if case.bias else None
    x = torch.randn(case.rows, case.inputs).to(dtype)
    tensors = [
        each if each is None else each.to(device) for each in (x, codes, scales, offsets, bias)
    ]
    rest: Any = (case.outputs, group, NUMBERS[form], ACTIVATIONS.index(case.activation))
    return Call._make((*tensors, *rest)), exact.to(device)


def expected(call: Call, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The result in float64, and the sum of the products' sizes, to which errors are relative."""
    x = call.x.double()
    experts = torch.zeros(len(x), dtype=torch.long, device=x.device)
    if call.offsets is not None:
        rows = torch.arange(len(x), device=x.device)
        experts = (rows[:, None] >= call.offsets).sum(1)
    chosen = weight[experts]
    out = torch.einsum("ri,roi->ro", x, chosen)
    size = torch.einsum("ri,roi->ro", x.abs(), chosen.abs())
    if call.bias is not None:
        out = out + call.bias.double().view(len(weight), -1)[experts]
    name = ACTIVATIONS[call.activation]
    functions: dict[str, Any] = {
        "gelu": lambda y: functional.gelu(y, approximate="tanh"),
        "relu": functional.relu,
        "silu": functional.silu,
        "identity": lambda y: y,
    }
    return functions[name](out), size


def check(case: Case, form: str, dtype: torch.dtype, op: Any, device: str = "cpu") -> None:
    """The op is within rounding of float64: sums are fp32, and results are rounded once."""
    call, weight = make(case, form, dtype, device)
    got = op(*call)
    exact, size = expected(call, weight)
    assert got.shape == exact.shape
    assert got.dtype == dtype
    wrong = (got.double() - exact).abs() > UNIT[dtype] * exact.abs() + 2e-6 * size + 1e-6
    for row, column in wrong.nonzero().tolist()[:1]:
        found, wanted = got[row, column], exact[row, column]
        raise AssertionError(f"{case}: {found} at [{row}, {column}], not {wanted}")
