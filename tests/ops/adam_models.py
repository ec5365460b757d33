"""Parameters, gradients and optimizers for the tests of optimizers."""

from __future__ import annotations

import io
from typing import Any

import torch
from torch import Tensor

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
SHAPES = ((3, 5), (17,), (), (64, 33), (0,))


def parameters(*shapes: tuple[int, ...], dtype: torch.dtype = F32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=generator).to(dtype).requires_grad_() for s in shapes]


def twins(*shapes: tuple[int, ...], dtype: torch.dtype = F32) -> tuple[list[Tensor], list[Tensor]]:
    return parameters(*shapes, dtype=dtype), parameters(*shapes, dtype=dtype)


def give_gradients(*models: list[Tensor], seed: int = 0) -> None:
    """The same gradients to each model."""
    generator = torch.Generator().manual_seed(seed)
    for members in zip(*models, strict=True):
        grad = torch.randn(members[0].shape, generator=generator)
        for param in members:
            param.grad = grad.to(param.dtype).contiguous()


def assert_same(ours: list[Tensor], theirs: list[Tensor]) -> None:
    """Up to fp32: torch rounds 1 - lr * weight_decay, which 100 steps add up to some 3e-6."""
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=5e-6, atol=2e-6)


def stepped(kind: Any, params: list[Tensor], steps: int, **options: Any) -> Any:
    optimizer = kind(params, lr=1e-2, weight_decay=0.1, **options)
    for step in range(steps):
        give_gradients(params, seed=step)
        optimizer.step()
    return optimizer


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    """A state dict that was saved and loaded."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)
