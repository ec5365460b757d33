"""Libraries that were built elsewhere: where they lie, and whether one fits this machine.

What packages were installed with, and listed layers. Both are layers like the user's own
(``store.layers``). But their entries were not built for this very machine, so no key finds them:
every entry of the op is judged, and the best of those that fit serves. Nothing is written, no
process is started, and the search of the user's own store is not imported.

<package>/prebuilt/v1/ops/…                 what a package carries for its own ops
<on sys.path>/opkiln_prebuilt/<name>/v1/…   what a wheel of prebuilt ops installs

To find out by opening a library that it does not fit is too late. An instruction that this CPU
lacks ends the process. A kernel that no GPU here can run fails at its first launch. A missing
symbol is reported by the dynamic linker, under its mangled name. So a manifest lists everything
that its library needs, and this module compares that with what is here. Libraries are asked for
symbols, not for versions: what counts is what they have.
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
    """What every library of an op is compared with."""

    spec_key: str
    flags: tuple[tuple[str, tuple[str, ...], str], ...]  # name, value, the variable that asks
    cpu: frozenset[str]  # this CPU's features, by the kernel's names


def measure(request: Request, *, listed: bool) -> Measure:
    """The op as it is declared, the flags that were asked for, and this CPU.

    ``listed``: for a layer that the user named. There, flags of the environment count as they do
    for the user's own store. What a package ships has the flags of whoever shipped it, so there
    only a setting of opkiln's own counts.
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
    """Compare a manifest with the op as it is declared and the machine as it is.

    ``lacking`` has the rest, which takes longer and is asked of the best alone. Raises KeyError,
    TypeError and ValueError for a damaged manifest.
    """
    target = manifest["target"]
    if manifest["spec"] != asked.spec_key:
        return Fit("it was built from another declaration of this op")
    if (target["system"], target["machine"]) != (uname.system(), uname.architecture()):
        return Fit(f"it is for {target['system']} on {target['machine']}")
    if bool(target["debug"]) != settings.debug:
        return Fit("OPKILN_DEBUG is set, and it was built without" if settings.debug else
                   "it was built for debugging")  # fmt: skip
    return (
        _other_flags(target, asked)
        or _other_abi(request, target["abi_tag"])
        or _lacking_cpu(request, manifest, asked)
        or _fit_device(request, manifest)
    )


def _other_flags(target: Mapping[str, Any], asked: Measure) -> Fit | None:
    built = {name: tuple(value) for name, value in target["flags"]}
    for name, value, variable in asked.flags:
        if value != built.get(name, ()):
            return Fit(f"it was built with other flags than {variable} asks for")
    return None


def _other_abi(request: Request, built: str) -> Fit | None:
    spec = request.op.spec
    # Not the CUDA or ROCm release that torch was built with: what a library needs of that it says
    # by the sonames it needs and the driver that its code takes.
    if spec.abi == ABI_STABLE and spec.kind == LIBRARY:
        here = STABLE_TAG
    else:
        from opkiln.machine.toolchain import torch_sdk

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
    tag, python, release = tag.partition("cpython-")
    kept = (part for part in tag.split("-") if part.rstrip("0123456789") not in _RUNTIMES)
    return "-".join(kept) + python + release.partition("-")[0]


_RUNTIMES = ("cuda", "rocm")


def _lacking_cpu(request: Request, manifest: Mapping[str, Any], asked: Measure) -> Fit | None:
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
                return f"it needs {_show_symbol(symbol)} of {version}, which this {soname} lacks"
        elif not version and not _has(dlsym, anywhere, symbol):
            unknown.append(symbol)
    if not unknown or (files and abi != ABI_STABLE):  # of one torch alone, which its tag names
        return ""
    return _lacking_symbols(unknown, files, needs["sonames"])


def _lacking_symbols(symbols: list[str], files: list[str], sonames: Iterable[str]) -> str:
    from opkiln.machine.binary.elf import missing_symbols

    for path in files:
        symbols = [*missing_symbols(path, symbols)]
    return (
        f"it needs {_show_symbol(symbols[0])}, which {_torch_of(sonames)} lacks" if symbols else ""
    )


def _show_symbol(symbol: str) -> str:
    from opkiln.machine.binary.elf import show_symbol

    return show_symbol(symbol)


def _brought(soname: str) -> str:
    """The file of a library that importing torch brings: its own, or of the packages it needs."""
    from opkiln.machine.toolchain import torch_sdk

    if (sdk := torch_sdk.find()) is None:
        return ""
    own = os.path.join(sdk.path, "lib", soname)
    if os.path.exists(own):
        return own
    from glob import glob

    packages = os.path.join(os.path.dirname(sdk.path), "nvidia", "*", "lib", soname)
    return next(iter(glob(packages)), "")


