"""File systems of a process's own: what to put before its command line."""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path


def read_only(directory: Path) -> list[str]:
    """The directory cannot be written to."""
    return _with('mount --bind "$0" "$0" && mount -o remount,ro,bind "$0"', directory)


def small(directory: Path, kilobytes: int) -> list[str]:
    """The directory is a file system of so many kilobytes, empty and private."""
    return _with(f'mount -t tmpfs -o size={kilobytes}k,mode=700 none "$0"', directory)


def without_execution(directory: Path) -> list[str]:
    """Nothing in the directory can be executed, or mapped as code."""
    return _with('mount -t tmpfs -o noexec,mode=700 none "$0"', directory)


def another_cpu(cpuinfo: Path) -> list[str]:
    """The kernel says of the CPU what is in a file."""
    return _with('mount --bind "$0" /proc/cpuinfo', cpuinfo)


def read_only_root(*writable: Path) -> list[str]:
    """The whole file system is read-only, but for these directories."""
    binds = " && ".join(f"mount --bind '{each}' '{each}'" for each in writable)
    everything = "mount -o remount,ro,bind /"
    return _with(f"{binds} && {everything}" if binds else everything, None)


def inside(pid: int, directory: Path) -> Path:
    """The directory as a process with mounts of its own sees it."""
    return type(directory)(f"/proc/{pid}/root{directory}")


def grow(pid: int, directory: Path, kilobytes: int) -> None:
    """Give a ``small`` file system of a running process more room."""
    remount = ["mount", "-o", f"remount,size={kilobytes}k", str(directory)]
    subprocess.run(["nsenter", "--target", str(pid), "--mount", *remount], check=True)


def _with(mounting: str, directory: Path | None) -> list[str]:
    place = "sh" if directory is None else str(directory)
    command = ["unshare", "--mount", "sh", "-c", f'{mounting} && exec "$@"', place]
    if os.getuid() != 0 or shutil.which("unshare") is None or shutil.which("nsenter") is None:
        pytest.skip("mounting needs root, unshare and nsenter")
    if subprocess.run([*command, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("nothing can be mounted here")
    return command
