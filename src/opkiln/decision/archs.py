"""Chooses what a build is for: the machine, its CPU, the architectures of devices.

The arch list comes from the call, from a setting (``OPKILN_CUDA_ARCH_LIST``,
``TORCH_CUDA_ARCH_LIST``; ``PYTORCH_ROCM_ARCH``), or from this machine's devices. Those are all of
them, so that ranks with one visible GPU each share a build.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from importlib import import_module
from typing import Any

from opkiln.base.build_model import DeviceCompiler, Target, Toolchain, TorchSDK
from opkiln.base.lazy import Record
from opkiln.base.model import (
    ABI_NONE,
    ABI_STABLE,
    CPU,
    CUDA,
    ONE_CALL,
    ROCM,
    STABLE_VERSION,
    Op,
    OpSpec,
    flag_settings,
)
from opkiln.base.trust import fault
from opkiln.errors import ArchError, ArchWarning, LoadError, ToolchainError, warn_caller
from opkiln.machine import uname
from opkiln.machine.arch import cpu
from opkiln.machine.toolchain import torch_sdk
from opkiln.settings import LAYOUT, origin_of, settings, store_candidates

TYPE_CHECKING = False
if TYPE_CHECKING:
    from opkiln.machine.devices.amd import AmdDevices
    from opkiln.machine.devices.nvidia import NvidiaDevices

SETTINGS = {CUDA: "cuda_arch_list", ROCM: "rocm_arch_list"}
_VARIABLES = {CUDA: "OPKILN_CUDA_ARCH_LIST", ROCM: "PYTORCH_ROCM_ARCH"}
_GRAMMARS = {CUDA: "opkiln.machine.arch.cuda", ROCM: "opkiln.machine.arch.hip"}
_NAMES = {CUDA: "CUDA", ROCM: "ROCm"}
_EXAMPLES = {CUDA: "9.0", ROCM: "gfx90a"}
_told: set[str] = set()


class Wanted(Record):
    """The architectures to build for, in the grammar's canonical words."""

    archs: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()  # by the op's filter
    asked: str = ""  # the list as it was written
    origin: str = ""  # call, a variable, devices
    native: bool = False  # they are those of this machine's devices


def grammar(backend: str) -> Any:
    """The module of a backend's arch lists: ``arch.cuda`` or ``arch.hip``."""
    return import_module(_GRAMMARS[backend])


def parse_names(backend: str, names: Iterable[str]) -> tuple[Any, ...]:
    """Canonical names as the grammar's records; none for none."""
    text = ";".join(names)
    return tuple(grammar(backend).parse(text)) if text else ()


def memory() -> tuple[str, ...]:
    """The directory in which the store remembers what compilers and drivers answered; none if the
    store does not exist or is not trusted."""
    root = os.path.join(next(store_candidates())[0], LAYOUT)
    try:
        if any(fault(each, os.lstat(each)) for each in (os.path.dirname(root), root)):
            return ()
    except OSError:
        return ()  # there is none yet
    return (os.path.join(root, "toolchains"),)


def find_wanted(op: Op) -> Wanted:
    """What an op is to be built for here. Starts a compiler only for the word ``all``. Raises
    ArchError for a list that is not valid, LoadError if there is nothing to build for."""
    backend = op.spec.backend
    if backend not in _GRAMMARS:
        return Wanted()
    language = grammar(backend)
    asked, origin = (op.asked, "call") if op.asked else origin_of(SETTINGS[backend])
    native = None
    if not asked or "native" in asked.lower():
        native = devices(backend)
    if not asked:
        if not native:
            why = f"{why_no_device(backend)}, and no list of architectures is set"
            raise _no_arch(op, why, _hint_elsewhere(op))
        asked, origin = "native", "devices"
    listed = _ask_toolkit() if "all" in asked.lower() and backend == CUDA else None
    by_device = asked.strip().lower() == "native"
    if by_device and not native:
        why = f"{_describe_origin(origin)} asks for native, and {why_no_device(backend)}"
        raise _no_arch(op, why, _hint_elsewhere(op))
    try:
        named = language.parse(asked, native=native, listed=listed)
    except ArchError as error:
        if not origin.isupper():
            raise
        hint = f"export {origin}={_EXAMPLES[backend]}"
        raise ArchError(f"{origin}: {error.what}", why=error.why, hint=hint) from None
    kept, removed = named, ()
    if op.rule is not None:
        kept, removed = language.apply_filter(named, op.rule)
    if not kept:
        why = f"{_describe_origin(origin)} asks for {language.show(named)}, and the op's filter "
        why += f"removed {language.show(removed)}"
        raise _no_arch(op, why, f"opkiln arch --op {op.spec.name} all")
    return Wanted(tuple(map(str, kept)), tuple(map(str, removed)), asked, origin, by_device)


