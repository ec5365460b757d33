"""The functions of the library; their bodies are the reference.

The numbers are those of DeepSpeed's quantizer, for its programs (``opkiln.compat.deepspeed``); in
other programs ``opkiln.quant`` has fewer surprises. All arithmetic is fp32:

- A group has the range of its numbers, without NaN. With ``with_zero`` 0 is in the range of every
  group, as it is in DeepSpeed's where a group does not fill its threads.
- Symmetric: ``factor = 2**bits / (2 * absmax)``, or 1 of zeros. Asymmetric:
  ``factor = 2**bits / (max - min)``, or 1 where they are equal; ``offset = (max + min) / 2``.
- ``level = round(x * factor)``, of asymmetric groups ``round((x - offset) * factor)``: ties to
  even, cut off at ``-2**(bits - 1)`` and ``2**(bits - 1) - 1``, 0 of NaN.
- ``params`` has a row for each group: ``1 / factor``, and where asymmetric the offset.
- Back: ``level * scale``, or ``level * scale + offset`` rounded once.
- Levels of four bits are two to a byte, the element of even index in the high half.
- Sums of parts are fp16, and so is each number that is added.

On NVIDIA GPUs the native version divides as DeepSpeed does there, by approximation: a scale may
differ from the reference's in its last bits, and a level that is all but a tie by one.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from opkiln.ops.checks import check, check_native, check_numel
from opkiln.ops.deepspeed_quantizer.op import kit


@kit.op(gradient=False)
def deepspeed_quantize(
    x: Tensor,
    groups: int,
    bits: int,
    symmetric: bool,
    with_zero: bool,
    nodes: int,
    devices_per_node: int,
    pipeline: int,
) -> tuple[Tensor, Tensor]:
    """Levels, in int8, and parameters of ``groups`` equal groups of ``x``.

    Groups are those of ``nodes * devices_per_node`` equal parts, a node's devices next to each
    other; each part is cut into ``pipeline`` pieces, and pieces lie in the order (piece, device,
    node). Raises RuntimeError, naming the argument.
    """
    check_native("x has dtype", x.dtype)
    _check_groups("x", x.numel(), groups, bits)
    pieces = nodes * devices_per_node * pipeline
    if min(nodes, devices_per_node, pipeline) < 1 or groups % pieces:
        raise RuntimeError(
            f"groups is {groups}, expected a multiple of nodes * devices_per_node * pipeline = "
            f"{pieces}"
        )
    levels, params = _quantize(x.reshape(groups, -1).float(), bits, symmetric, with_zero)
    if pieces > 1:
        own = torch.arange(groups, device=x.device)
        order = own.view(nodes, devices_per_node, pipeline, -1).permute(2, 1, 0, 3).reshape(-1)
        levels, params = levels[order], params[order]
    return levels.reshape(-1), params


@kit.op(gradient=False)
def deepspeed_dequantize(
    levels: Tensor, params: Tensor, groups: int, bits: int, symmetric: bool, dtype: torch.dtype
) -> Tensor:
    """What levels stand for, rounded to fp32 and then to ``dtype``, in one dimension."""
    check_native("dtype is", dtype)
    return _numbers(levels, params, groups, bits, symmetric).to(dtype).reshape(-1)


@kit.op(gradient=False)
def deepspeed_reduce(
    levels: Tensor,
    params: Tensor,
    parts: int,
    in_groups: int,
    out_groups: int,
    bits: int,
    symmetric: bool,
    with_zero: bool,
) -> tuple[Tensor, Tensor]:
    """The sum of equal parts that lie one after the other, quantized in ``out_groups`` groups.

    ``in_groups`` is of all parts together. They are added in their order.
    """
    if parts < 1 or in_groups % parts:
        raise RuntimeError(f"in_groups is {in_groups}, expected a multiple of parts = {parts}")
    found = _numbers(levels, params, in_groups, bits, symmetric).half().view(parts, -1)
    _check_groups("the sum", found.shape[1], out_groups, bits)
    total = torch.zeros_like(found[0])
    for part in found:
        total = total + part
    levels, params = _quantize(total.view(out_groups, -1).float(), bits, symmetric, with_zero)
    return levels.reshape(-1), params


def _quantize(rows: Tensor, bits: int, symmetric: bool, with_zero: bool) -> tuple[Tensor, Tensor]:
    """A row of packed levels and one of parameters for each group."""
    count, nan = float(2**bits), rows.isnan()
    least = rows.masked_fill(nan, math.inf).amin(1)
    most = (rows.abs() if symmetric else rows).masked_fill(nan, -math.inf).amax(1)
    if with_zero:
        least, most = least.clamp(max=0.0), most.clamp(min=0.0)
    if symmetric:
        factor = torch.where(most == 0, 1.0, count / (2 * most))
        params = factor.reciprocal()[:, None]
        scaled = rows * factor[:, None]
    else:
        factor = torch.where(most == least, 1.0, count / (most - least))
        offset = (most + least) / 2
        params = torch.stack([factor.reciprocal(), offset], dim=1)
        scaled = (rows - offset[:, None]) * factor[:, None]
    half = 2 ** (bits - 1)
    levels = scaled.masked_fill(scaled.isnan(), 0.0).clamp(-half, half - 1).round().to(torch.int8)
    if bits == 4:
        levels = levels[:, ::2] << 4 | levels[:, 1::2] & 15
    return levels, params


def _numbers(levels: Tensor, params: Tensor, groups: int, bits: int, symmetric: bool) -> Tensor:
    """What levels stand for, in fp32, a group to a row."""
    check("levels", levels, torch.int8, torch.uint8)
    check("params", params, torch.float32)
    # Another number of bits is refused before it matters how many levels that makes.
    _check_groups("levels", levels.numel() * (2 if bits == 4 else 1), groups, bits)
    check_numel("params", params, groups * (1 if symmetric else 2))
    rows = levels.view(torch.int8).reshape(groups, -1)
    if bits == 4:
        rows = torch.stack([rows >> 4, rows << 4 >> 4], dim=2).view(groups, -1)
    table = params.reshape(groups, -1)
    if symmetric:
        return rows.float() * table
    return _multiply_add(rows, table[:, :1], table[:, 1:])


def _multiply_add(levels: Tensor, scales: Tensor, offsets: Tensor) -> Tensor:
    """``levels * scales + offsets``, rounded to fp32 once.

    In fp64 the products are exact and the sums are not always. Where one is not, the odd one of the
    two numbers around it is taken: then the second rounding goes the way that a single one would.
    """
    products, added = levels.double() * scales.double(), offsets.double()
    total = products + added
    other = total - products
    lost = (products - (total - other)) + (added - other)
    bits = total.view(torch.int64)
    step = torch.where((lost > 0) == (total > 0), 1, -1)
    odd = torch.where((lost != 0) & lost.isfinite() & (bits & 1 == 0), bits + step, bits)
    return odd.view(torch.float64).float()


def _check_groups(name: str, elements: int, groups: int, bits: int) -> None:
    if bits not in (4, 8):
        raise RuntimeError(f"bits is {bits}, expected 4 or 8")
    if groups < 1 or elements % groups or (elements // groups) * bits % 8:
        raise RuntimeError(
            f"{name} has {elements} elements, expected a multiple of groups = {groups}, of whole "
            f"bytes at {bits} bits"
        )
