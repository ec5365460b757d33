"""Sinks that report progress: to people on standard error, to services through ``logging``.

The sinks on standard error never raise into the build. If the stream is closed or broken, they
become silent. Exceptions from the handlers of a logger are not caught.
"""

from __future__ import annotations

import os
import shlex
import sys
import threading
import time
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

from opkiln.base import forks
from opkiln.base.model import display_name
from opkiln.run import child, events, process
from opkiln.settings import settings

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from logging import Logger
    from typing import TextIO

    from opkiln.run.events import Event

LOGGER = "opkiln"
_TICK = 0.1
# Seconds of waiting before the first line: for a free CPU, for a build; and between lines.
_FIRST_LINE, _FIRST_BUILD_LINE, _NEXT_LINE = 2.0, 0.2, 30.0
_FIRST_QUIET_LINE = 5.0  # before the first line of a program that wants no progress
_listening: ContextVar[bool] = ContextVar("opkiln_progress", default=False)
_CLEAR, _GREEN, _RED, _PLAIN = "\r\x1b[2K", "\x1b[32m", "\x1b[31m", "\x1b[0m"


@contextmanager
def show_builds(trace: str | None = None, *, traced: bool = True) -> Iterator[None]:
    """Within the block, report builds as ``OPKILN_PROGRESS``, ``OPKILN_TRACE`` and the logger say.

    Blocks inside another have no effect, so a command that builds ten ops shows one bar. Blocks of
    several threads that ask for the same share it: events go to the sinks of the whole process.
    With ``traced=False``, no trace file is written.
    """
    if _listening.get():
        yield
        return
    token = _listening.set(True)
    file = (trace or settings.trace) if traced else None
    key = settings.progress, settings.rank, settings.debug_cuda, id(sys.stderr), file
    try:
        with _turn:
            sinks, count = _shared.get(key) or (_open_sinks(file), 0)
            _shared[key] = sinks, count + 1
        try:
            yield
        finally:
            with _turn:
                _, count = _shared.pop(key, (sinks, 1))  # a forked child has none
                if count > 1:
                    _shared[key] = sinks, count - 1
            if count == 1:
                sinks.close()
    finally:
        _listening.reset(token)


# The sinks of the blocks that are running, and how many blocks each has.
_shared: dict[tuple[object, ...], tuple[ExitStack, int]] = {}
_turn = forks.lock()
os.register_at_fork(after_in_child=_shared.clear)


def _open_sinks(file: str | None) -> ExitStack:
    """The sinks for what is set; closing it closes them."""
    with ExitStack() as stack:
        stack.enter_context(events.listen(people_sink()))
        if settings.progress == "verbose" and sys.stderr is not None and not child.listeners:
            output = _Stream(sys.stderr)
            stack.enter_context(process.watch_starts(output.write_command))
        if (log := logging_sink()) is not None:
            stack.enter_context(events.listen(log))
            stack.enter_context(process.watch_starts(log.command))
        if file:
            from opkiln.run import chrome

            stack.enter_context(events.listen(chrome.ChromeTrace(file)))
        return stack.pop_all()


def people_sink(stream: TextIO | None = None) -> Bar | Lines | None:
    """The sink that ``OPKILN_PROGRESS`` asks for, on ``stream`` or standard error.

    Returns None for silence. ``auto`` means a bar on a terminal and lines elsewhere. It means
    silence in every rank but the first, and if the logger's handlers show the lines. The notes
    that ``DS_DEBUG_CUDA`` asks for are written even then, by the one process that compiles.
    """
    target = sys.stderr if stream is None else stream
    choice = settings.progress
    if target is None:  # a service may have no stderr
        return None
    terminal = _is_terminal(target)
    if choice == "auto":
        silent = settings.rank not in (None, 0) or _logging_shows(target, terminal=terminal)
        choice = "off" if silent else "bar" if terminal else "lines"
    notes = (events.NOTE,) if settings.debug_cuda else ()
    if choice == "quiet":
        return Lines(target, kinds=(events.WAITING, *notes), quiet=True)
    if choice == "off":
        return Lines(target, kinds=notes) if notes else None
    colour = terminal and not settings.no_color
    return Bar(target, colour=colour) if choice == "bar" else Lines(target, colour=colour)


def logging_sink() -> Log | None:
    """The sink for the logger ``opkiln``; None if no handler would take its records. It never
    imports ``logging``: a process that has not imported it has no handlers."""
    logger = _logger()
    return None if logger is None else Log(logger)


