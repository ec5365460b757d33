"""What all ranks of a job have agreed on: this process serves exactly that, and nothing better.

``opkiln.cluster`` pins; ``decide`` obeys. A rank that found a newer library, or could not open the
agreed one and ran the reference instead, would compute other numbers than the others.
"""

from __future__ import annotations

import os

from opkiln import trust
from opkiln.digest import open_regular, sha256_file
from opkiln.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from opkiln.model import Artifact, Op, OpSpec


class Pin(Record):
    """A library, or the reference and why."""

    spec: OpSpec
    artifact: Artifact | None
    reason: str = ""
    passing: bool = False  # the job still prepares a library, as the program asked it to
    # Says what an op computes in Python otherwise than was agreed on, in a word or two; None if
    # that was not compared.
    find_change: Callable[[Op], str] | None = None


_pins: dict[tuple[str, str, str], Pin] = {}


def pin(
    op: Op,
    artifact: Artifact | None,
    reason: str = "",
    *,
    passing: bool = False,
    find_change: Callable[[Op], str] | None = None,
) -> Pin:
    """From now on serve this library; None is the reference."""
    made = _pins[op.name] = Pin(op.spec, artifact, reason, passing, find_change)
    return made


def pinned(op: Op) -> Pin | None:
    """What was agreed on for an op."""
    return _pins.get(op.name)


def release(op: Op) -> None:
    """Forget what was agreed on."""
    _pins.pop(op.name, None)


def fault(artifact: Artifact) -> str:
    """Why a pinned library must not be opened; empty if it is what was agreed on."""
    path = artifact.path
    in_memory = path.startswith("/proc/")  # of a bundle: nobody can change it any more
    try:
        if not in_memory and (reason := trust.fault(
            path, os.lstat(path), listed=artifact.origin not in ("store", "built")
        )):  # fmt: skip
            return reason
        with open_regular(path) as (fd, _):
            found = sha256_file(fd)
    except OSError as error:
        return f"{path}: {error.strerror or error}"
    return "" if found == artifact.sha256 else f"{path} has the SHA-256 {found}"
