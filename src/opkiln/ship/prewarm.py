"""Building just what a workload uses: by a record of its ops, or by running it."""

from __future__ import annotations

import os
import sys

from opkiln import process
from opkiln.errors import BuildError, UnknownOp
from opkiln.loading import recording
from opkiln.model import ONE_CALL
from opkiln.registry import ALL_OPS, listed_as
from opkiln.settings import whole_environment
from opkiln.ship import prebuild
from opkiln.ship.prebuild import SKIPPED, Asked, Outcome
from opkiln.ship.targets import Wanted

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence


def requests(file: str, wanted: Sequence[Wanted] = (), *, ran_here: bool = False) -> Asked:
    """What to build for a record: each op for what it was used for, or for ``wanted``.

    What `opkiln.load` compiled belongs to no package and cannot be asked for by name: it is among
    the refused, as skipped; unless the program ``ran_here``, which then compiled it. Raises
    StoreError for the file, UnknownOp for an op that is not installed.
    """
    asked: list[prebuild.Request] = []
    refused: list[Outcome] = []
    for use in recording.read(file):
        if use.distribution == ONE_CALL:
            reason = "opkiln.load() compiles it, which only the program that calls it can do"
            if not ran_here:
                refused.append(Outcome(use.op, SKIPPED, use.backend, reason=reason))
            continue
        for_ = list(wanted) or [Wanted(use.backend, use.archs)]
        found = prebuild.requests(ALL_OPS, [_registered(use)], for_, named=True)
        asked += [each for each in found.requests if _new(each, asked)]
        refused += found.refused
    return Asked(tuple(asked), tuple(dict.fromkeys(refused)))


def _registered(use: recording.Use) -> str:
    """The op's name among all of them. Raises UnknownOp where only others' ops have its name."""
    owners = {name: ALL_OPS[name]().distribution for name in listed_as(use.op) or (use.op,)}
    for name, owner in owners.items():
        if owner == use.distribution:
            return name
    raise UnknownOp(
        f"op {use.op} of {use.distribution} is not installed here",
        why=f"the op of this name is one of {', '.join(owners.values())}",
        hint=f"pip install {use.distribution}",
    )


def _new(request: prebuild.Request, asked: list[prebuild.Request]) -> bool:
    known = ((each.op, each.builder.backend, each.wanted) for each in asked)
    return (request.op, request.builder.backend, request.wanted) not in known


def run_script(script: str, arguments: Sequence[str], file: str, **changes: str) -> None:
    """Run a Python script to its end, and have the ops that it loads noted in a file.

    ``changes`` are variables for it, beside this process's own.
    Nothing is compiled in it but what has no reference. Raises BuildError where it fails.
    """
    argv = (sys.executable, script, *arguments)
    status = run(argv, file, OPKILN_MODE="needed", **changes)
    if status != 0:
        how = f"exit status {status}" if status > 0 else f"signal {-status}"
        raise BuildError(
            f"{script} ended with {how}, and nothing was built",
            why="what it would have loaded after that is not known",
            hint=f"python {script}    # once it runs, build for it again",
        )


def run(argv: Sequence[str], file: str, **changes: str) -> int:
    """Run a command of the user's in the foreground, with recording; returns its exit status.

    Raises ToolchainError where it cannot be started.
    """
    environment = {**whole_environment(), "OPKILN_RECORD": os.path.abspath(file), **changes}
    return process.attend(argv, env=environment)
