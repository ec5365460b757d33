"""The machine, its limits and its devices. Starts no process and loads no library."""

from __future__ import annotations

import os
import re
import resource
import sys
from collections.abc import Iterator
from glob import escape, glob
from typing import NamedTuple

from opkiln.accelerator.device import Answer
from opkiln.base.build_model import TorchSDK
from opkiln.decision.archs import features
from opkiln.errors import AcceleratorError
from opkiln.machine import uname as this
from opkiln.machine.arch import cpu
from opkiln.machine.devices import amd, nvidia
from opkiln.machine.toolchain import hipcc
from opkiln.report.layout import size
from opkiln.run import budget
from opkiln.settings import child_environment, origin_of

SHARED_MEMORY = "/dev/shm"
# Limits that jobs reach: pinned memory, open files (one per worker and socket), processes.
_LIMITS = (
    ("memlock", resource.RLIMIT_MEMLOCK),
    ("nofile", resource.RLIMIT_NOFILE),
    ("nproc", resource.RLIMIT_NPROC),
)
_SYSTEM = ("/usr/local/lib", "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu",
           "/usr/lib64", "/usr/lib", "/usr/local/cuda/lib64")  # fmt: skip
_LIBRARIES = (("NCCL", "libnccl.so"), ("RCCL", "librccl.so"))
# The header of the same installation, relative to the library's directory.
_HEADERS = ("../include/nccl.h", "../include/rccl/rccl.h", "../../include/nccl.h")


class Space(NamedTuple):
    """The file system of a directory that exists or would be made."""

    path: str  # the nearest directory that exists
    total: int  # bytes
    free: int  # bytes for this user
    inodes: int | None = None  # left for this user; None if the file system has no limit
    noexec: bool = False
    read_only: bool = False

    def __str__(self) -> str:
        return f"{size(self.free)} free of {size(self.total)}"


class Limit(NamedTuple):
    """A limit of this process, as in ``ulimit``. None: unlimited."""

    name: str
    soft: int | None
    hard: int | None


class Cgroup(NamedTuple):
    """The control group of this process. None: there is no limit, or it is not known."""

    path: str
    cpu_quota: float | None
    memory_limit: int | None
    cpus: int | None


class Machine(NamedTuple):
    """The interpreter, the system, the CPU and their limits."""

    python: str
    executable: str
    system: str
    cpu: str  # its name, for people
    level: str  # its target: a psABI level and further features
    simd: str
    shared_memory: Space | None  # None: there is no /dev/shm
    limits: tuple[Limit, ...]
    cgroup: Cgroup


def machine(root: str = "/") -> Machine:
    """This interpreter, system, CPU and their limits."""
    family = this.architecture()
    native = cpu.native(family, features())
    system = read_release(os.path.join(root, "etc/os-release"))
    distribution = system.get("PRETTY_NAME", "unknown distribution")
    return Machine(
        python=".".join(str(part) for part in sys.version_info[:3]),
        executable=sys.executable or "",
        system=f"{distribution} ({this.system()} {os.uname().release}, {family})",
        cpu=this.cpu_name(),
        level=str(native),
        simd=cpu.simd(family, native),
        shared_memory=known_space(SHARED_MEMORY) if os.path.isdir(SHARED_MEMORY) else None,
        limits=tuple(_limit(name, which) for name, which in _LIMITS),
        cgroup=_cgroup(root),
    )


def space(path: str) -> Space:
    """The space at a path, which need not exist. Raises OSError."""
    there = os.path.abspath(path)
    while not os.path.isdir(there) and there != "/":
        there = os.path.dirname(there)
    found = os.statvfs(there)
    return Space(
        path=there,
        total=found.f_blocks * found.f_frsize,
        free=found.f_bavail * found.f_frsize,  # without the part reserved for root
        inodes=found.f_favail if found.f_files else None,
        noexec=bool(found.f_flag & os.ST_NOEXEC),
        read_only=bool(found.f_flag & os.ST_RDONLY),
    )


def known_space(path: str) -> Space | None:
    """The space at a path; None if the kernel does not say."""
    try:
        return space(path)
    except OSError:
        return None


def _limit(name: str, which: int) -> Limit:
    soft, hard = (None if v == resource.RLIM_INFINITY else v for v in resource.getrlimit(which))
    return Limit(name, soft, hard)


def _cgroup(root: str) -> Cgroup:
    lines = this.read_text(os.path.join(root, "proc/self/cgroup")).splitlines()
    parts = (line.split(":", 2) for line in lines if line.count(":") > 1)
    paths = {controller: path for _, controller, path in parts}
    cpus = budget.cpus(root)
    return Cgroup(
        path=paths.get("") or next(iter(paths.values()), ""),  # of version 2, else of version 1
        cpu_quota=budget.cpu_quota(root),
        memory_limit=budget.memory_limit(root),
        cpus=None if cpus is None else len(cpus),
    )


def read_release(path: str) -> dict[str, str]:
    """The fields of an os-release file; none if there is no such file."""
    pairs = (line.strip().partition("=") for line in this.read_text(path).splitlines())
    return {name: value.strip("\"'") for name, _, value in pairs}


