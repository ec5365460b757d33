"""The full search for an op's artifact: target, toolchain, plan, keys, the store's layers, a build.

Imported when no receipt serves; ``loader`` is the front that every load goes through.
"""

from __future__ import annotations

import os
import warnings

from opkiln import machine
from opkiln import plan as plans
from opkiln.arch import cpu
from opkiln.errors import (
    ArchError,
    LoadError,
    OpkilnError,
    StoreWarning,
    ToolchainError,
)
from opkiln.loading import archs, prebuilt, seal
from opkiln.loading.trace import Trace
from opkiln.model import (
    ABI_NONE,
    ABI_STABLE,
    CPU,
    CUDA,
    ROCM,
    STABLE_VERSION,
    XPU,
    Artifact,
    OpSpec,
    Target,
    Toolchain,
    TorchSDK,
)
from opkiln.settings import origin_of, settings
from opkiln.store import key
from opkiln.store.layers import Store
from opkiln.store.recheck import Hasher
from opkiln.toolchain import choice, libsycl, torch_sdk

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from opkiln.loading.loader import Op

_FLAG_SETTINGS = (
    "cppflags", "cxxflags", "ldflags", "cpath", "cplus_include_path", "library_path",
)  # fmt: skip
_told: set[str] = set()


def features() -> frozenset[str]:
    """This CPU's features, by the compiler's names."""
    return cpu.features_of(machine.cpu_flags())


def target_machine() -> str:
    """The machine to build CPU ops for: this one, unless the settings name a CPU of another."""
    return cpu.machine_of(settings.cpu, machine.architecture())


def target_cpu() -> cpu.CPU:
    """The CPU to build for, as the settings have it. Raises ArchError."""
    asked, origin = origin_of("cpu")
    try:
        return cpu.parse(asked, target_machine(), features())
    except ArchError as error:
        what = f"{origin}={asked!r}: {error.what}" if origin.isupper() else error.what
        hint = f"unset {origin}" if origin.isupper() else error.hint
        raise ArchError(what, why=error.why, hint=hint) from None


def target_of(op: Op, sdk: TorchSDK | None = None) -> Target:
    """The target of this machine, as the settings have it.

    Raises ArchError, BuildError, and LoadError where there is no device to build for.
    """
    spec = op.spec
    sdk = sdk or (None if spec.abi == ABI_NONE else torch_sdk.find())
    # Code for a GPU is launched by this machine's CPU, whatever that of other ops is.
    ours = spec.backend != CPU and not spec.vectorize
    architecture = machine.architecture() if ours else target_machine()
    if spec.vectorize:
        chosen = target_cpu()
    else:
        chosen = cpu.CPU(cpu.native(architecture, frozenset()).level)
    flags = [(name, value) for name in _FLAG_SETTINGS if (value := getattr(settings, name))]
    if spec.backend != CPU:
        flags += _device_flags(spec.backend)
    return Target(
        backend=spec.backend,
        system=machine.system(),
        machine=architecture,
        cpu=chosen.level,
        cpu_features=chosen.features,
        abi_tag=torch_sdk.abi_tag(spec, sdk),
        debug=settings.debug,
        flags=tuple(flags),
        archs=archs.wanted(op).archs,
    )


def _device_flags(backend: str) -> list[tuple[str, tuple[str, ...]]]:
    flags = [("cudaflags", settings.cudaflags)] if settings.cudaflags else []
    if backend == CUDA and settings.lineinfo:
        flags.append(("lineinfo", ("-lineinfo",)))
    if backend == CUDA and settings.debug_cuda:
        flags.append(("debug_cuda", ("-Xptxas=-v",)))
    return flags


def runnable(spec: OpSpec) -> TorchSDK | None:
    """Whether a native op could run here at all. Raises LoadError with the reason."""
    if machine.system() != "linux":
        raise LoadError(
            f"op {spec.name} has no native version for {machine.system()}",
            why="native ops are built and loaded on Linux, x86-64 and aarch64",
        )
    if spec.abi == ABI_NONE:
        return None
    sdk = torch_sdk.find()
    if sdk is None:
        raise LoadError(
            f"op {spec.name} needs torch", why="torch is not installed", hint="pip install torch"
        )
    if spec.abi == ABI_STABLE and not torch_sdk.has_stable_abi(sdk):
        raise LoadError(
            f"op {spec.name} needs torch {STABLE_VERSION} or later",
            why=f"torch {sdk.version} lacks the stable ABI",
            hint=f"pip install 'torch>={STABLE_VERSION}'",
        )
    return sdk


def lacking(target: Target) -> tuple[str, ...]:
    """The features that this CPU lacks to run what is built for a target."""
    if target.machine != machine.architecture():
        return (target.machine,)
    return cpu.lacking(target.cpu, target.cpu_features, features())


