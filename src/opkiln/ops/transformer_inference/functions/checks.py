"""Checks of arguments."""

from __future__ import annotations

from torch import Tensor


def check_row(x: Tensor, name: str, row: Tensor | None, *, of: str = "x") -> None:
    """``row`` has an element for each column of ``x``, which messages call ``of``. Raises
    RuntimeError."""
    if x.dim() == 0:
        raise RuntimeError(f"{of} has no dimensions, expected at least 1")
    if row is None:
        return
    check_like(x, name, row, of=of)
    if tuple(row.shape) != (x.shape[-1],):
        raise RuntimeError(f"{name} has shape {list(row.shape)}, expected [{x.shape[-1]}]")


def check_same(x: Tensor, name: str, other: Tensor | None, *, of: str = "x") -> None:
    """``other`` has the shape of ``x``. Raises RuntimeError."""
    if x.dim() == 0:
        raise RuntimeError(f"{of} has no dimensions, expected at least 1")
    if other is None:
        return
    check_like(x, name, other, of=of)
    if other.shape != x.shape:
        raise RuntimeError(f"{name} has shape {list(other.shape)}, {of} has {list(x.shape)}")


def check_like(x: Tensor, name: str, other: Tensor, *, of: str = "x") -> None:
    """``other`` has the dtype of ``x`` and is where ``x`` is. Raises RuntimeError."""
    if other.dtype != x.dtype:
        raise RuntimeError(f"{name} has dtype {other.dtype}, {of} has {x.dtype}")
    if other.device != x.device:
        raise RuntimeError(f"{name} is on {other.device}, {of} is on {x.device}")
