"""The states of parameters: how they are made, and counts of steps that parameters share."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from opkiln.errors import UsageError
from opkiln.ops.sharded import has_shards

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Iterable

_POOLED = 1 << 16  # elements up to which a state shares its memory with others
_ALIGNED = 64  # elements: 256 bytes, so that each state begins where torch's own would


def zeros_like(params: list[Tensor]) -> list[Tensor]:
    """An fp32 tensor of zeros for each parameter of one device, laid out as it is.

    Small ones are views of one tensor: ten thousand of them are made, and have their versions
    counted up, at the cost of one.
    """
    small = [p for p in params if p.numel() <= _POOLED and p.is_contiguous()]
    if len(small) < 2 or has_shards(params):
        small = []
    offsets = list(accumulate((-(-p.numel() // _ALIGNED) * _ALIGNED for p in small), initial=0))
    pool = torch.zeros(offsets[-1], dtype=torch.float32, device=params[0].device)
    pooled = {
        id(param): pool[offset : offset + param.numel()].view(param.shape)
        for param, offset in zip(small, offsets, strict=False)
    }
    return [
        pooled[id(param)]
        if id(param) in pooled
        else torch.zeros_like(param, dtype=torch.float32, requires_grad=False)
        for param in params
    ]


def counted_up_once(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The tensors whose versions to count up so that those of all of these are, each once."""
    found: dict[int, Tensor] = {}
    for tensor in tensors:
        base = tensor if tensor._base is None else tensor._base
        found[id(base)] = base
    return list(found.values())


def shared_steps(states: list[dict[str, Any]], holders: Counter[int]) -> list[Tensor]:
    """The counts of steps: one where all share one, otherwise one for each, no two the same.

    ``holders`` is how many states hold a count, by its id. A count that states outside this call
    hold, too, is left to them, and these states get a copy.
    """
    first: Tensor = states[0]["step"]
    if all(state["step"] is first for state in states):
        here = len(set(map(id, states)))  # a group may name a parameter twice
        if holders[id(first)] > here:
            refuse_capture(first.device, "parameters that were stepped together no longer are")
            holders[id(first)] -= here
            first = first.clone()
            for state in states:
                state["step"] = first
        return [first]
    steps: dict[int, Tensor] = {}
    for state in states:
        step = state["step"]
        if holders[id(step)] > 1 or id(step) in steps:
            refuse_capture(first.device, "parameters that were stepped together no longer are")
            holders[id(step)] -= 1
            step = state["step"] = step.clone()
        steps[id(step)] = step
    return list(steps.values())


def refuse_capture(device: torch.device, why: str) -> None:
    """Raises UsageError while a graph is captured: each replay would make the new tensor again."""
    if is_capturing(device):
        raise UsageError(
            f"the step cannot be captured: {why}",
            why="what a step makes for later ones would be made anew at each replay",
            hint="call step() once, with the same gradients present, before the capture",
        )


def is_capturing(device: torch.device) -> bool:
    """Whether what is enqueued goes into a graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
