"""The states of an optimizer's parameters, and what was prepared for as long as they stay."""

from __future__ import annotations

import weakref
from collections import defaultdict
from operator import is_
from typing import Any, Generic, TypeVar

TYPE_CHECKING = False
if TYPE_CHECKING:
    from torch import Tensor

_T = TypeVar("_T")


class _Watched(dict[Any, Any]):
    """A dict that tells the plans when an entry is set or removed: who keeps the tensors in it, or
    their addresses, has to know. A copy is watched by nobody."""

    # Not the plans themselves: they hold these dicts, and an optimizer's states should be gone with
    # it, not when cycles are next collected.
    watcher: weakref.ref[Plans[Any]] | None = None

    def _changed(self) -> None:
        plans = None if self.watcher is None else self.watcher()
        if plans is not None:
            plans.forget()

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        self._changed()

    def __delitem__(self, key: Any) -> None:
        super().__delitem__(key)
        self._changed()

    def __ior__(self, other: Any) -> Any:  # type: ignore[misc]
        self.update(other)
        return self

    def update(self, *args: Any, **kwargs: Any) -> None:
        super().update(*args, **kwargs)
        self._changed()

    def setdefault(self, key: Any, default: Any = None) -> Any:
        value = super().setdefault(key, default)
        self._changed()
        return value

    def pop(self, *args: Any) -> Any:
        value = super().pop(*args)
        self._changed()
        return value

    def popitem(self) -> tuple[Any, Any]:
        item = super().popitem()
        self._changed()
        return item

    def clear(self) -> None:
        super().clear()
        self._changed()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (dict(self),)


class ParamState(_Watched):
    """The state of one parameter."""


class States(_Watched, defaultdict[Any, Any]):
    """The states of all parameters; torch's own are such a dict, too."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.default_factory, dict(self))


def watchable(states: dict[Any, Any]) -> States:
    """An optimizer's states as plans can watch them: these, or a dict of the same entries."""
    return states if isinstance(states, States) else States(dict, states)


class Plans(Generic[_T]):
    """What was planned, by the index of the group, for the states as they are."""

    def __init__(self, states: States) -> None:
        self.of_group: dict[int, _T | None] = {}  # None: there can be none
        self._stepped: dict[int, list[Tensor]] = {}  # the last time, without a plan
        self._states = weakref.ref(states)
        self._self = weakref.ref(self)
        states.watcher = self._self

    def are_for(self, states: dict[Any, Any]) -> bool:
        """Whether these are the states; they are others where torch has loaded a state dict."""
        return self._states() is states

    def again(self, group: int, params: list[Tensor]) -> bool:
        """Whether a group was stepped with these parameters the last time, too."""
        last, self._stepped[group] = self._stepped.get(group), params
        return last is not None and same_tensors(last, params)

    def forget(self) -> None:
        """Everything: a state has changed."""
        self.of_group.clear()
        self._stepped.clear()

    def drop(self, group: int) -> None:
        """What there is for a group, which has changed."""
        self.of_group.pop(group, None)
        self._stepped.pop(group, None)

    def watch(self, states: list[dict[str, Any]]) -> bool:
        """Whether it will be known when entries of these are replaced."""
        for state in states:
            if not isinstance(state, ParamState):
                return False  # a plain dict, which a user put there
            state.watcher = self._self
        return True


def same_tensors(some: list[Tensor], others: list[Tensor]) -> bool:
    """Whether the lists hold the same objects."""
    return len(some) == len(others) and all(map(is_, some, others))
