"""Finds libraries that were built elsewhere, and judges whether one fits this machine.

They come with packages or are in listed layers. Both are layers like the user's own
(``store.layers``). But their entries were not built for this very machine, so no key finds them:
every entry of the op is judged, and the best of those that fit serves. Nothing is written, no
process is started, and the search of the user's own store is not imported.

<package>/prebuilt/v1/ops/…                 what a package carries for its own ops
<on sys.path>/opkiln_prebuilt/<name>/v1/…   what a wheel of prebuilt ops installs

Opening a library to see whether it fits would be too late. An instruction that this CPU lacks ends
the process. A kernel that no GPU here can run fails at its first launch. The dynamic linker reports
a missing symbol under its mangled name. So a manifest lists everything that its library needs, and
this module compares that with what is here. Symbols are compared, not versions of libraries.
"""

from __future__ import annotations

import os
import sys

from opkiln.base.lazy import Record
from opkiln.base.model import (
    ABI_NONE,
    ABI_STABLE,
    CUDA,
    LIBRARY,
    OUTSIDE,
    PACKAGE,
    ROCM,
    STABLE_TAG,
    Artifact,
    flag_settings,
    place_of,
)
from opkiln.base.trust import open_to_all
from opkiln.errors import LoadError, StoreError
from opkiln.machine import uname
from opkiln.machine.facts import Hasher
from opkiln.settings import origin_of, settings
from opkiln.store import entry, key

TYPE_CHECKING = False

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from typing import Any

    from opkiln.base.model import OpSpec
    from opkiln.decision.terms import Request, Trace


_RTLD_NOLOAD = 4  # glibc's; the os module has it under no name before Python 3.13


class Fit(Record):
    """How well a library fits, the smallest first; or why it does not."""

    misfit: str
    rank: tuple[int, ...] = ()


class Measure(Record):
    """The values with which each library of an op is compared."""

    spec_key: str
    flags: tuple[tuple[str, tuple[str, ...], str], ...]  # name, value, the variable that asks
    cpu: frozenset[str]  # this CPU's features, by the kernel's names


def measure(request: Request, *, listed: bool) -> Measure:
    """The op as it is declared, the flags that were asked for, and this CPU.

    In a layer that the user named (``listed``), flags of the environment count as they do for the
    user's own store. A package's libraries have the flags of whoever shipped it, so for these only
    opkiln's own settings count.
    """
    flags = []
    for name in flag_settings(request.op.spec.backend):
        value, origin = origin_of(name)
        if listed or origin.startswith("OPKILN_"):
            variable = origin if origin.isupper() else name.upper()
            flags.append((name, tuple(value or ()), variable))
    have = frozenset(uname.cpu_flags().split())
    return Measure(key.spec_key(request.op.spec), tuple(flags), have)


def judge(request: Request, manifest: Mapping[str, Any], asked: Measure) -> Fit:
    """Compare a manifest with the op as it is declared and the machine as it is. ``missing_needs``
    compares the rest. It takes longer, so only the best are asked. Raises KeyError, TypeError and
    ValueError for a damaged manifest."""
    target = manifest["target"]
    if manifest["spec"] != asked.spec_key:
        return Fit("it was built from another declaration of this op")
    if (target["system"], target["machine"]) != (uname.system(), uname.architecture()):
        return Fit(f"it is for {target['system']} on {target['machine']}")
    if bool(target["debug"]) != settings.debug:
        return Fit("OPKILN_DEBUG is set, and it was built without" if settings.debug else
                   "it was built for debugging")  # fmt: skip
    return (
        _compare_flags(target, asked)
        or _compare_abi(request, target["abi_tag"])
        or _compare_cpu(request, manifest, asked)
        or _fit_device(request, manifest)
    )