# Devices


class Gpu(NamedTuple):
    """One GPU. ``visible``: this process may use it."""

    vendor: str  # NVIDIA, AMD
    index: int  # type: ignore[assignment]
    name: str
    arch: str  # its compute capability, or its gfx name
    memory: int  # bytes; 0 if the driver does not say
    visible: bool


class Driver(NamedTuple):
    """A vendor's driver. ``why``: why there are no GPUs, or why some are left out."""

    vendor: str
    version: str
    cuda: str  # the highest CUDA version that it supports
    why: str


class ChosenAccelerator(NamedTuple):
    """The accelerator that this process would run on, or why there is none."""

    name: str  # "" if the one that was asked for cannot be used
    why: str  # the device that was found
    origin: str  # the variable that asks for it; "" if it was detected
    error: str = ""
    hint: str = ""


class CommunicationLibrary(NamedTuple):
    """A library for collective communication."""

    name: str  # NCCL, RCCL
    path: str
    version: str  # "" if no file says it


class FoundDevices(NamedTuple):
    """All devices, with their drivers and libraries."""

    accelerator: ChosenAccelerator
    accelerators: tuple[Answer, ...]  # every kind of device, in the order of detection
    drivers: tuple[Driver, ...]
    gpus: tuple[Gpu, ...]
    collectives: tuple[CommunicationLibrary, ...]


def devices(memory: tuple[str, ...], torch: TorchSDK | None) -> FoundDevices:
    """Look for devices, without creating a context on one. Raises SettingError.

    If there seems to be a device of another vendor, the vendor's package is imported: only that can
    count the devices.
    """
    from opkiln.accelerator import detect

    of_nvidia, of_amd = nvidia.devices(memory), amd.devices()
    usable, left = nvidia.visible(of_nvidia)[0], amd.visible(of_amd)
    gpus = [
        *(Gpu("NVIDIA", each.index, each.name, each.capability, each.memory, each in usable)
          for each in of_nvidia.gpus),
        *(Gpu("AMD", each.index, each.name, each.arch, each.memory, each in left)
          for each in of_amd.gpus),
    ]  # fmt: skip
    # Only a driver that is installed separately has a version; the kernel's own has none.
    amd_version = this.read_text("/sys/module/amdgpu/version").strip()
    kinds = detect.survey()
    return FoundDevices(
        accelerator=_choose_accelerator(kinds),
        accelerators=kinds,
        drivers=(
            Driver("NVIDIA", of_nvidia.driver, of_nvidia.cuda, of_nvidia.why),
            Driver("AMD", amd_version, "", of_amd.why),
        ),
        gpus=tuple(gpus),
        collectives=tuple(collectives(torch)),
    )


def _choose_accelerator(kinds: tuple[Answer, ...]) -> ChosenAccelerator:
    """The accelerator that the user named, else the first of ``kinds`` that is present."""
    from opkiln.accelerator import detect
    from opkiln.machine.devices import choice

    if choice.requested_name() is None:
        first = next(kind for kind in kinds if kind.present)  # the CPU always is
        return ChosenAccelerator(first.name, first.why, "")
    origin = "" if choice.given_accelerator() is not None else origin_of("accelerator")[1]
    try:
        taken = detect.trace()[-1]
    except AcceleratorError as error:
        return ChosenAccelerator("", "", origin, error.what, error.hint)
    return ChosenAccelerator(taken.name, taken.why, origin)


def collectives(torch: TorchSDK | None) -> Iterator[CommunicationLibrary]:
    """NCCL and RCCL where processes find them: in torch, in wheels, in the system; each once."""
    seen: set[str] = set()
    for directory in _directories(torch):
        for label, stem in _LIBRARIES:
            for path in sorted(glob(os.path.join(escape(directory), f"{stem}*"))):
                real = os.path.realpath(path)
                if real not in seen and os.path.isfile(real):
                    seen.add(real)
                    yield CommunicationLibrary(label, path, _version(real, stem))


def _directories(torch: TorchSDK | None) -> Iterator[str]:
    for directory in child_environment().get("LD_LIBRARY_PATH", "").split(os.pathsep):
        if os.path.isabs(directory):
            yield directory
    if torch is not None:
        yield os.path.join(torch.path, "lib")
        yield os.path.join(os.path.dirname(torch.path), "nvidia", "nccl", "lib")
    for home in hipcc.rocm_homes():
        yield os.path.join(home, "lib")
    yield from _SYSTEM


def _version(path: str, stem: str) -> str:
    """``2.27.3`` for ``libnccl.so.2.27.3``; else the version in the installation's header."""
    numbers = os.path.basename(path).removeprefix(stem).removeprefix(".")
    if re.fullmatch(r"\d+(\.\d+)+", numbers):
        return numbers
    for header in _HEADERS:
        text = this.read_text(os.path.join(os.path.dirname(path), header))
        defined = dict(re.findall(r"#define NCCL_(MAJOR|MINOR|PATCH)\s+(\d+)", text))
        if len(defined) == 3:
            return f"{defined['MAJOR']}.{defined['MINOR']}.{defined['PATCH']}"
    return ""
