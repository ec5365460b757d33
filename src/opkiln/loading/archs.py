"""The architectures an op is wanted for here: who says so, what its filter leaves, what fits.

Precedence: the call, the setting (``OPKILN_CUDA_ARCH_LIST``, ``TORCH_CUDA_ARCH_LIST``;
``OPKILN_ROCM_ARCH_LIST``, ``PYTORCH_ROCM_ARCH``), this machine's devices: all of them, so that
ranks with one visible GPU each share a build.
"""

from __future__ import annotations

import os
import warnings
from importlib import import_module
from typing import Any

from opkiln.errors import ArchError, ArchWarning, LoadError, ToolchainError
from opkiln.model import CUDA, ROCM, DeviceCompiler, Target, Toolchain
from opkiln.record import Record
from opkiln.settings import LAYOUT, origin_of, settings, store_candidates
from opkiln.toolchain.torch_sdk import release
from opkiln.trust import fault

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from opkiln.loading.loader import Op

_SETTINGS = {CUDA: "cuda_arch_list", ROCM: "rocm_arch_list"}
_GRAMMARS = {CUDA: "opkiln.arch.cuda", ROCM: "opkiln.arch.hip"}
_told: set[str] = set()


class Wanted(Record):
    """What to build for, in the grammar's canonical words."""

    archs: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()  # by the op's filter
    asked: str = ""  # the list as it was written
    origin: str = ""  # call, a variable, devices
    native: bool = False  # this machine's devices, and nothing that was asked for by name


def grammar(backend: str) -> Any:
    """The module of a backend's arch lists: ``arch.cuda`` or ``arch.hip``."""
    return import_module(_GRAMMARS[backend])


def memory() -> tuple[str, ...]:
    """Where the store remembers what was asked, without looking for the store."""
    root = os.path.join(store_candidates()[0][0], LAYOUT)
    try:
        if any(fault(each, os.lstat(each)) for each in (os.path.dirname(root), root)):
            return ()
    except OSError:
        return ()  # there is none yet
    return (os.path.join(root, "toolchains"),)


def wanted(op: Op) -> Wanted:
    """What an op is to be built for here. Starts no compiler, unless the list is of all it has.

    Raises ArchError for a list that means nothing, LoadError where there is nothing to build for.
    """
    backend = op.spec.backend
    if backend not in _GRAMMARS:
        return Wanted()
    language = grammar(backend)
    asked, origin = (op.asked, "call") if op.asked else origin_of(_SETTINGS[backend])
    devices = None
    if not asked or "native" in asked.lower():
        devices = _devices(backend)
    if not asked:
        if not devices:
            raise LoadError(
                f"op {op.spec.name} has no {_name(backend)} architecture to be built for",
                why=f"{why_no_device(backend)}, and no list of architectures is set",
                hint=f"export {_variable(backend)}={_EXAMPLE[backend]}",
            )
        asked, origin = "native", "devices"
    listed = {"listed": _listed(backend)} if "all" in asked.lower() and backend == CUDA else {}
    try:
        named = language.parse(asked, native=devices, **listed)
    except ArchError as error:
        if not origin.isupper():
            raise
        raise ArchError(f"{origin}: {error.what}", why=error.why, hint=f"unset {origin}") from None
    kept, removed = named, ()
    if op.rule is not None:
        kept, removed = language.filtered(named, op.rule)
    if not kept:
        raise LoadError(
            f"op {op.spec.name} has no {_name(backend)} architecture to be built for",
            why=f"{origin} asks for {language.show(named)}, and the op's filter removed "
            f"{language.show(removed)}",
            hint=f"opkiln arch --op {op.spec.name} all",
        )
    native = asked.strip().lower() == "native"
    return Wanted(tuple(map(str, kept)), tuple(map(str, removed)), asked, origin, native)


_EXAMPLE = {CUDA: "9.0", ROCM: "gfx90a"}


def _name(backend: str) -> str:
    return {CUDA: "CUDA", ROCM: "ROCm"}[backend]


def _variable(backend: str) -> str:
    return {CUDA: "OPKILN_CUDA_ARCH_LIST", ROCM: "OPKILN_ROCM_ARCH_LIST"}[backend]


def _devices(backend: str) -> tuple[Any, ...]:
    """This machine's devices as the grammar's records."""
    language = grammar(backend)
    if backend == CUDA:
        from opkiln.accelerator import nvidia

        names = nvidia.capabilities(nvidia.devices(memory()))
    else:
        from opkiln.accelerator import amd

        names = tuple(gpu.arch for gpu in amd.devices().gpus)
    return tuple(language.parse(";".join(names))) if names else ()