def _compare_flags(target: Mapping[str, Any], asked: Measure) -> Fit | None:
    built = {name: tuple(value) for name, value in target["flags"]}
    for name, value, variable in asked.flags:
        if value != built.get(name, ()):
            return Fit(f"it was built with other flags than {variable} asks for")
    return None


def _compare_abi(request: Request, built: str) -> Fit | None:
    spec = request.op.spec
    # The CUDA or ROCm release that torch was built with does not count: what a library needs of it
    # shows in its sonames and in the driver that its code needs.
    if spec.abi == ABI_STABLE and spec.kind == LIBRARY:
        here = STABLE_TAG
    else:
        from opkiln.machine.toolchain import torch_sdk

        sdk = None if spec.abi == ABI_NONE else torch_sdk.find()
        if sdk is None and spec.abi != ABI_NONE:
            return Fit("torch is not installed")
        here = torch_sdk.abi_tag(spec, sdk)
    if _comparable_tag(built) == _comparable_tag(here):
        return None
    return Fit(f"it is built for {built}, and here is {here}")


def _comparable_tag(tag: str) -> str:
    """A tag without torch's runtime and without Python's patch release, which has the ABI of its
    minor release. (The store's keys have both.)"""
    tag, python, release = tag.partition("cpython-")
    kept = (part for part in tag.split("-") if part.rstrip("0123456789") not in _RUNTIMES)
    return "-".join(kept) + python + release.partition("-")[0]


_RUNTIMES = ("cuda", "rocm")


def _compare_cpu(request: Request, manifest: Mapping[str, Any], asked: Measure) -> Fit | None:
    lacks = set(manifest["needs"]["cpu"]) - asked.cpu
    named, origin = origin_of("cpu")
    if not lacks and (named == "native" or not request.op.spec.vectorize):
        return None
    from opkiln.machine.arch import cpu

    if lacks:
        names = sorted(cpu.features_of(" ".join(lacks)))
        return Fit(f"it needs {', '.join(names)}, which this CPU lacks")
    target = manifest["target"]
    level, features = target["cpu"], tuple(target["cpu_features"])
    other = cpu.parse(named, uname.architecture(), cpu.features_of(uname.cpu_flags()))
    if (level, features) == tuple(other):
        return None
    return Fit(f"it is for {cpu.CPU(level, features)}, and {origin} asks for {other}")


def missing_needs(needs: Mapping[str, Any], abi: str) -> str:
    """What a library needs and this machine's libraries lack; empty if nothing is missing. The
    dynamic linker is asked for every soname and every symbol. If torch is not imported yet, its
    libraries are read as files: opening them would take a second."""
    # Opening a path would run its code, and nothing has been verified yet.
    if paths := [soname for soname in needs["sonames"] if "/" in soname]:
        return f"it needs {paths[0]}, which is a path, not a library's name"
    import ctypes
    from _ctypes import dlopen, dlsym

    program = ctypes.pythonapi  # the whole program; opening it again would take longer
    dlvsym = None
    if hasattr(program, "dlvsym"):  # glibc's; others have no versions
        dlvsym = program["dlvsym"]  # not the attribute, which is everybody's
        dlvsym.restype, dlvsym.argtypes = ctypes.c_void_p, (ctypes.c_void_p, *[ctypes.c_char_p] * 2)
    handles: dict[str, int] = {}
    files: list[str] = []  # torch's libraries, if it is not imported yet
    for soname in needs["sonames"]:
        if soname.startswith("ld-"):
            # The dynamic linker is here, and its symbols are found everywhere but by its handle.
            handles[soname] = program._handle
            continue
        handle = _open_loaded(dlopen, soname)
        # Once torch is imported, what it brings is found by its soname. Before that, opening the
        # system's library of that name would have torch take it, too.
        unasked = not handle and abi != ABI_NONE and "torch" not in sys.modules
        if brought := (_find_brought(soname) if unasked else ""):
            files.append(brought)
            continue
        try:
            handles[soname] = handle or dlopen(soname, os.RTLD_LAZY)
        except OSError:
            if not (found := _find_sycl(soname)):
                return f"it needs {soname}, which is not here"
            files.append(found)
    unknown = []
    # The program's own, too: a Python module finds the interpreter's symbols there.
    anywhere = (*handles.values(), program._handle)
    for soname, symbol, version in needs["symbols"]:
        if version and soname in handles and dlvsym is not None:
            if not dlvsym(handles[soname], symbol.encode(), version.encode()):
                from opkiln.machine.binary.elf import show_symbol

                return f"it needs {show_symbol(symbol)} of {version}, which this {soname} lacks"
        elif not version and not _has_symbol(dlsym, anywhere, symbol):
            unknown.append(symbol)
    if not unknown or (files and abi != ABI_STABLE):  # of one torch alone, which its tag names
        return ""
    return _missing_symbols(unknown, files, needs["sonames"])


