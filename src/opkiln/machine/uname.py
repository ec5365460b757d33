"""Reads ``uname``, ``/proc/cpuinfo`` and other files about this machine, which may be missing."""

from __future__ import annotations

import os
from functools import cache

_CPUINFO = "/proc/cpuinfo"


@cache
def system() -> str:
    """The operating system, in lower case: ``linux``."""
    return os.uname().sysname.lower()


@cache
def architecture() -> str:
    """The instruction set family: ``x86_64``, ``aarch64``."""
    return os.uname().machine


@cache
def cpuinfo() -> str:
    """The kernel's description of the first CPU; empty if there is none. The kernel writes a block
    for each CPU while the file is read. The first suffices: the whole file of a 256-core machine
    would take longer than the rest of a cache hit."""
    try:
        fd = os.open(_CPUINFO, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return ""
    try:
        text = b""
        while b"\n\n" not in text and (chunk := os.read(fd, 8192)):
            text += chunk
    finally:
        os.close(fd)
    return text.partition(b"\n\n")[0].decode("utf-8", "replace")


def cpu_flags() -> str:
    """The line that lists the CPU's features, by the kernel's names."""
    return _field("flags") or _field("Features")


def cpu_name() -> str:
    """The CPU's name for people."""
    return _field("model name") or architecture()


def read_text(path: str) -> str:
    """The text of a file; empty if it cannot be read: a minimal image or a sandbox lacks many."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def _field(name: str) -> str:
    _, found, rest = f"\n{cpuinfo()}".partition(f"\n{name}")
    label, _, value = rest.partition("\n")[0].partition(":")
    return value.strip() if found and not label.strip() else ""
