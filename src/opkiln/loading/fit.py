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
from opkiln.model import ABI_NONE, ABI_STABLE, CPU, CUDA, LIBRARY, ROCM, STABLE_TAG
from opkiln.record import Record
from opkiln.settings import origin_of, settings
from opkiln.store import key

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Any

    from opkiln.loading.loader import Op

_RTLD_NOLOAD = 4  # glibc's; the os module has it under no name before Python 3.13
_FLAGS = ("cppflags", "cxxflags", "ldflags", "cudaflags")


class Fit(Record):
    """How well a library fits, the smallest first; or why it does not."""

    misfit: str
    rank: tuple[int, ...] = ()


class Wanted(Record):
    """What every library of an op is held against."""

    spec_key: str
    flags: tuple[tuple[str, tuple[str, ...], str], ...]  # name, value, the variable that asks
    cpu: frozenset[str]  # this CPU's features, by the kernel's names


def wanted(op: Op, *, listed: bool) -> Wanted:
    """The op as it is declared, the flags that were asked for, and this CPU.

    ``listed``: in a layer that the user named, where flags of the environment count as they do for
    the user's own store; what a package was shipped with has the flags of whoever shipped it.
    """
    flags = []
    for name in _FLAGS if op.spec.backend != CPU else _FLAGS[:-1]:
        value, origin = origin_of(name)
        if listed or origin.startswith("OPKILN_"):
            variable = origin if origin.isupper() else name.upper()
            flags.append((name, tuple(value or ()), variable))
    have = frozenset(machine.cpu_flags().split())
    return Wanted(key.spec_key(op.spec), tuple(flags), have)


def judge(op: Op, manifest: Mapping[str, Any], asked: Wanted) -> Fit:
    """Hold a manifest against the op as it is declared and the machine as it is.

    ``lacking`` has the rest, which takes longer and is asked of the best alone. Raises KeyError,
    TypeError and ValueError for a manifest that is none.
    """
    target = manifest["target"]
    if manifest["spec"] != asked.spec_key:
        return Fit("it was built from another declaration of this op")
    if (target["system"], target["machine"]) != (machine.system(), machine.architecture()):
        return Fit(f"it is for {target['system']} on {target['machine']}")
    if bool(target["debug"]) != settings.debug:
        return Fit("OPKILN_DEBUG is set, and it was built without" if settings.debug else
                   "it was built for debugging")  # fmt: skip
    return (
        _other_flags(target, asked)
        or _other_abi(op, target["abi_tag"])
        or _lacking_cpu(op, manifest, asked)
        or _on_device(op, manifest)
    )


def _other_flags(target: Mapping[str, Any], asked: Wanted) -> Fit | None:
    built = {name: tuple(value) for name, value in target["flags"]}
    for name, value, variable in asked.flags:
        if value != built.get(name, ()):
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
        here = torch_sdk.abi_tag(spec, sdk)
    if _comparable(built) == _comparable(here):
        return None
    return Fit(f"it is built for {built}, and here is {here}")


def _comparable(tag: str) -> str:
    """A tag without torch's runtime and without Python's patch release, whose ABI is its minor's;
    the store's keys have both."""
    tag, python, release = tag.partition("-cpython-" if "-cpython-" in tag else "cpython-")
    kept = (part for part in tag.split("-") if part.rstrip("0123456789") not in _RUNTIMES)
    return "-".join(kept) + python + release.partition("-")[0]


_RUNTIMES = ("cuda", "rocm")


def _lacking_cpu(op: Op, manifest: Mapping[str, Any], asked: Wanted) -> Fit | None:
    lacks = set(manifest["needs"]["cpu"]) - asked.cpu
    named, origin = origin_of("cpu")
    if not lacks and (named == "native" or not op.spec.vectorize):
        return None
    from opkiln.arch import cpu

    if lacks:
        names = sorted(cpu.features_of(" ".join(lacks)))
        return Fit(f"it needs {', '.join(names)}, which this CPU lacks")
    target = manifest["target"]
    level, features = target["cpu"], tuple(target["cpu_features"])
    other = cpu.parse(named, machine.architecture(), cpu.features_of(machine.cpu_flags()))
    if (level, features) == tuple(other):
        return None
    return Fit(f"it is for {cpu.CPU(level, features)}, and {origin} asks for {other}")