def _torch_of(sonames: Iterable[str]) -> str:
    """Who should have had the symbols of a library that is linked to these."""
    from opkiln.machine.toolchain import torch_sdk

    sdk = torch_sdk.find()
    if sdk is None or not any(each.startswith(("libtorch", "libc10")) for each in sonames):
        return "every library here"
    return f"torch {sdk.version}"


def _sycl(soname: str) -> str:
    """SYCL's runtime, which no linker finds where pip has put it; ``loading.native`` opens it."""
    from opkiln.machine.toolchain import libsycl

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
    if spec.backend == CUDA and (reason := _old_driver(manifest["toolchain"], way)):
        return Fit(reason)
    return Fit("", (archs.WAYS.index(way), len(built), -len(manifest["needs"]["cpu"])))


def _old_driver(toolchain: Mapping[str, str], way: str) -> str:
    """The driver must know the runtime in the library, and its images. To recompile PTX it must be
    as new as the compiler."""
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


# The resorts: installed with a package; a layer that is listed; imported into the user's own.
PREBUILT, LAYER, STORE = "prebuilt", "layer", "store"

_NO_MANIFEST = (
    OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, StoreError,
)  # fmt: skip


class DirectoryLayer:
    """A layer of directories: ``<intent>/<build>/<deps>`` below an op's own."""

    def __init__(self, root: str, *, own: bool = False) -> None:
        self.root = root
        self.own = own  # the user's, where what was built has been looked up by its key

    def leaves(self, spec: OpSpec) -> Iterable[str]:
        """An op's entries."""
        return _list_below(
            os.path.join(self.root, "ops", place_of(spec.distribution, spec.name)), 3
        )

    def manifest(self, leaf: str) -> dict[str, Any]:
        """What an entry says of itself. Raises OSError, ValueError, and StoreError where everybody
        may put entries there."""
        if reason := open_to_all(self.root, os.path.dirname(leaf)):
            raise StoreError(reason)
        return entry.read_manifest(leaf)

    def examine(
        self, leaf: str, places: Mapping[str, str], *, own: bool
    ) -> entry.Leaf | entry.Refused | None:
        """``store.entry.examine``."""
        return entry.examine(leaf, places, Hasher(), listed=not self.own, whole=False, own=own)

    def subject(self, found: entry.Leaf) -> str:
        """What the trace calls an entry."""
        return found.payload


class BundleLayer:
    """A layer in one file (``store.archive``), with the methods of ``Directory``."""

    own = False

    def __init__(self, file: str) -> None:
        self.root = file

    def leaves(self, spec: OpSpec) -> Iterable[str]:
        """An op's entries. Raises StoreError, OSError, ValueError for a file that is not a
        bundle."""
        from opkiln.store import archive

        return archive.leaves(self.root, spec.distribution, spec.name)

    def manifest(self, leaf: str) -> dict[str, Any]:
        """What an entry says of itself. Raises StoreError, KeyError, ValueError, OSError."""
        from opkiln.store import archive

        return archive.manifest(leaf)

    def examine(
        self, leaf: str, places: Mapping[str, str], *, own: bool
    ) -> entry.Leaf | entry.Refused:
        """``store.archive.examine``: a good one's library is in memory."""
        from opkiln.store import archive

        return archive.examine(leaf, places, Hasher(), own=own)

    def subject(self, found: entry.Leaf) -> str:
        """What the trace calls an entry: the path of its file in memory means nothing."""
        return found.directory


class Fitting(Record):
    """An entry that fits by its manifest, with the place it is in."""

    rank: tuple[int, ...]
    leaf: str
    needs: Mapping[str, Any]
    place: DirectoryLayer | BundleLayer