def why_no_device(backend: str) -> str:
    """Why there is no device of a backend here; empty where there is one."""
    if backend == CUDA:
        from opkiln.accelerator import nvidia

        devices = nvidia.devices(memory())
        return "" if devices.gpus else devices.why
    if backend == ROCM:
        from opkiln.accelerator import amd

        found = amd.devices()
        return "" if found.gpus else found.why
    return ""


def nothing_asked(backend: str) -> bool:
    """Whether neither a setting nor a device says what to build for, so that a build for other
    machines is for every architecture that the toolkit has."""
    return backend == CUDA and not settings.cuda_arch_list and bool(why_no_device(CUDA))


def _listed(backend: str) -> tuple[Any, ...]:
    from opkiln.toolchain import choice

    toolchain = choice.recall(memory(), backend) or choice.choose(memory(), backend)
    assert toolchain.device is not None
    return tuple(grammar(backend).parse(";".join(toolchain.device.archs)))


def fitted(op: Op, target: Target, toolchain: Toolchain) -> Target:
    """The target as this toolchain can serve it.

    A device that is newer than the toolkit gets what it can run, with a warning; an architecture
    that was asked for by name and cannot be compiled is a ToolchainError.
    """
    device = toolchain.device
    if device is None or not target.archs:
        return target
    language = grammar(target.backend)
    archs = language.parse(";".join(target.archs))
    listed = language.parse(";".join(device.archs)) if device.archs else ()
    if target.backend == CUDA:
        _, refused = language.usable(archs, listed, device.accepts)
    else:
        refused = language.usable(archs, listed).refused if listed else ()
    if not refused:
        return target
    if target.backend != CUDA or not wanted(op).native:
        raise ToolchainError(
            f"op {op.spec.name} cannot be compiled for {language.show(a for a, _ in refused)}",
            why="\n".join(f"{arch}: {reason}" for arch, reason in refused)
            + f"\nthe toolkit is {_name(target.backend)} {device.version}, {device.home}",
            hint=f"{_variable(target.backend)}='{language.show(listed)}'",
        )
    try:
        chosen, notes = for_devices(archs, device)
    except ArchError as error:
        raise ToolchainError(error.what, why=error.why, hint=error.hint) from None
    for note in notes:
        if note not in _told:
            _told.add(note)
            newer = _newer_toolkit(device)
            warnings.warn(f"op {op.spec.name}: {note}\nhint: {newer}", ArchWarning, stacklevel=6)
    return target._replace(archs=tuple(map(str, chosen)))


def for_devices(
    archs: Iterable[Any], device: DeviceCompiler
) -> tuple[tuple[Any, ...], tuple[str, ...]]:
    """What this machine's GPUs get of a CUDA toolkit that may not know them, with a note for each
    that it does not know. Raises ArchError."""
    from opkiln.accelerator import nvidia

    language = grammar(CUDA)
    listed = language.parse(";".join(device.archs))
    driver = nvidia.devices(memory()).cuda
    takes_ptx = release(driver) >= release(device.version)
    chosen = [language.for_device(arch, listed, takes_ptx) for arch in archs]
    notes = tuple(dict.fromkeys(note for _, note in chosen if note))
    return language.merged(arch for arch, _ in chosen), notes


def _newer_toolkit(device: DeviceCompiler) -> str:
    major = device.version.partition(".")[0]
    return f"install a newer CUDA {major} toolkit: pip install -U 'opkiln[cuda]'"


def coverage(target: Target) -> str:
    """How code for a target's architectures runs on the devices that this process may use:
    ``exact``, ``binary``, ``ptx``; empty where it does not, or where there is no device."""
    language = grammar(target.backend)
    archs = language.parse(";".join(target.archs))
    if target.backend == CUDA:
        from opkiln.accelerator import nvidia

        gpus, _ = nvidia.visible(nvidia.devices(memory()))
        names = sorted({gpu.capability for gpu in gpus})
    else:
        from opkiln.accelerator import amd

        names = sorted({gpu.arch for gpu in amd.visible(amd.devices())})
    ways = [language.covers(archs, language.parse(name)[0]) for name in names]
    order = ("", "ptx", "generic", "binary", "exact")
    return min(ways, key=order.index) if ways else ""
