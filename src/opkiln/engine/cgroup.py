"""What the kernel grants this process: CPUs, CPU quota and memory, from cgroups v1 and v2.

Every function takes the root of the file system, so that a test can pass a made-up tree. Limits are
read from this process's group and all of its ancestors, because the tightest one applies. In a
container, the group's path may be the host's, which does not exist below the mounted tree. Its
ancestors are read anyway, up to the mount itself.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

# cgroups v1 writes "no limit" as the largest page-aligned number.
_UNLIMITED = 1 << 60


def cpu_quota(root: str = "/") -> float | None:
    """The CPU quota, in CPUs; None if there is no quota."""
    pairs = [text.partition(" ") for text in _values(root, "cpu.max", "")]
    for folder in _folders(root, "cpu"):
        period = _read(os.path.join(folder, "cpu.cfs_period_us"))
        pairs.append((_read(os.path.join(folder, "cpu.cfs_quota_us")), " ", period))
    # Without a quota it is "max" or -1.
    found = [int(quota) / int(period or "100000") for quota, _, period in pairs if quota.isdigit()]
    return min((value for value in found if value > 0), default=None)


def memory_limit(root: str = "/") -> int | None:
    """The memory limit in bytes; None if there is no limit."""
    texts = [
        *_values(root, "memory.max", ""),
        *_values(root, "memory.limit_in_bytes", "memory"),
    ]
    sizes = [int(text) for text in texts if text.isdigit()]
    return min((size for size in sizes if 0 < size < _UNLIMITED), default=None)


class Kills(NamedTuple):
    """How many processes the kernel has killed because memory ran out."""

    group: int  # in this process's control group
    machine: int


def out_of_memory_kills(root: str = "/") -> Kills:
    """The kernel's counts so far; 0 if it does not report one."""
    group = 0
    for name, controller in (("memory.events", ""), ("memory.oom_control", "memory")):
        innermost = next(_values(root, name, controller), "")
        group += _counted(innermost, "oom_kill")
    return Kills(group, _counted(_read(os.path.join(root, "proc/vmstat")), "oom_kill"))


def _counted(text: str, name: str) -> int:
    """The number after a name, in a file with a name and a number on each line."""
    for line in text.splitlines():
        words = line.split()
        if words[:1] == [name] and words[1:] and words[1].isdigit():
            return int(words[1])
    return 0


def cpus(root: str = "/") -> frozenset[int] | None:
    """The CPUs that the whole group may run on; None if that is unknown."""
    for name, controller in (
        ("cpuset.cpus.effective", ""),
        ("cpuset.effective_cpus", "cpuset"),
        ("cpuset.cpus", "cpuset"),
    ):
        for text in _values(root, name, controller):
            found = _cpu_list(text)
            if found:
                return found  # the innermost group's: its set is part of its parent's
    return None


def total_memory(root: str = "/") -> int:
    """Bytes of memory in the machine."""
    for line in _read(os.path.join(root, "proc/meminfo")).splitlines():
        name, _, rest = line.partition(":")
        if name == "MemTotal":
            return int(rest.split()[0]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _values(root: str, name: str, controller: str) -> Iterator[str]:
    """The file's content in each folder that has it, innermost first.

    An empty ``controller`` means cgroups v2.
    """
    for folder in _folders(root, controller):
        text = _read(os.path.join(folder, name))
        if text:
            yield text


def _folders(root: str, controller: str) -> Iterator[str]:
    mount = os.path.join(root, "sys/fs/cgroup")
    for line in _read(os.path.join(root, "proc/self/cgroup")).splitlines():
        _, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if controller not in names.split(","):
            continue
        if controller:
            # Usually mounted as `cpu,cpuacct`, with links `cpu` and `cpuacct`. A minimal system
            # may have only one of these names.
            tops = [os.path.join(mount, names), os.path.join(mount, controller)]
        else:
            tops = [mount, os.path.join(mount, "unified")]  # the second if v1 is mounted as well
        # `..` stands for groups outside this namespace, which are not visible.
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for top in tops:
            if os.path.isdir(top):
                for depth in range(len(parts), -1, -1):
                    yield os.path.join(top, *parts[:depth])
                break


def _read(path: str) -> str:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""  # missing or unreadable: it tells us no limit


def _cpu_list(text: str) -> frozenset[int]:
    """The CPUs in the kernel's list format, such as ``0-3,8``."""
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        if first.isdigit():
            found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)