def find(
    request: Request,
    layers: Iterable[str],
    trace: Trace,
    resort: str,
    own: Iterable[str] = (),
    only: str = "",
) -> Artifact | None:
    """The best library for this machine in some layers, with what was refused in the trace.

    In the user's ``own`` layers only what `opkiln cache import` put there is looked at: what was
    built there has a key. ``only`` is the SHA-256 of the one library that is wanted, however it
    came there. Raises ArchError for an architecture list, or a CPU, that was asked for
    and cannot be understood.
    """
    spec = request.op.spec
    places: list[DirectoryLayer | BundleLayer] = [DirectoryLayer(layer, own=True) for layer in own]
    places += [
        BundleLayer(layer) if os.path.isfile(layer) else DirectoryLayer(layer) for layer in layers
    ]
    told = {place: STORE if place.own else resort for place in places}
    fitting = [
        each for place in places for each in _fitting(request, place, trace, told[place], only)
    ]
    for each in sorted(fitting, key=lambda each: each.rank):  # of equals, the first layer's
        try:
            reason = lacking(each.needs, spec.abi)
            found = None if reason else _examine(spec, each)
            fits = _fits(found.manifest) if isinstance(found, entry.Leaf) else ""
        except (*_NO_MANIFEST, LoadError) as error:
            trace.add(told[each.place], "refused", f"damaged: {entry.in_words(error)}", each.leaf)
            continue
        if reason:
            trace.add(told[each.place], "refused", reason, each.leaf)
        if isinstance(found, entry.Leaf):
            if failed := request.cannot_open.get(found.payload):
                trace.add(told[each.place], "refused", failed.why, each.place.subject(found))
                continue
            trace.add(told[each.place], "taken", fits, each.place.subject(found))
            return Artifact(found.payload, found.manifest["sha256"], told[each.place])
        if found is not None:
            trace.add(told[each.place], "refused", found.reason, found.directory)
    return None


def _fitting(
    request: Request, place: DirectoryLayer | BundleLayer, trace: Trace, resort: str, only: str
) -> Iterator[Fitting]:
    """A layer's entries that fit by what their manifests say."""
    try:
        leaves = place.leaves(request.op.spec)
    except _NO_MANIFEST as error:
        reason = error.what if isinstance(error, StoreError) else entry.in_words(error)
        trace.add(resort, "refused", reason, place.root)
        return
    asked = measure(request, listed=resort != PREBUILT)
    for leaf in leaves:
        try:
            manifest = place.manifest(leaf)
            if manifest["target"]["backend"] != request.op.spec.backend:
                continue
            if manifest["sha256"] != only if only else place.own and "created" in manifest:
                continue
            verdict = judge(request, manifest, asked)
            needs = manifest["needs"]
        except FileNotFoundError:
            continue  # removed meanwhile
        except StoreError as error:
            trace.add(resort, "refused", error.what, leaf)
            continue
        except _NO_MANIFEST as error:
            if not place.own:  # where the look-up by key has said so
                trace.add(resort, "refused", f"damaged: {entry.in_words(error)}", leaf)
            continue
        if verdict.misfit:
            trace.add(resort, "refused", verdict.misfit, leaf)
        else:
            yield Fitting(verdict.rank, leaf, needs, place)


def _fits(manifest: dict[str, Any]) -> str:
    target = manifest["target"]
    made = ";".join(target["archs"]) or "+".join((target["cpu"], *target["cpu_features"]))
    fits = f"its sources are today's, and its code for {made} runs here"
    origin = fetched_from(manifest)
    return f"{fits}; {origin}" if origin else fits


def fetched_from(manifest: Mapping[str, Any]) -> str:
    """Which remote tier an entry came from, and why it is trusted; empty for any other."""
    if (origin := manifest.get(entry.FETCHED)) is None:
        return ""
    by = origin.get("key") or origin.get("lock", "")
    return f"fetched from {origin.get('url')}, trusted by {by}"


def _list_below(directory: str, levels: int) -> Iterator[str]:
    """The directories so many levels down."""
    if not levels:
        yield directory
        return
    for name in _names(directory):
        yield from _list_below(os.path.join(directory, name), levels - 1)


def _names(directory: str) -> list[str]:
    """The newest first, where there is more than one: of equals, it is the one that serves."""
    try:
        names = sorted(name for name in os.listdir(directory) if not name.startswith("."))
        if len(names) > 1:
            names.sort(key=lambda name: -os.stat(os.path.join(directory, name)).st_mtime)
        return names
    except OSError:
        return []  # not there, no directory, or not ours to read


def _examine(spec: OpSpec, each: Fitting) -> entry.Leaf | entry.Refused | None:
    """Check owner and mode, the sources and the digests. A package that ships no sources is not
    checked for them."""
    places = {"src": spec.root, "opkiln": PACKAGE, "abs": "", OUTSIDE: ""}
    found = each.place.examine(each.leaf, places, own=True)
    if isinstance(found, entry.Refused) and not found.damaged:
        files = (os.path.join(spec.root, source) for source in spec.sources)
        if not spec.inline and not any(map(os.path.lexists, files)):
            return each.place.examine(each.leaf, places, own=False)
    return found
