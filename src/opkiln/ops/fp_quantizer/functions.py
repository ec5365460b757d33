"""The functions of the library; their bodies are the reference.

A format is its bits and those of its mantissa: a sign, an exponent and a mantissa, from the highest
bit to the lowest, with the subnormals of IEEE 754. ``e4m3`` and ``e5m2`` are the bytes of
``torch.float8_e4m3fn`` and ``torch.float8_e5m2``, with their NaN and infinity; ``e3m2`` and
``e2m1`` are those of the Open Compute Project's MX formats. They and ``e4m7`` have neither.

``size`` is the shape of what was quantized, ``dtype`` that of the result. ``offset_tensor`` stands
in for ``offset`` and is read when the kernel runs: each replay of a captured graph can have random
bits of its own.

Every native version gives the same bits. All arithmetic is fp32, each operation rounded on its own:

- Elements are taken in the order of ``x.reshape(-1)``, in groups of ``group_size`` neighbours;
  the last group may be shorter.
- ``scale = max(absmax / largest, 2**-126)``, with the largest number that the format holds. What is
  encoded is ``x * (1 / scale)``; what comes back is the number of the code times ``scale``.
- To nearest: the code of the nearest number, ties to the even code, subnormals included.
- Stochastic: of the two numbers that a value lies between, the upper one with the probability of
  its distance from the lower one, in units of 2**-16. A number that the format holds stays itself.
- A group that holds NaN or infinity has the scale NaN and codes of 0: all of it comes back as NaN,
  so that nobody takes it for a number.
- Codes follow each other without gaps, the first in the lowest bits: two of four bits in a byte,
  four of six bits or two of twelve in three bytes. Bits after the last one are 0.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from opkiln.ops.checks import check, check_flat, check_least, check_native, check_on
from opkiln.ops.fp_quantizer.op import kit
from opkiln.ops.quantizer.functions import check_offset, random_bits


class Format(NamedTuple):
    """A number format; ``largest`` is the largest number that it holds."""

    name: str
    bits: int
    mantissa_bits: int
    largest: float

    @property
    def bias(self) -> int:
        """What is added to the exponent before it is stored."""
        return (1 << (self.bits - 2 - self.mantissa_bits)) - 1

    @property
    def per_pack(self) -> int:
        """How many values fill a whole number of bytes, at the least."""
        return {4: 2, 6: 4, 8: 1, 12: 2}[self.bits]


FORMATS = {
    each.name: each
    for each in (
        Format("e4m3", 8, 3, 448.0),
        Format("e5m2", 8, 2, 57344.0),
        Format("e3m2", 6, 2, 28.0),
        Format("e4m7", 12, 7, 510.0),
        Format("e2m1", 4, 1, 6.0),
    )
}
FORMATS_IN_WORDS = ", ".join(
    f"{each.name} ({each.bits} bits, {each.mantissa_bits} of mantissa)" for each in FORMATS.values()
)
_LEAST_SCALE = 2.0**-126  # fp32's least normal number: its inverse is finite
_EXPONENT = 0x7F800000  # of fp32


@kit.op(gradient=False)
def fp_quantize(
    x: Tensor,
    group_size: int,
    bits: int,
    mantissa_bits: int,
    stochastic: bool = False,
    seed: int = 0,
    offset: int = 0,
    offset_tensor: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The codes of ``x``, packed into bytes, and the scales of its groups, in fp32. Raises
    RuntimeError, naming the argument."""
    form = _format(bits, mantissa_bits)
    check_native("x has dtype", x.dtype)
    check_group_size(group_size)
    check_offset(offset_tensor, x.device)
    count = x.numel()
    groups = group_count(count, group_size)
    rows = x.new_zeros(groups * group_size, dtype=torch.float32)
    rows[:count] = x.detach().reshape(-1)
    rows = rows.view(groups, group_size)
    absmax = rows.abs().amax(1) if groups else rows.new_empty(0)
    finite = absmax.isfinite()  # NaN, too, travels through amax
    # A tensor as divisor: by a number, GPUs multiply with its inverse instead.
    scales = (absmax / absmax.new_tensor(form.largest)).clamp(min=_LEAST_SCALE)
    scaled = rows * (1.0 / scales)[:, None]
    magnitudes = scaled.abs().clamp(max=form.largest)
    if stochastic:
        start = offset if offset_tensor is None else offset_tensor
        codes = _stochastic(magnitudes, form, seed, start)
    else:
        codes = _nearest(magnitudes, form)
    codes = codes | scaled.signbit().to(torch.int32) << (bits - 1)
    codes = torch.where(finite[:, None], codes, 0)
    packed = _pack(codes.view(-1)[:count], form)
    return packed, torch.where(finite, scales, math.nan)


