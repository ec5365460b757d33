"""Locks that a forked child does not wait for.

A child gets each lock as it was at the fork. If another thread of the parent held it, no thread of
the child can release it. The locks of this module are free in the child.
"""

from __future__ import annotations

import os
import sys
import threading
from _weakrefset import WeakSet  # threading has it already, and weakref takes a millisecond
from typing import TYPE_CHECKING, Any

_locks: WeakSet[Any] = WeakSet()


def lock() -> threading.RLock:
    """A lock. The thread that holds it may take it again: a signal handler may run the same code,
    and it runs in the thread that it interrupted."""
    made = threading.RLock()
    _locks.add(made)
    return made


def _free() -> None:
    for each in tuple(_locks):
        if not each._is_owned():  # by the thread that forked, which goes on in the child
            each._at_fork_reinit()


os.register_at_fork(after_in_child=_free)


if sys.version_info >= (3, 12) or TYPE_CHECKING:
    import functools

    cached_property = functools.cached_property
else:

    class cached_property:  # noqa: N801
        """functools' holds a lock while it computes a value, one for all objects of a class."""

        def __init__(self, compute: Any) -> None:
            self._compute, self.__doc__ = compute, compute.__doc__

        def __set_name__(self, owner: type, name: str) -> None:
            self._name = name

        def __get__(self, instance: Any, owner: type | None = None) -> Any:
            if instance is None:
                return self
            value = instance.__dict__[self._name] = self._compute(instance)
            return value
