"""A note of each op that a process loads, and of each module that another JIT builds in it: what a
workload uses, so that it can be built before.

One line of JSON for each op, backend and target, and for each module, appended in one write, so
that all processes of a job can share a file. A line that is there already is not written again.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shlex
import time
import warnings
from typing import NamedTuple

from opkiln.base.model import CPU
from opkiln.building.recorded import RecordedModule
from opkiln.errors import OpkilnError, StoreError, StoreWarning

TYPE_CHECKING = False
if TYPE_CHECKING:
    from opkiln.base.model import Op

_PATIENCE = 5.0  # seconds to wait for the lock of the file


class Use(NamedTuple):
    """An op that a process loaded, and what for: architectures, or a CPU, empty for any."""

    distribution: str
    op: str
    backend: str
    archs: str


def note(file: str, op: Op) -> None:
    """Append an op to a file. One that cannot be written is a warning: the op is loaded anyway."""
    use = Use(op.spec.distribution, op.spec.name, op.spec.backend, _archs(op))
    append(file, use, f"op {use.op}")


def append(file: str, noted: NamedTuple, what: str) -> None:
    """Append a record to a file, unless it is there. If it cannot be written, that is a warning."""
    line = (json.dumps(noted._asdict()) + "\n").encode()
    try:
        fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            _lock(fd)
            known = os.pread(fd, os.fstat(fd).st_size, 0)
            if line not in known.splitlines(keepends=True):
                # After a line that a full disk cut off, this one must not go on with it.
                os.write(fd, line if known.endswith(b"\n") or not known else b"\n" + line)
        finally:
            os.close(fd)
    except OSError as error:
        warnings.warn(
            f"{what} is not noted in {file}: {error.strerror or error}", StoreWarning, stacklevel=4
        )


def _lock(fd: int) -> None:
    # For file systems of several hosts, where appending is no single step. Others do without.
    # A stopped process may hold the lock: a line that is written twice is better than a hang.
    deadline = time.monotonic() + _PATIENCE
    while time.monotonic() < deadline:
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                return
        else:
            return
        time.sleep(0.01)


def _archs(op: Op) -> str:
    """What the op is wanted for here; empty where nothing can tell, or it is the same anywhere."""
    from opkiln.decision import archs
    from opkiln.decision.archs import target_cpu

    try:
        if op.spec.backend != CPU:
            return ";".join(archs.find_wanted(op).archs)
        return str(target_cpu()) if op.spec.vectorize else ""
    except OpkilnError:
        return ""


def read(file: str) -> list[Use]:
    """The ops that were noted in a file, each once. Raises StoreError.

    What a full disk cut off is passed over.
    """
    return list(_parse(file)[0])


def read_modules(file: str) -> dict[str, RecordedModule]:
    """The modules of other programs that were noted, by name, each as it was the last time. Raises
    StoreError."""
    return _parse(file)[1]


def _parse(file: str) -> tuple[dict[Use, None], dict[str, RecordedModule]]:
    try:
        with open(file, encoding="utf-8", errors="surrogateescape") as lines:
            text = lines.read()
    except OSError as error:
        raise StoreError(
            f"{file} cannot be read: {error.strerror or error}",
            hint=f"opkiln cache record {shlex.quote(file)} -- COMMAND",
        ) from error
    found: dict[Use, None] = {}
    modules: dict[str, RecordedModule] = {}
    for line in text.splitlines():
        try:
            record = json.loads(line)
            if "levels" in record:
                module = RecordedModule.parse(record)
                modules[module.name] = module
                continue
            found[Use(*(str(record[name]) for name in Use._fields))] = None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue
    if text and not (found or modules):
        raise StoreError(
            f"{file} is no record of ops",
            hint=f"opkiln cache record OTHER -- COMMAND    # and leave {file} alone",
        )
    return found, modules
