"""quantizer's CUDA kernels on the CPU, with the interface of the reference."""

from __future__ import annotations

import ctypes
from ctypes import Structure, byref, c_double, c_int64, c_void_p
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from opkiln.ops.quantizer import fake

if TYPE_CHECKING:
    from pathlib import Path

_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class _Call(Structure):
    _fields_ = (
        ("numel", c_int64), ("type", c_int64),
        *((name, c_void_p) for name in ("from_", "error", "out", "values", "scales", "offsets")),
        ("bits", c_int64), ("group_size", c_int64), ("symmetric", c_int64),
        ("full", c_int64), ("nodes", c_int64), ("devices", c_int64), ("pipeline", c_int64),
        ("piece", c_int64),
        ("stochastic", c_int64), ("seed", c_int64), ("offset", c_int64), ("offset_at", c_void_p),
        ("from_bits", c_int64), ("from_group_size", c_int64), ("from_symmetric", c_int64),
        ("factor", c_double), ("parts", c_int64), ("part_values", c_void_p),
        ("part_scales", c_void_p), ("part_offsets", c_void_p),
    )  # fmt: skip


class Kernel:
    """The kernels as a library that a C++ compiler made."""

    def __init__(self, library: Path) -> None:
        self._run = ctypes.CDLL(str(library)).run

    def _call(self, back: bool, **fields: Any) -> None:
        made = {n: v.data_ptr() if isinstance(v, Tensor) else v for n, v in fields.items()}
        assert self._run(byref(_Call(**made)), int(back)) == 0

    def _quantize(
        self, x: Tensor, error: Tensor | None, bits: int, group_size: int, symmetric: bool,
        stochastic: bool, seed: int, offset: int, nodes: int, devices: int, pipeline: int,
        offset_tensor: Tensor | None = None, narrow_range: bool = True,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        out = fake.quantize(x, bits, group_size, symmetric)
        pieces = nodes * devices * pipeline
        self._call(
            False, numel=x.numel(), type=_TYPES[x.dtype], from_=x, error=error, values=out[0],
            scales=out[1], offsets=out[2], bits=bits, group_size=group_size, symmetric=symmetric,
            full=symmetric and not narrow_range, nodes=nodes, devices=devices, pipeline=pipeline,
            piece=0 if pieces == 1 else x.numel() // group_size // pieces, stochastic=stochastic,
            seed=seed, offset=offset, offset_at=offset_tensor,
        )  # fmt: skip
        return out

    def quantize(self, x: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
        return self._quantize(x, None, *args)

    def quantize_with_feedback(
        self, x: Tensor, error: Tensor, *args: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        return self._quantize(x, error, *args)

    def dequantize(
        self, values: Tensor, scales: Tensor, offsets: Tensor, numel: int, dtype: torch.dtype,
        bits: int, group_size: int, symmetric: bool, nodes: int, devices: int, pipeline: int,
    ) -> Tensor:  # fmt: skip
        out = torch.full((numel,), 7.0, dtype=dtype)
        pieces = nodes * devices * pipeline
        self._call(
            True, numel=numel, type=_TYPES[dtype], out=out, values=values, scales=scales,
            offsets=offsets, bits=bits, group_size=group_size, symmetric=symmetric, nodes=nodes,
            devices=devices, pipeline=pipeline,
            piece=0 if pieces == 1 else numel // group_size // pieces,
        )  # fmt: skip
        return out

    def fake_quantize(self, x: Tensor, *args: Any) -> Tensor:
        out = torch.full_like(x, 7)
        self._fake(x, out, *args)
        return out

    def fake_quantize_(self, x: Tensor, *args: Any) -> None:
        self._fake(x, x, *args)

    def _fake(
        self, x: Tensor, out: Tensor, bits: int, group_size: int, symmetric: bool,
        stochastic: bool, seed: int, offset: int, offset_tensor: Tensor | None = None,
        narrow_range: bool = True,
    ) -> None:  # fmt: skip
        self._call(
            False, numel=x.numel(), type=_TYPES[x.dtype], from_=x, out=out, bits=bits,
            group_size=group_size, symmetric=symmetric, full=symmetric and not narrow_range,
            stochastic=stochastic, seed=seed, offset=offset, offset_at=offset_tensor,
        )  # fmt: skip

    def quantized_reduce(self, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
        return self._reduce(None, *args)

    def quantized_reduce_with_feedback(
        self, error: Tensor, *args: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        return self._reduce(error, *args)

    def _reduce(
        self, error: Tensor | None, values: list[Tensor], scales: list[Tensor],
        offsets: list[Tensor], numel: int, from_bits: int, from_group_size: int,
        from_symmetric: bool, factor: float, bits: int, group_size: int, symmetric: bool,
        stochastic: bool, seed: int, offset: int, offset_tensor: Tensor | None = None,
        narrow_range: bool = True,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        like = torch.empty(numel, dtype=torch.float32)
        out = fake.quantize(like, bits, group_size, symmetric)
        lists = [
            (c_void_p * len(row))(*(t.data_ptr() for t in row)) for row in (values, scales, offsets)
        ]
        self._call(
            False, numel=numel, error=error, values=out[0], scales=out[1], offsets=out[2],
            bits=bits, group_size=group_size, symmetric=symmetric,
            full=symmetric and not narrow_range, stochastic=stochastic, seed=seed, offset=offset,
            offset_at=offset_tensor, from_bits=from_bits,
            from_group_size=from_group_size, from_symmetric=from_symmetric, factor=factor,
            parts=len(values), part_values=ctypes.addressof(lists[0]),
            part_scales=ctypes.addressof(lists[1]), part_offsets=ctypes.addressof(lists[2]),
        )  # fmt: skip
        return out
