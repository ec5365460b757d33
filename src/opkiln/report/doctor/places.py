"""Where builds work, and with what: the temporary directory, shared memory, CPUs and memory."""

from __future__ import annotations

import os
import shlex
import tempfile

from opkiln.engine import budget, cgroup
from opkiln.report.commands import as_root
from opkiln.report.doctor.terms import Here, Missing, Outcome, failed, joined, passed, warned
from opkiln.report.layout import count, size
from opkiln.report.machine import SHARED_MEMORY, Space, space
from opkiln.settings import origin_of, settings

_LITTLE, _TOO_LITTLE = 1 << 30, 64 << 20  # bytes: builds put their objects there
_SHARED_LEAST = 64 << 20  # bytes: the default of container runtimes
# Bytes that one compile needs at most: of a plain C++ source, and of one with torch's headers.
# Below the first, a build may be killed.
_LEAST, _ENOUGH = 512 << 20, 2 << 30


def elsewhere(least: int) -> str:
    """A directory with ``least`` free bytes that this user can write to and load libraries from;
    empty if there is none."""
    for place in ("/tmp", "/var/tmp", os.path.expanduser("~"), "/dev/shm"):
        if os.path.isdir(place) and os.access(place, os.W_OK | os.X_OK):
            found = space(place)
            if not found.noexec and not found.read_only and found.free >= least:
                return place
    return ""


# Directories


def tmpdir(_: Here) -> Outcome:
    """The temporary directory exists and can be written to. Writes a file to find out."""
    path = _tmpdir()
    if not os.path.lexists(path):
        return failed(f"{_named(path)} does not exist", f"mkdir -p -m 700 {shlex.quote(path)}")
    if not os.path.isdir(path):
        return failed(f"{_named(path)} is not a directory", _another())
    try:
        with tempfile.TemporaryFile(prefix="opkiln-doctor-", dir=path) as file:
            file.write(b"x" * 4096)
    except OSError as error:
        return failed(f"{_named(path)} cannot be written to: {error.strerror}", _another())
    return passed(_named(path))


def tmpdir_noexec(_: Here) -> Outcome:
    """Libraries can be loaded from the temporary directory, for load tests."""
    found = _tmpdir_space()
    if found.noexec:
        why = "is mounted noexec: libraries that are built there cannot be loaded"
        return failed(f"{_named(found.path)} {why}", _another())
    return passed(f"{found.path} is not mounted noexec")


def tmpdir_space(_: Here) -> Outcome:
    """The temporary directory has enough space for builds."""
    found = _tmpdir_space()
    facts = f"{found} at {found.path}"
    if found.inodes is not None and found.inodes < 100:
        return failed(f"{facts}, and only {found.inodes} inodes", _another())
    if found.free >= _LITTLE:
        return passed(facts)
    return (failed if found.free < _TOO_LITTLE else warned)(facts, _another())


def _tmpdir() -> str:
    return os.path.abspath(settings.tmpdir or "/tmp")


def _tmpdir_space() -> Space:
    if not os.path.isdir(_tmpdir()):
        raise Missing(f"{_tmpdir()} does not exist: see tmpdir")
    return space(_tmpdir())


def _named(path: str) -> str:
    origin = origin_of("tmpdir")[1]
    return f"{origin}={path}" if origin.isupper() else path


def _another() -> str:
    """The command that moves builds to a usable directory; empty if there is none."""
    other = elsewhere(_LITTLE)
    return f"export OPKILN_TMPDIR={shlex.quote(other)}" if other else ""


def shared_memory(_: Here) -> Outcome:
    """/dev/shm can be used: builds share their budget there, data loaders and NCCL their data."""
    try:
        found = space(SHARED_MEMORY)
        with tempfile.TemporaryFile(prefix="opkiln-doctor-", dir=SHARED_MEMORY):
            pass
    except OSError as error:
        return warned(
            f"{SHARED_MEMORY} cannot be written to ({error.strerror}): builds share their budget "
            "through the temporary directory instead, and torch's data loaders may fail",
            as_root(f"mount -t tmpfs -o size=8G,mode=1777 tmpfs {SHARED_MEMORY}"),
        )
    facts = str(found)
    larger = as_root(f"mount -o remount,size=8G {SHARED_MEMORY}")
    if found.total <= _SHARED_LEAST:
        return warned(
            f"{facts}: enough for builds, but data loaders and NCCL share memory through it "
            "(containers: --shm-size=8g)",
            larger,
        )
    return warned(f"{facts}: it is full", larger) if found.free < 1 << 20 else passed(facts)


# The budget of all builds of this user


def budget_cpus(_: Here) -> Outcome:
    """The number of jobs that run at once, and what limits it."""
    limits = budget.measure()
    facts = [f"{count(len(limits.slots), 'CPU')} by {limits.cpus_from}"]
    if (quota := cgroup.cpu_quota()) is not None:
        facts.append(f"a cgroup quota of {quota:g}")
    if settings.max_jobs:
        facts.append(f"at most {settings.max_jobs} jobs, set by {origin_of('max_jobs')[1]}")
    return passed(joined(*facts))


def budget_memory(_: Here) -> Outcome:
    """There is enough memory for one job."""
    limits = budget.measure()
    facts = f"{size(limits.memory)} ({limits.memory_from}), {size(limits.share)} for each CPU"
    if (limit := cgroup.memory_limit()) is not None:
        facts = f"{facts}; the cgroup's limit is {size(limit)}"
    command = "unset OPKILN_MEMORY" if limits.memory_from == "OPKILN_MEMORY" else ""
    if limits.memory < _LEAST:
        text = f"{facts}: less than one job needs ({size(_LEAST)}), so a job may be killed"
        return failed(text, command)
    if limits.memory < _ENOUGH:
        return warned(f"{facts}: one compile with torch's headers needs {size(_ENOUGH)}", command)
    return passed(facts)


def budget_sharing(_: Here) -> Outcome:
    """All processes of this user share one budget."""
    found = budget.shared().describe()
    refused = joined(*found.refused)
    command = "unset OPKILN_RUNTIME_DIR" if settings.runtime_dir else ""
    if found.where is None:
        return warned(f"each process has a budget of its own: {refused}", command)
    facts = joined(f"through {found.where}", f"not through {refused}" if refused else "")
    return warned(facts, command) if refused and command else passed(facts)
