"""The states of an optimizer's parameters: how they are made, counted and watched for changes."""

from __future__ import annotations

import functools
import weakref
from collections import Counter, defaultdict
from itertools import accumulate, repeat
from operator import is_, itemgetter
from typing import Any

import torch
from torch import Tensor

from opkiln.errors import UsageError
from opkiln.optimizing.op_calls import same_tensors
from opkiln.optimizing.sharded import has_shards

TYPE_CHECKING = False
if TYPE_CHECKING:
    from opkiln.optimizing.op_calls import Kept

_STEP = itemgetter("step")
_POOLED = 1 << 16  # elements up to which a state shares its memory with others
_ALIGNED = 64  # elements: 256 bytes, so that each state begins where torch's own would


def _telling(method: Any) -> Any:
    """The method of a dict, which then tells the plans."""

    @functools.wraps(method)
    def call(self: _Watched, *args: Any, **kwargs: Any) -> Any:
        result = method(self, *args, **kwargs)
        self._changed()
        return result

    return call


class _Watched(dict[Any, Any]):
    """A dict that tells the plans when an entry is set or removed, because they hold its tensors or
    their addresses. A copy is not watched."""

    # This is a weak reference, because plans hold these dicts. An optimizer's states should be
    # freed with it, not at the next collection of cycles.
    watcher: weakref.ref[Plans] | None = None

    def _changed(self) -> None:
        plans = None if self.watcher is None else self.watcher()
        if plans is not None:
            plans.forget()

    __setitem__ = _telling(dict.__setitem__)
    __delitem__ = _telling(dict.__delitem__)
    __ior__ = _telling(dict.__ior__)
    update = _telling(dict.update)
    setdefault = _telling(dict.setdefault)
    pop = _telling(dict.pop)
    popitem = _telling(dict.popitem)
    clear = _telling(dict.clear)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (dict(self),)


class ParamState(_Watched):
    """The state of one parameter."""


class States(_Watched, defaultdict[Any, Any]):
    """The states of all parameters. torch's own are also a defaultdict."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.default_factory, dict(self))


def watchable(states: dict[Any, Any]) -> States:
    """An optimizer's states in a dict that plans can watch: this dict, or a new one."""
    return states if isinstance(states, States) else States(dict, states)


class Plans:
    """What the op keeps of each group, by its index. It is valid while the states do not change."""

    def __init__(self, states: States) -> None:
        self.of_group: dict[int, Kept | None] = {}  # None: the op keeps nothing for this group
        self._stepped: dict[int, list[Tensor]] = {}  # parameters of the last step without a plan
        self._states = weakref.ref(states)
        self._self = weakref.ref(self)
        states.watcher = self._self

    def are_for(self, states: dict[Any, Any]) -> bool:
        """Whether these are the states. torch makes a new dict when it loads a state dict."""
        return self._states() is states

    def again(self, group: int, params: list[Tensor]) -> bool:
        """Whether a group was also stepped with these parameters the last time."""
        last, self._stepped[group] = self._stepped.get(group), params
        return last is not None and same_tensors(last, params)

    def forget(self) -> None:
        """Forget everything: a state has changed."""
        self.of_group.clear()
        self._stepped.clear()

    def drop(self, group: int) -> None:
        """Forget the plan of a group that has changed."""
        self.of_group.pop(group, None)
        self._stepped.pop(group, None)

    def watch(self, states: list[dict[str, Any]]) -> bool:
        """Watch these states. False if one cannot be watched."""
        for state in states:
            if not isinstance(state, ParamState):
                return False  # a plain dict that a user put there
            state.watcher = self._self
        return True


def zeros_like(params: list[Tensor]) -> list[Tensor]:
    """An fp32 tensor of zeros for each parameter of one device, with the parameter's layout.

    Small ones are views of one tensor. It is made once for all, and only its version is counted up.
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


def shared_steps(states: list[dict[str, Any]], holders: Counter[int]) -> list[Tensor]:
    """The counts of steps: one if all states share it, otherwise one for each, all distinct.

    ``holders`` is how many states hold a count, by its id; it is empty if these are all states. If
    states outside this call also hold a count, they keep it and these states get a copy.
    """
    first: Tensor = states[0]["step"]
    if all(map(is_, map(_STEP, states), repeat(first))):
        # A group may name a parameter twice.
        if holders and holders[id(first)] > (here := len(set(map(id, states)))):
            refuse_capture(first.device, "parameters are no longer stepped together as before")
            holders[id(first)] -= here
            first = first.clone()
            for state in states:
                state["step"] = first
        return [first]
    if not holders:
        distinct = {id(state): state for state in states}.values()
        holders = Counter(id(state["step"]) for state in distinct)
    steps: dict[int, Tensor] = {}
    for state in states:
        step = state["step"]
        if holders[id(step)] > 1 or id(step) in steps:
            refuse_capture(first.device, "parameters are no longer stepped together as before")
            holders[id(step)] -= 1
            step = state["step"] = step.clone()
        steps[id(step)] = step
    return list(steps.values())


def refuse_capture(device: torch.device, why: str) -> None:
    """Raises UsageError while a graph is captured: each replay would make new tensors."""
    if is_capturing(device):
        raise UsageError(
            f"the step cannot be captured: {why}",
            why="each replay would create new tensors in place of those that later steps use",
            hint="call step() once, with the same gradients present, before the capture",
        )


def is_capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
