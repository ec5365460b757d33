"""Compilers that do not end by themselves, and which processes are alive."""

from __future__ import annotations

import os

# Keeps g++ busy for longer than any test, with little memory.
ENDLESS = """
constexpr long long endless() {
    long long sum = 0;
    for (long long i = 0; i < 4000000000LL; ++i) sum += i;
    return sum;
}
constexpr long long value = endless();
"""
# The flags without which g++ gives up on it.
UNLIMITED = ("-fconstexpr-ops-limit=9223372036854775807", "-fconstexpr-loop-limit=2147483647")


def pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def field(pid: int, name: str) -> list[bytes]:
    """The words of a process's command line (``cmdline``), or its variables (``environ``)."""
    try:
        with open(f"/proc/{pid}/{name}", "rb") as file:
            return file.read().split(b"\0")
    except OSError:
        return []


def watchdogs(parent: int) -> list[int]:
    """Watchdogs that were started by a process of that number; their command line ends with it."""
    found = [(pid, field(pid, "cmdline")) for pid in pids()]
    return [pid for pid, words in found if b"-S" in words and words[-2:-1] == [b"%d" % parent]]
