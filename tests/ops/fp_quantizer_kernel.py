"""fp_quantizer's CUDA kernels on the CPU, with the interface of the reference."""

from __future__ import annotations

import ctypes
import math
from ctypes import c_int, c_int64, c_void_p
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from opkiln.ops.fp_quantizer import fake

if TYPE_CHECKING:
    from pathlib import Path

_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_POISON = 0x5A  # in what a kernel is to write: every byte of it must have been


class Kernel:
    """The kernels as libraries that a C++ compiler made."""

    def __init__(self, quantize: Path, dequantize: Path) -> None:
        self._quantize = ctypes.CDLL(str(quantize)).quantize
        self._quantize.argtypes = (
            *(c_void_p,) * 3, c_int64, c_int64, *(c_int,) * 4, c_int64, c_int64, c_void_p
        )  # fmt: skip
        self._dequantize = ctypes.CDLL(str(dequantize)).dequantize
        self._dequantize.argtypes = (
            *(c_void_p,) * 3, c_int64, c_int64, *(c_int,) * 3, c_void_p, c_int64, c_int64
        )  # fmt: skip

    def fp_quantize(
        self, x: Tensor, group_size: int, bits: int, mantissa_bits: int,
        stochastic: bool = False, seed: int = 0, offset: int = 0,
        offset_tensor: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        x = x.contiguous()
        codes, scales = fake.fp_quantize(x, group_size, bits, mantissa_bits)
        codes.fill_(_POISON)
        scales.fill_(-1.0)
        after = None if offset_tensor is None else offset_tensor.data_ptr()
        error = self._quantize(
            x.data_ptr(), codes.data_ptr(), scales.data_ptr(), x.numel(), group_size, bits,
            mantissa_bits, _TYPES[x.dtype], stochastic, seed, offset, after,
        )  # fmt: skip
        assert error == 0
        return codes, scales

    def fp_dequantize(
        self, codes: Tensor, scales: Tensor, size: list[int], group_size: int, bits: int,
        mantissa_bits: int, dtype: torch.dtype,
    ) -> Tensor:  # fmt: skip
        out = torch.full(size, 77.0, dtype=dtype)
        self._run(codes, scales, out, group_size, bits, mantissa_bits, None, math.prod(size), 1)
        return out

    def fp_dequantize_rows(
        self, codes: Tensor, scales: Tensor, rows: Tensor, size: list[int], group_size: int,
        bits: int, mantissa_bits: int, dtype: torch.dtype,
    ) -> Tensor:  # fmt: skip
        out = torch.full((rows.numel(), *size[1:]), 77.0, dtype=dtype)
        self._run(
            codes, scales, out, group_size, bits, mantissa_bits, rows, math.prod(size[1:]), size[0]
        )
        return out

    def _run(
        self, codes: Tensor, scales: Tensor, out: Tensor, group_size: int, bits: int,
        mantissa_bits: int, rows: Tensor | None, width: int, height: int,
    ) -> None:  # fmt: skip
        error = self._dequantize(
            codes.data_ptr(), scales.data_ptr(), out.data_ptr(), out.numel(), group_size, bits,
            mantissa_bits, _TYPES[out.dtype], None if rows is None else rows.data_ptr(), width,
            height,
        )  # fmt: skip
        assert error == 0