def _logger() -> Logger | None:
    if "logging" not in sys.modules:
        return None
    import logging

    logger = logging.getLogger(LOGGER)
    # Without a handler, Python itself would write warnings to standard error.
    return logger if logger.isEnabledFor(logging.INFO) and logger.hasHandlers() else None


def _logging_shows(stream: TextIO, *, terminal: bool) -> bool:
    """Whether the logger's records replace the lines on ``stream``. On a terminal they do so only
    if they appear on it: a user does not watch records in a file."""
    logger = _logger()
    if logger is None or not terminal:
        return logger is not None
    each: Logger | None = logger
    while each is not None:
        if any(getattr(handler, "stream", None) is stream for handler in each.handlers):
            return True
        each = each.parent if each.propagate else None
    return False


class _OpProgress:
    """The state of one op's build."""

    def __init__(self, started: float, steps: int) -> None:
        self.started = started
        self.steps = steps
        self.running: dict[str, str] = {}  # step -> label, in the order they started
        self.ended = 0
        self.compiled = 0
        self.cached = 0
        self.over = False


class _Tally:
    """The state of all builds, updated by the events, and the lines that describe it."""

    def __init__(self, *, colour: bool = False, quiet: bool = False) -> None:
        self._ops: dict[str, _OpProgress] = {}
        self._waiting: dict[str, Event] = {}
        self._next: dict[str, float] = {}  # op -> seconds of waiting before the next line
        self._colour = colour
        self._quiet = quiet

    def add(self, event: Event) -> str:
        """Take an event. Returns its line; empty if it has none. Not safe for concurrent calls."""
        data = event.data
        if event.kind == events.NOTE:
            return _printable(data["text"])
        op = data["op"]
        if event.kind == events.WAITING:
            self._waiting[op] = event
            if data["seconds"] < self._next.get(op, self._first(data["what"])):
                return ""
            self._next[op] = data["seconds"] + _NEXT_LINE
            return _describe_wait(event, data["seconds"])
        self._waiting.pop(op, None)
        self._next.pop(op, None)
        if event.kind == events.BUILD_START or op not in self._ops:
            self._ops[op] = _OpProgress(event.at, data.get("steps", 0))
        state = self._ops[op]
        if event.kind == events.BUILD_START:
            plural = "" if data["steps"] == 1 else "s"
            return f"building {_printable(display_name(op))} ({data['steps']} step{plural})"
        if event.kind == events.STEP_START:
            state.running[data["step"]] = data["label"]
        elif event.kind == events.STEP_END:
            state.running.pop(data["step"], None)
            state.ended += 1
            state.cached += bool(data["cached"])
            state.compiled += not data["cached"] and data["label"] not in events.NO_COMPILES
        elif event.kind == events.BUILD_END:
            state.running.clear()
            state.over = True
            return self._summary(event, state)
        return ""

    def _first(self, what: str) -> float:
        if self._quiet:
            return _FIRST_QUIET_LINE
        return _FIRST_LINE if what == events.CPU else _FIRST_BUILD_LINE

    def _summary(self, event: Event, state: _OpProgress) -> str:
        op, wall = _printable(display_name(event.data["op"])), _seconds(event.data["wall"])
        colour, word = (_GREEN, "built") if event.data["ok"] else (_RED, "failed")
        word = f"{colour}{word}{_PLAIN}" if self._colour else word
        if not event.data["ok"]:
            return f"{word} {op} after {wall}"
        return f"{word} {op} in {wall} ({state.compiled} compiled, {state.cached} cached)"

    def active(self) -> bool:
        return bool(self._waiting) or not all(state.over for state in self._ops.values())

    def line(self, now: float) -> str:
        """One line about what runs now; empty if nothing does."""
        ended = sum(state.ended for state in self._ops.values())
        steps = max(ended, sum(state.steps for state in self._ops.values()))
        for op, state in reversed(self._ops.items()):
            if not state.over and (state.running or op not in self._waiting):
                label = next(reversed(state.running.values()), "")
                words = [
                    f"[{ended}/{steps}] {display_name(op)}",
                    label,
                    _seconds(now - state.started),
                ]
                return "  ".join(_printable(word) for word in words if word)
        for event in reversed(self._waiting.values()):
            return _describe_wait(event, event.data["seconds"] + now - event.at)
        return ""


