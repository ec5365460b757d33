"""The functions of ``stable`` in PyTorch."""

from __future__ import annotations

import torch

calls: list[str] = []  # of the functions here, so that a test sees who was called


def who(x: torch.Tensor) -> int:
    return 0


def axpy(x: torch.Tensor, y: torch.Tensor, alpha: float) -> torch.Tensor:
    calls.append("axpy")
    return alpha * x + y


def scale_(x: torch.Tensor, by: float) -> None:
    calls.append("scale_")
    x.mul_(by)


class Fake:
    """Shapes without values."""

    @staticmethod
    def who(x: torch.Tensor) -> int:
        return 0

    @staticmethod
    def axpy(x: torch.Tensor, y: torch.Tensor, alpha: float) -> torch.Tensor:
        return torch.empty_like(x)
