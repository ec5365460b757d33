"""The directories that builds pass through: the temporary one, and shared memory."""

from __future__ import annotations

import os
import shlex
import tempfile

from opkiln.report.doctor import room
from opkiln.report.doctor.finding import Outcome, failed, passed, skipped, warned
from opkiln.report.doctor.here import Here
from opkiln.report.doctor.packages import as_root
from opkiln.report.layout import size
from opkiln.settings import origin_of, settings

_LITTLE, _TOO_LITTLE = 1 << 30, 64 << 20  # bytes: builds are staged there, objects and all
_SHM = "/dev/shm"
_SHM_LEAST = 64 << 20  # what container runtimes give unless they are told otherwise


def tmpdir(here: Here) -> Outcome:  # noqa: ARG001 (the form of a check)
    """The temporary directory is there and can be written to: tried with a file."""
    path = _tmpdir()
    quoted = shlex.quote(path)
    if not os.path.isdir(path):
        if os.path.lexists(path):
            return failed(f"{_named(path)} is not a directory", _another())
        return failed(f"{_named(path)} does not exist", f"mkdir -p -m 700 {quoted}")
    try:
        with tempfile.TemporaryFile(prefix="opkiln-doctor-", dir=path) as file:
            file.write(b"x" * 4096)
    except OSError as error:
        return failed(f"{_named(path)} cannot be written to: {error.strerror}", _another())
    return passed(_named(path))


def tmpdir_noexec(here: Here) -> Outcome:  # noqa: ARG001
    """What is built can be load-tested where it is built."""
    path = _tmpdir()
    if not os.path.isdir(path):
        return skipped(f"{path} is not there: see tmpdir")
    if room.of(path).noexec:
        return failed(
            f"{_named(path)} is mounted noexec: a library that is built there cannot be loaded",
            _another(),
        )
    return passed(f"{path} is not mounted noexec")


def tmpdir_space(here: Here) -> Outcome:  # noqa: ARG001
    """Builds have room."""
    path = _tmpdir()
    if not os.path.isdir(path):
        return skipped(f"{path} is not there: see tmpdir")
    found = room.of(path)
    facts = f"{size(found.free)} free of {size(found.total)} at {path}"
    if found.inodes is not None and found.inodes < 100:
        return failed(f"{facts}, and only {found.inodes} inodes", _another())
    if found.free >= _LITTLE:
        return passed(facts)
    return (failed if found.free < _TOO_LITTLE else warned)(facts, _another())


def _tmpdir() -> str:
    return os.path.abspath(settings.tmpdir or "/tmp")


def _named(path: str) -> str:
    origin = origin_of("tmpdir")[1]
    return f"{origin}={path}" if origin.isupper() else path


def _another() -> str:
    """The command that has builds staged where they can be; empty where that is nowhere."""
    other = room.elsewhere(_LITTLE)
    return f"export OPKILN_TMPDIR={shlex.quote(other)}" if other else ""


def shared_memory(here: Here) -> Outcome:  # noqa: ARG001
    """/dev/shm: builds share their budget through it, data loaders and NCCL their data."""
    try:
        found = os.statvfs(_SHM)
        with tempfile.TemporaryFile(prefix="opkiln-doctor-", dir=_SHM):
            pass
    except OSError as error:
        return warned(
            f"{_SHM} cannot be written to ({error.strerror}): builds share their budget through "
            "the temporary directory instead, and torch's data loaders may fail",
            as_root(f"mount -t tmpfs -o size=8G,mode=1777 tmpfs {_SHM}"),
        )
    total, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    facts = f"{size(free)} free of {size(total)}"
    larger = as_root(f"mount -o remount,size=8G {_SHM}")
    if total <= _SHM_LEAST:
        return warned(
            f"{facts}: enough for builds, but data loaders and NCCL share memory through it "
            "(containers: --shm-size=8g)",
            larger,
        )
    return warned(f"{facts}: it is full", larger) if free < 1 << 20 else passed(facts)