def _missing_symbols(symbols: list[str], files: list[str], sonames: Iterable[str]) -> str:
    from opkiln.machine.binary.elf import missing_symbols

    for path in files:
        symbols = [*missing_symbols(path, symbols)]
    return (
        f"it needs {_show_symbol(symbols[0])}, which {_name_owner(sonames)} lacks"
        if symbols
        else ""
    )


def _show_symbol(symbol: str) -> str:
    from opkiln.machine.binary.elf import show_symbol

    return show_symbol(symbol)


def _find_brought(soname: str) -> str:
    """The file of a library that ``import torch`` loads: torch's own, or one of NVIDIA's wheels."""
    from opkiln.machine.toolchain import torch_sdk

    if (sdk := torch_sdk.find()) is None:
        return ""
    own = os.path.join(sdk.path, "lib", soname)
    if os.path.exists(own):
        return own
    from glob import glob

    packages = os.path.join(os.path.dirname(sdk.path), "nvidia", "*", "lib", soname)
    return next(iter(glob(packages)), "")


def _name_owner(sonames: Iterable[str]) -> str:
    """What should define the symbols of a library that is linked to these, in words."""
    from opkiln.machine.toolchain import torch_sdk

    sdk = torch_sdk.find()
    if sdk is None or not any(each.startswith(("libtorch", "libc10")) for each in sonames):
        return "every library here"
    return f"torch {sdk.version}"


def _find_sycl(soname: str) -> str:
    """SYCL's runtime, which no linker finds where pip has put it; ``loading.native`` opens it."""
    from opkiln.machine.toolchain import libsycl

    return (libsycl.locate(soname) or "") if libsycl.is_library(soname) else ""


def _open_loaded(dlopen: Any, soname: str) -> int:
    try:
        return int(dlopen(soname, os.RTLD_LAZY | _RTLD_NOLOAD))
    except OSError:
        return 0


def _has_symbol(dlsym: Any, handles: Iterable[int], symbol: str) -> bool:
    for handle in handles:
        try:
            if dlsym(handle, symbol):
                return True
        except OSError:
            continue
    return False


def _fit_device(request: Request, manifest: Mapping[str, Any]) -> Fit:
    """How well its code runs on the GPUs here. A library without device code fits every machine."""
    spec = request.op.spec
    if spec.backend not in (CUDA, ROCM):
        return Fit("", (0, -len(manifest["needs"]["cpu"])))
    from opkiln.decision import archs

    target, images = manifest["target"], tuple(manifest["needs"]["images"])
    built, shown = tuple(target["archs"]), ";".join(target["archs"])
    if not archs.knows_all(spec.backend, built, images):
        return Fit(f"its code is for {shown}, which this opkiln does not know")
    if not archs.keeps_all(request.op, built):
        return Fit(f"it is for {shown}, of which the op's filter keeps less")
    way, device = archs.way_of(spec.backend, request.wanted, built, images)
    if not way:
        return Fit(f"its code is for {shown}, which does not run on {device}")
    if spec.backend == CUDA and (reason := _compare_driver(manifest["toolchain"], way)):
        return Fit(reason)
    return Fit("", (archs.WAYS.index(way), len(built), -len(manifest["needs"]["cpu"])))


