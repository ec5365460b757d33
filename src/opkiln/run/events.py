"""The events of a build, and the sinks that receive them.

There is a fixed list of kinds, each with its data:

- ``build-start(op, steps)``: a build begins. ``steps`` is the number of its steps;
- ``step-start(op, label, step)``: a step's process starts. ``step`` is its name, unique in the
  build. ``label`` is for people: a source's name, or ``link``;
- ``step-end(op, label, step, wall, max_rss, cached)``: a step has ended, successfully or not. A
  cached step has no step-start. A step that was cancelled or timed out has no step-end;
- ``waiting(op, pid, host, seconds, what)``: another process holds what the build needs. Repeated
  while the build waits. ``pid`` is 0 if it is unknown;
- ``build-end(op, ok, wall)``: the build is over;
- ``note(text)``: something that a user may want to know.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple

BUILD_START = "build-start"
STEP_START = "step-start"
STEP_END = "step-end"
WAITING = "waiting"
BUILD_END = "build-end"
NOTE = "note"

# The values of ``what`` in a ``waiting`` event.
BUILD = "build"  # another process's
CPU = "a free CPU"
COMPILERS = "the list of compilers"
LINK, STUB = NO_COMPILES = "link", "stub"  # the labels of steps that are not compiles


class Event(NamedTuple):
    """One thing that happened."""

    kind: str
    at: float  # time.monotonic()
    data: Mapping[str, Any]


if TYPE_CHECKING:
    Sink = Callable[[Event], None]

# Appending to a list and removing from it are atomic, with and without the GIL, so this needs no
# lock. A fork could copy a lock while it is held.
_sinks: list[Sink] = []
# A forked child does not have the thread that redraws the bar, and must not write the parent's
# trace file.
os.register_at_fork(after_in_child=_sinks.clear)

_name: ContextVar[str] = ContextVar("opkiln_reported_name", default="")


@contextlib.contextmanager
def report_as(name: str) -> Iterator[None]:
    """Within the block, and in the threads that it starts, report the op under this name. Without
    it, builds of one op for several targets look like one build. So do builds of ops with the same
    name from several packages."""
    token = _name.set(name)
    try:
        yield
    finally:
        _name.reset(token)


def emit(kind: str, **data: Any) -> None:
    """Call every sink, in this thread. Without sinks this costs next to nothing. An exception of a
    sink gets through, so sinks must not raise."""
    if not _sinks:
        return
    if (name := _name.get()) and "op" in data:
        data["op"] = name
    event = Event(kind, time.monotonic(), data)
    for sink in tuple(_sinks):
        sink(event)


@contextlib.contextmanager
def listen(sink: Sink | None) -> Iterator[None]:
    """Within the block, send the events of all threads to ``sink``; then call its ``close``, if it
    has one. Does nothing if ``sink`` is None."""
    if sink is None:
        yield
        return
    _sinks.append(sink)
    try:
        yield
    finally:
        if sink in _sinks:  # not in a forked child: closing it would write the parent's file
            _sinks.remove(sink)
            close = getattr(sink, "close", None)
            if close is not None:
                close()