def lacking(needs: Mapping[str, Any], abi: str) -> str:
    """What a library needs and this machine's libraries lack. Empty where nothing is missing.

    Every soname and every symbol is asked of the dynamic linker. Where nobody has imported torch
    yet, its libraries are not opened, which would take a second: they are asked as files.
    """
    # Opening a path would run its code, and nothing has been verified yet.
    if paths := [soname for soname in needs["sonames"] if "/" in soname]:
        return f"it needs {paths[0]}, which is a path, not a library's name"
    return _lacking(needs, abi)


def _lacking(needs: Mapping[str, Any], abi: str) -> str:
    import ctypes
    from _ctypes import dlopen, dlsym

    program = ctypes.pythonapi  # the whole program; opening it again would take longer
    dlvsym = None
    if hasattr(program, "dlvsym"):  # glibc's; others have no versions
        dlvsym = program["dlvsym"]  # not the attribute, which is everybody's
        dlvsym.restype, dlvsym.argtypes = ctypes.c_void_p, (ctypes.c_void_p, *[ctypes.c_char_p] * 2)
    handles: dict[str, int] = {}
    files: list[str] = []  # of torch's, which nobody has imported yet
    for soname in needs["sonames"]:
        if soname.startswith("ld-"):
            # The dynamic linker is here, and its symbols are found everywhere but by its handle.
            handles[soname] = program._handle
            continue
        handle = _already(dlopen, soname)
        # Once torch is imported, what it brings is found by its soname. Before that, opening the
        # system's library of that name would have torch take it, too.
        unasked = not handle and abi != ABI_NONE and "torch" not in sys.modules
        if brought := (_brought(soname) if unasked else ""):
            files.append(brought)
            continue
        try:
            handles[soname] = handle or dlopen(soname, os.RTLD_LAZY)
        except OSError:
            if not (found := _sycl(soname)):
                return f"it needs {soname}, which is not here"
            files.append(found)
    unknown = []
    # The program's own, too: a Python module finds the interpreter's symbols there.
    anywhere = (*handles.values(), program._handle)
    for soname, symbol, version in needs["symbols"]:
        if version and soname in handles and dlvsym is not None:
            if not dlvsym(handles[soname], symbol.encode(), version.encode()):
                return f"it needs {_shown(symbol)} of {version}, which this {soname} lacks"
        elif not version and not _has(dlsym, anywhere, symbol):
            unknown.append(symbol)
    if not unknown or (files and abi != ABI_STABLE):  # of one torch alone, which its tag names
        return ""
    from opkiln.loading import torch_files

    if unknown := torch_files.missing(files, unknown):
        lacking = torch_files.named(needs["sonames"])
        return f"it needs {_shown(unknown[0])}, which {lacking} lacks"
    return ""


def _shown(symbol: str) -> str:
    from opkiln.binary.symbols import shown

    return shown(symbol)


def _brought(soname: str) -> str:
    from opkiln.loading import torch_files

    return torch_files.locate(soname)


def _sycl(soname: str) -> str:
    """SYCL's runtime, which no linker finds where pip has put it; ``loading.native`` opens it."""
    from opkiln.toolchain import libsycl

    return (libsycl.locate(soname) or "") if libsycl.is_library(soname) else ""


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


def _on_device(op: Op, manifest: Mapping[str, Any]) -> Fit:
    """The rank, or why no device here runs it; libraries without device code fit every machine."""
    if op.spec.backend not in (CUDA, ROCM):
        return Fit("", (0, -len(manifest["needs"]["cpu"])))
    from opkiln.loading import device_fit

    return device_fit.judge(op, manifest)