def _no_arch(op: Op, why: str, hint: str) -> LoadError:
    what = f"op {op.spec.title} has no {_NAMES[op.spec.backend]} architecture to be built for"
    return LoadError(what, why=why, hint=hint)


def _hint_elsewhere(op: Op) -> str:
    """How to build for a machine that has a device."""
    backend, example = op.spec.backend, _EXAMPLES[op.spec.backend]
    if op.spec.distribution == ONE_CALL:
        return f"export {_VARIABLES[backend]}={example}"
    return f"opkiln build {op.spec.name} --target {backend}:{example}    # for a machine with one"


def _describe_origin(origin: str) -> str:
    return {"call": "the call", "devices": "this machine"}.get(origin, origin)


def _ask_driver(backend: str) -> NvidiaDevices | AmdDevices:
    if backend == CUDA:
        from opkiln.machine.devices import nvidia

        return nvidia.devices(memory())
    from opkiln.machine.devices import amd

    return amd.devices()


def _visible_gpus(backend: str) -> tuple[tuple[Any, ...], bool]:
    """The GPUs that this process may use, and whether that is certain."""
    if backend == CUDA:
        from opkiln.machine.devices import nvidia

        return nvidia.visible(nvidia.devices(memory()))
    from opkiln.machine.devices import amd

    return amd.visible(amd.devices()), True


def _list_visible(backend: str) -> list[str]:
    gpus, certain = _visible_gpus(backend)
    return sorted({gpu.arch for gpu in gpus}) if certain else []


def devices(backend: str) -> tuple[Any, ...]:
    """This machine's devices as the grammar's records."""
    return parse_names(backend, (gpu.arch for gpu in _ask_driver(backend).gpus))


def why_no_device(backend: str) -> str:
    """Why there is no device of a backend here; empty if there is one, or if it needs none."""
    if backend not in _GRAMMARS:
        return ""
    found = _ask_driver(backend)
    return "" if found.gpus else found.why


def lacks_targets(backend: str) -> bool:
    """Whether neither a setting nor a device says what to build for. Then a build for other
    machines is for every architecture that the toolkit has."""
    return backend == CUDA and not settings.cuda_arch_list and bool(why_no_device(CUDA))


def may_use_device(backend: str) -> bool:
    """Whether this process may use a device of a backend."""
    return backend not in _GRAMMARS or bool(_visible_gpus(backend)[0])


def _ask_toolkit() -> tuple[Any, ...]:
    from opkiln.machine.toolchain import choice

    toolchain = choice.recall(memory(), CUDA) or choice.choose(memory(), CUDA)
    assert toolchain.device is not None
    return parse_names(CUDA, toolchain.device.archs)


def fit_target(op: Op, needs: Wanted, target: Target, toolchain: Toolchain) -> Target:
    """The target as this toolchain can serve it. A device that is newer than the toolkit gets what
    it can run, with a warning; an architecture that was asked for by name and cannot be compiled is
    a ToolchainError."""
    device, backend = toolchain.device, target.backend
    if device is None or not target.archs:
        return target
    language = grammar(backend)
    archs, listed = parse_names(backend, target.archs), parse_names(backend, device.archs)
    left, refused = language.usable(archs, listed, device.accepts)
    if not refused:
        return target
    if backend != CUDA or not needs.native:
        reasons = [f"{arch}: {reason}" for arch, reason in refused]
        reasons.append(f"the toolkit is {_NAMES[backend]} {device.version}, {device.home}")
        # The list without those that cannot be compiled, or else the newest architecture.
        possible = language.show(left or listed[-1:])
        hint = f"export {_VARIABLES[backend]}='{possible}'"
        if op.asked:
            hint = f"opkiln build {op.spec.name} --target {backend}:{possible.replace(';', ',')}"
        raise ToolchainError(
            f"op {op.spec.title} cannot be compiled for {language.show(a for a, _ in refused)}",
            why="\n".join(reasons),
            hint=hint,
        )
    chosen, notes = _choose_served(archs, device)
    major = device.version.partition(".")[0]
    newer = f"install a newer CUDA {major} toolkit: pip install -U 'opkiln[cuda]'"
    for note in notes:
        if note not in _told:
            _told.add(note)
            warn_caller(f"op {op.spec.title}: {note}\nhint: {newer}", ArchWarning)
    return target._replace(archs=tuple(map(str, chosen)))