class _Stream:
    """A stream that may go away."""

    def __init__(self, stream: TextIO) -> None:
        self._stream: TextIO | None = stream

    def write(self, text: str) -> None:
        if self._stream is None:
            return
        try:
            self._stream.write(text)
            self._stream.flush()
        except RuntimeError:
            return  # a signal handler has interrupted a write to the same stream: one line is lost
        except (OSError, ValueError):  # broken or closed: the build goes on without it
            self._stream = None

    def write_command(self, argv: Sequence[str]) -> None:
        """Print a command that is run, quoted for a shell. ``process.watch_starts`` calls it."""
        self.write(f"+ {_printable(shlex.join(argv))}\n")

    def width(self) -> int:
        try:
            return os.get_terminal_size(self._stream.fileno()).columns or 80 if self._stream else 80
        except (OSError, ValueError):
            return 80


class Lines:
    """Plain lines, for people who read logs. If ``kinds`` of events are named, only their lines are
    written. If ``quiet``, a wait is reported only after several seconds."""

    def __init__(
        self,
        stream: TextIO,
        *,
        kinds: tuple[str, ...] = (),
        colour: bool = False,
        quiet: bool = False,
    ) -> None:
        self._output = _Stream(stream)
        self._tally = _Tally(colour=colour, quiet=quiet)
        self._kinds = kinds
        self._lock = forks.lock()  # a signal handler may emit an event, too

    def __call__(self, event: Event) -> None:
        with self._lock:
            text = self._tally.add(event)
            if text and (not self._kinds or event.kind in self._kinds):
                self._write(f"{text}\n")

    def _write(self, line: str) -> None:
        self._output.write(line)


class Bar(Lines):
    """One line on a terminal, redrawn in place. A summary line stays for each op."""

    def __init__(self, stream: TextIO, *, colour: bool = True) -> None:
        super().__init__(stream, kinds=(events.BUILD_END, events.NOTE), colour=colour)
        self._closed = threading.Event()
        self._ticker: threading.Thread | None = None
        self._drawn = False

    def __call__(self, event: Event) -> None:
        with self._lock:
            super().__call__(event)
            self._draw()
            if self._ticker is None and self._tally.active():
                self._ticker = threading.Thread(
                    target=self._tick, name="opkiln-progress", daemon=True
                )
                self._ticker.start()

    def close(self) -> None:
        """Clear the line. Nothing is drawn after this."""
        self._closed.set()
        ticker = self._ticker
        if ticker is not None:
            ticker.join()
        with self._lock:
            self._erase()

    def _tick(self) -> None:
        while not self._closed.wait(_TICK):
            with self._lock:
                if not self._tally.active():
                    self._ticker = None
                    return
                self._draw()

    def _draw(self) -> None:
        line = "" if self._closed.is_set() else self._tally.line(time.monotonic())
        if line:
            # One column short: some terminals wrap a line that is as wide as they are.
            self._output.write(_CLEAR + line[: self._output.width() - 1])
            self._drawn = True
        else:
            self._erase()

    def _write(self, line: str) -> None:
        self._erase()
        super()._write(line)

    def _erase(self) -> None:
        if self._drawn:
            self._output.write(_CLEAR)
            self._drawn = False


class Log:
    """Writes log records: a failed build is a warning, commands and steps are debug records. Each
    record has the event and its data as the attribute ``opkiln``."""

    def __init__(self, logger: Logger) -> None:
        self._logger = logger
        self._tally = _Tally()
        self._lock = forks.lock()  # a signal handler may emit an event, too

    def __call__(self, event: Event) -> None:
        import logging

        with self._lock:
            text = self._tally.add(event)
        level = logging.INFO
        if event.kind in (events.STEP_START, events.STEP_END):
            level = logging.DEBUG
            text = f"{event.data['op']}: {event.data['label']}, {event.kind}"
        elif event.kind == events.BUILD_END and not event.data["ok"]:
            level = logging.WARNING
        if text:
            self._log(level, text, {"event": event.kind, **event.data})

    def command(self, argv: Sequence[str]) -> None:
        """Log a command that is run. ``process.watch_starts`` calls it."""
        import logging

        self._log(logging.DEBUG, shlex.join(argv), {"event": "command", "argv": tuple(argv)})

    def _log(self, level: int, text: str, data: dict[str, object]) -> None:
        self._logger.log(level, "%s", text, extra={"opkiln": data})


def _describe_wait(event: Event, seconds: float) -> str:
    data = event.data
    whom = f"pid {data['pid']}" if data["pid"] else "another process"
    text = f"waiting for {whom} on host {data['host']}, {_seconds(seconds)} ({data['what']})"
    return _printable(f"{display_name(data['op'])}  {text}")


def _is_terminal(stream: TextIO) -> bool:
    try:
        return stream.isatty()
    except ValueError:
        return False  # the stream is closed


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value < 10 else f"{value:.0f} s"


def _printable(text: str) -> str:
    """Replace unprintable characters: a file name may contain terminal control sequences."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)
