"""``opkiln run``: a program that knows nothing of opkiln, with its extensions built by it."""

from __future__ import annotations

import os
import shutil
import sys

import click

from opkiln import settings
from opkiln.errors import UsageError
from opkiln.model import PACKAGE

_STARTUP = os.path.join(PACKAGE, "compat", "startup")


@click.command(
    "run",
    short_help="Run a program with its PyTorch extensions built by opkiln.",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="COMMAND…")
def command(command: tuple[str, ...]) -> None:
    """Run COMMAND, an unmodified program, with opkiln in the place of torch.utils.cpp_extension and
    of DeepSpeed's op builders.

    \b
        opkiln run python train.py
        opkiln run train.py
        opkiln run pip install --no-build-isolation some-extension

    It holds for every Python that COMMAND starts, and changes nothing on disk. COMMAND is looked
    for as a shell does it; a FILE.py that is no program is run by this Python. OPKILN_PATCH_TORCH=1
    does the same for a Python that has opkiln installed. OPKILN_DEEPSPEED says what DeepSpeed's
    builders get.
    """
    words = list(command)
    program = shutil.which(words[0])
    if program is None and words[0].endswith(".py") and os.path.isfile(words[0]):
        words.insert(0, sys.executable)
        program = sys.executable
    if program is None:
        raise UsageError(
            f"{words[0]!r} is no program here",
            why="it is neither on PATH nor an executable file",
            hint="opkiln run python -c 'import sys; print(sys.executable)'",
        )
    sys.stdout.flush()
    os.execve(program, words, _environment())  # noqa: S606 (argv as the user gave it, no shell)


def _environment() -> dict[str, str]:
    """This process's environment, with what has Python start with the exchange."""
    given = settings.whole_environment()
    others = [part for part in given.get("PYTHONPATH", "").split(os.pathsep) if part]
    paths = [_STARTUP, *(part for part in others if part != _STARTUP)]
    return {**given, "PYTHONPATH": os.pathsep.join(paths), "OPKILN_PATCH_TORCH": "1"}
