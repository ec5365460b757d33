"""The machine and what it grants this process: read from files and the kernel, nothing is run."""

from __future__ import annotations

import os
import resource
import sys
from typing import NamedTuple

from opkiln import machine as this
from opkiln.arch import cpu
from opkiln.decision.target import features
from opkiln.engine import cgroup

_SHARED_MEMORY = "/dev/shm"
# What jobs run into: pinned memory, open files (one per worker and socket), processes.
_LIMITS = (
    ("memlock", resource.RLIMIT_MEMLOCK),
    ("nofile", resource.RLIMIT_NOFILE),
    ("nproc", resource.RLIMIT_NPROC),
)


class Space(NamedTuple):
    """Room on a file system, in bytes."""

    path: str
    total: int
    free: int


class Limit(NamedTuple):
    """A limit of this process, as ``ulimit`` has it. None: unlimited."""

    name: str
    soft: int | None
    hard: int | None


class Cgroup(NamedTuple):
    """The control group of this process. None: it sets no limit, or says nothing."""

    path: str
    cpu_quota: float | None
    memory_limit: int | None
    cpus: int | None


class Machine(NamedTuple):
    """What opkiln runs on."""

    python: str
    executable: str
    system: str
    cpu: str  # its name, for people
    level: str  # its target: a psABI level and the features beyond
    simd: str
    shared_memory: Space | None  # None: there is no /dev/shm
    limits: tuple[Limit, ...]
    cgroup: Cgroup


def machine(root: str = "/") -> Machine:
    """This interpreter, system, CPU and their limits."""
    family = this.architecture()
    native = cpu.native(family, features())
    return Machine(
        python=".".join(str(part) for part in sys.version_info[:3]),
        executable=sys.executable or "",
        system=f"{_distribution(root)} ({this.system()} {os.uname().release}, {family})",
        cpu=this.cpu_name(),
        level=str(native),
        simd=cpu.simd(family, native),
        shared_memory=space(_SHARED_MEMORY) if os.path.isdir(_SHARED_MEMORY) else None,
        limits=tuple(_limit(name, which) for name, which in _LIMITS),
        cgroup=_cgroup(root),
    )


def space(path: str) -> Space | None:
    """The room where a path is, or will be. None where the kernel does not say."""
    while not os.path.lexists(path):
        path = os.path.dirname(path)
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    # Free to this user, without what is kept for root.
    return Space(path, found.f_frsize * found.f_blocks, found.f_frsize * found.f_bavail)


def _limit(name: str, which: int) -> Limit:
    soft, hard = (None if v == resource.RLIM_INFINITY else v for v in resource.getrlimit(which))
    return Limit(name, soft, hard)


def _cgroup(root: str) -> Cgroup:
    cpus = cgroup.cpus(root)
    return Cgroup(
        path=_group(root),
        cpu_quota=cgroup.cpu_quota(root),
        memory_limit=cgroup.memory_limit(root),
        cpus=None if cpus is None else len(cpus),
    )


def _group(root: str) -> str:
    """The group's path as the kernel gives it: version 2's, else the first of version 1."""
    lines = _lines(os.path.join(root, "proc/self/cgroup"))
    paths = {line.split(":", 2)[1]: line.split(":", 2)[2] for line in lines if line.count(":") > 1}
    return paths.get("") or next(iter(paths.values()), "")


def _distribution(root: str) -> str:
    for line in _lines(os.path.join(root, "etc/os-release")):
        name, _, value = line.partition("=")
        if name == "PRETTY_NAME":
            return value.strip("\"'")
    return "unknown distribution"


def _lines(path: str) -> list[str]:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return [line.strip() for line in file]
    except OSError:
        return []  # a minimal image, or a sandbox, has none