def _compare_driver(toolchain: Mapping[str, str], way: str) -> str:
    """Why the driver here is too old for a library; empty if it is not. The driver must know the
    library's runtime and images. To recompile PTX it must be as new as the compiler."""
    from opkiln.decision import archs
    from opkiln.machine.devices import nvidia
    from opkiln.machine.toolchain import torch_sdk

    made = toolchain.get("nvcc") or toolchain.get("nvrtc", "")
    driver = nvidia.devices(archs.memory()).cuda
    if not driver or not made:
        return ""
    here, needs = torch_sdk.release(driver), torch_sdk.release(made)
    if here[0] < needs[0]:
        return f"it is built with CUDA {made}, and the driver here takes CUDA up to {driver}"
    if way == archs.PTX and here < needs:
        return (
            f"only its PTX fits the GPU, which is of CUDA {made}, and the driver here takes PTX "
            f"up to CUDA {driver}"
        )
    return ""


# Where a library is from: installed with a package, in a listed layer, imported by the user.
PREBUILT, LAYER, STORE = "prebuilt", "layer", "store"

_NO_MANIFEST = (
    OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, StoreError,
)  # fmt: skip


class SearchedLayer(Record):
    """A layer of directories, or a bundle: one file."""

    root: str
    resort: str  # what the trace calls it
    own: bool = False  # the user's, where builds were looked up by their keys
    bundle: bool = False

    def leaves(self, spec: OpSpec) -> list[str]:
        """An op's entries, the newest first. Raises StoreError, OSError, ValueError for a file that
        is not a bundle."""
        if self.bundle:
            from opkiln.store import archive

            return archive.leaves(self.root, spec.distribution, spec.name)
        base = os.path.join(self.root, "ops", place_of(spec.distribution, spec.name))
        intents = [os.path.join(base, name) for name in entry.list_newest(base)]
        builds = [os.path.join(each, name) for each in intents for name in entry.list_newest(each)]
        return [os.path.join(each, name) for each in builds for name in entry.list_newest(each)]

    def manifest(self, leaf: str) -> dict[str, Any]:
        """An entry's manifest. Raises OSError, KeyError, ValueError, and StoreError if everybody
        may put entries there."""
        if self.bundle:
            from opkiln.store import archive

            return archive.manifest(leaf)
        if reason := open_to_all(self.root, os.path.dirname(leaf)):
            raise StoreError(reason)
        return entry.read_manifest(leaf)

    def examine(
        self, leaf: str, places: Mapping[str, str], *, own: bool
    ) -> entry.Leaf | entry.Refused | None:
        """``entry.examine``, or ``archive.examine``, which copies a good library into memory."""
        if self.bundle:
            from opkiln.store import archive

            return archive.examine(leaf, places, Hasher(), own=own)
        return entry.examine(leaf, places, Hasher(), listed=not self.own, whole=False, own=own)


class Fitting(Record):
    """An entry that fits by its manifest."""

    rank: tuple[int, ...]
    leaf: str
    needs: Mapping[str, Any]
    layer: SearchedLayer


