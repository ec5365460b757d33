"""Checks of arguments, and the precision that references compute in. All raise RuntimeError, naming
the argument."""

from __future__ import annotations

import torch
from torch import Tensor

NATIVE = (torch.float32, torch.bfloat16, torch.float16)
FLOATS = (*NATIVE, torch.float64)


def widen(x: Tensor) -> Tensor:
    """``x`` as what arithmetic is done in: fp32 for 16-bit elements."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def check_float(name: str, x: Tensor) -> None:
    if x.dtype not in FLOATS:
        raise RuntimeError(
            f"{name} has dtype {dtype_name(x.dtype)}, expected float32, float16 or bfloat16"
        )


def check_dim(name: str, x: Tensor, dim: int) -> None:
    if x.dim() != dim:
        raise RuntimeError(f"{name} has shape {list(x.shape)}, expected {dim} dimensions")


def check_some(name: str, x: Tensor) -> None:
    """Only the first dimension may have the size 0."""
    for dim, size in enumerate(x.shape):
        if dim > 0 and size == 0:
            raise RuntimeError(
                f"{name} has shape {list(x.shape)}, expected at least 1 in dimension {dim}"
            )


def check_shape(name: str, x: Tensor, shape: list[int]) -> None:
    if list(x.shape) != shape:
        raise RuntimeError(f"{name} has shape {list(x.shape)}, expected {shape}")


def check_like(name: str, x: Tensor, of: Tensor, of_name: str) -> None:
    """``x`` has the dtype of the other and is where it is."""
    if x.dtype != of.dtype:
        raise RuntimeError(
            f"{name} has dtype {dtype_name(x.dtype)}, {of_name} has {dtype_name(of.dtype)}"
        )
    check_device(name, x, of, of_name)


def check_rows(x: Tensor, x_name: str = "x", /, **rows: Tensor | None) -> None:
    """``x`` has columns, and each of ``rows`` is like it and has an element for each column."""
    if x.dim() == 0:
        raise RuntimeError(f"{x_name} has no dimensions, expected at least 1")
    for name, row in rows.items():
        if row is not None:
            check_like(name, row, x, x_name)
            check_shape(name, row, [x.shape[-1]])


def check_same(x: Tensor, x_name: str = "x", /, **others: Tensor | None) -> None:
    """Each of ``others`` is like ``x`` and has its shape."""
    for name, other in others.items():
        if other is not None:
            check_like(name, other, x, x_name)
            if other.shape != x.shape:
                raise RuntimeError(
                    f"{name} has shape {list(other.shape)}, {x_name} has {list(x.shape)}"
                )


def check_device(name: str, x: Tensor, of: Tensor, of_name: str) -> None:
    if x.device != of.device:
        raise RuntimeError(f"{name} is on {x.device}, {of_name} is on {of.device}")


def check_dtype(name: str, x: Tensor, *expected: torch.dtype) -> None:
    if x.dtype not in expected:
        *first, last = map(dtype_name, expected)
        names = f"{', '.join(first)} or {last}" if first else last
        raise RuntimeError(f"{name} has dtype {dtype_name(x.dtype)}, expected {names}")


def check_numel(name: str, x: Tensor, numel: int) -> None:
    if x.numel() != numel:
        raise RuntimeError(f"{name} has {x.numel()} elements, expected {numel}")


def check_contiguous(name: str, x: Tensor) -> None:
    if not x.is_contiguous():
        raise RuntimeError(
            f"{name} is not contiguous: its shape is {list(x.shape)}, its strides are "
            f"{list(x.stride())}"
        )


def check_within(name: str, values: Tensor, least: int, most: int) -> None:
    """All values are from ``least`` to ``most``."""
    check_all(
        (values >= least) & (values <= most), f"{name} has a value outside of {least} to {most}"
    )


def check_all(holds: Tensor, what: str) -> None:
    """All of ``holds`` is true. On a GPU it is an assertion, as in torch's own functions: nobody
    waits for it."""
    torch._assert_async(holds.all(), what)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check_native(said: str, dtype: torch.dtype) -> None:
    if dtype not in NATIVE:
        raise RuntimeError(f"{said} {dtype_name(dtype)}, expected float32, bfloat16 or float16")


def check_on(name: str, x: Tensor, device: torch.device) -> None:
    if x.device != device:
        raise RuntimeError(f"{name} is not on {'the CPU' if device.type == 'cpu' else device}")


def check_flat(name: str, x: Tensor, device: torch.device, dtype: torch.dtype, numel: int) -> None:
    """``x`` is on the device, and has this dtype and so many elements."""
    check_on(name, x, device)
    check_dtype(name, x, dtype)
    check_numel(name, x, numel)
