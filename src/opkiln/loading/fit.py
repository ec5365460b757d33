"""Whether a library that was built elsewhere fits this machine: asked before it is opened.

A misfit that is found by opening the library is found too late: an instruction that this CPU lacks
is a signal, a kernel that no GPU here runs an error at its first launch, and a missing symbol the
dynamic linker's own words about a mangled name. So everything that a library needs is in its
manifest (``loading.needs``) and is held against what is here. Libraries are asked for symbols, not
for their versions: what counts is what they have.
"""

from __future__ import annotations

import os
import sys

from opkiln import machine
from opkiln.model import ABI_NONE, ABI_STABLE, CPU, CUDA, LIBRARY, STABLE_TAG
from opkiln.record import Record
from opkiln.settings import origin_of, settings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Any

    from opkiln.loading.loader import Op

_WAYS = ("exact", "binary", "generic", "ptx")
_RTLD_NOLOAD = 4  # glibc's; the os module has it under no name before Python 3.13
_FLAGS = ("cppflags", "cxxflags", "ldflags", "cudaflags")


class Fit(Record):
    """How well a library fits, the smallest first; or why it does not."""

    misfit: str
    rank: tuple[int, ...] = ()


def judge(op: Op, manifest: Mapping[str, Any], spec_key: str, *, listed: bool) -> Fit:
    """Hold a manifest against the op as it is declared and the machine as it is.

    ``listed``: in a layer that the user named, where flags of the environment count as they do for
    the user's own store; what a package was shipped with has the flags of whoever shipped it.
    ``lacking`` has the rest, which takes longer and is asked of the best alone. Raises KeyError,
    TypeError and ValueError for a manifest that is none.
    """
    target = manifest["target"]
    if manifest["spec"] != spec_key:
        return Fit("it was built from another declaration of this op")
    if (target["system"], target["machine"]) != (machine.system(), machine.architecture()):
        return Fit(f"it is for {target['system']} on {target['machine']}")
    if bool(target["debug"]) != settings.debug:
        return Fit("OPKILN_DEBUG is set, and it was built without" if settings.debug else
                   "it was built for debugging")  # fmt: skip
    return (
        _other_flags(target, listed)
        or _other_abi(op, target["abi_tag"])
        or _lacking_cpu(op, manifest)
        or _on_device(op, manifest)
    )


def _other_flags(target: Mapping[str, Any], listed: bool) -> Fit | None:
    built = {name: tuple(value) for name, value in target["flags"]}
    for name in _FLAGS:
        if name == "cudaflags" and target["backend"] == CPU:
            continue
        value, origin = origin_of(name)
        counts = listed or origin.startswith("OPKILN_")
        if counts and tuple(value or ()) != built.get(name, ()):
            variable = origin if origin.isupper() else name.upper()
            return Fit(f"it was built with other flags than {variable} asks for")
    return None


def _other_abi(op: Op, built: str) -> Fit | None:
    spec = op.spec
    # Not the CUDA or ROCm release that torch was built with: what a library needs of that it says
    # by the sonames it needs and the driver that its code takes.
    if spec.abi == ABI_STABLE and spec.kind == LIBRARY:
        here = STABLE_TAG
    else:
        from opkiln.toolchain import torch_sdk

        sdk = None if spec.abi == ABI_NONE else torch_sdk.find()
        if sdk is None and spec.abi != ABI_NONE:
            return Fit("torch is not installed")
        here = _without_runtime(torch_sdk.abi_tag(spec, sdk))
    if _without_runtime(built) == here:
        return None
    return Fit(f"it is built for {built}, and here is {here}")


def _without_runtime(tag: str) -> str:
    return "-".join(part for part in tag.split("-") if part.rstrip("0123456789") not in _RUNTIMES)


_RUNTIMES = ("cuda", "rocm")


def _lacking_cpu(op: Op, manifest: Mapping[str, Any]) -> Fit | None:
    lacks = set(manifest["needs"]["cpu"]).difference(machine.cpu_flags().split())
    asked, origin = origin_of("cpu")
    if not lacks and (asked == "native" or not op.spec.vectorize):
        return None
    from opkiln.arch import cpu

    if lacks:
        names = sorted(cpu.features_of(" ".join(lacks)))
        return Fit(f"it needs {', '.join(names)}, which this CPU lacks")
    target = manifest["target"]
    level, features = target["cpu"], tuple(target["cpu_features"])
    wanted = cpu.parse(asked, machine.architecture(), cpu.features_of(machine.cpu_flags()))
    if (level, features) == tuple(wanted):
        return None
    return Fit(f"it is for {cpu.CPU(level, features)}, and {origin} asks for {wanted}")


