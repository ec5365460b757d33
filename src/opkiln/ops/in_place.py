"""Calling an op that writes to long lists of tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.graph import increment_version

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor


def call_in_place(
    op: Callable[..., None],
    lists: Sequence[list[Tensor]],
    written: Sequence[list[Tensor]],
    hyper: dict[str, Any],
) -> None:
    """``op(*lists, **hyper)``, with the versions of ``written`` counted up after it.

    The op counts them up itself when called; but that is a kernel in Python on the way, for which
    every list is turned into Python objects and back, a sixth of a step over ten thousand tensors.
    Here it comes after the call, when a GPU is at work already.
    """
    with torch._C._AutoDispatchBelowADInplaceOrView():
        op(*lists, **hyper)
    for tensors in written:
        try:
            increment_version(tensors)
        except RuntimeError:  # some were made in inference mode: these have no version
            increment_version([tensor for tensor in tensors if not tensor.is_inference()])