def find(
    request: Request,
    layers: Iterable[str],
    trace: Trace,
    resort: str,
    own: Iterable[str] = (),
    only: str = "",
) -> Artifact | None:
    """The best library for this machine in some layers, with what was refused in the trace.

    In the user's ``own`` layers, only imported entries are judged: those that were built there are
    found by their keys. ``only`` is the SHA-256 of the one library that is wanted, wherever it is
    from. Raises ArchError for an architecture list or a CPU that is not valid.
    """
    spec = request.op.spec
    searched = [SearchedLayer(each, STORE, own=True) for each in own]
    searched += [SearchedLayer(each, resort, bundle=os.path.isfile(each)) for each in layers]
    fitting = [found for each in searched for found in _find_fitting(request, each, trace, only)]
    for each in sorted(fitting, key=lambda each: each.rank):  # of equals, the first layer's
        told = each.layer.resort
        try:
            reason = missing_needs(each.needs, spec.abi)
            found = None if reason else _examine(spec, each)
            fits = _explain_fit(found.manifest) if isinstance(found, entry.Leaf) else ""
        except (*_NO_MANIFEST, LoadError) as error:
            trace.add(told, "refused", f"damaged: {entry.describe_error(error)}", each.leaf)
            continue
        if reason:
            trace.add(told, "refused", reason, each.leaf)
        if isinstance(found, entry.Leaf):
            # The path of a bundle's file in memory would mean nothing to a reader.
            subject = found.directory if each.layer.bundle else found.payload
            if failed := request.cannot_open.get(found.payload):
                trace.add(told, "refused", failed.why, subject)
                continue
            trace.add(told, "taken", fits, subject)
            return Artifact(found.payload, found.manifest["sha256"], told)
        if found is not None:
            trace.add(told, "refused", found.reason, found.directory)
    return None


def _find_fitting(
    request: Request, layer: SearchedLayer, trace: Trace, only: str
) -> Iterator[Fitting]:
    """A layer's entries that fit by what their manifests say."""
    resort = layer.resort
    try:
        leaves = layer.leaves(request.op.spec)
    except _NO_MANIFEST as error:
        reason = error.what if isinstance(error, StoreError) else entry.describe_error(error)
        trace.add(resort, "refused", reason, layer.root)
        return
    asked = measure(request, listed=resort != PREBUILT)
    for leaf in leaves:
        try:
            manifest = layer.manifest(leaf)
            if manifest["target"]["backend"] != request.op.spec.backend:
                continue
            if manifest["sha256"] != only if only else layer.own and "created" in manifest:
                continue
            verdict = judge(request, manifest, asked)
            needs = manifest["needs"]
        except FileNotFoundError:
            continue  # removed meanwhile
        except StoreError as error:
            trace.add(resort, "refused", error.what, leaf)
            continue
        except _NO_MANIFEST as error:
            if not layer.own:  # there, the look-up by key has said so
                trace.add(resort, "refused", f"damaged: {entry.describe_error(error)}", leaf)
            continue
        if verdict.misfit:
            trace.add(resort, "refused", verdict.misfit, leaf)
        else:
            yield Fitting(verdict.rank, leaf, needs, layer)


def _explain_fit(manifest: dict[str, Any]) -> str:
    target = manifest["target"]
    made = ";".join(target["archs"]) or "+".join((target["cpu"], *target["cpu_features"]))
    fits = f"its sources are today's, and its code for {made} runs here"
    origin = fetched_from(manifest)
    return f"{fits}; {origin}" if origin else fits


def fetched_from(manifest: Mapping[str, Any]) -> str:
    """The remote tier that an entry came from, and why it is trusted; empty for other entries."""
    if (origin := manifest.get(entry.FETCHED)) is None:
        return ""
    by = origin.get("key") or origin.get("lock", "")
    return f"fetched from {origin.get('url')}, trusted by {by}"


def _examine(spec: OpSpec, each: Fitting) -> entry.Leaf | entry.Refused | None:
    """Check owner and mode, the digests, and the sources if the package ships them."""
    places = {"src": spec.root, "opkiln": PACKAGE, "abs": "", OUTSIDE: ""}
    found = each.layer.examine(each.leaf, places, own=True)
    if isinstance(found, entry.Refused) and not found.damaged:
        files = (os.path.join(spec.root, source) for source in spec.sources)
        if not spec.inline and not any(map(os.path.lexists, files)):
            return each.layer.examine(each.leaf, places, own=False)
    return found
