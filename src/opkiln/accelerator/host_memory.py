"""The host's memory and this process's part of it, as the kernel tells: bytes; 0 where it does not.

Linux alone has these files.
"""

from __future__ import annotations


def total() -> int:
    """What the machine has."""
    return _kibibytes("/proc/meminfo", "MemTotal")


def available() -> int:
    """What programs could still have without anything being swapped out."""
    return _kibibytes("/proc/meminfo", "MemAvailable")


def resident() -> int:
    """What this process holds."""
    return _kibibytes("/proc/self/status", "VmRSS")


def peak() -> int:
    """What this process held at most."""
    return _kibibytes("/proc/self/status", "VmHWM")


def reset_peak() -> None:
    """Count the peak from now on. Does nothing where the kernel does not let a process."""
    try:
        with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
            file.write("5")  # proc(5): resets VmHWM, and touches nothing else
    except OSError:
        pass  # no such file in some sandboxes: the peak stays the process's


def _kibibytes(path: str, name: str) -> int:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            for line in file:
                label, _, value = line.partition(":")
                if label == name:
                    return int(value.split()[0]) << 10
    except OSError:
        pass
    return 0
