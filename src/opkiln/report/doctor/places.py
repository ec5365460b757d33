"""Where builds work, and with what: the temporary directory, shared memory, CPUs and memory."""

from __future__ import annotations

import os
import shlex
import tempfile
from typing import NamedTuple

from opkiln.engine import budget, cgroup
from opkiln.report.commands import as_root
from opkiln.report.doctor.finding import Outcome, failed, joined, passed, skipped, warned
from opkiln.report.doctor.here import Here
from opkiln.report.layout import size
from opkiln.settings import origin_of, settings

_LITTLE, _TOO_LITTLE = 1 << 30, 64 << 20  # bytes: builds put their objects there
_SHM = "/dev/shm"
_SHM_LEAST = 64 << 20  # bytes: the default of container runtimes
# Bytes that one compile needs at most: of a plain C++ source, and of one with torch's headers.
# Below the first, a build may be killed.
_LEAST, _ENOUGH = 512 << 20, 2 << 30


class Room(NamedTuple):
    """The file system of a directory that exists or would be made."""

    path: str  # the nearest directory that exists
    free: int  # bytes for this user
    total: int
    inodes: int | None  # left for this user; None if the file system has no limit
    noexec: bool
    read_only: bool


def room(path: str) -> Room:
    """The file system of ``path``, which need not exist. Raises OSError."""
    there = os.path.abspath(path)
    while not os.path.isdir(there) and there != "/":
        there = os.path.dirname(there)
    found = os.statvfs(there)
    return Room(
        path=there,
        free=found.f_bavail * found.f_frsize,
        total=found.f_blocks * found.f_frsize,
        inodes=found.f_favail if found.f_files else None,
        noexec=bool(found.f_flag & os.ST_NOEXEC),
        read_only=bool(found.f_flag & os.ST_RDONLY),
    )


def elsewhere(least: int) -> str:
    """A directory with ``least`` free bytes that this user can write to and load libraries from;
    empty if there is none."""
    for place in ("/tmp", "/var/tmp", os.path.expanduser("~"), "/dev/shm"):
        if os.path.isdir(place) and os.access(place, os.W_OK | os.X_OK):
            found = room(place)
            if not found.noexec and not found.read_only and found.free >= least:
                return place
    return ""


# Directories


def tmpdir(here: Here) -> Outcome:  # noqa: ARG001 (the form of a check)
    """The temporary directory exists and can be written to. Writes a file to find out."""
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
    """Libraries can be loaded from the temporary directory, for load tests."""
    path = _tmpdir()
    if not os.path.isdir(path):
        return skipped(f"{path} does not exist: see tmpdir")
    if room(path).noexec:
        return failed(
            f"{_named(path)} is mounted noexec: libraries that are built there cannot be loaded",
            _another(),
        )
    return passed(f"{path} is not mounted noexec")


def tmpdir_space(here: Here) -> Outcome:  # noqa: ARG001
    """The temporary directory has enough space for builds."""
    path = _tmpdir()
    if not os.path.isdir(path):
        return skipped(f"{path} does not exist: see tmpdir")
    found = room(path)
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
    """The command that moves builds to a usable directory; empty if there is none."""
    other = elsewhere(_LITTLE)
    return f"export OPKILN_TMPDIR={shlex.quote(other)}" if other else ""


def shared_memory(here: Here) -> Outcome:  # noqa: ARG001
    """/dev/shm can be used: builds share their budget there, data loaders and NCCL their data."""
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


# The budget of all builds of this user


def budget_cpus(here: Here) -> Outcome:  # noqa: ARG001 (the form of a check)
    """The number of jobs that run at once, and what limits it."""
    limits = budget.measure()
    quota = cgroup.cpu_quota()
    noun = "CPU" if len(limits.slots) == 1 else "CPUs"
    limited = "" if quota is None else f"a cgroup quota of {quota:g}"
    jobs = f"at most {settings.max_jobs} jobs, set by {origin_of('max_jobs')[1]}"
    return passed(joined(f"{len(limits.slots)} {noun} by {limits.cpus_from}", limited,
                         jobs if settings.max_jobs else ""))  # fmt: skip


def budget_memory(here: Here) -> Outcome:  # noqa: ARG001
    """There is enough memory for one job."""
    limits = budget.measure()
    share = f"{size(limits.memory)} ({limits.memory_from}), {size(limits.share)} for each CPU"
    limit = cgroup.memory_limit()
    facts = joined(share, "" if limit is None else f"the cgroup's limit is {size(limit)}")
    command = "unset OPKILN_MEMORY" if limits.memory_from == "OPKILN_MEMORY" else ""
    if limits.memory < _LEAST:
        text = f"{facts}: less than one job needs ({size(_LEAST)}), so a job may be killed"
        return failed(text, command)
    if limits.memory < _ENOUGH:
        return warned(f"{facts}: one compile with torch's headers needs {size(_ENOUGH)}", command)
    return passed(facts)


def budget_sharing(here: Here) -> Outcome:  # noqa: ARG001
    """All processes of this user share one budget."""
    found = budget.shared().describe()
    refused = joined(*found.refused)
    if found.where is None:
        return warned(f"each process has a budget of its own: {refused}",
                      "unset OPKILN_RUNTIME_DIR" if settings.runtime_dir else "")  # fmt: skip
    if found.refused and settings.runtime_dir:
        return warned(f"through {found.where}; not through {refused}", "unset OPKILN_RUNTIME_DIR")
    return passed(joined(f"through {found.where}", f"not through {refused}" if refused else ""))
