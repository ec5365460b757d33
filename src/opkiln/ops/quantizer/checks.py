"""What the reference refuses, in the words of the native versions. Each raises RuntimeError."""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST_GROUP = 65536
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_NAMES = {
    torch.float32: "Float", torch.bfloat16: "BFloat16", torch.float16: "Half",
    torch.float64: "Double", torch.int8: "Char", torch.uint8: "Byte", torch.int16: "Short",
    torch.int32: "Int", torch.int64: "Long", torch.bool: "Bool",
}  # fmt: skip


def shown(dtype: torch.dtype) -> str:
    return _NAMES.get(dtype, str(dtype))


def place(device: torch.device) -> str:
    return "the CPU" if device.type == "cpu" else str(device)


def check_tensor(name: str, tensor: Tensor) -> None:
    if tensor.dtype not in DTYPES:
        raise RuntimeError(
            f"{name} has dtype {shown(tensor.dtype)}, expected Float, BFloat16 or Half"
        )


def check_format(bits: int, group_size: int, prefix: str = "") -> None:
    if bits not in (4, 8):
        raise RuntimeError(f"{prefix}bits is {bits}, expected 4 or 8")
    if not 16 <= group_size <= LARGEST_GROUP or group_size % 8:
        raise RuntimeError(
            f"{prefix}group_size is {group_size}, expected a multiple of 8 from 16 to "
            f"{LARGEST_GROUP}"
        )


def check_offset(tensor: Tensor | None, device: torch.device) -> None:
    if tensor is None:
        return
    if tensor.device != device:
        raise RuntimeError(f"offset_tensor is not on {place(device)}")
    if tensor.dtype != torch.int64:
        raise RuntimeError(f"offset_tensor has dtype {shown(tensor.dtype)}, expected Long")
    if tensor.numel() != 1:
        raise RuntimeError(f"offset_tensor has {tensor.numel()} elements, expected 1")


def check_error(error: Tensor, numel: int, device: torch.device) -> None:
    if error.device != device:
        raise RuntimeError(f"error is not on {place(device)}")
    if error.dtype != torch.float32:
        raise RuntimeError(f"error has dtype {shown(error.dtype)}, expected Float")
    if error.numel() != numel:
        raise RuntimeError(f"error has {error.numel()} elements, expected {numel}")


def check_quantized(
    index: str,
    values: Tensor,
    scales: Tensor,
    offsets: Tensor,
    numel: int,
    bits: int,
    group_size: int,
    symmetric: bool,
) -> None:
    if numel < 0:
        raise RuntimeError(f"numel is {numel}, expected at least 0")
    groups = -(-numel // group_size)
    levels = torch.int8 if symmetric and bits == 8 else torch.uint8
    for name, tensor, dtype, count in (
        ("values", values, levels, numel if bits == 8 else (numel + 1) // 2),
        ("scales", scales, torch.float32, groups),
        ("offsets", offsets, torch.float32, 0 if symmetric else groups),
    ):
        if tensor.device != values.device:
            raise RuntimeError(f"{name}{index} is not on {place(values.device)}")
        if tensor.dtype != dtype:
            raise RuntimeError(
                f"{name}{index} has dtype {shown(tensor.dtype)}, expected {shown(dtype)}"
            )
        if tensor.numel() != count:
            raise RuntimeError(f"{name}{index} has {tensor.numel()} elements, expected {count}")