def check_sycl_device(spec: OpSpec) -> None:
    """Refuse to load a SYCL op where there is no device for it. Raises LoadError."""
    if spec.backend == XPU and (missing := libsycl.no_device(settings.ocl_icd_filenames)):
        why, hint = missing
        raise LoadError(f"op {spec.name} has no SYCL device to run on", why=why, hint=hint)


def check_device(spec: OpSpec, target: Target) -> None:
    """Refuse to load what was asked for by name and cannot run here. Raises LoadError."""
    check_sycl_device(spec)
    if lacks := lacking(target):
        raise LoadError(
            f"op {spec.name} for {cpu.CPU(target.cpu, target.cpu_features)} cannot run here",
            why=f"it needs {', '.join(lacks)}, which this CPU lacks",
            hint="OPKILN_CPU=native",
        )


def artifact(op: Op, trace: Trace, *, elsewhere: bool = False) -> Artifact:
    """The op's artifact in the store, found or built, whatever packages were installed with.

    torch is imported by what the author's Python imports, where it is built, and by nothing here.
    ``elsewhere`` as for ``find``. Native or an error: OpkilnError.
    """
    target, store = target_of(op, runnable(op.spec)), Store()
    found = find(op, target, store, trace, elsewhere=elsewhere)
    if found is None:
        from opkiln.loading import declaration

        declaration.check(op)
    return found or build(op, target, store, trace)


def _tell_notes(store: Store) -> None:
    """Warn, once, of what keeps the store from being where it was asked to be.

    Before a build only: a hit from a read-only store is nothing to warn of.
    """
    text = "\n".join(store.location.notes)
    if text and text not in _told:
        _told.add(text)
        warnings.warn(text, StoreWarning, stacklevel=6)


def find(
    op: Op,
    target: Target,
    store: Store,
    trace: Trace,
    *,
    alone: bool = False,
    elsewhere: bool = False,
) -> Artifact | None:
    """The first entry of the store's layers that serves. Needs no compiler and writes nothing.

    In the user's own layers that is the build that this machine would make, in listed ones the best
    that runs here.
    ``alone``: no compiler here can be used, so that any build of today's sources will do.
    ``elsewhere``: it is for another machine, so that it must be what was asked for, and need not
    run here.
    """
    spec = op.spec
    plans.check(spec)  # before its name becomes part of a path
    elsewhere = elsewhere or target.machine != machine.architecture()
    toolchain = None if alone else choice.recall(store.memory, spec.backend, target.machine)
    unknown = False
    if toolchain is not None:
        try:
            target = archs.fitted(op, target, toolchain)
        except ToolchainError as error:
            trace.add("build", "refused", f"{error.what}: {error.why}")
            toolchain = None  # it cannot make what is wanted, which may be there all the same
    elif (
        not alone and choice.available(spec.backend, target.machine) and not seal.why_not_compile()
    ):
        trace.add("store", "none", "the compiler is not known yet", store.root or "")
        unknown = True  # it must be asked who it is before any entry can be its own
    places = plans.anchors_of(spec, toolchain)
    hasher = Hasher()
    for candidate in _covering(op, target, store, toolchain):
        build = "" if unknown else None
        if toolchain is not None:
            build = key.build_key(plans.make(spec, candidate, toolchain))
        intent = key.intent_key(spec, candidate)
        leaf, refused = store.find_op(spec.distribution, spec.name, intent, build, places, hasher)
        for each in refused:
            trace.add("store", "refused", each.reason, each.directory)
        if leaf is None:
            continue
        needs = leaf.manifest["target"]
        lacks = cpu.lacking(needs["cpu"], tuple(needs["cpu_features"]), features())
        if lacks and not elsewhere:
            trace.add("store", "refused", f"needs {', '.join(lacks)}, which this CPU lacks",
                      leaf.directory)  # fmt: skip
            continue
        reason = "its sources, flags and compiler are today's"
        if candidate.archs != target.archs:
            reason += f"; its code for {';'.join(candidate.archs)} runs here"
        trace.add("store", "taken", reason, leaf.directory)
        return Artifact(leaf.payload, leaf.manifest["sha256"], "store")
    if not elsewhere and (shared := _built_elsewhere(op, store, trace)):
        return shared
    trace.add("store", "none", "no entry for these sources, flags and compiler", store.root or "")
    return None


def _built_elsewhere(op: Op, store: Store, trace: Trace) -> Artifact | None:
    """The best of listed layers, and of what was imported into the user's own."""
    listed = []
    for layer in store.location.layers:
        if layer.listed and os.path.lexists(layer.root):
            listed.append(layer.root)
        elif layer.listed:
            trace.add(prebuilt.LAYER, "none", _no_layer(layer.root), os.path.dirname(layer.root))
    own = [layer.root for layer in store.location.layers if not layer.listed]
    return prebuilt.find(op, listed, trace, prebuilt.LAYER, own)