@fp_quantize.fake
def _(x: Tensor, group_size: int, bits: int, *_: object) -> tuple[Tensor, Tensor]:
    count = x.numel()
    return (
        x.new_empty(byte_count(count, bits), dtype=torch.uint8),
        x.new_empty(group_count(count, group_size), dtype=torch.float32),
    )


@kit.op(gradient=False)
def fp_dequantize(
    codes: Tensor,
    scales: Tensor,
    size: list[int],
    group_size: int,
    bits: int,
    mantissa_bits: int,
    dtype: torch.dtype,
) -> Tensor:
    """The numbers of the codes of a tensor of this size, in ``dtype``. Raises RuntimeError, naming
    the argument."""
    form = _check_quantized(codes, scales, size, group_size, bits, mantissa_bits, dtype)
    indices = torch.arange(math.prod(size), device=codes.device)
    return _numbers_at(indices, codes, scales, group_size, form).to(dtype).view(size)


@fp_dequantize.fake
def _(codes: Tensor, scales: Tensor, size: list[int], *rest: Any) -> Tensor:
    return codes.new_empty(size, dtype=rest[-1])


@kit.op(gradient=False)
def fp_dequantize_rows(
    codes: Tensor,
    scales: Tensor,
    rows: Tensor,
    size: list[int],
    group_size: int,
    bits: int,
    mantissa_bits: int,
    dtype: torch.dtype,
) -> Tensor:
    """As ``fp_dequantize``, of these rows (indices of the first dimension) alone.

    Raises RuntimeError also where a row is not there. On a GPU, which is not waited for, such a row
    comes out as NaN.
    """
    form = _check_quantized(codes, scales, size, group_size, bits, mantissa_bits, dtype)
    if not size:
        raise RuntimeError("size has no dimension, expected rows to choose from")
    check("rows", rows, torch.int64)
    if rows.dim() != 1:
        raise RuntimeError(f"rows has {rows.dim()} dimensions, expected 1")
    check_on("rows", rows, codes.device)
    there = (rows >= 0) & (rows < size[0])
    if rows.device.type == "cpu" and not bool(there.all()):
        i = int((~there).nonzero()[0])
        raise RuntimeError(f"rows[{i}] is {int(rows[i])}, expected 0 to {size[0] - 1}")
    width = math.prod(size[1:])
    starts = torch.where(there, rows, 0)[:, None] * width
    indices = starts + torch.arange(width, device=rows.device)
    if codes.numel() == 0:  # nothing to look up, and so no row that is there
        values = indices.new_full(indices.shape, math.nan, dtype=torch.float32)
    else:
        values = _numbers_at(indices, codes, scales, group_size, form)
    values = torch.where(there[:, None], values, math.nan)
    return values.to(dtype).view(rows.numel(), *size[1:])


@fp_dequantize_rows.fake
def _(codes: Tensor, scales: Tensor, rows: Tensor, size: list[int], *rest: Any) -> Tensor:
    return codes.new_empty((rows.numel(), *size[1:]), dtype=rest[-1])


def packed_codes(values: Tensor, form: Format) -> Tensor:
    """The nearest codes of finite ``values`` themselves, without scales, packed into bytes."""
    flat = values.detach().reshape(-1).float()
    codes = _nearest(flat.abs().clamp(max=form.largest), form)
    return _pack(codes | flat.signbit().to(torch.int32) << (form.bits - 1), form)


def _nearest(magnitudes: Tensor, form: Format) -> Tensor:
    """Codes without sign. Adding a power of two cuts a number off at the format's last bit, and
    rounds as fp32 does."""
    cut = 23 - form.mantissa_bits
    exponents = (magnitudes.view(torch.int32) & _EXPONENT).clamp(min=_least(form))
    magic = exponents + (cut << 23)
    rounded = magnitudes + magic.view(torch.float32)
    return rounded.view(torch.int32) - magic + (exponents - _least(form) >> cut)


