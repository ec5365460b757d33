"""What every command shares: data to standard output, words to standard error."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import click

from opkiln.report.layout import paint
from opkiln.settings import settings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TextIO

    from opkiln.errors import OpkilnError

# Exit codes that no error class has; docs/cli.md lists them all.
FOUND = 1  # `check`: something is not cached; `demo`: FAIL
INTERRUPTED = 130


def colour(stream: TextIO | None = None) -> bool:
    """Whether to colour what goes to ``stream`` (standard output): a terminal, no ``NO_COLOR``."""
    return (stream or sys.stdout).isatty() and not settings.no_color


def width() -> int | None:
    """Of the terminal; None where the output goes elsewhere, and lines are for programs."""
    if not sys.stdout.isatty():
        return None
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or None
    except OSError:
        return None  # a terminal that does not say


def data(text: str) -> None:
    """The answer of a command."""
    click.echo(text, color=colour())


def data_json(value: Any) -> None:
    """The answer of a command, for programs."""
    click.echo(json.dumps(value, indent=2))


def say(text: str) -> None:
    """Words for people, beside the answer."""
    click.echo(text, err=True, color=colour(sys.stderr))


def say_error(text: str, hint: str = "") -> None:
    """``error: …`` and ``hint: …``."""
    red = colour(sys.stderr)
    say(f"{paint('error:', 'bad', colour=red)} {text}")
    if hint:
        say(f"{paint('hint:', 'strong', colour=red)} {hint}")


def say_failure(error: OpkilnError) -> None:
    """All three parts of an error."""
    lines = [error.what, *(f"  {line}" for line in error.why.splitlines())]
    say_error("\n".join(lines), error.hint)
