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
from opkiln.arch import cpu
from opkiln.model import ABI_NONE, ABI_STABLE, CPU, CUDA, LIBRARY
from opkiln.record import Record
from opkiln.settings import origin_of, settings
from opkiln.toolchain import torch_sdk

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
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
    Raises KeyError, TypeError and ValueError for a manifest that is none.
    """
    spec, target = op.spec, manifest["target"]
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
        or _lacking_cpu(op, target)
        or _lacking(manifest["needs"], torch=spec.abi != ABI_NONE)
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
    stable_library = spec.abi == ABI_STABLE and spec.kind == LIBRARY
    sdk = None if spec.abi == ABI_NONE or stable_library else torch_sdk.find()
    if spec.abi != ABI_NONE and not stable_library and sdk is None:
        return Fit("torch is not installed")
    here = torch_sdk.abi_tag(spec, sdk)
    # The CUDA or ROCm release that torch was built with: what a library needs of that it says by
    # the sonames it needs and the driver that its code takes.
    if _without_runtime(built) == _without_runtime(here):
        return None
    return Fit(f"it is built for {built}, and here is {here}")


def _without_runtime(tag: str) -> str:
    return "-".join(part for part in tag.split("-") if part.rstrip("0123456789") not in _RUNTIMES)


_RUNTIMES = ("cuda", "rocm")


def _lacking_cpu(op: Op, target: Mapping[str, Any]) -> Fit | None:
    level, features = target["cpu"], tuple(target["cpu_features"])
    have = cpu.features_of(machine.cpu_flags())
    if lacks := cpu.lacking(level, features, have):
        return Fit(f"it needs {', '.join(lacks)}, which this CPU lacks")
    asked, origin = origin_of("cpu")
    if asked == "native" or not op.spec.vectorize:
        return None
    wanted = cpu.parse(asked, machine.architecture(), have)
    if (level, features) == tuple(wanted):
        return None
    return Fit(f"it is for {cpu.CPU(level, features)}, and {origin} asks for {wanted}")


def _lacking(needs: Mapping[str, Any], *, torch: bool) -> Fit | None:
    """Every library that it needs, and every symbol of theirs: asked of the dynamic linker."""
    import ctypes
    from _ctypes import dlopen, dlsym

    dlvsym = getattr(ctypes.CDLL(None), "dlvsym", None)  # glibc's; others have no versions
    if dlvsym is not None:
        dlvsym.restype, dlvsym.argtypes = ctypes.c_void_p, (ctypes.c_void_p, *[ctypes.c_char_p] * 2)
    handles: dict[str, int] = {}
    for soname in needs["sonames"]:
        try:
            handles[soname] = _already(dlopen, soname) or dlopen(soname, os.RTLD_LAZY)
        except OSError:
            if torch and "torch" not in sys.modules and soname.startswith(_OF_TORCH):
                continue  # nobody has imported it yet; it brings them
            return Fit(f"it needs {soname}, which is not here")
    whole = len(handles) == len(needs["sonames"])
    for soname, symbol, version in needs["symbols"]:
        if version and soname in handles and dlvsym is not None:
            if not dlvsym(handles[soname], symbol.encode(), version.encode()):
                return Fit(f"it needs {symbol} of {version}, which this {soname} lacks")
        elif not version and whole and not _anywhere(dlsym, handles, symbol):
            where = " or ".join(name for name in handles if name.startswith(_OF_TORCH))
            return Fit(f"it needs {symbol}, which {_torch() or where or 'no library'} lacks")
    return None


_OF_TORCH = ("libtorch", "libc10")


def _already(dlopen: Any, soname: str) -> int:
    try:
        return int(dlopen(soname, os.RTLD_LAZY | _RTLD_NOLOAD))
    except OSError:
        return 0


def _anywhere(dlsym: Any, handles: Mapping[str, int], symbol: str) -> bool:
    for handle in handles.values():
        try:
            if dlsym(handle, symbol):
                return True
        except OSError:
            continue
    return False


def _torch() -> str:
    module = sys.modules.get("torch")
    return "" if module is None else f"torch {getattr(module, '__version__', '')}"


def _on_device(op: Op, manifest: Mapping[str, Any]) -> Fit:
    """The rank, or why no device here runs it; libraries without device code fit every machine."""
    target = manifest["target"]
    size = len(cpu.requires(target["cpu"], tuple(target["cpu_features"])))
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