def _no_layer(root: str) -> str:
    place = os.path.dirname(root)
    if not os.path.lexists(place):
        return "OPKILN_STORE_LAYERS names it, and it is not there"
    return f"OPKILN_STORE_LAYERS names it, and it has no {os.path.basename(root)}: it is no layer"


def _covering(
    op: Op, target: Target, store: Store, toolchain: Toolchain | None
) -> Iterator[Target]:
    """The target, then those of other architectures whose binaries this machine also covers.

    Only for ``native``: a list of architectures that was named is the one that is wanted.
    """
    yield target
    if op.spec.backend in (CUDA, ROCM) and archs.wanted(op).native:
        yield from _of_other_archs(op, target, store, toolchain)


def _of_other_archs(
    op: Op, target: Target, store: Store, toolchain: Toolchain | None
) -> Iterator[Target]:
    """Targets of entries in the store that differ in their architectures alone and run here."""
    spec = op.spec
    ways: dict[str, list[Target]] = {"exact": [], "binary": [], "generic": [], "ptx": []}
    for intent, needs in store.targets(spec.distribution, spec.name):
        other = target._replace(archs=tuple(needs.get("archs", ())))
        if other.archs == target.archs or key.intent_key(spec, other) != intent:
            continue
        # What the op's filter removes does not come back this way.
        if archs.kept(op, other.archs) and (way := archs.coverage(spec.backend, other.archs)):
            ways[way].append(other)
    # What the driver would have to translate at each start is only better than nothing.
    if toolchain is not None and not seal.why_not_compile():
        del ways["ptx"]
    for found in ways.values():
        yield from found


def build(op: Op, target: Target, store: Store, trace: Trace) -> Artifact:
    """Build the op, or find that another process just did. Raises BuildError, CompilingOff."""
    spec = op.spec
    _tell_notes(store)
    if reason := seal.why_not_compile():
        trace.add("build", "refused", reason)
        seal.about_to_compile(spec)
    from opkiln.loading import build as building
    from opkiln.loading import progress

    try:
        with progress.shown():
            toolchain = _asked(store, spec.backend, target.machine)
            if note := choice.note(spec.backend, toolchain):
                _note_once(note)
            built = building.build(spec, archs.fitted(op, target, toolchain), toolchain, store)
    except OpkilnError as error:
        trace.add("build", "refused", error.what)
        raise
    how = f"compiled {built.compiled} file(s) in {built.seconds:.1f} s"
    trace.add(
        "build", "taken", how if built.origin == "built" else "another process built it", built.path
    )
    return built


def _asked(store: Store, backend: str, architecture: str) -> Toolchain:
    """The compilers for a build. Of many processes that know none, one asks and the others wait.

    Raises ToolchainError, and StoreError for a store that has become somebody else's.
    """
    from opkiln.store import location, lock

    location.claim(store.root)
    known = choice.recall(store.memory, backend, architecture)
    if known is not None or store.root is None:
        return known or choice.choose(store.memory, backend, architecture)
    waited = False

    def waiting(_: lock.Waiting) -> None:
        nonlocal waited
        waited = True

    def arrived() -> Toolchain | None:
        return choice.recall(store.memory, backend, architecture)

    with lock.turn(store.root, f"compilers-{backend}-{architecture}", arrived, waiting) as got:
        if isinstance(got, Toolchain):
            return got
        if not waited:
            return choice.choose(store.memory, backend, architecture)
    # What was remembered meanwhile is not believed: a compiler that has only just been installed.
    # To ask one after the other would only take longer.
    return choice.choose(store.memory, backend, architecture)


def _note_once(text: str) -> None:
    from opkiln.engine import events

    if text not in _told:
        _told.add(text)
        events.emit(events.NOTE, text=text)


def chosen(op: Op, store: Store) -> tuple[Target, Toolchain]:
    """The target and the compilers that a build here would use. Raises OpkilnError."""
    target = target_of(op)
    toolchain = choice.choose(store.memory, op.spec.backend, target.machine)
    return archs.fitted(op, target, toolchain), toolchain


def would_compile(op: Op, *, elsewhere: bool = False) -> tuple[bool, Trace]:
    """Whether loading this op here would compile, and the trace of looking. Builds nothing.

    ``elsewhere``: whether building it for another machine would, which need not be able to run here
    and must be in the store.
    """
    trace = Trace()
    if elsewhere:
        target = target_of(op, runnable(op.spec))
        return find(op, target, Store(), trace, elsewhere=True) is None, trace
    try:
        target = target_of(op, runnable(op.spec))
        check_device(op.spec, target)
        found = prebuilt.carried(op, trace) or find(op, target, Store(), trace)
    except (LoadError, ToolchainError) as error:
        trace.add("build", "refused", f"{error.what}: {error.why}")
        return False, trace
    return found is None, trace
