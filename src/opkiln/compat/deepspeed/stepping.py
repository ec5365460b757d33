"""A step of an op over lists of tensors as DeepSpeed's front ends hand them on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from opkiln.ops.in_place import call_in_place
from opkiln.ops.layout import lay_out_alike

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


def make_step(
    op: Callable[..., None],
    params: list[Tensor],
    grads: list[Tensor],
    states: list[list[Tensor]],
    rest: list[Any],
    hyper: dict[str, Any],
) -> None:
    """``op(params, grads, *states, *rest, **hyper)``, in place, however the tensors lie in memory.

    Raises RuntimeError, naming the argument, before anything is written.
    """
    with torch.no_grad():
        try:
            call_in_place(op, [params, grads, *states, *rest], [params, *states], hyper)
        except RuntimeError:
            # The op refuses before it writes. Looking at all layouts first would cost every step.
            laid = lay_out_alike(params, grads, *states)
            if laid is None:
                raise
            stepped, gradients, *averages = laid.lists
            op(stepped, gradients, *averages, *rest, **hyper)
            for tensors, were in zip(averages, states, strict=True):
                for tensor, was in zip(tensors, were, strict=True):
                    if tensor is not was:
                        was.copy_(tensor)
            for staged in laid.staged:
                staged.write_back()