def _choose_served(
    archs: Iterable[Any], device: DeviceCompiler
) -> tuple[tuple[Any, ...], tuple[str, ...]]:
    """``archs_for_devices``, less the GPUs that this toolkit cannot serve and this process may not
    use: an old display card beside the GPUs of a job must not cost the job its op."""
    seen = set(_list_visible(CUDA))
    left: list[Any] = []
    notes: list[str] = []
    last = None
    for arch in archs:
        try:
            served, said = archs_for_devices([arch], device)
        except ArchError as error:
            if str(arch) in seen or not seen:
                raise ToolchainError(error.what, why=error.why, hint=error.hint) from None
            notes.append(f"{error.what}: it is left out")
            last = error
        else:
            left += served
            notes += said
    if not left:
        assert last is not None  # the list is not empty
        raise ToolchainError(last.what, why=last.why, hint=last.hint)
    return grammar(CUDA).merge(left), tuple(notes)


def archs_for_devices(
    archs: Iterable[Any], device: DeviceCompiler
) -> tuple[tuple[Any, ...], tuple[str, ...]]:
    """The architectures that a CUDA toolkit compiles for these GPUs, and a note for each GPU that
    it does not know. Raises ArchError."""
    from opkiln.machine.devices import nvidia
    from opkiln.machine.toolchain.torch_sdk import release  # not on the way to a hit

    language = grammar(CUDA)
    listed = parse_names(CUDA, device.archs)
    driver = nvidia.devices(memory()).cuda
    takes_ptx = release(driver) >= release(device.version)
    served = language.usable(archs, listed, device.accepts).kept  # also a variant that an op names
    chosen = [
        (arch, "") if arch in served else language.choose_for_device(arch, listed, takes_ptx)
        for arch in archs
    ]
    notes = tuple(dict.fromkeys(note for _, note in chosen if note))
    return language.merge(arch for arch, _ in chosen), notes


# How code runs on a device, the best way first.
PTX = "ptx"
WAYS = ("exact", "binary", "generic", PTX)


def _rank(way: str) -> int:
    return WAYS.index(way) if way else len(WAYS)


def coverage(backend: str, archs: tuple[str, ...]) -> str:
    """How code for these architectures runs on the devices that this process may use: ``exact``,
    ``binary``, ``generic``, ``ptx``; empty if it does not, or if there is no device."""
    language = grammar(backend)
    code = language.parse(";".join(archs))
    ways = [language.covers(code, language.parse(name)[0]) for name in _list_visible(backend)]
    return max(ways, key=_rank) if ways else ""


def way_of(
    backend: str, needs: Wanted, archs: tuple[str, ...], images: tuple[str, ...]
) -> tuple[str, str]:
    """(how a library runs, the device or architecture for which it is worst). That is for what was
    asked for by name, else for the GPUs that this process may use. The way is empty if it does not
    run."""
    language = grammar(backend)
    made = language.parse(";".join(archs))
    code = images if backend == CUDA and images else made
    names = (_list_visible(backend) or needs.archs) if needs.native else needs.archs
    ways = []
    for name in names:
        device = language.parse(name)[0]
        way = language.covers(code, device)
        # A variant that was asked for by name is wanted for its instructions, PTX for GPUs that
        # are not here. PTX is recompiled at every start, so it does not satisfy an explicit list.
        variant = getattr(device, "suffix", "")
        lacks = variant and not any(each[:3] == device[:3] for each in made)
        lacks = lacks or (getattr(device, "ptx", False) and not any(each.ptx for each in made))
        if not needs.native and (way == PTX or lacks):
            way = ""
        ways.append((-_rank(way), way, name))
    _, way, name = min(ways)
    return way, name


def knows_all(backend: str, archs: tuple[str, ...], images: tuple[str, ...]) -> bool:
    """Whether this version of opkiln knows all of these: a newer one may know more."""
    language = grammar(backend)
    try:
        made = language.parse(";".join(archs))
        language.covers(images if backend == CUDA and images else made, made[0])
    except ArchError:
        return False
    return True


def keeps_all(op: Op, archs: tuple[str, ...]) -> bool:
    """Whether the op's filter keeps all of these."""
    if op.rule is None or not archs:
        return bool(archs)
    backend = op.spec.backend
    return not grammar(backend).apply_filter(parse_names(backend, archs), op.rule).removed


