"""What every command shares: data to standard output, words to standard error."""

from __future__ import annotations

import errno
import json
import os
import re
import sys
from contextlib import contextmanager
from contextvars import ContextVar
from io import UnsupportedOperation
from typing import Any

import click

from opkiln.report.layout import paint, visible
from opkiln.settings import settings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import TextIO

    from opkiln.errors import OpkilnError

# Exit codes that no error class has; docs/cli.md lists them all.
FOUND = 1  # `check`: something is not cached; `demo`: FAIL
INTERRUPTED = 130

QUIET, NORMAL, VERBOSE = "quiet", "normal", "verbose"
_level: ContextVar[str] = ContextVar("opkiln_verbosity", default=NORMAL)

_KEPT = re.compile(
    r"(\n|\t|\x1b\[(?:0|1|2|31|32)m)"
)  # of what a terminal obeys: what paint() makes


def colour(stream: TextIO | None = None) -> bool:
    """Whether to colour what goes to ``stream`` (standard output): a terminal, no ``NO_COLOR``."""
    target = sys.stdout if stream is None else stream
    return _is_terminal(target) and not settings.no_color


def width() -> int | None:
    """Of the terminal; None where the output goes elsewhere, and lines are for programs."""
    if not _is_terminal(sys.stdout):
        return None
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or None
    except OSError:
        return None  # a terminal that does not say


def data(text: str) -> None:
    """The answer of a command. Raises OSError where standard output takes none."""
    _answer(_fit(text, sys.stdout))


def data_json(value: Any) -> None:
    """The answer of a command, for programs. Raises OSError as ``data`` does."""
    _answer(json.dumps(value, indent=2))


def data_file(content: bytes) -> None:
    """The answer of a command, byte by byte. Raises OSError as ``data`` does."""
    _answer(content, end=False)


@contextmanager
def speaking(level: str) -> Iterator[None]:
    """Within the block, commands speak as ``-q`` or ``-v`` ask; ``NORMAL`` is without either."""
    token = _level.set(level)
    try:
        yield
    finally:
        _level.reset(token)


def level() -> str:
    """How commands speak now."""
    return _level.get()


def say(text: str) -> None:
    """Words for people, beside the answer; none with ``-q``."""
    if _level.get() != QUIET:
        _write(text)


def say_end(text: str) -> None:
    """Why a command ended early; also with ``-q``."""
    _write(text)


def _write(text: str) -> None:
    try:
        click.echo(_fit(text, sys.stderr), err=True, color=colour(sys.stderr))
    except OSError:
        pass  # standard error is full, or gone: there is nobody left who could be told


def discard() -> None:
    """Give up standard output: the interpreter must not try to flush again what failed."""
    if sys.stdout is None:
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, sys.stdout.fileno())
    except UnsupportedOperation:
        pass  # no file, and so no interpreter's: somebody collects what is written in this process
    finally:
        os.close(nowhere)


def say_error(text: str, hint: str = "") -> None:
    """``error: …`` and ``hint: …``; also with ``-q``."""
    red = colour(sys.stderr)
    _write(f"{paint('error:', 'bad', colour=red)} {text}")
    if hint:
        _write(f"{paint('hint:', 'strong', colour=red)} {hint}")


def say_failure(error: OpkilnError) -> None:
    """All three parts of an error."""
    lines = [error.what, *(f"  {line}" for line in error.why.splitlines())]
    say_error("\n".join(lines), error.hint)


def _answer(content: str | bytes, *, end: bool = True) -> None:
    if sys.stdout is None:  # it was closed before we started
        raise OSError(errno.EBADF, "standard output is closed")
    try:
        click.echo(content, nl=end, color=colour())
    except BrokenPipeError:
        raise
    except OSError as error:
        told = f"standard output cannot be written: {error.strerror}"
        raise OSError(error.errno, told) from error


def _is_terminal(stream: TextIO | None) -> bool:
    return stream is not None and stream.isatty()


def _fit(text: str, stream: TextIO | None) -> str:
    """What ``stream`` can show of a text: paths may be no text, and texts of others may steer."""
    if stream is None:
        return text
    if _is_terminal(stream):
        parts = _KEPT.split(text)
        text = "".join(part if _KEPT.fullmatch(part) else visible(part) for part in parts)
    encoding = stream.encoding or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)
