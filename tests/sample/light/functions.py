"""The functions of ``light``, native alone: one for each type that an op may take or return. Those
that need no tensor have one, because torch finds a function's device by its tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from .op import kit


@kit.op(gradient=False)
def who(t: Tensor) -> int:
    raise NotImplementedError


@kit.op(gradient=False)
def scaled_add(x: Tensor, y: Tensor, scale: float) -> Tensor:
    raise NotImplementedError


@kit.op(mutates="x")
def scale_(x: Tensor, by: float) -> None:
    raise NotImplementedError


@kit.op(mutates="xs")
def scale_each_(xs: list[Tensor], by: float) -> None:
    raise NotImplementedError


@kit.op(mutates="x")
def maybe_fill_(t: Tensor, x: Tensor | None, value: float) -> bool:
    raise NotImplementedError


@kit.op(gradient=False)
def sum_all(xs: list[Tensor], bias: Tensor | None = None) -> Tensor:
    raise NotImplementedError


@kit.op(gradient=False)
def numbers(t: Tensor, i: int, f: float, b: bool) -> tuple[int, float, bool]:
    raise NotImplementedError


@kit.op(gradient=False)
def lists(
    t: Tensor, i: list[int], f: list[float], b: list[bool], s: list[str]
) -> tuple[list[int], list[float], list[bool], list[str]]:
    raise NotImplementedError


@kit.op(gradient=False)
def twice(t: Tensor, text: str) -> str:
    raise NotImplementedError


@kit.op(gradient=False)
def same_dtype(t: Tensor, dtype: torch.dtype) -> torch.dtype:
    raise NotImplementedError


@kit.op(gradient=False)
def same_device(t: Tensor, device: torch.device) -> torch.device:
    raise NotImplementedError


@kit.op(gradient=False)
def make(t: Tensor, size: list[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    raise NotImplementedError


@kit.op(gradient=False)
def describe(x: Tensor) -> tuple[list[int], list[int], int, torch.dtype, torch.device, bool]:
    raise NotImplementedError


@kit.op(gradient=False)
def split(x: Tensor) -> tuple[Tensor, list[Tensor]]:
    raise NotImplementedError


@kit.op(gradient=False)
def like(x: Tensor) -> Tensor:
    raise NotImplementedError


@kit.op(gradient=False)
def dense(x: Tensor) -> Tensor:
    raise NotImplementedError


@kit.op(gradient=False)
def doubled(x: Tensor) -> Tensor:
    return x * 2


@kit.op(gradient=False)
def through_torch(x: Tensor, dim: int) -> Tensor:
    raise NotImplementedError


@kit.op(gradient=False)
def topk(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    raise NotImplementedError


@kit.op(gradient=False)
def refused_by_torch(x: Tensor) -> Tensor:
    raise NotImplementedError


@kit.op(gradient=False)
def fail_in_part(t: Tensor, at: int) -> None:
    raise NotImplementedError


@kit.op(gradient=False)
def threads(t: Tensor) -> int:
    raise NotImplementedError


@kit.op(gradient=False)
def check(x: Tensor, y: Tensor, what: str) -> None:
    """What the kernel passes on is all right."""


@kit.op(gradient=False)
def item_check(xs: list[Tensor]) -> None:
    raise NotImplementedError


@kit.op(gradient=False)
def unmet(t: Tensor, k: int) -> None:
    raise NotImplementedError


@kit.op(gradient=False)
def standard_error(t: Tensor) -> None:
    raise NotImplementedError


@kit.op(gradient=False)
def stream(t: Tensor) -> None:
    raise NotImplementedError


@kit.op(gradient=False)
def optionals(
    t: Tensor, i: int | None, f: float | None, b: bool | None, s: str | None, many: list[int] | None
) -> tuple[int | None, float | None, bool | None, str | None, list[int] | None]:
    raise NotImplementedError