def require_coverage(op: Op, needs: Wanted) -> None:
    """Raise LoadError if code for these cannot run on a GPU that this process may use. A GPU that
    is newer than the toolkit is not refused here: it may get what it can run."""
    backend = op.spec.backend
    if not needs.archs:
        return
    language = grammar(backend)
    code = parse_names(backend, needs.archs)
    for name in _list_visible(backend):
        if not language.covers(code, language.parse(name)[0]):
            origin = _describe_origin(needs.origin)
            raise LoadError(
                f"op {op.spec.title} for {language.show(code)} cannot run on this machine's {name}",
                why=f"{origin} asks for {needs.asked}"
                + (f", of which the op's filter left {language.show(code)}" if op.rule else ""),
                hint=f"export {_VARIABLES[backend]}=native" if origin.isupper() else "",
            )


def features() -> frozenset[str]:
    """This CPU's features, by the compiler's names."""
    return cpu.features_of(uname.cpu_flags())


def target_machine() -> str:
    """The machine to build CPU ops for: this one, unless the settings name a CPU of another."""
    return cpu.machine_of(settings.cpu, uname.architecture())


def target_cpu() -> cpu.CPU:
    """The CPU to build for, by the settings. Raises ArchError."""
    asked, origin = origin_of("cpu")
    try:
        return cpu.parse(asked, target_machine(), features())
    except ArchError as error:
        what = f"{origin}={asked!r}: {error.what}" if origin.isupper() else error.what
        hint = f"unset {origin}" if origin.isupper() else error.hint
        raise ArchError(what, why=error.why, hint=hint) from None


def target_of(spec: OpSpec, sdk: TorchSDK | None, archs: tuple[str, ...]) -> Target:
    """What an op is built for here, by the settings. Raises ArchError, BuildError."""
    # Code for a GPU is launched by this machine's CPU, whatever CPU other ops are for.
    ours = spec.backend != CPU and not spec.vectorize
    architecture = uname.architecture() if ours else target_machine()
    if spec.vectorize:
        chosen = target_cpu()
    else:
        chosen = cpu.CPU(cpu.native(architecture, frozenset()).level)
    return Target(
        backend=spec.backend,
        system=uname.system(),
        machine=architecture,
        cpu=chosen.level,
        cpu_features=chosen.features,
        abi_tag=torch_sdk.abi_tag(spec, sdk),
        debug=settings.debug,
        flags=_flags(spec.backend),
        archs=archs,
    )


def _flags(backend: str) -> tuple[tuple[str, tuple[str, ...]], ...]:
    found = [(name, getattr(settings, name)) for name in flag_settings(backend)]
    if backend == CUDA and settings.debug_cuda:
        found.append(("debug_cuda", ("-Xptxas=-v",)))
    return tuple((name, value) for name, value in found if value)


def require_torch(spec: OpSpec) -> TorchSDK | None:
    """The torch that an op would run on; None if it needs none. Raises LoadError if there is no
    such torch, and on a system for which there are no native ops."""
    if uname.system() != "linux":
        raise LoadError(
            f"op {spec.title} has no native version for {uname.system()}",
            why="native ops are built and loaded on Linux, x86-64 and aarch64",
        )
    if spec.abi == ABI_NONE:
        return None
    sdk = torch_sdk.find()
    if sdk is None:
        raise LoadError(
            f"op {spec.title} needs torch", why="torch is not installed", hint="pip install torch"
        )
    if spec.abi == ABI_STABLE and not torch_sdk.has_stable_abi(sdk):
        raise LoadError(
            f"op {spec.title} needs torch {STABLE_VERSION} or later",
            why=f"torch {sdk.version} lacks the stable ABI",
            hint=f"pip install 'torch>={STABLE_VERSION}'",
        )
    return sdk


def missing_here(target: Target) -> tuple[str, ...]:
    """The features that this machine lacks to run a build for a target; empty if it can."""
    if target.machine != uname.architecture():
        return (target.machine,)
    return cpu.missing_features(target.cpu, target.cpu_features, features())


def require_cpu(spec: OpSpec, target: Target) -> None:
    """Raise LoadError if a build for a target cannot run on this CPU."""
    if lacks := missing_here(target):
        raise LoadError(
            f"op {spec.title} for {cpu.CPU(target.cpu, target.cpu_features)} cannot run here",
            why=f"it needs {', '.join(lacks)}, which this CPU lacks",
            hint="OPKILN_CPU=native",
        )


def require_sycl_device(spec: OpSpec) -> None:
    """Raise LoadError if there is no SYCL device."""
    from opkiln.machine.toolchain import libsycl

    if missing := libsycl.why_no_device(settings.ocl_icd_filenames):
        why, hint = missing
        raise LoadError(f"op {spec.title} has no SYCL device to run on", why=why, hint=hint)
