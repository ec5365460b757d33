"""The order of resorts: what is loaded, the store's layers, a build, the fallback.

    load -> loaded? -> runnable? -> store -> build -> open -> register
                \\_______ refused, anywhere: the next resort, with the reason ______-> reference

Safe to call from many threads and after a fork. The hit path imports nothing third-party, takes no
lock on disk, starts no process and writes nothing.
"""

from __future__ import annotations

import os
import threading
import warnings
from typing import Any

from opkiln import plan as plans
from opkiln.arch import cpu, host
from opkiln.errors import (
    BuildError,
    FallbackWarning,
    LoadError,
    OpkilnError,
    SealedError,
    StoreWarning,
    ToolchainError,
)
from opkiln.loading import register, seal
from opkiln.loading.native import open_artifact
from opkiln.loading.register import Registration
from opkiln.loading.trace import Trace
from opkiln.model import ABI_NONE, ABI_STABLE, ABI_TORCH, Artifact, OpSpec, Target, TorchSDK
from opkiln.record import Record
from opkiln.settings import settings
from opkiln.store import deps, key
from opkiln.store.layers import Store
from opkiln.toolchain import host as host_compiler
from opkiln.toolchain import torch_sdk


class Op(Record):
    """What the loader needs: what to build, and how it is called."""

    spec: OpSpec
    registration: Registration | None = None


class Loaded(Record):
    """What this process has of an op. ``artifact`` is None when the reference serves."""

    value: Any
    artifact: Artifact | None
    trace: Trace


_loaded: dict[tuple[str, str], Loaded] = {}
_opened: dict[str, Any] = {}  # sha256 of a library -> what opening it gave
_history: dict[tuple[str, str], list[str]] = {}  # an op's libraries in this process, oldest first
_lock = threading.RLock()
_told: set[str] = set()


def _after_fork() -> None:
    # The forking thread may not have been the one inside: the child must not inherit its lock.
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)


def target_of(spec: OpSpec, sdk: TorchSDK | None = None) -> Target:
    """The target of this machine, as the settings have it. Raises ArchError, BuildError."""
    sdk = sdk or (None if spec.abi == ABI_NONE else torch_sdk.find())
    machine = host.machine()
    if spec.vectorize:
        chosen = cpu.parse(settings.cpu, machine, host.features())
    else:
        chosen = cpu.CPU(cpu.native(machine, frozenset()).level)
    flags = [
        (name, value)
        for name in (
            "cppflags",
            "cxxflags",
            "ldflags",
            "cpath",
            "cplus_include_path",
            "library_path",
        )
        if (value := getattr(settings, name))
    ]
    return Target(
        backend="cpu",
        system=host.system(),
        machine=machine,
        cpu=chosen.level,
        cpu_features=chosen.features,
        abi_tag=_abi_tag(spec, sdk),
        debug=settings.debug,
        flags=tuple(flags),
    )


def _abi_tag(spec: OpSpec, sdk: TorchSDK | None) -> str:
    python = torch_sdk.python_tag()
    if spec.abi == ABI_STABLE:
        tag = torch_sdk.stable_abi_tag()
        return f"{tag}-{python}" if spec.kind == "python" else tag
    if spec.abi == ABI_TORCH:
        if sdk is None:
            raise BuildError(
                f"op {spec.name} needs torch",
                why="torch is not installed",
                hint="pip install torch",
            )
        return torch_sdk.full_abi_tag(sdk)
    return python if spec.kind == "python" else "none"


def load(op: Op, *, again: bool = False, must_be_native: bool = False) -> Loaded:
    """Serve an op by the first resort that can.

    ``again`` looks at the sources anew, although the op is loaded. ``must_be_native`` makes an
    error of what would fall back. Raises OpkilnError where nothing can serve.
    """
    name = (op.spec.distribution, op.spec.name)
    known = _loaded.get(name)
    if known is not None and not again and (known.artifact is not None or not must_be_native):
        return known
    with _lock:
        known = _loaded.get(name)
        if known is not None and not again and (known.artifact is not None or not must_be_native):
            return known
        found = _serve(op, must_be_native)
        _loaded[name] = found
        return found


def _serve(op: Op, must_be_native: bool) -> Loaded:
    trace = Trace()
    functions = None
    if op.registration is not None:
        functions = register.register(op.spec.name, op.registration)
    try:
        artifact, opened = _native(op, trace)
    except (BuildError, LoadError, ToolchainError, SealedError) as error:
        return _fall_back(op, functions, trace, error, must_be_native)
    return Loaded(opened if functions is None else functions, artifact, trace)


def _native(op: Op, trace: Trace) -> tuple[Artifact, Any]:
    spec = op.spec
    sdk = runnable(spec)
    target = target_of(spec, sdk)
    store = Store()
    for note in store.location.notes:
        _tell_once(note)
    artifact = find(spec, target, store, trace)
    if artifact is not None:
        try:
            return artifact, _open(spec, artifact)
        except LoadError as error:
            trace.add("store", "refused", error.why, artifact.path)
    return _build(spec, target, store, trace)


