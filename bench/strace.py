"""System calls between two marks of a child, from ``strace -f``."""

from __future__ import annotations

import re
import shutil
import sys
from collections import Counter
from typing import NamedTuple

from children import Caches, ask
from measured import Failure

_CALL = re.compile(r"^\d+\s+(\w+)\((.*)$")
_MARK = re.compile(r'"/opkiln-bench-(\w+)"')

_STATS = {
    "stat", "lstat", "fstat", "newfstatat", "statx", "access", "faccessat", "faccessat2",
    "readlink", "readlinkat", "getcwd", "statfs", "fstatfs",
}  # fmt: skip
_MAPS = {"mmap", "munmap", "mprotect", "mremap", "madvise", "brk"}
_WRITES = {"write", "pwrite64", "writev", "pwritev", "pwritev2", "sendfile", "copy_file_range"}
_CHANGES = {
    "mkdir", "mkdirat", "rmdir", "rename", "renameat", "renameat2", "unlink", "unlinkat", "link",
    "linkat", "symlink", "symlinkat", "chmod", "fchmod", "fchmodat", "chown", "fchown", "lchown",
    "fchownat", "truncate", "ftruncate", "utimensat", "futimesat", "fsync", "fdatasync", "mknodat",
    "creat", "fallocate", "setxattr", "fsetxattr",
}  # fmt: skip
_READS = {"read", "pread64", "readv", "lseek", "getdents64"}


class Calls(NamedTuple):
    """The calls of one section: by name, and by what they do."""

    names: Counter[str]
    kinds: Counter[str]

    @property
    def total(self) -> int:
        return self.names.total()

    def described(self) -> str:
        """``opens 12, stats 30, ...``, zeros included where a zero is the point."""
        shown = ("opens", "stats", "reads", "maps", "writes", "files made", "locks", "processes")
        parts = [f"{kind} {self.kinds[kind]}" for kind in shown]
        return ", ".join([*parts, f"other {self.kinds['other']}"])


def kind(name: str, arguments: str) -> str:
    """What a call does, in the words of the table."""
    if name in {"open", "openat", "openat2"}:
        return "files made" if "O_CREAT" in arguments else "opens"
    if name == "flock" or (name == "fcntl" and "SETLK" in arguments):
        return "locks"
    if name in {"fork", "vfork"}:
        return "processes"
    if name in {"clone", "clone3"}:
        return "threads" if "CLONE_THREAD" in arguments else "processes"
    for names, title in (
        (_STATS, "stats"),
        (_MAPS, "maps"),
        (_WRITES, "writes"),
        (_CHANGES, "files made"),
        (_READS, "reads"),
    ):
        if name in names:
            return title
    return "other"


def sections(text: str) -> dict[str, Calls]:
    """The calls after each mark up to the next one, by the mark's name."""
    found: dict[str, Calls] = {}
    current: Calls | None = None
    for line in text.splitlines():
        match = _CALL.match(line)
        if match is None:  # a signal, an exit, the second half of an interrupted call
            continue
        name, arguments = match.groups()
        mark = _MARK.search(arguments)
        if mark is not None:
            current = found.setdefault(mark.group(1), Calls(Counter(), Counter()))
        elif current is not None:
            current.names[name] += 1
            current.kinds[kind(name, arguments)] += 1
    return found


def traced(script: list[str], caches: Caches, python: str = sys.executable) -> dict[str, Calls]:
    """The sections of a child script, run once under strace with warm caches."""
    strace = shutil.which("strace")
    if strace is None:
        raise Failure("strace is not installed")
    log = caches.root / "strace.log"
    ask(script, caches, prefix=(strace, "-f", "-o", str(log)), python=python)
    found = sections(log.read_text(errors="replace"))
    if "end" not in found:
        raise Failure("the trace has no end mark")
    return found
