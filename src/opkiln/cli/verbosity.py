"""``-q`` and ``-v``: every command takes them, and they mean the same for all.

They may stand before or after a command's name. ``-q`` leaves data and errors. ``-v`` adds every
program that is started, and what a build does, line by line.
"""

from __future__ import annotations

import functools
import platform
import shlex
import sys
from contextlib import ExitStack

import click

from opkiln import __version__, settings
from opkiln.cli import output
from opkiln.model import PACKAGE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_KEY = "opkiln.verbosity"
_PROGRESS = {output.QUIET: "off", output.VERBOSE: "verbose"}
_EQUIPPED = "_opkiln_verbosity"


def equip(command: click.Command) -> click.Command:
    """The command, and all below it, with both options. Calling it again has no effect."""
    if hasattr(command, _EQUIPPED):
        return command
    setattr(command, _EQUIPPED, True)
    command.params += [
        _option("-q", "--quiet", output.QUIET, "Print data and errors alone."),
        _option("-v", "--verbose", output.VERBOSE, "Print each program that is started, too."),
    ]
    if isinstance(command, click.Group):
        for inner in command.commands.values():
            equip(inner)
    elif command.callback is not None:
        command.callback = _within(command.callback, warns=command.name != "doctor")
    return command


def child_variables() -> dict[str, str]:
    """What tells a program that a command starts to be as quiet or as verbose."""
    progress = _PROGRESS.get(output.level())
    return {} if progress is None else {"OPKILN_PROGRESS": progress}


def _option(short: str, long: str, level: str, text: str) -> click.Option:
    def remember(context: click.Context, _option: click.Parameter, given: bool) -> None:
        if not given:
            return
        # One place for a command and those above it.
        if context.meta.setdefault(_KEY, level) != level:
            raise click.UsageError("--quiet and --verbose exclude each other", context)

    return click.Option(
        [short, long], is_flag=True, expose_value=False, callback=remember, help=text
    )


def _within(body: Callable[..., Any], *, warns: bool) -> Callable[..., Any]:
    @functools.wraps(body)
    def run(*arguments: Any, **options: Any) -> Any:
        level = click.get_current_context().meta.get(_KEY, output.NORMAL)
        with ExitStack() as stack:
            stack.enter_context(output.speaking(level))
            if level in _PROGRESS:
                stack.enter_context(settings.override(progress=_PROGRESS[level]))
            if level == output.VERBOSE:
                from opkiln import process

                python = f"Python {platform.python_version()} at {sys.executable}"
                output.say(f"opkiln {__version__} in {PACKAGE}, {python}")
                stack.enter_context(process.telling(_tell))
            if warns:
                for text in settings.unknown():
                    output.say(f"warning: {text}")
            return body(*arguments, **options)

    return run


def _tell(argv: Any) -> None:
    output.say(f"+ {shlex.join(argv)}")
