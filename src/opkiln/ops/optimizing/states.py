"""The states of an optimizer's parameters. They hold what the op keeps, until they change."""

from __future__ import annotations

import functools
import weakref
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

from opkiln.errors import UsageError
from opkiln.ops.optimizing.op_calls import KeptLists, same_tensors


def _notify_after(method: Any) -> Any:
    """The method of a dict, which then tells it that an entry was set or removed."""

    @functools.wraps(method)
    def call(self: _Watched, *args: Any, **kwargs: Any) -> Any:
        result = method(self, *args, **kwargs)
        self.forget()
        return result

    return call


class _Watched(dict[Any, Any]):
    """A dict that calls ``forget()`` when an entry is set or removed."""

    def forget(self) -> None:
        raise NotImplementedError

    __setitem__ = _notify_after(dict.__setitem__)
    __delitem__ = _notify_after(dict.__delitem__)
    __ior__ = _notify_after(dict.__ior__)
    update = _notify_after(dict.update)
    setdefault = _notify_after(dict.setdefault)
    pop = _notify_after(dict.pop)
    popitem = _notify_after(dict.popitem)
    clear = _notify_after(dict.clear)


class ParamState(_Watched):
    """The state of one parameter. A copy is not watched."""

    # This is a weak reference, because kept lists hold these dicts. An optimizer's states should be
    # freed with it, not at the next collection of cycles.
    watcher: weakref.ref[States] | None = None

    def forget(self) -> None:
        states = None if self.watcher is None else self.watcher()
        if states is not None:
            states.forget()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (dict(self),)


class States(_Watched, defaultdict[Any, Any]):
    """The states of all parameters, and what the op keeps of each group, by its index. What it
    keeps has the states' tensors or their addresses, so it is forgotten when a state changes.

    torch's own are also a defaultdict. A copy keeps nothing.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.of_group: dict[int, KeptLists | None] = {}  # None: the op keeps nothing for this group
        self._stepped: dict[int, list[Tensor]] = {}  # parameters of the last step over lists

    def is_repeated(self, group: int, params: list[Tensor]) -> bool:
        """Whether a group was also stepped with these parameters the last time."""
        last, self._stepped[group] = self._stepped.get(group), params
        return last is not None and same_tensors(last, params)

    def forget(self) -> None:
        """Forget what the op keeps of all groups."""
        self.of_group.clear()
        self._stepped.clear()

    def drop(self, group: int) -> None:
        """Forget what the op keeps of a group that has changed."""
        self.of_group.pop(group, None)
        self._stepped.pop(group, None)

    def watch(self, states: list[dict[str, Any]]) -> bool:
        """Watch these states. False if one cannot be watched."""
        own = weakref.ref(self)
        for state in states:
            if not isinstance(state, ParamState):
                return False  # a plain dict that a user put there
            state.watcher = own
        return True

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.default_factory, dict(self))


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
