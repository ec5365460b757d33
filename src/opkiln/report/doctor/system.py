"""Python, the kernel and the container around them."""

from __future__ import annotations

import os
import sys

from opkiln import machine
from opkiln.report.doctor.finding import Outcome, failed, joined, passed, warned
from opkiln.report.doctor.here import Here
from opkiln.report.doctor.packages import install
from opkiln.toolchain import torch_sdk

_PROCESSORS = ("x86_64", "aarch64")
_CONTAINERS = ("/.dockerenv", "/run/.containerenv", "/run/systemd/container")


def python(here: Here) -> Outcome:  # noqa: ARG001 (the form of a check)
    """This interpreter, and whether it can start another: load tests run in one."""
    version = ".".join(map(str, sys.version_info[:3]))
    # On Linux, a build without the GIL says so in its flags.
    kind = "free-threaded" if "t" in getattr(sys, "abiflags", "") else "with the GIL"
    if not sys.executable:
        return warned(f"{version}, {kind}, is embedded in a program: sys.executable is empty")
    return passed(f"{version}, {kind}, {sys.executable}")


def python_headers(here: Here) -> Outcome:  # noqa: ARG001
    """Python.h, which extension modules need and the bundled ops do not."""
    directory = torch_sdk.python_include()
    if os.path.exists(os.path.join(directory, "Python.h")):
        return passed(directory)
    return warned(
        f"there is no {directory}/Python.h: ops that are Python modules (pybind11) do not compile",
        install("python3-dev"),
    )


def system(here: Here) -> Outcome:  # noqa: ARG001
    """The kernel and the processor, as far as native ops need them."""
    release = os.uname().release
    family = machine.architecture()
    facts = f"{machine.system()} {release}, {family}"
    if machine.system() != "linux" or family not in _PROCESSORS:
        return failed(f"{facts}: native ops are built and loaded on Linux, x86-64 and aarch64")
    if not os.path.exists("/proc/self/environ"):
        return warned(
            f"{facts}: /proc is not mounted, so compilers outlive a build that is killed",
            "mount -t proc proc /proc",
        )
    contained = "in a container" if any(map(os.path.exists, _CONTAINERS)) else ""
    # Of what a sandbox takes away, nothing is needed: no ptrace, no mount, no capability.
    seccomp = "seccomp on, which is fine" if _status("Seccomp") not in ("", "0") else ""
    return passed(joined(facts, contained, seccomp))


def _status(field: str) -> str:
    with open("/proc/self/status", encoding="ascii", errors="replace") as lines:
        for line in lines:
            name, _, value = line.partition(":")
            if name == field:
                return value.strip()
    return ""
