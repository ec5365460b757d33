"""GPUs, drivers, accelerators and the libraries they talk through. No library is loaded for it."""

from __future__ import annotations

import os
import re
from typing import NamedTuple

from opkiln.accelerator import amd, nvidia
from opkiln.errors import AcceleratorError
from opkiln.settings import child_environment, origin_of
from opkiln.toolchain import rocm

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from opkiln.model import TorchSDK

_SYSTEM = ("/usr/local/lib", "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu",
           "/usr/lib64", "/usr/lib", "/usr/local/cuda/lib64")  # fmt: skip
_LIBRARIES = (("NCCL", "libnccl.so"), ("RCCL", "librccl.so"))
# Where a header of the same installation is, as seen from the directory of the library.
_HEADERS = ("../include/nccl.h", "../include/rccl/rccl.h", "../../include/nccl.h")


class Gpu(NamedTuple):
    """One GPU. ``visible``: this process may use it."""

    vendor: str  # NVIDIA, AMD
    index: int  # type: ignore[assignment]
    name: str
    arch: str  # its compute capability, or its gfx name
    memory: int  # bytes; 0 where the driver does not say
    visible: bool


class Driver(NamedTuple):
    """What a vendor's driver says of itself. ``why``: why there are no GPUs, or which are left."""

    vendor: str
    version: str
    cuda: str  # the highest CUDA that it takes
    why: str


class Accelerator(NamedTuple):
    """One kind of device that was looked for, in the order of detection."""

    name: str
    present: bool
    why: str


class InForce(NamedTuple):
    """The accelerator that this process would run on, or why there is none."""

    name: str  # "" where the one that was asked for cannot serve
    why: str  # the device that answers
    origin: str  # the variable that asks for it; "" where it is the first that answers
    error: str = ""
    hint: str = ""


class Library(NamedTuple):
    """A library for collective communication, by its files."""

    name: str  # NCCL, RCCL
    path: str
    version: str  # "" where no file says it


class Devices(NamedTuple):
    """All of it."""

    gpus: tuple[Gpu, ...]
    drivers: tuple[Driver, ...]
    in_force: InForce
    accelerators: tuple[Accelerator, ...]
    collectives: tuple[Library, ...]


def devices(memory: tuple[str, ...], torch: TorchSDK | None) -> Devices:
    """Look for devices. No context comes to be. Raises SettingError."""
    of_nvidia, of_amd = nvidia.devices(memory), amd.devices()
    usable, _ = nvidia.visible(of_nvidia)
    gpus = [
        Gpu("NVIDIA", each.index, each.name, each.capability, each.memory, each in usable)
        for each in of_nvidia.gpus
    ]
    left = amd.visible(of_amd)
    gpus += [
        Gpu("AMD", each.index, each.name, each.arch, each.memory, each in left)
        for each in of_amd.gpus
    ]
    kinds = accelerators()
    return Devices(
        gpus=tuple(gpus),
        drivers=(
            Driver("NVIDIA", of_nvidia.driver, of_nvidia.cuda, of_nvidia.why),
            Driver("AMD", _amd_driver(), "", of_amd.why),
        ),
        in_force=in_force(kinds),
        accelerators=kinds,
        collectives=tuple(collectives(torch)),
    )


def accelerators() -> tuple[Accelerator, ...]:
    """Every kind of device in the order of detection, and whether one answers.

    Where a device of another vendor's seems to be, only its package can count them: it is imported.
    """
    from opkiln.accelerator import detect

    return tuple(Accelerator(each.name, each.present, each.why) for each in detect.survey())


def in_force(kinds: tuple[Accelerator, ...]) -> InForce:
    """The one that was asked for by name, else the first of ``kinds`` that answers."""
    from opkiln.accelerator import choice, detect

    if choice.asked_name() is None:
        first = next(kind for kind in kinds if kind.present)  # the CPU always is
        return InForce(first.name, first.why, "")
    origin = "" if choice.given() is not None else origin_of("accelerator")[1]
    try:
        taken = detect.trace()[-1]
    except AcceleratorError as error:
        return InForce("", "", origin, error.what, error.hint)
    return InForce(taken.name, taken.why, origin)


def collectives(torch: TorchSDK | None) -> Iterator[Library]:
    """NCCL and RCCL where processes find them: torch's, the wheels', the system's; each once."""
    seen: set[str] = set()
    for directory in _directories(torch):
        try:
            names = sorted(os.listdir(directory))
        except OSError:
            continue  # most of these places are not there
        for label, stem in _LIBRARIES:
            for name in names:
                if not name.startswith(stem):
                    continue
                real = os.path.realpath(os.path.join(directory, name))
                if real not in seen and os.path.isfile(real):
                    seen.add(real)
                    yield Library(label, os.path.join(directory, name), _version(real, stem))


def _directories(torch: TorchSDK | None) -> Iterator[str]:
    for directory in child_environment().get("LD_LIBRARY_PATH", "").split(os.pathsep):
        if os.path.isabs(directory):
            yield directory
    if torch is not None:
        yield os.path.join(torch.path, "lib")
        yield os.path.join(os.path.dirname(torch.path), "nvidia", "nccl", "lib")
    for home in rocm.homes():
        yield os.path.join(home, "lib")
    yield from _SYSTEM


def _version(path: str, stem: str) -> str:
    """``2.27.3`` of ``libnccl.so.2.27.3``; else what the header of the same installation says."""
    numbers = os.path.basename(path).removeprefix(stem).removeprefix(".")
    if re.fullmatch(r"\d+(\.\d+)+", numbers):
        return numbers
    for header in _HEADERS:
        try:
            with open(os.path.join(os.path.dirname(path), header), encoding="utf-8",
                      errors="replace") as file:  # fmt: skip
                text = file.read(1 << 16)
        except OSError:
            continue  # the next may be there
        parts = [re.search(rf"#define NCCL_{part}\s+(\d+)", text)
                 for part in ("MAJOR", "MINOR", "PATCH")]  # fmt: skip
        if all(parts):
            return ".".join(part[1] for part in parts if part)
    return ""


def _amd_driver() -> str:
    """The version of a driver that was installed beside the kernel; its own has none."""
    try:
        with open("/sys/module/amdgpu/version", encoding="ascii", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""
