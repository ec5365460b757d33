"""Numbers that scale a step, on the devices that want them. Nothing here waits for a GPU."""

from __future__ import annotations

from typing import overload

import torch
from torch import Tensor


@overload
def moved(device: torch.device, number: None) -> None: ...
@overload
def moved(device: torch.device, number: Tensor) -> Tensor: ...
@overload
def moved(device: torch.device, number: Tensor | None) -> Tensor | None: ...
def moved(device: torch.device, number: Tensor | None) -> Tensor | None:
    """The number where an op wants it; itself, mostly."""
    if number is None:
        return None
    wide = number.dtype if number.dtype == torch.float64 else torch.float32
    # Towards the CPU it must have arrived when the op reads it; the GPU's stream keeps the order.
    return number.to(device=device, dtype=wide, non_blocking=device.type == "cuda")


def clipping(lists: list[list[Tensor]], scale: Tensor | None, limit: float) -> Tensor:
    """What to divide gradients by, so that they lose their scale and the norm of them all, over all
    lists, is no more than ``limit``: as ``torch.nn.utils.clip_grad_norm_`` of those without it."""
    first = lists[0][0].device
    norms = [
        torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads, 2, dtype=torch.float32)))
        for grads in lists
    ]
    total = torch.linalg.vector_norm(torch.stack([moved(first, norm) for norm in norms]))
    given = 1.0 if scale is None else moved(first, scale).reshape(())
    return torch.clamp((total / given + 1e-6) / limit, min=1.0) * given
