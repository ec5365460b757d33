"""What references and front ends check, and the precision that references compute in.

A check raises RuntimeError, naming the argument, in the words of the native versions. A front end
calls by ``call_checked``, which makes a UsageError of that.
"""

from __future__ import annotations

import re
from typing import Any, TypeVar

import torch
from torch import Tensor

from opkiln.errors import ArgumentError, ArgumentTypeError
from opkiln.loading.register import at_trace_time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from opkiln.builder.base import OpBuilder

NATIVE = (torch.float32, torch.bfloat16, torch.float16)
FLOATS = (*NATIVE, torch.float64)
WHOLE = (torch.int32, torch.int64)
KERNEL_TYPES = {torch.float16: "half", torch.bfloat16: "bfloat16"}  # as the sources call them

_R = TypeVar("_R")
_REFUSED = r", expected | is (?:not )?on | is not contiguous|, \w+ ha(?:s|ve) "


def widen(x: Tensor) -> Tensor:
    """``x`` as what arithmetic is done in: fp32 for 16-bit elements."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def check(
    name: str,
    x: Tensor,
    *dtypes: torch.dtype,
    like: Tensor | None = None,
    at: Tensor | None = None,
    of: str = "x",
    dims: int | None = None,
    shape: list[int] | None = None,
) -> None:
    """``x`` has one of these dtypes, the dtype of ``like``, the device of that or of ``at``, so
    many dimensions, and this shape. ``of`` is the name of ``like`` or ``at``."""
    if dtypes and x.dtype not in dtypes:
        *first, last = map(dtype_name, dtypes)
        names = f"{', '.join(first)} or {last}" if first else last
        raise RuntimeError(f"{name} has dtype {dtype_name(x.dtype)}, expected {names}")
    if like is not None and x.dtype != like.dtype:
        raise RuntimeError(
            f"{name} has dtype {dtype_name(x.dtype)}, {of} has {dtype_name(like.dtype)}"
        )
    there = at if like is None else like
    if there is not None and x.device != there.device:
        raise RuntimeError(f"{name} is on {x.device}, {of} is on {there.device}")
    if dims is not None and x.dim() != dims:
        raise RuntimeError(f"{name} has shape {list(x.shape)}, expected {dims} dimensions")
    if shape is not None and list(x.shape) != shape:
        raise RuntimeError(f"{name} has shape {list(x.shape)}, expected {shape}")


def check_rows(x: Tensor, x_name: str = "x", /, **rows: Tensor | None) -> None:
    """``x`` has columns, and each of ``rows`` is like it and has an element for each column."""
    if x.dim() == 0:
        raise RuntimeError(f"{x_name} has no dimensions, expected at least 1")
    for name, row in rows.items():
        if row is not None:
            check(name, row, like=x, of=x_name, shape=[x.shape[-1]])


def check_same(x: Tensor, x_name: str = "x", /, **others: Tensor | None) -> None:
    """Each of ``others`` is like ``x`` and has its shape."""
    for name, other in others.items():
        if other is not None:
            check(name, other, like=x, of=x_name)
            if other.shape != x.shape:
                raise RuntimeError(
                    f"{name} has shape {list(other.shape)}, {x_name} has {list(x.shape)}"
                )


def check_float(name: str, x: Tensor, dims: int) -> None:
    if x.dtype not in FLOATS:
        raise RuntimeError(
            f"{name} has dtype {dtype_name(x.dtype)}, expected float32, float16 or bfloat16"
        )
    check(name, x, dims=dims)


def check_native(said: str, dtype: torch.dtype) -> None:
    if dtype not in NATIVE:
        raise RuntimeError(f"{said} {dtype_name(dtype)}, expected float32, bfloat16 or float16")


def check_least(least: int, **numbers: int) -> None:
    for name, number in numbers.items():
        if number < least:
            raise RuntimeError(f"{name} is {number}, expected at least {least}")


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


def check_on(name: str, x: Tensor, device: torch.device) -> None:
    if x.device != device:
        raise RuntimeError(f"{name} is not on {'the CPU' if device.type == 'cpu' else device}")


def check_numel(name: str, x: Tensor, numel: int) -> None:
    if x.numel() != numel:
        raise RuntimeError(f"{name} has {x.numel()} elements, expected {numel}")


def check_flat(name: str, x: Tensor, device: torch.device, dtype: torch.dtype, numel: int) -> None:
    """``x`` is on the device, and has this dtype and so many elements."""
    check_on(name, x, device)
    check(name, x, dtype)
    check_numel(name, x, numel)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# For front ends


def check_dense(x: Tensor, name: str = "x") -> None:
    """Raises UsageError for another layout."""
    if x.layout != torch.strided:
        hint = f"{name}.to_dense()"
        raise ArgumentError(f"{name} is not dense: its layout is {x.layout}", hint=hint)


def runs_cuda_kernels(x: Tensor, builder: type[OpBuilder]) -> bool:
    """Whether a call with ``x`` runs the op's CUDA kernels: on a GPU, or in the emulator."""
    return x.device.type == "cuda" or _emulates(builder)


@at_trace_time  # it reads settings, which torch.compile cannot trace
def _emulates(builder: type[OpBuilder]) -> bool:
    return builder.emulates()


def call_checked(function: Callable[..., _R], *args: Any, **named: Any) -> _R:
    """Call an op, or a function that checks arguments. What it refuses is the caller's to mend, so
    that is a UsageError: a wrong device, dtype or size, by name."""
    if torch.compiler.is_compiling():
        return function(*args, **named)
    try:
        return function(*args, **named)
    except RuntimeError as error:
        said = str(error).splitlines()[0]
        if type(error) is RuntimeError and re.search(_REFUSED, said):
            kind = ArgumentTypeError if "dtype" in said else ArgumentError
            raise kind(said) from error
        raise
