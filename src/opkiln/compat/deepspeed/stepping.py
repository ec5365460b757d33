"""A step of an op over lists of tensors, as DeepSpeed's front ends pass them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from opkiln.optimizing.op_calls import call_in_place, lay_out_alike

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
        laid = lay_out_alike(params, grads, *states)
        lists = [params, grads, *states] if laid is None else laid.lists
        stepped, _, *averages = lists
        call_in_place(op, [*lists, *rest], [stepped, *averages], hyper)
        if laid is not None:
            for tensors, were in zip(averages, states, strict=True):
                for tensor, was in zip(tensors, were, strict=True):
                    if tensor is not was:
                        was.copy_(tensor)
            for staged in laid.staged:
                staged.write_back()
