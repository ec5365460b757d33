"""What this machine is: the one reader of ``uname`` and ``/proc/cpuinfo``."""

from __future__ import annotations

import os
from functools import cache

from opkiln.arch import cpu

_CPUINFO = "/proc/cpuinfo"


@cache
def system() -> str:
    """The operating system, in lower case: ``linux``."""
    return os.uname().sysname.lower()


@cache
def machine() -> str:
    """The instruction set family: ``x86_64``, ``aarch64``."""
    return os.uname().machine


@cache
def features() -> frozenset[str]:
    """This CPU's features, by the compiler's names. Empty where the kernel does not tell."""
    try:
        fd = os.open(_CPUINFO, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return frozenset()
    try:
        # The kernel writes a block per CPU as it is read: the first suffices, the whole file of a
        # 256-core machine would take longer than the rest of a cache hit.
        text = b""
        while b"\n\n" not in text and (chunk := os.read(fd, 8192)):
            text += chunk
    finally:
        os.close(fd)
    return cpu.features_of(text.decode("ascii", "replace"))


def native() -> cpu.CPU:
    """This CPU."""
    return cpu.native(machine(), features())


def model_name() -> str:
    """The CPU's name for people; for reports only."""
    try:
        with open(_CPUINFO, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                label, _, value = line.partition(":")
                if label.strip() == "model name":
                    return value.strip()
    except FileNotFoundError:
        pass
    return machine()
