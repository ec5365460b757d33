"""Output of all commands: data on standard output, messages on standard error, verbosity.

All commands take ``-q`` and ``-v``, before or after the command's name. ``-q`` leaves data and
errors. ``-v`` adds every program that is started, and what a build does, line by line.
"""

from __future__ import annotations

import errno
import functools
import json
import os
import platform
import re
import shlex
import sys
from collections.abc import Callable
from contextlib import ExitStack
from contextvars import ContextVar
from io import UnsupportedOperation
from typing import Any, TextIO

import click

from opkiln import __version__
from opkiln.base.model import PACKAGE
from opkiln.errors import OpkilnError, visible
from opkiln.report.layout import paint, plain
from opkiln.settings import override, settings, unknown

# Exit codes that no error class has; docs/cli.md lists them all.
FOUND = 1  # `check`: something is not cached; `demo`: FAIL
INTERRUPTED = 130

QUIET, NORMAL, VERBOSE = "quiet", "normal", "verbose"
_level: ContextVar[str] = ContextVar("opkiln_verbosity", default=NORMAL)

_LEVEL_KEY = "opkiln.verbosity"
_PROGRESS = {QUIET: "off", VERBOSE: "verbose"}

# Only these control characters reach a terminal. paint() makes them.
_KEPT = re.compile(r"(\n|\t|\x1b\[(?:0|1|2|31|32)m)")


def colour(stream: TextIO | None) -> bool:
    """Whether ``stream`` gets colour: it is a terminal, and ``NO_COLOR`` is not set."""
    return is_terminal(stream) and not settings.no_color


def width() -> int | None:
    """The width of the terminal; None if the output goes elsewhere and is not wrapped."""
    if not is_terminal(sys.stdout):
        return None
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or None
    except OSError:
        return None  # the terminal does not say


def data(text: str) -> None:
    """Print the answer of a command. Raises OSError if standard output cannot be written."""
    _answer(_fit(text, sys.stdout))


def data_json(value: Any) -> None:
    """Print the answer of a command as JSON: records as objects. An object that has no ``schema``
    gets 1. Raises OSError as ``data`` does."""
    document = {"schema": 1, **value} if isinstance(value, dict) else value
    _answer(json.dumps(plain(document), indent=2))


def answer(as_json: bool, document: dict[str, Any], text: str, note: str = "") -> None:
    """Print the answer of a command as JSON, or as text with a ``note`` for people. Raises OSError
    as ``data`` does."""
    if as_json:
        data_json(document)
    else:
        data(text)
        if note:
            say(note)


def data_file(content: bytes) -> None:
    """Print bytes unchanged as the answer of a command. Raises OSError as ``data`` does."""
    _answer(content, end=False)


def level() -> str:
    """The current verbosity."""
    return _level.get()


def say(text: str) -> None:
    """Print a message for people; nothing with ``-q``."""
    if level() != QUIET:
        say_always(text)


def say_always(text: str) -> None:
    """Print why a command ended early; also with ``-q``."""
    try:
        click.echo(_fit(text, sys.stderr), err=True, color=colour(sys.stderr))
    except OSError:
        pass  # standard error is full or closed: there is nowhere left to write


def discard() -> None:
    """Redirect standard output to nowhere, so that the interpreter does not flush it again."""
    if sys.stdout is None:
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, sys.stdout.fileno())
    except UnsupportedOperation:
        pass  # it is not a file: a test collects the output in this process
    finally:
        os.close(nowhere)


def say_error(text: str, hint: str = "") -> None:
    """Print ``error: …`` and ``hint: …``; also with ``-q``."""
    say_always(f"{paint('error:', 'bad')} {text}")
    if hint:
        say_always(f"{paint('hint:', 'strong')} {hint}")


def say_failure(error: OpkilnError) -> None:
    """Print all three parts of an error."""
    lines = [error.what, *(f"  {line}" for line in error.why.splitlines())]
    say_error("\n".join(lines), error.hint)


def _answer(content: str | bytes, *, end: bool = True) -> None:
    if sys.stdout is None:  # it was closed before we started
        raise OSError(errno.EBADF, "standard output is closed")
    try:
        click.echo(content, nl=end, color=colour(sys.stdout))
    except BrokenPipeError:
        raise
    except OSError as error:
        told = f"standard output cannot be written: {error.strerror}"
        raise OSError(error.errno, told) from error


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a stream is a terminal, which shows what is written at once."""
    return stream is not None and stream.isatty()


def _fit(text: str, stream: TextIO | None) -> str:
    """``text`` as ``stream`` can show it.

    A path may not be valid text, and text from elsewhere may contain control characters.
    """
    if stream is None:
        return text
    if is_terminal(stream):
        parts = _KEPT.split(text)
        text = "".join(part if _KEPT.fullmatch(part) else visible(part) for part in parts)
    encoding = stream.encoding or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


# -q and -v


def equip(command: click.Command) -> click.Command:
    """Add both options to a command and its sub-commands."""
    command.params += [
        _level_option("-q", "--quiet", QUIET, "Print only data and errors."),
        _level_option("-v", "--verbose", VERBOSE, "Also print each program that is started."),
    ]
    if isinstance(command, click.Group):
        for inner in command.commands.values():
            equip(inner)
    elif command.callback is not None:
        command.callback = _add_verbosity(command.callback, warns=command.name != "doctor")
    return command


def child_variables() -> dict[str, str]:
    """The environment variables that give a child process the same verbosity."""
    progress = _PROGRESS.get(level())
    return {} if progress is None else {"OPKILN_PROGRESS": progress}


def _level_option(short: str, long: str, level: str, text: str) -> click.Option:
    def remember(context: click.Context, _option: click.Parameter, given: bool) -> None:
        if not given:
            return
        # A command and its groups share this value.
        if context.meta.setdefault(_LEVEL_KEY, level) != level:
            raise click.UsageError("--quiet and --verbose exclude each other", context)

    return click.Option(
        [short, long], is_flag=True, expose_value=False, callback=remember, help=text
    )


def _add_verbosity(body: Callable[..., Any], *, warns: bool) -> Callable[..., Any]:
    @functools.wraps(body)
    def run(*arguments: Any, **options: Any) -> Any:
        level = click.get_current_context().meta.get(_LEVEL_KEY, NORMAL)
        with ExitStack() as stack:
            stack.callback(_level.reset, _level.set(level))
            if level in _PROGRESS:
                stack.enter_context(override(progress=_PROGRESS[level]))
            if level == VERBOSE:
                from opkiln.run import process

                python = f"Python {platform.python_version()} at {sys.executable}"
                say(f"opkiln {__version__} in {PACKAGE}, {python}")
                stack.enter_context(process.watch_starts(lambda argv: say(f"+ {shlex.join(argv)}")))
            if warns:
                for text in unknown():
                    say(f"warning: {text}")
            return body(*arguments, **options)

    return run