def _stochastic(magnitudes: Tensor, form: Format, seed: int, offset: int | Tensor) -> Tensor:
    """Codes without sign: those of all numbers are equally far apart, and each number between two
    of the format's lies as far between their codes. To that 16 random bits are added."""
    least, cut = _least(form), 23 - form.mantissa_bits
    bits = magnitudes.view(torch.int32)
    significand = bits & 0x7FFFFF | torch.where(bits >= 1 << 23, 1 << 23, 0)
    shift = (least - (bits & _EXPONENT) >> 23).clamp(0, 31)
    exact = torch.where(bits >= least, bits - least + (1 << 23), significand >> shift)
    random = random_bits(exact.numel(), seed, offset, exact.device).view(exact.shape).int()
    largest = int(torch.tensor(form.largest).view(torch.int32)) - least + (1 << 23) >> cut
    return (exact + (random << 7 - form.mantissa_bits) >> cut).clamp(max=largest)


def _least(form: Format) -> int:
    """The least normal number of the format, as the bits of an fp32."""
    return (128 - form.bias) << 23


def _pack(codes: Tensor, form: Format) -> Tensor:
    count = codes.numel()
    missing = -count % form.per_pack
    rows = torch.cat([codes, codes.new_zeros(missing)]).view(-1, form.per_pack)
    whole = rows.new_zeros(len(rows))
    for i in range(form.per_pack):
        whole |= rows[:, i] << (form.bits * i)
    bytes_each = form.bits * form.per_pack // 8
    packed = torch.stack([whole >> 8 * i & 0xFF for i in range(bytes_each)], dim=1)
    return packed.view(-1)[: byte_count(count, form.bits)].to(torch.uint8)


def _numbers_at(
    indices: Tensor, codes: Tensor, scales: Tensor, group_size: int, form: Format
) -> Tensor:
    """The numbers with these indices, in fp32."""
    if indices.numel() == 0:
        return indices.to(torch.float32)
    flat = torch.cat([codes.reshape(-1), codes.new_zeros(1)]).to(torch.int32)
    first = indices * form.bits >> 3
    pair = flat[first] | flat[first + 1] << 8
    found = (pair >> (indices * form.bits & 7)) & (1 << form.bits) - 1
    return _table(form).to(codes.device)[found] * scales.reshape(-1)[indices // group_size]


def _table(form: Format) -> Tensor:
    """The numbers of all codes."""
    codes = torch.arange(1 << form.bits)
    mantissa = codes & (1 << form.mantissa_bits) - 1
    exponent = codes >> form.mantissa_bits & (1 << form.bits - 1 - form.mantissa_bits) - 1
    hidden = (exponent > 0) * (1 << form.mantissa_bits)
    power = exponent.clamp(min=1) - form.bias - form.mantissa_bits
    values = torch.ldexp((mantissa + hidden).double(), power)
    if form.name == "e4m3":
        values[values > form.largest] = math.nan
    elif form.name == "e5m2":
        values[values > form.largest] = math.nan
        values[(exponent == 31) & (mantissa == 0)] = math.inf
    return torch.where(codes >> form.bits - 1 == 1, -values, values).float()


def byte_count(numel: int, bits: int) -> int:
    """How many bytes so many values take."""
    return (numel * bits + 7) // 8


def group_count(numel: int, group_size: int) -> int:
    """How many groups so many values make; the last one may be shorter."""
    return (numel + group_size - 1) // group_size


def _format(bits: int, mantissa_bits: int) -> Format:
    for each in FORMATS.values():
        if (each.bits, each.mantissa_bits) == (bits, mantissa_bits):
            return each
    raise RuntimeError(
        f"bits is {bits} and mantissa_bits is {mantissa_bits}, expected one of {FORMATS_IN_WORDS}"
    )


def check_group_size(group_size: int) -> None:
    """Each group starts at a whole byte."""
    if not 16 <= group_size <= 65536 or group_size % 16:
        raise RuntimeError(
            f"group_size is {group_size}, expected a multiple of 16 from 16 to 65536"
        )


def _check_quantized(
    codes: Tensor,
    scales: Tensor,
    size: list[int],
    group_size: int,
    bits: int,
    mantissa_bits: int,
    dtype: torch.dtype,
) -> Format:
    form = _format(bits, mantissa_bits)
    check_group_size(group_size)
    check_native("dtype is", dtype)
    check_least(0, **{f"size[{i}]": each for i, each in enumerate(size)})
    count = math.prod(size)
    check_flat("codes", codes, codes.device, torch.uint8, byte_count(count, bits))
    check_flat("scales", scales, codes.device, torch.float32, group_count(count, group_size))
    return form