def lacking(needs: Mapping[str, Any], abi: str) -> str:
    """What a library needs and this machine's libraries lack. Empty where nothing is missing.

    Every soname and every symbol is asked of the dynamic linker. Where nobody has imported torch
    yet, its libraries are not opened, which would take a second: they are asked as files.
    """
    import ctypes
    from _ctypes import dlopen, dlsym

    program = ctypes.CDLL(None)
    dlvsym = getattr(program, "dlvsym", None)  # glibc's; others have no versions
    if dlvsym is not None:
        dlvsym.restype, dlvsym.argtypes = ctypes.c_void_p, (ctypes.c_void_p, *[ctypes.c_char_p] * 2)
    handles: dict[str, int] = {}
    files: list[str] = []
    for soname in needs["sonames"]:
        try:
            handles[soname] = _already(dlopen, soname) or dlopen(soname, os.RTLD_LAZY)
        except OSError:
            # Once torch is imported, what it brings is found by its soname.
            unasked = abi != ABI_NONE and "torch" not in sys.modules
            found = _with_torch(soname) if unasked else ""
            if not found:
                return f"it needs {soname}, which is not here"
            files.append(found)
    unknown = []
    # The program's own, too: a Python module finds the interpreter's symbols there.
    anywhere = (*handles.values(), program._handle)
    for soname, symbol, version in needs["symbols"]:
        if version and soname in handles and dlvsym is not None:
            if not dlvsym(handles[soname], symbol.encode(), version.encode()):
                return f"it needs {symbol} of {version}, which this {soname} lacks"
        elif not version and not _has(dlsym, anywhere, symbol):
            unknown.append(symbol)
    if files and abi == ABI_STABLE:  # any other ABI is of one torch, which its tag names
        unknown = _not_in(files, unknown)
    elif files:
        unknown = []
    if unknown:
        return f"it needs {unknown[0]}, which {_torch(needs['sonames']) or 'no library here'} lacks"
    return ""


_OF_TORCH = ("libtorch", "libc10")


def _already(dlopen: Any, soname: str) -> int:
    try:
        return int(dlopen(soname, os.RTLD_LAZY | _RTLD_NOLOAD))
    except OSError:
        return 0


def _has(dlsym: Any, handles: Iterable[int], symbol: str) -> bool:
    for handle in handles:
        try:
            if dlsym(handle, symbol):
                return True
        except OSError:
            continue
    return False


def _with_torch(soname: str) -> str:
    """The file of a library that importing torch brings: its own, or of the packages it needs."""
    from opkiln.toolchain import torch_sdk

    if (sdk := torch_sdk.find()) is None:
        return ""
    own = os.path.join(sdk.path, "lib", soname)
    if os.path.exists(own):
        return own
    from glob import glob

    packages = os.path.join(os.path.dirname(sdk.path), "nvidia", "*", "lib", soname)
    return next(iter(glob(packages)), "")


def _not_in(files: Iterable[str], symbols: list[str]) -> list[str]:
    """The symbols that none of these files has."""
    from opkiln.binary import exported

    for file in files:
        symbols = [*exported.missing(file, symbols)]
    return symbols


def _torch(sonames: Iterable[str]) -> str:
    if not any(soname.startswith(_OF_TORCH) for soname in sonames):
        return ""
    from opkiln.toolchain import torch_sdk

    sdk = torch_sdk.find()
    return "" if sdk is None else f"torch {sdk.version}"


def _on_device(op: Op, manifest: Mapping[str, Any]) -> Fit:
    """The rank, or why no device here runs it; libraries without device code fit every machine."""
    target = manifest["target"]
    size = len(manifest["needs"]["cpu"])
    if op.spec.backend not in ("cuda", "rocm"):
        return Fit("", (0, -size))
    from opkiln.loading import archs

    made = ";".join(target["archs"])
    if not archs.kept(op, tuple(target["archs"])):
        return Fit(f"it is for {made}, of which the op's filter keeps less")
    way, device = archs.way_of(op, tuple(target["archs"]), tuple(manifest["needs"]["images"]))
    if not way:
        return Fit(f"its code is for {made}, which does not run on {device}")
    if op.spec.backend == CUDA and (reason := _old_driver(manifest["toolchain"], way)):
        return Fit(reason)
    return Fit("", (_WAYS.index(way), len(target["archs"]), -size))


def _old_driver(toolchain: Mapping[str, str], way: str) -> str:
    """The driver must know the runtime in the library; translating PTX takes one as new as it."""
    from opkiln.accelerator import nvidia
    from opkiln.loading import archs
    from opkiln.toolchain import torch_sdk

    made = toolchain.get("nvcc", "")
    driver = nvidia.devices(archs.memory()).cuda
    if not driver or not made:
        return ""
    here, needs = torch_sdk.release(driver), torch_sdk.release(made)
    if here[0] < needs[0]:
        return f"it is built with CUDA {made}, and the driver here takes CUDA up to {driver}"
    if way == "ptx" and here < needs:
        return (
            f"only its PTX fits the GPU, which is of CUDA {made}, and the driver here takes PTX "
            f"up to CUDA {driver}"
        )
    return ""
