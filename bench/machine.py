"""What a run was measured on and with; nothing that identifies the host or its paths."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("opkiln", "torch", "apache-tvm-ffi", "deepspeed", "ninja", "numpy")


def described() -> dict[str, Any]:
    """The head of the results file."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": _commit(),
        "machine": {
            "cpu": _cpu(),
            "cores": len(os.sched_getaffinity(0)),
            "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
            "system": _system(),
        },
        "versions": {"python": platform.python_version(), "g++": _compiler(), **_packages()},
    }


def heading(head: dict[str, Any]) -> str:
    """The same in the two lines above the table."""
    machine, versions = head["machine"], head["versions"]
    return (
        f"{head['date']}, commit {head['commit']}, {machine['cpu']}, {machine['cores']} cores, "
        f"{machine['memory_gib']} GiB, {machine['system']}\n"
        + ", ".join(f"{name} {number}" for name, number in versions.items())
    )


def _said(*command: str) -> str:
    """A command's stdout, or nothing when it cannot be asked."""
    try:
        done = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _commit() -> str:
    commit = _said("git", "--no-optional-locks", "rev-parse", "--short=12", "HEAD")
    changed = _said("git", "--no-optional-locks", "status", "--porcelain", "--", "../src")
    return f"{commit or 'unknown'}{' with changes' if changed else ''}"


def _cpu() -> str:
    found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return found.group(1) if found else platform.machine()


def _system() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except OSError:
        return platform.system()


def _compiler() -> str:
    return _said("g++", "-dumpfullversion") or "not found"


def _packages() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def load_average() -> float:
    """Over the last minute: over the number of cores, others were at work too."""
    return os.getloadavg()[0]


if __name__ == "__main__":
    sys.stdout.write(heading(described()) + "\n")
