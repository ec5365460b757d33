"""Numbers that scale a step, on the devices that want them. Nothing here waits for a GPU."""

from __future__ import annotations

from typing import overload

import torch
from torch import Tensor

from opkiln.ops.sharded import has_shards, sum_over_shards


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


def clipping(
    lists: list[tuple[list[Tensor], list[Tensor]]], scale: Tensor | None, limit: float
) -> Tensor:
    """What to divide gradients by, so that they lose their scale and the norm of them all, over all
    lists, is no more than ``limit``: as ``torch.nn.utils.clip_grad_norm_`` of those without it.

    A list has parameters and their gradients; where parameters are DTensors, the gradients' parts
    that are here, and the norm is that of the whole.
    """
    first = lists[0][1][0].device
    norms = [torch.linalg.vector_norm(_norms(params, grads)) for params, grads in lists]
    total = torch.linalg.vector_norm(torch.stack([moved(first, norm) for norm in norms]))
    given = 1.0 if scale is None else moved(first, scale).reshape(())
    return torch.clamp((total / given + 1e-6) / limit, min=1.0) * given


def _norms(params: list[Tensor], grads: list[Tensor]) -> Tensor:
    """Those of the gradients, one by one."""
    here = torch.stack(torch._foreach_norm(grads, 2, dtype=torch.float32))
    if not has_shards(params):
        return here
    squares = here.double().square()
    sum_over_shards(params, squares)
    return squares.sqrt().float()
