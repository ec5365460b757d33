"""Which engines can be used here, and why the others cannot."""

from __future__ import annotations

import errno
import os
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from opkiln.errors import ArgumentError, UsageError
from opkiln.ops.async_io import functions

ORDER = ("io_uring", "libaio", "threads")  # the first that can be used is chosen
_NOT_COMPILED = -1


class EngineState(NamedTuple):
    """An engine, and whether it can be used. ``why`` and ``hint`` are empty if it can."""

    name: str  # io_uring, libaio or threads
    usable: bool  # whether it can be used here
    why: str  # why not
    hint: str  # what would help


@cache
def engines() -> tuple[EngineState, ...]:
    """All engines for host memory, in the order in which they are tried. Each is started once."""
    like = torch.empty(0, device="cpu")  # whatever the default device is
    return tuple(_state(name, int(functions.aio_probe(like, name))) for name in ORDER)


def choose(name: str) -> str:
    """The engine to use: this one, or the first usable one for "auto". Raises UsageError."""
    if name == "auto":
        return next(each.name for each in engines() if each.usable)
    if name not in ORDER:
        raise ArgumentError(
            f"engine is {name!r}, expected auto, {', '.join(ORDER)}, or cufile or copies for GPUs"
        )
    state = next(each for each in engines() if each.name == name)
    if not state.usable:
        raise UsageError(f"{name} cannot be used here", why=state.why, hint=state.hint)
    return name


def _state(name: str, error: int) -> EngineState:
    return EngineState(name, not error, *_reason(name, error))


def _reason(name: str, error: int) -> tuple[str, str]:
    if error == 0:
        return "", ""
    if error == _NOT_COMPILED:
        return (
            "linux/io_uring.h was not there when the op was compiled",
            "apt-get install linux-libc-dev",
        )
    said = os.strerror(error)
    if name == "io_uring" and error == errno.EPERM:
        switch = _setting("/proc/sys/kernel/io_uring_disabled")
        if switch not in ("", "0"):
            return (
                f"{said}: kernel.io_uring_disabled is {switch}",
                "sysctl kernel.io_uring_disabled=0",
            )
        return (
            f"{said}: a seccomp filter refuses it, as that of most containers does",
            "docker run --security-opt seccomp=unconfined",
        )
    if name == "io_uring" and error == errno.ENOMEM:
        return f"{said}: before Linux 5.12 it counts as locked memory", "ulimit -l unlimited"
    if name == "libaio" and error == errno.EAGAIN:
        most, taken = (_setting(f"/proc/sys/fs/aio-{each}") for each in ("max-nr", "nr"))
        return (
            f"{said}: {taken} of at most {most} requests of all processes are reserved",
            "sysctl fs.aio-max-nr=1048576",
        )
    if error == errno.ENOSYS:
        return f"{said}: this kernel or the pure-Python version of the op does not have it", ""
    return said, ""


def _setting(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
