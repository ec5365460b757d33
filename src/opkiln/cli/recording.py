"""``opkiln cache record``: which ops a command loads, for ``opkiln build --recorded``."""

from __future__ import annotations

import os

import click

from opkiln.cli import output, verbosity


@click.command(
    "record", short_help="Note which ops a command loads.",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)  # fmt: skip
@click.argument("file", type=click.Path(dir_okay=False))
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def record(file: str, command: tuple[str, ...]) -> int:
    """Run COMMAND and note in FILE which ops it loads, and for which devices.

    FILE is added to, by every process that COMMAND starts, so that several runs can share it;
    `opkiln build --recorded FILE` builds what is in it. Exits as COMMAND does. Setting
    OPKILN_RECORD=FILE does the same where COMMAND is started by something else.
    """
    from opkiln.loading.recording import read
    from opkiln.ship import prebuild

    argv = command[1:] if command[0] == "--" else command
    if not argv:
        raise click.UsageError("there is no command to run after --")
    status = prebuild.run_recorded(argv, file, **verbosity.child_variables())
    noted = len(read(file)) if os.path.exists(file) else 0
    output.say(f"{file}: {noted} op(s) noted" if noted else "no op was loaded")
    return status if status >= 0 else 128 - status
