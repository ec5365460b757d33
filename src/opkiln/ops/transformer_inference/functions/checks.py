"""Checks of arguments, by their names. All raise RuntimeError; messages call the first ``of``."""

from __future__ import annotations

from torch import Tensor


def check_rows(x: Tensor, /, *, of: str = "x", **rows: Tensor | None) -> None:
    """Each of ``rows`` has an element for each column of ``x``, and is like it."""
    if x.dim() == 0:
        raise RuntimeError(f"{of} has no dimensions, expected at least 1")
    for name, row in rows.items():
        if row is not None:
            check_like(x, name, row, of=of)
            if tuple(row.shape) != (x.shape[-1],):
                raise RuntimeError(f"{name} has shape {list(row.shape)}, expected [{x.shape[-1]}]")


def check_same(x: Tensor, /, *, of: str = "x", **others: Tensor | None) -> None:
    """Each of ``others`` has the shape of ``x``, and is like it."""
    check_rows(x, of=of)
    for name, other in others.items():
        if other is not None:
            check_like(x, name, other, of=of)
            if other.shape != x.shape:
                shapes = f"{list(other.shape)}, {of} has {list(x.shape)}"
                raise RuntimeError(f"{name} has shape {shapes}")


def check_like(x: Tensor, name: str, other: Tensor, *, of: str = "x") -> None:
    """``other`` has the dtype of ``x`` and is where ``x`` is."""
    if other.dtype != x.dtype:
        raise RuntimeError(f"{name} has dtype {other.dtype}, {of} has {x.dtype}")
    if other.device != x.device:
        raise RuntimeError(f"{name} is on {other.device}, {of} is on {x.device}")
