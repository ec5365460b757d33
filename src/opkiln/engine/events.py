"""What a build says while it runs: events, and the sinks that listen to them.

The kinds are a closed list, each with its data:

- ``build-start(op, steps)``: a build begins, of so many steps;
- ``step-start(op, label, step)``: a step's process starts. ``step`` is its name, unique in the
  build; ``label`` is for people: a source's name, or ``link``;
- ``step-end(op, label, step, wall, max_rss, cached)``: it has ended, well or badly. One that was
  cached has no step-start, and one that was cancelled or timed out has no step-end;
- ``waiting(op, pid, host, seconds, what)``: somebody else holds what the build needs; repeated
  while that lasts. ``pid`` is 0 when it cannot be told;
- ``build-end(op, ok, wall)``: the build is over;
- ``note(text)``: something that a user may want to know.
"""

from __future__ import annotations

import contextlib
import os
import time
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

BUILD_START = "build-start"
STEP_START = "step-start"
STEP_END = "step-end"
WAITING = "waiting"
BUILD_END = "build-end"
NOTE = "note"

FIELDS = {
    BUILD_START: ("op", "steps"),
    STEP_START: ("op", "label", "step"),
    STEP_END: ("op", "label", "step", "wall", "max_rss", "cached"),
    WAITING: ("op", "pid", "host", "seconds", "what"),
    BUILD_END: ("op", "ok", "wall"),
    NOTE: ("text",),
}

LINK = "link"  # the label of a step that is not a compile


class Event(NamedTuple):
    """One thing that happened."""

    kind: str
    at: float  # time.monotonic()
    data: Mapping[str, Any]


if TYPE_CHECKING:
    Sink = Callable[[Event], None]

# Appending to and removing from a list are atomic, with and without the GIL; so there is no lock
# that a fork could copy while it is held.
_sinks: list[Sink] = []
_hooked: list[bool] = []


_name: ContextVar[str] = ContextVar("opkiln_told_name", default="")


@contextlib.contextmanager
def told_as(name: str) -> Iterator[None]:
    """Within the block, and the threads it starts, the op that is built goes by this name.

    For builds of one op for several targets, or of several packages' ops with one name: they would
    be taken for one.
    """
    token = _name.set(name)
    try:
        yield
    finally:
        _name.reset(token)


def emit(kind: str, **data: Any) -> None:
    """Tell every sink, in this thread. With none it costs next to nothing.

    Raises ValueError for a kind or data not in the list, and what a sink raises: sinks must not.
    """
    if not _sinks:
        return
    if FIELDS.get(kind) is None or set(FIELDS[kind]) != data.keys():
        raise ValueError(f"no event {kind!r} with {', '.join(data)}")
    if (name := _name.get()) and "op" in data:
        data["op"] = name
    event = Event(kind, time.monotonic(), data)
    for sink in tuple(_sinks):
        sink(event)


@contextlib.contextmanager
def listening(sink: Sink | None) -> Iterator[None]:
    """Send events of all threads to ``sink`` within the block, then call its ``close``, if any.

    None listens to nothing, so that callers need not ask whether there is a sink.
    """
    if sink is None:
        yield
        return
    if not _hooked:
        _hooked.append(True)
        # A forked child has neither the thread that redraws the bar nor a claim to the trace file.
        os.register_at_fork(after_in_child=_sinks.clear)
    _sinks.append(sink)
    try:
        yield
    finally:
        if sink in _sinks:  # not after a fork
            _sinks.remove(sink)
        close = getattr(sink, "close", None)
        if close is not None:
            close()
