"""What fp_quantizer must give, worked out in float64 from lists of all numbers; no bit is shared
with the reference."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

F32, BF16, F16 = DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Form(NamedTuple):
    bits: int
    mantissa_bits: int
    largest: float


FORMS = {
    "e4m3": Form(8, 3, 448.0),
    "e5m2": Form(8, 2, 57344.0),
    "e3m2": Form(6, 2, 28.0),
    "e4m7": Form(12, 7, 510.0),
    "e2m1": Form(4, 1, 6.0),
}


def numbers(form: Form) -> Tensor:
    """All finite numbers that are not negative, by their codes."""
    exponents = form.bits - 1 - form.mantissa_bits
    bias = 2 ** (exponents - 1) - 1
    found = []
    for code in range(2 ** (form.bits - 1)):
        exponent, mantissa = divmod(code, 2**form.mantissa_bits)
        part = mantissa / 2**form.mantissa_bits
        value = part * 2.0 ** (1 - bias) if exponent == 0 else (1 + part) * 2.0 ** (exponent - bias)
        if value <= form.largest:
            found.append(value)
    assert found[-1] == form.largest
    return torch.tensor(found, dtype=torch.float64)


def nearest_codes(scaled: Tensor, form: Form) -> Tensor:
    """The codes of the nearest numbers, of two equally near ones the even code."""
    table = numbers(form)
    magnitudes = scaled.double().abs()
    upper = torch.searchsorted(table, magnitudes).clamp(max=len(table) - 1)
    lower = (upper - 1).clamp(min=0)
    below, above = magnitudes - table[lower], table[upper] - magnitudes
    even = torch.where(upper % 2 == 0, upper, lower)
    codes = torch.where(below < above, lower, torch.where(above < below, upper, even))
    return codes | scaled.signbit().long() << (form.bits - 1)


def unpack(codes: Tensor, count: int, bits: int) -> Tensor:
    """The codes one by one, from a stream of bits; those left over must be 0."""
    assert codes.numel() == -(-count * bits // 8)
    stream = (codes.long()[:, None] >> torch.arange(8) & 1).view(-1)
    assert not stream[count * bits :].any()
    return (stream[: count * bits].view(count, bits) << torch.arange(bits)).sum(1)


def scales_of(x: Tensor, group_size: int, form: Form) -> Tensor:
    """The scale of each group, in fp32."""
    flat = x.reshape(-1).float()
    found = []
    for group in flat.split(group_size) if flat.numel() else ():
        most = group.abs().max()
        scale = torch.maximum(most / torch.tensor(form.largest), torch.tensor(2.0**-126))
        found.append(scale if bool(most.isfinite()) else torch.tensor(math.nan))
    return torch.stack(found) if found else torch.empty(0)


def sample(count: int, dtype: torch.dtype = F32, seed: int = 0) -> Tensor:
    """Numbers of many magnitudes, some zeros among them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, generator=generator)
    x = x * torch.randn(count, generator=generator).mul(2).exp()
    x[::17] = 0.0
    x[5::31] = -0.0
    return x.to(dtype)


def same(a: Tensor, b: Tensor) -> bool:
    """Bit for bit, but any NaN is any other."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.is_floating_point():
        return bool(((a == b) & (a.signbit() == b.signbit()) | a.isnan() & b.isnan()).all())
    return torch.equal(a, b)
