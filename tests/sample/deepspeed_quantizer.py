"""What DeepSpeed 0.19.8's quantizer computes, in numpy, from reading its CUDA sources.

It follows csrc/quantization/*.cu and csrc/includes/*quantization_utils.h operation by operation: in
fp32 but for the sums of a reduction, which are fp16. A group has ``slots``, a place for each
element that its threads load; a slot beyond the group's end holds 0, and takes part in the group's
range. Divisions are IEEE's here. On NVIDIA GPUs DeepSpeed's are approximate
(``--use_fast_math``), so there a scale may differ in its last bit. That this is what its kernels
compute is tested in tests/build/test_compat_deepspeed_kernels.py, which runs them on the CPU.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

F16, F32, F64 = np.float16, np.float32, np.float64
Halves = NDArray[np.float16]
Levels = NDArray[np.int8]
Params = NDArray[np.float32]


def power_of_two(count: int) -> int:
    return 1 << max(0, count - 1).bit_length()


def slots_of_quantize(size: int) -> int:
    """``launch_quant``: 8 elements a thread up to 128, else 16, by at most 256 threads."""
    step = 8 if size <= 128 else 16
    threads = min(256, power_of_two(-(-size // step)))
    return -(-size // (threads * step)) * threads * step


def slots_of_swizzle(size: int) -> int:
    """``launch_swizzled_quant_impl``: 16 elements a thread, 32 to 512 threads."""
    threads = max(32, min(512, power_of_two(-(-size // 16))))
    return -(-size // (threads * 16)) * threads * 16


def slots_of_reduction(size: int, bits: int) -> int:
    """``launch_dequant_reduce_impl``, which counts bytes: as many as ``bits`` a thread."""
    size_in_bytes = size * bits // 8
    threads = min(1024, power_of_two(-(-size_in_bytes // bits)))
    turns = -(-size_in_bytes // (threads * bits))
    turns = turns + turns % 2 if turns >= 4 else turns
    return turns * threads * bits * 8 // bits


def range_of(rows: NDArray[np.float32], slots: int) -> tuple[Params, Params]:
    """The least and the greatest of each group: ``__hmin2`` and ``__hmax2`` pass over NaN."""
    zeros = np.zeros((len(rows), slots - rows.shape[1]), dtype=F32)
    filled = np.concatenate([rows, zeros], axis=1)
    least = np.where(np.isnan(filled), F32(np.inf), filled).min(axis=1)
    return least, np.where(np.isnan(filled), F32(-np.inf), filled).max(axis=1)


def scale_of(rows: NDArray[np.float32], bits: int, symmetric: bool, slots: int) -> Params:
    """``Params``: what elements are multiplied by, and what is subtracted before."""
    count = F32(1 << bits)
    if symmetric:
        _, most = range_of(np.abs(rows), slots)
        factor = np.where(most == 0, F32(1), count / (F32(2) * most))
        return np.stack([factor, np.zeros_like(factor)], axis=1)
    least, most = range_of(rows, slots)
    factor = np.where(most == least, F32(1), count / (most - least))
    return np.stack([factor, (most + least) / F32(2)], axis=1)


def packed(levels: NDArray[np.int8], bits: int) -> Levels:
    """Of four bits two to a byte, the element of even index in the high half."""
    if bits == 8:
        return levels
    pairs = levels.view(np.uint8).reshape(-1, 2)
    return ((pairs[:, 0] & 15) << 4 | pairs[:, 1] & 15).view(np.int8)


def unpacked(levels: Levels, bits: int) -> Levels:
    if bits == 8:
        return levels
    bytes_ = levels.view(np.uint8)
    halves = np.stack([bytes_ >> 4, bytes_ & 15], axis=1).reshape(-1).astype(np.int8)
    return np.where(halves > 7, halves - 16, halves).astype(np.int8)


def quantize(
    x: Halves, groups: int, bits: int, symmetric: bool, slots: int | None = None
) -> tuple[Levels, Params]:
    rows = x.reshape(groups, -1).astype(F32)
    slots = slots_of_quantize(rows.shape[1]) if slots is None else slots
    with np.errstate(all="ignore"):
        scales = scale_of(rows, bits, symmetric, slots)
        factors, offsets = scales[:, :1], scales[:, 1:]
        scaled = (rows if symmetric else rows - offsets) * factors
        # __float2int_rn: to nearest, ties to even; 0 of NaN.
        whole = np.rint(np.where(np.isnan(scaled), F32(0), scaled))
        stored = F32(1) / factors
    levels = np.clip(whole, -(1 << bits - 1), (1 << bits - 1) - 1).astype(np.int8).reshape(-1)
    return packed(levels, bits), stored if symmetric else np.concatenate([stored, offsets], axis=1)


def swizzle_quant(
    x: Halves, groups: int, bits: int, symmetric: bool, pipeline: int, nodes: int, devices: int
) -> tuple[Levels, Params]:
    slots = slots_of_swizzle(x.size // groups)
    levels, params = quantize(x, groups, bits, symmetric, slots)
    rows, run = levels.reshape(groups, -1), groups // (nodes * devices * pipeline)
    laid, kept = np.empty_like(rows), np.empty_like(params)
    for group in range(groups):
        piece, within = divmod(group, run)
        partition, turn = divmod(piece, pipeline)
        node, device = divmod(partition, devices)
        to = ((turn * devices + device) * nodes + node) * run + within
        laid[to], kept[to] = rows[group], params[group]
    return laid.reshape(-1), kept


def fused(levels: Levels, scales: Params, offsets: Params) -> NDArray[np.float32]:
    """``levels * scales + offsets`` rounded once, as nvcc has it."""
    products, added = np.broadcast_arrays(levels.astype(F64) * scales, offsets.astype(F64))
    total = products + added
    out = total.astype(F32)
    inexact = np.isfinite(total) & ((total - products != added) | (total - added != products))
    for at in np.argwhere(inexact):
        exact = Fraction(float(products[tuple(at)])) + Fraction(float(added[tuple(at)]))
        near = out[tuple(at)]
        around = [np.nextafter(near, F32(-np.inf)), near, np.nextafter(near, F32(np.inf))]
        # The nearest, and of two that are as near the one whose last bit is 0.
        out[tuple(at)] = min(
            around,
            key=lambda each, exact=exact: (
                abs(Fraction(float(each)) - exact),
                int(each.view(np.uint32)) & 1,
            ),
        )
    return out


def dequantize(
    levels: Levels, params: Params, groups: int, bits: int, symmetric: bool
) -> NDArray[np.float32]:
    """In fp32; fp16 is this, rounded."""
    rows = unpacked(levels, bits).reshape(groups, -1)
    with np.errstate(all="ignore"):
        if symmetric:
            return (rows.astype(F32) * params).reshape(-1)
        return fused(rows, params[:, :1], params[:, 1:]).reshape(-1)


def quantized_reduction(
    levels: Levels,
    params: Params,
    in_groups: int,
    out_groups: int,
    bits: int,
    symmetric: bool,
    parts: int,
) -> tuple[Levels, Params]:
    """But for one thing: where asymmetric, DeepSpeed reads another group's parameters from the
    second part on. Here each part has its own."""
    found = dequantize(levels.reshape(-1), params, in_groups, bits, symmetric)
    with np.errstate(all="ignore"):
        total = np.zeros(found.size // parts, dtype=F16)
        for part in found.astype(F16).reshape(parts, -1):
            total = (total.astype(F32) + part.astype(F32)).astype(F16)
    slots = slots_of_reduction(total.size // out_groups, bits)
    return quantize(total, out_groups, bits, symmetric, slots)


def experimental(
    levels: NDArray[np.uint8], scales: Halves, least: Halves, groups: int, bits: int
) -> Halves:
    """``dequantize_int4_to_half_experimental`` and its sibling of 8 bits: all in fp16."""
    if bits == 4:
        levels = np.stack([levels >> 4, levels & 15], axis=-1)
    rows = levels.reshape(groups, -1).astype(F16)
    quotients = (rows.astype(F32) / scales.astype(F32)[:, None]).astype(F16)
    return (quotients.astype(F32) + least.astype(F32)[:, None]).astype(F16)