def runnable(spec: OpSpec) -> TorchSDK | None:
    """Whether a native op could run here at all. Raises LoadError with the reason."""
    if host.system() != "linux":
        raise LoadError(
            f"op {spec.name} has no native version for {host.system()}",
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
            f"op {spec.name} needs torch {torch_sdk.STABLE_VERSION} or later",
            why=f"torch {sdk.version} lacks the stable ABI",
            hint=f"pip install 'torch>={torch_sdk.STABLE_VERSION}'",
        )
    return sdk


def find(spec: OpSpec, target: Target, store: Store, trace: Trace) -> Artifact | None:
    """The first entry of the store's layers that serves. Needs no compiler and writes nothing."""
    toolchain = host_compiler.recall(store.memory)
    build = None
    if toolchain is not None:
        build = key.build_key(plans.make(spec, target, toolchain))
    elif host_compiler.available():
        trace.add("store", "none", "the compiler is not known yet", store.memory)
        build = ""  # it must be asked who it is before any entry can be its own
    places = plans.anchors_of(spec, toolchain)
    hasher = deps.Hasher()
    for candidate in _covering(spec, target):
        intent = key.intent_key(spec, candidate)
        leaf, refused = store.find_op(spec.distribution, spec.name, intent, build, places, hasher)
        for each in refused:
            trace.add("store", "refused", each.reason, each.directory)
        if leaf is None:
            continue
        needs = leaf.manifest["target"]
        lacks = cpu.lacking(needs["cpu"], tuple(needs["cpu_features"]), host.features())
        if lacks:
            trace.add("store", "refused", f"needs {', '.join(lacks)}, which this CPU lacks",
                      leaf.directory)  # fmt: skip
            continue
        trace.add("store", "taken", "its sources, flags and compiler are today's", leaf.directory)
        return Artifact(leaf.payload, leaf.manifest["sha256"], "store")
    trace.add("store", "none", "no entry for these sources, flags and compiler", store.root or "")
    return None


def _covering(spec: OpSpec, target: Target) -> list[Target]:
    """The target, then those of the same kind whose binaries this CPU also covers.

    Only for ``native``: a CPU that was named is the one that is wanted. Lower levels come from
    layers that were built elsewhere; the user's own store holds what this machine would build.
    """
    if not spec.vectorize or settings.cpu != "native" or not settings.store_layers:
        return [target]
    options = cpu.covering(target.machine, host.features())
    return [target._replace(cpu=each.level, cpu_features=each.features) for each in options]


def _build(spec: OpSpec, target: Target, store: Store, trace: Trace) -> tuple[Artifact, Any]:
    if reason := seal.why_not_compile():
        trace.add("build", "refused", reason)
        seal.about_to_compile(spec.name)
    from opkiln.loading import progress
    from opkiln.loading.build import build

    earlier = tuple(_history.get((spec.distribution, spec.name), ()))
    try:
        with progress.shown():
            artifact = build(spec, target, store, loaded=earlier if spec.kind == "library" else ())
    except OpkilnError as error:
        trace.add("build", "refused", error.what)
        raise
    how = f"compiled {artifact.compiled} file(s) in {artifact.seconds:.1f} s"
    trace.add("build", "taken", how if artifact.origin == "built" else "another process built it",
              artifact.path)  # fmt: skip
    return artifact, _open(spec, artifact)


def _open(spec: OpSpec, artifact: Artifact) -> Any:
    if artifact.sha256 in _opened:
        return _opened[artifact.sha256]
    value = open_artifact(spec, artifact.path)
    _opened[artifact.sha256] = value
    _history.setdefault((spec.distribution, spec.name), []).append(artifact.path)
    return value


def _fall_back(
    op: Op, functions: Any, trace: Trace, error: OpkilnError, must_be_native: bool
) -> Loaded:
    has_reference = op.registration is not None and op.registration.reference is not None
    if must_be_native or not has_reference or settings.fallback == "error":
        reason = "not allowed here" if has_reference else "the op has no reference"
        trace.add("fallback", "refused", reason)
        raise error
    trace.add("fallback", "taken", "the pure-PyTorch reference serves")
    if settings.fallback == "warn":
        lines = [f"op {op.spec.name} runs as its pure-PyTorch reference: {error.what}"]
        lines += [f"  {line}" for line in error.why.splitlines()]
        if error.hint:
            lines.append(f"hint: {error.hint}")
        _tell_once("\n".join(lines), FallbackWarning)
    return Loaded(functions, None, trace)


def _tell_once(text: str, category: type[Warning] = StoreWarning) -> None:
    if text not in _told:
        _told.add(text)
        warnings.warn(text, category, stacklevel=5)


def would_compile(op: Op) -> tuple[bool, Trace]:
    """Whether loading this op here would compile, and the trace of looking. Builds nothing."""
    trace = Trace()
    try:
        sdk = runnable(op.spec)
    except LoadError as error:
        trace.add("build", "refused", f"{error.what}: {error.why}")
        return False, trace
    target = target_of(op.spec, sdk)
    return find(op.spec, target, Store(), trace) is None, trace


def traces() -> dict[tuple[str, str], Trace]:
    """The traces of what this process has loaded."""
    return {name: loaded.trace for name, loaded in _loaded.items()}
