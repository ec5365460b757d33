"""``opkiln run``: an unmodified program, with its extensions built by opkiln."""

from __future__ import annotations

import os
import shlex
import shutil
import sys

import click

from opkiln import settings
from opkiln.cli import output
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
    """Run COMMAND, an unmodified program, with opkiln in place of torch.utils.cpp_extension and of
    DeepSpeed's op builders.

    \b
        opkiln run python train.py
        opkiln run train.py
        opkiln run pip install --no-build-isolation ./some-extension

    One line on standard error says that opkiln took over, and opkiln then shows what it builds; -q
    silences both. This holds for every Python that COMMAND starts, and nothing on disk changes.
    COMMAND is looked up as in a shell; this Python runs a FILE.py that is not executable.
    OPKILN_PATCH_TORCH=1 does the same for a Python that has opkiln installed. OPKILN_DEEPSPEED
    chooses what DeepSpeed's builders load.
    """
    words = list(command)
    program = shutil.which(words[0])
    if program is None and words[0].endswith(".py") and os.path.isfile(words[0]):
        words.insert(0, sys.executable)
        program = sys.executable
    if program is None:
        raise UsageError(
            f"there is no program {words[0]!r}",
            why="it is neither on PATH nor an executable file",
            hint="opkiln run python -c 'import sys; print(sys.executable)'",
        )
    _tell(command)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(program, words, _environment())  # noqa: S606 (argv as the user gave it, no shell)


def _tell(command: tuple[str, ...]) -> None:
    """Say in one line what opkiln builds. Silent if a build would be silent."""
    others = settings.settings.rank not in (None, 0)
    if settings.settings.progress == "off" or (settings.settings.progress == "auto" and others):
        return
    deepspeed = any(ways for _, ways in settings.settings.deepspeed)
    what = "PyTorch extensions and DeepSpeed ops" if deepspeed else "PyTorch extensions"
    output.say(f"opkiln builds the {what} of: {shlex.join(command)}")


def _environment() -> dict[str, str]:
    """This process's environment, with what makes every Python start with the import hook."""
    # A named OPKILN_PROGRESS wins over the verbose=False that programs pass to torch's functions.
    given = {"OPKILN_PROGRESS": "auto", **settings.whole_environment()}
    given |= output.child_variables()
    others = [part for part in given.get("PYTHONPATH", "").split(os.pathsep) if part]
    paths = [_STARTUP, *(part for part in others if part != _STARTUP)]
    return {**given, "PYTHONPATH": os.pathsep.join(paths), "OPKILN_PATCH_TORCH": "1"}
