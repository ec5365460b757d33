"""``opkiln run``: an unmodified program, with its extensions built by opkiln.

The program must start quickly. So this module imports nothing of the command line, and
``start_now`` does without it.
"""

from __future__ import annotations

import os
import shlex
import sys

from opkiln import settings
from opkiln.base.model import PACKAGE
from opkiln.errors import SettingError, UsageError

_STARTUP = os.path.join(PACKAGE, "compat", "startup")


def start_now(arguments: list[str]) -> None:
    """Start the program of ``run COMMAND``. Returns only if more than the usual line has to be
    said, which the full command line then does."""
    if len(arguments) < 2 or arguments[0] != "run" or arguments[1].startswith("-"):
        return
    command = arguments[1:]
    try:
        for setting in settings.table():
            setting.resolve()
        if settings.misspelt() or not all(map(os.path.isabs, settings.settings.path)):
            return
    except SettingError:
        return
    program = next(settings.on_path(command[0]), None)
    line = announcement(command)
    if program is None or not line.isprintable() or sys.stderr is None:
        return
    try:
        sys.stderr.write(f"{line}\n" if line else "")
        sys.stderr.flush()
    except (OSError, UnicodeError):
        return
    os.execve(program, command, environment())  # noqa: S606 (argv as the user gave it, no shell)


def find(command: list[str]) -> tuple[str, list[str]]:
    """The program and its arguments, looked up as a shell does. Raises UsageError."""
    from shutil import which

    program = which(command[0])
    if program is not None:
        return program, command
    if command[0].endswith(".py") and os.path.isfile(command[0]):
        return sys.executable, [sys.executable, *command]
    raise UsageError(
        f"there is no program {command[0]!r}",
        why="it is neither on PATH nor an executable file",
        hint="opkiln run python -c 'import sys; print(sys.executable)'",
    )


def announcement(command: list[str]) -> str:
    """One line that says what opkiln builds. Empty if a build would be silent."""
    others = settings.settings.rank not in (None, 0)
    if settings.settings.progress in ("quiet", "off") or (
        settings.settings.progress == "auto" and others
    ):
        return ""
    deepspeed = any(ways for _, ways in settings.settings.deepspeed)
    what = "PyTorch extensions and DeepSpeed ops" if deepspeed else "PyTorch extensions"
    return f"opkiln builds the {what} of: {shlex.join(command)}"


def environment() -> dict[str, str]:
    """This process's environment, with what makes every Python start with the import hook."""
    # A named OPKILN_PROGRESS wins over the verbose=False that programs pass to torch's functions.
    given = {"OPKILN_PROGRESS": "auto", **settings.whole_environment()}
    others = [part for part in given.get("PYTHONPATH", "").split(os.pathsep) if part]
    paths = [_STARTUP, *(part for part in others if part != _STARTUP)]
    from opkiln.compat.ninja import front

    programs = [front.SHIM, *(part for part in settings.settings.path if part != front.SHIM)]
    return {
        **given,
        "PYTHONPATH": os.pathsep.join(paths),
        "OPKILN_PATCH_TORCH": "1",
        "PATH": os.pathsep.join(programs),
        **front.environment(),
    }
