"""The functions of the library; their bodies are the reference.

``offset_tensor`` stands in for ``offset`` and is read when the kernel runs: each replay of a
captured graph, and each call of a compiled function, can have random bits of its own.

Every native version gives the same bits. All arithmetic is fp32, each operation rounded on its own:

- Elements are taken in the order of ``x.reshape(-1)``, in groups of ``group_size`` neighbours; the
  last group may be shorter.
- Symmetric: ``scale = max(absmax * (1 / top), 2**-126)`` with a top of 127 or 7, levels from -top
  to top. Without ``narrow_range`` the top is 128 or 8, and levels go from -top to top - 1: what
  would be above is cut off.
- Asymmetric: ``offset = min``, ``scale = max((max - min) * (1 / top), 2**-126)`` with a top of 255
  or 15, levels from 0 to top of ``x - offset``.
- To nearest, ties to even: ``level = round(x * (1 / scale))``. Stochastic:
  ``level = floor(x * (1 / scale) + (128 + u)) - 128``, ``u`` of ``random_bits``; of a top of 255
  the 128 is taken off before ``u`` is added. Where ``1 / scale`` would take the greatest element
  above the top, it is less by 2**-21 of itself.
- Back: ``level * scale + offset``.
- A group that holds NaN or infinity, or whose ``max - min`` is beyond fp32, has the scale (and
  offset) NaN and levels of 0: all of it comes back as NaN, so that nobody takes it for a number.
- Four-bit levels are two to a byte, the element of even index in the low half; a missing last one
  is 0.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from opkiln.ops.checks import check_flat, check_least, check_native, check_on
from opkiln.ops.philox import WORD, philox
from opkiln.ops.quantizer.op import kit

_Three = tuple[Tensor, Tensor, Tensor]

_LEAST_SCALE = 2.0**-126
_LARGEST_GROUP = 65536


@kit.op(gradient=False)
def quantize(
    x: Tensor, bits: int, group_size: int, symmetric: bool, stochastic: bool, seed: int,
    offset: int, nodes: int, devices_per_node: int, pipeline: int,
    offset_tensor: Tensor | None = None, narrow_range: bool = True,
) -> _Three:  # fmt: skip
    """Levels, scales and offsets (none where symmetric) of the groups of ``x``, which are put in
    the order of ``swizzle``. Raises RuntimeError, naming the argument."""
    rounding = _Rounding(bits, group_size, symmetric, stochastic, seed, offset, offset_tensor,
                         narrow_range)  # fmt: skip
    return _quantize(x, None, rounding, (nodes, devices_per_node, pipeline))


@quantize.fake
def _(x: Tensor, *rest: Any) -> _Three:
    return _shapes(x, x.numel(), *rest[:3])


@kit.op(mutates="error")
def quantize_with_feedback(
    x: Tensor, error: Tensor, bits: int, group_size: int, symmetric: bool, stochastic: bool,
    seed: int, offset: int, nodes: int, devices_per_node: int, pipeline: int,
    offset_tensor: Tensor | None = None, narrow_range: bool = True,
) -> _Three:  # fmt: skip
    """As ``quantize`` of ``x + error``; ``error``, fp32, receives what the levels leave out."""
    rounding = _Rounding(bits, group_size, symmetric, stochastic, seed, offset, offset_tensor,
                         narrow_range)  # fmt: skip
    return _quantize(x, error, rounding, (nodes, devices_per_node, pipeline))


@quantize_with_feedback.fake
def _(x: Tensor, error: Tensor, *rest: Any) -> _Three:
    return _shapes(x, x.numel(), *rest[:3])


@kit.op(gradient=False)
def dequantize(
    values: Tensor, scales: Tensor, offsets: Tensor, numel: int, dtype: torch.dtype, bits: int,
    group_size: int, symmetric: bool, nodes: int, devices_per_node: int, pipeline: int,
) -> Tensor:  # fmt: skip
    """The ``numel`` numbers that the levels stand for, rounded to ``dtype``, in one dimension."""
    _check_format(bits, group_size)
    check_native("dtype is", dtype)
    form = (numel, bits, group_size, symmetric)
    found = _unpack("", values, scales, offsets, *form)
    order = swizzle(numel, group_size, nodes, devices_per_node, pipeline, values.device)
    return found.in_order(order).back().to(dtype)


@dequantize.fake
def _(values: Tensor, scales: Tensor, offsets: Tensor, *rest: Any) -> Tensor:
    return values.new_empty(rest[0], dtype=rest[1])


@kit.op()
def fake_quantize(
    x: Tensor, bits: int, group_size: int, symmetric: bool, stochastic: bool, seed: int,
    offset: int, offset_tensor: Tensor | None = None, narrow_range: bool = True,
) -> Tensor:  # fmt: skip
    """``x`` as it comes back from being quantized, in its own dtype and shape."""
    rounding = _Rounding(bits, group_size, symmetric, stochastic, seed, offset, offset_tensor,
                         narrow_range)  # fmt: skip
    return _fake_quantize(x, rounding)


@fake_quantize.fake
def _(x: Tensor, *_: object) -> Tensor:
    return torch.empty_like(x)


@fake_quantize.backward
def _(grad: Tensor, *inputs: object) -> tuple[Tensor | None, ...]:
    """Straight through, as if nothing had been rounded."""
    return grad, *(None for _ in inputs[1:])


@kit.op(mutates="x")
def fake_quantize_(
    x: Tensor, bits: int, group_size: int, symmetric: bool, stochastic: bool, seed: int,
    offset: int, offset_tensor: Tensor | None = None, narrow_range: bool = True,
) -> None:  # fmt: skip
    """As ``fake_quantize``, in place."""
    rounding = _Rounding(bits, group_size, symmetric, stochastic, seed, offset, offset_tensor,
                         narrow_range)  # fmt: skip
    x.copy_(_fake_quantize(x, rounding))


@kit.op(gradient=False)
def quantized_reduce(
    values: list[Tensor], scales: list[Tensor], offsets: list[Tensor], numel: int, from_bits: int,
    from_group_size: int, from_symmetric: bool, factor: float, bits: int, group_size: int,
    symmetric: bool, stochastic: bool, seed: int, offset: int, offset_tensor: Tensor | None = None,
    narrow_range: bool = True,
) -> _Three:  # fmt: skip
    """The sum of parts of ``numel`` elements each, times ``factor``, quantized.

    The parts, of one format, are added one after the other in fp32. ``offsets`` is empty where
    they are symmetric.
    """
    total = _sum(values, scales, offsets, numel, from_bits, from_group_size, from_symmetric, factor)
    rounding = _Rounding(bits, group_size, symmetric, stochastic, seed, offset, offset_tensor,
                         narrow_range)  # fmt: skip
    rounding.check(None, numel, total.device)
    return _with_feedback(total, None, rounding).pack(None)


@quantized_reduce.fake
def _(values: list[Tensor], scales: list[Tensor], *rest: Any) -> _Three:
    return _shapes(scales[0], rest[1], *rest[6:9])


@kit.op(mutates="error")
def quantized_reduce_with_feedback(
    error: Tensor, values: list[Tensor], scales: list[Tensor], offsets: list[Tensor], numel: int,
    from_bits: int, from_group_size: int, from_symmetric: bool, factor: float, bits: int,
    group_size: int, symmetric: bool, stochastic: bool, seed: int, offset: int,
    offset_tensor: Tensor | None = None, narrow_range: bool = True,
) -> _Three:  # fmt: skip
    """As ``quantized_reduce`` of the sum plus ``error``, which receives what is left out."""
    total = _sum(values, scales, offsets, numel, from_bits, from_group_size, from_symmetric, factor)
    rounding = _Rounding(bits, group_size, symmetric, stochastic, seed, offset, offset_tensor,
                         narrow_range)  # fmt: skip
    rounding.check(error, numel, total.device)
    return _with_feedback(total, error, rounding).pack(None)


@quantized_reduce_with_feedback.fake
def _(error: Tensor, values: list[Tensor], scales: list[Tensor], *rest: Any) -> _Three:
    return _shapes(scales[0], rest[1], *rest[6:9])


def _quantize(
    x: Tensor, error: Tensor | None, rounding: _Rounding, cut: tuple[int, int, int]
) -> _Three:
    check_native("x has dtype", x.dtype)
    rounding.check(error, x.numel(), x.device)
    order = swizzle(x.numel(), rounding.group_size, *cut, x.device)
    return _with_feedback(x.reshape(-1).float(), error, rounding).pack(order)


def _fake_quantize(x: Tensor, rounding: _Rounding) -> Tensor:
    check_native("x has dtype", x.dtype)
    rounding.check(None, x.numel(), x.device)
    return _levels(x.reshape(-1).float(), rounding).back().to(x.dtype).view(x.shape)


def _shapes(like: Tensor, numel: int, bits: int, group_size: int, symmetric: bool) -> _Three:
    groups = (numel + group_size - 1) // group_size
    levels = torch.int8 if symmetric and bits == 8 else torch.uint8
    return (
        like.new_empty(numel if bits == 8 else (numel + 1) // 2, dtype=levels),
        like.new_empty(groups, dtype=torch.float32),
        like.new_empty(0 if symmetric else groups, dtype=torch.float32),
    )


def swizzle(
    numel: int,
    group_size: int,
    nodes: int,
    devices_per_node: int,
    pipeline: int,
    device: torch.device,
) -> Tensor | None:
    """Which group lies at each place of a ``Swizzle``, or None where all lie in order. Raises
    RuntimeError where the groups cannot be cut so."""
    check_least(1, nodes=nodes, devices_per_node=devices_per_node, pipeline=pipeline)
    pieces = nodes * devices_per_node * pipeline
    if pieces == 1:
        return None
    if numel % (pieces * group_size):
        raise RuntimeError(
            f"x has {numel} elements, expected a multiple of nodes * devices_per_node * pipeline * "
            f"group_size = {pieces * group_size}"
        )
    if numel // group_size > WORD:
        raise RuntimeError(f"x has {numel // group_size} groups, at most {WORD} can be swizzled")
    groups = torch.arange(numel // group_size, device=device)
    return groups.view(nodes, devices_per_node, pipeline, -1).permute(2, 1, 0, 3).reshape(-1)


def random_bits(
    count: int, seed: int, offset: int | Tensor, device: torch.device | None = None
) -> Tensor:
    """16 random bits for each of ``count`` elements, in int64.

    Philox4x32-7 with the key ``seed``; the counter is the index of 16 elements, and in its upper
    half ``offset``. Four elements take each of its four words: the 16 bits from bit 0, 8, 16 and 24
    on, around its end. So the upper eight are an element's own, and the lower eight, which decide
    one time in 256, the upper ones of a neighbour.
    """
    words = torch.stack(philox(torch.arange((count + 15) // 16, device=device), offset, seed), -1)
    twice = words | (words & 0xFF) << 32
    fours = torch.stack([twice >> 8 * i & 0xFFFF for i in range(4)], -1)
    return fours.view(-1)[:count]


class _Rounding(NamedTuple):
    """The format of levels, and how numbers are rounded to them."""

    bits: int
    group_size: int
    symmetric: bool
    stochastic: bool
    seed: int
    offset: int
    offset_tensor: Tensor | None
    narrow_range: bool

    def check(self, error: Tensor | None, numel: int, device: torch.device) -> None:
        """Raises RuntimeError, also for an ``error`` that does not go with so many elements."""
        _check_format(self.bits, self.group_size)
        check_offset(self.offset_tensor, device)
        if error is not None:
            check_flat("error", error, device, torch.float32, numel)


class _Levels(NamedTuple):
    """Groups as rows of whole numbers, in fp32; the last row may hold more than there are."""

    rows: Tensor
    scales: Tensor
    offsets: Tensor | None
    numel: int
    bits: int

    def back(self) -> Tensor:
        found = self.rows * self.scales[:, None]
        if self.offsets is not None:
            found = found + self.offsets[:, None]
        return found.view(-1)[: self.numel]

    def in_order(self, order: Tensor | None) -> _Levels:
        """The groups that lie in this order, as in the tensor."""
        if order is None:
            return self
        back = torch.empty_like(order)
        back[order] = torch.arange(order.numel(), device=order.device)
        offsets = None if self.offsets is None else self.offsets[back]
        return self._replace(rows=self.rows[back], scales=self.scales[back], offsets=offsets)

    def pack(self, order: Tensor | None) -> _Three:
        rows, scales, offsets = self.rows, self.scales, self.offsets
        if order is not None:
            rows, scales = rows[order], scales[order]
            offsets = None if offsets is None else offsets[order]
        none = scales.new_empty(0)
        flat = rows.reshape(-1)[: self.numel].to(torch.int32)
        if self.bits == 8:
            values = flat.to(torch.int8 if offsets is None else torch.uint8)
        else:
            halves = torch.cat([flat, flat.new_zeros(self.numel % 2)]).view(-1, 2) & 15
            values = (halves[:, 0] | halves[:, 1] << 4).to(torch.uint8)
        return values, scales.clone(), none if offsets is None else offsets.clone()


def _with_feedback(flat: Tensor, error: Tensor | None, rounding: _Rounding) -> _Levels:
    if error is None:
        return _levels(flat, rounding)
    wanted = flat + error.reshape(-1)
    found = _levels(wanted, rounding)
    error.copy_((wanted - found.back()).view(error.shape))
    return found


def _levels(flat: Tensor, rounding: _Rounding) -> _Levels:
    bits, symmetric = rounding.bits, rounding.symmetric
    rows = _rows(flat, rounding.group_size)
    full = symmetric and not rounding.narrow_range
    top = flat.new_tensor(2 ** (bits - 1) - (not full) if symmetric else 2**bits - 1)
    if symmetric:
        low, spread = None, rows.abs().amax(1) if len(rows) else rows.new_empty(0)
    else:
        low = rows.amin(1) + 0.0 if len(rows) else rows.new_empty(0)  # no negative zero
        spread = (rows.amax(1) if len(rows) else low) - low
    finite = spread.isfinite()  # NaN, too, travels through amax and amin
    scales = (spread * top.reciprocal()).clamp(min=_LEAST_SCALE)
    scales = torch.where(finite, scales, math.nan)
    inverses = scales.reciprocal()
    if rounding.stochastic:
        inverses = torch.where(spread * inverses > top, inverses * (1 - 2.0**-21), inverses)
    scaled = (rows if low is None else rows - low[:, None]) * inverses[:, None]
    if rounding.stochastic:
        offset = rounding.offset if rounding.offset_tensor is None else rounding.offset_tensor
        random = random_bits(scaled.numel(), rounding.seed, offset, flat.device).view(scaled.shape)
        random = random.float() * 2.0**-16 + 128
        shift = 128 if bits == 8 and not symmetric else 0
        levels = (scaled - shift + random).floor() + (shift - 128)
    else:
        levels = scaled.round() + 0.0  # no negative zero
    if full:
        levels = levels.clamp(max=2 ** (bits - 1) - 1)
    levels = torch.where(finite[:, None], levels, 0.0)
    offsets = None if low is None else torch.where(finite, low, math.nan)
    return _Levels(levels, scales, offsets, flat.numel(), bits)


def _rows(flat: Tensor, group_size: int) -> Tensor:
    """Groups as rows; a shorter last one is filled up with its last element, which changes neither
    its least nor its greatest."""
    missing = -flat.numel() % group_size
    return torch.cat([flat, flat[-1:].expand(missing)]).view(-1, group_size)


def _check_format(bits: int, group_size: int, prefix: str = "") -> None:
    if bits not in (4, 8):
        raise RuntimeError(f"{prefix}bits is {bits}, expected 4 or 8")
    if not 16 <= group_size <= _LARGEST_GROUP or group_size % 8:
        raise RuntimeError(
            f"{prefix}group_size is {group_size}, expected a multiple of 8 from 16 to "
            f"{_LARGEST_GROUP}"
        )


def check_offset(tensor: Tensor | None, device: torch.device) -> None:
    if tensor is not None:
        check_flat("offset_tensor", tensor, device, torch.int64, 1)


def _unpack(
    index: str, values: Tensor, scales: Tensor, offsets: Tensor, numel: int, bits: int,
    group_size: int, symmetric: bool,
) -> _Levels:  # fmt: skip
    """The levels of a tensor. ``index`` says in messages which of several it is."""
    check_least(0, numel=numel)
    wanted = _shapes(torch.empty(0, device="meta"), numel, bits, group_size, symmetric)
    named = {"values": values, "scales": scales, "offsets": offsets}
    for (name, tensor), form in zip(named.items(), wanted, strict=True):
        check_flat(f"{name}{index}", tensor, values.device, form.dtype, form.numel())
    values = values.reshape(-1)
    if bits == 4:
        halves = torch.stack((values & 15, values >> 4), dim=1).view(-1)[:numel].to(torch.int32)
        values = (halves ^ 8) - 8 if symmetric else halves
    kept = None if symmetric else offsets.reshape(-1)
    return _Levels(_rows(values.float(), group_size), scales.reshape(-1), kept, numel, bits)


def _sum(
    values: list[Tensor], scales: list[Tensor], offsets: list[Tensor], numel: int, bits: int,
    group_size: int, symmetric: bool, factor: float,
) -> Tensor:  # fmt: skip
    _check_format(bits, group_size, "from_")
    if not values:
        raise RuntimeError("values has no tensors, expected one for each part")
    for name, listed in (("scales", scales), *((("offsets", offsets),) if not symmetric else ())):
        if len(listed) != len(values):
            raise RuntimeError(f"{name} has {len(listed)} tensors, values has {len(values)}")
    total = values[0].new_zeros(()).float()
    for i, (levels, scale) in enumerate(zip(values, scales, strict=True)):
        low = scale.new_empty(0) if symmetric else offsets[i]
        check_on(f"values[{i}]", levels, values[0].device)
        found = _unpack(f"[{i}]", levels, scale, low, numel, bits, group_size, symmetric).back()
        total = found if i == 0 else total + found
    return total * factor
