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
    """``op(*lists, **hyper)``, with the versions of ``written`` counted up.

    The op counts them up itself when called; but that is a kernel in Python on the way, for which
    every list is turned into Python objects and back, a sixth of a step over ten thousand tensors.
    """
    if torch.compiler.is_compiling():
        op(*lists, **hyper)
        return
    try:
        for tensors in written:
            increment_version(tensors)
    except RuntimeError:  # made in inference mode: these have no version, and the op knows that
        op(*lists, **hyper)
        return
    with torch._C._AutoDispatchBelowADInplaceOrView():
        op(*lists, **hyper)
