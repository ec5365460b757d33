"""The order of resorts: loaded, installed, the store's layers, a build, the fallback.

    load -> loaded? -> prebuilt? -> receipt? -> runnable? -> store -> build -> open
                \\_______ refused, anywhere: the next resort, with the reason ____-> reference

Safe to call from many threads and after a fork. The hit path imports nothing third-party but torch,
takes no lock on disk, starts no process and writes nothing.
"""

from __future__ import annotations

import os
import threading
import time
import warnings
from contextlib import contextmanager
from typing import Any

from opkiln.errors import (
    BuildError,
    FallbackWarning,
    LoadError,
    OpkilnError,
    ReloadError,
    SealedError,
    StoreError,
    ToolchainError,
)
from opkiln.loading import installed, receipt, register
from opkiln.loading.native import open_artifact
from opkiln.loading.register import Registration
from opkiln.loading.trace import Trace
from opkiln.model import CPU, EXECUTABLE, LIBRARY, XPU, Artifact, OpSpec
from opkiln.record import Record
from opkiln.settings import override, settings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Op(Record):
    """What the loader needs: what to build, for which devices, and how it is called."""

    spec: OpSpec
    registration: Registration | None = None
    rule: Callable[[list[str]], Any] | None = None  # the author's filter_ccs
    asked: str = ""  # an arch list given in the call; it comes before every setting

    @property
    def name(self) -> tuple[str, str, str]:
        """What tells it from every other: one library per distribution, op and backend."""
        return self.spec.distribution, self.spec.name, self.spec.backend

    @property
    def has_reference(self) -> bool:
        """Whether it can be served where its native version cannot."""
        return self.registration is not None and self.registration.reference is not None


class Loaded(Record):
    """What this process has of an op. ``artifact`` is None when the reference serves."""

    value: Any
    artifact: Artifact | None
    trace: Trace
    op: Op


_Name = tuple[str, str, str]

_loaded: dict[_Name, Loaded] = {}
_since: dict[_Name, float] = {}  # when each was loaded
_opened: dict[_Name, dict[str, Any]] = {}  # what opening each library of an op gave, by sha256
_history: dict[_Name, list[Artifact]] = {}  # an op's libraries here, oldest first
_locks: dict[_Name, threading.RLock] = {}  # one per op: two ops may build at once
_told: set[_Name] = set()


def _after_fork() -> None:
    # The thread that forked may not be the one that is inside; the child must not wait for it.
    _locks.clear()


os.register_at_fork(after_in_child=_after_fork)


def load(op: Op, *, again: bool = False, must_be_native: bool = False) -> Loaded:
    """Serve an op by the first resort that can.

    ``again`` looks at the sources anew, although the op is loaded. ``must_be_native`` makes an
    error of what would fall back. Raises OpkilnError where nothing can serve.
    """
    known = None if again else _known(op, must_be_native)
    if known is not None:
        return known
    with _locks.setdefault(op.name, threading.RLock()):
        known = None if again else _known(op, must_be_native)
        if known is None:
            if settings.record:
                from opkiln.loading import recording

                recording.note(settings.record, op)
            with _sparing(op, must_be_native):
                known = _loaded[op.name] = _serve(op, must_be_native, again)
                _since[op.name] = time.time()
        return known


@contextmanager
def _sparing(op: Op, must_be_native: bool) -> Iterator[None]:
    """With OPKILN_JIT=needed, an op that has a reference is not compiled."""
    falls_back = op.has_reference and not must_be_native and settings.fallback != "error"
    if settings.jit == "needed" and falls_back:
        with override(jit=None):
            yield
    else:
        yield


def _known(op: Op, must_be_native: bool) -> Loaded | None:
    """What is loaded under this name, if it is what is asked for: a notebook may have redefined
    the builder with other flags, or another gradient."""
    known = _loaded.get(op.name)
    if known is None or (must_be_native and known.artifact is None):
        return None
    # Not the filter, which is another object for each builder.
    same = known.op.spec == op.spec and known.op.asked == op.asked
    return known if same and register.same(known.op.registration, op.registration) else None


def _serve(op: Op, must_be_native: bool, again: bool) -> Loaded:
    trace = Trace()
    functions = None
    if op.registration is not None:
        functions = register.register(op.spec.name, op.registration, anew=again)
    try:
        artifact, opened = _native(op, trace)
    except (ReloadError, SealedError):
        raise
    except (BuildError, LoadError, StoreError, ToolchainError) as error:
        if _history.get(op.name):
            raise  # a native version is registered already, and no reference would replace it
        return _fall_back(op, functions, trace, error, must_be_native)
    return Loaded(opened if functions is None else functions, artifact, trace, op)


def _native(op: Op, trace: Trace) -> tuple[Artifact, Any]:
    archs = _archs(op)
    if (layers := installed.layers(op.spec)) and (carried := _carried(op, layers, trace)):
        return carried
    remembered = receipt.recall(op.spec, archs)
    if remembered is not None:
        try:
            opened = _open(op, remembered)
        except ReloadError:
            raise
        except LoadError as error:
            trace.add("store", "refused", error.why, remembered.path)
        else:
            trace.add("store", "taken", "nothing it rests on has changed", remembered.path)
            return remembered, opened
    from opkiln.loading import declaration, resolve
    from opkiln.store.layers import Store

    declaration.check(op)
    target, store = resolve.target_of(op, resolve.runnable(op.spec)), Store()
    resolve.check_device(op.spec, target)
    found = resolve.find(op, target, store, trace)
    refused = None
    if found is not None:
        try:
            return found, _open(op, found)
        except ReloadError:
            raise
        except LoadError as error:
            trace.add("store", "refused", error.why, found.path)
            refused = error
    try:
        built = resolve.build(op, target, store, trace)
    except OpkilnError as error:
        if refused is None:
            unusable = isinstance(error, ToolchainError)
            found = resolve.find(op, target, store, trace, alone=True) if unusable else None
            if found is None:
                raise
            return found, _open(op, found)
        # That it cannot be built again is not what is wrong.
        why = f"{refused.why}\nand it cannot be built again: {error.what}"
        raise LoadError(refused.what, why=why, hint=refused.hint or error.hint) from error
    return _open_built(op, built, lambda: resolve.build(op, target, store, trace), trace)


def _open_built(
    op: Op, built: Artifact, build: Callable[[], Artifact], trace: Trace
) -> tuple[Artifact, Any]:
    """Open what was just built; built anew if a collector was faster. Raises OpkilnError."""
    for _ in range(4):
        try:
            return built, _open(op, built)
        except ReloadError:
            raise
        except LoadError as error:
            if os.path.exists(built.path):
                raise
            trace.add("store", "refused", error.why, built.path)
        built = build()
    return built, _open(op, built)


def _carried(op: Op, layers: list[str], trace: Trace) -> tuple[Artifact, Any] | None:
    """What a package was installed with, if it fits and opens; the next resort serves if not."""
    from opkiln.loading import prebuilt

    if op.spec.backend == XPU:
        from opkiln.loading import resolve

        resolve.check_sycl_device(op.spec)
    found = prebuilt.find(op, layers, trace, prebuilt.PREBUILT)
    if found is None:
        return None
    try:
        return found, _open(op, found)
    except ReloadError:
        raise
    except LoadError as error:
        trace.add(prebuilt.PREBUILT, "refused", error.why, found.path)
        return None


def _archs(op: Op) -> tuple[str, ...]:
    if op.spec.backend == CPU:
        return ()
    from opkiln.loading import archs

    wanted = archs.wanted(op)
    archs.require_coverage(op, wanted.archs)
    return wanted.archs


def _open(op: Op, artifact: Artifact) -> Any:
    """What opening the artifact gives; every op has a library of its own, even where two have the
    same bytes. Nothing is remembered of one that is refused. Raises LoadError."""
    spec = op.spec
    if spec.kind == EXECUTABLE:
        return artifact.path
    opened, earlier = _opened.setdefault(op.name, {}), _history.setdefault(op.name, [])
    newest = bool(earlier) and earlier[-1].sha256 == artifact.sha256
    # Opening a library registers its ops over those before it. One that is not the newest any more
    # (an edit that was undone) must be opened again to come out on top.
    if artifact.sha256 in opened and (newest or spec.kind != LIBRARY):
        return opened[artifact.sha256]
    if earlier:
        from opkiln.loading.reload import prepare

        artifact = prepare(spec, artifact, earlier)
    value = open_artifact(spec, artifact.path)
    if spec.kernels and spec.kind == LIBRARY:
        register.require_kernels(spec)
    opened[artifact.sha256] = value
    earlier.append(artifact)
    return value


def _fall_back(
    op: Op, functions: Any, trace: Trace, error: OpkilnError, must_be_native: bool
) -> Loaded:
    if not trace.refusals():
        trace.add("target", "refused", f"{error.what}: {error.why}" if error.why else error.what)
    if must_be_native or not op.has_reference or settings.fallback == "error":
        reason = "not allowed here" if op.has_reference else "the op has no reference"
        trace.add("fallback", "refused", reason)
        raise error
    from opkiln.loading import declaration

    declaration.check(op)
    trace.add("fallback", "taken", "the pure-PyTorch reference serves")
    if settings.fallback == "warn":
        lines = [f"op {op.spec.name} runs as its pure-PyTorch reference: {error.what}"]
        lines += [f"  {line}" for line in (*error.why.splitlines(), *_passed_over(op, trace))]
        if error.hint:
            lines.append(f"hint: {error.hint}")
        if op.name not in _told:
            _told.add(op.name)
            warnings.warn("\n".join(lines), FallbackWarning, stacklevel=7)
    return Loaded(functions, None, trace, op)


def _passed_over(op: Op, trace: Trace) -> list[str]:
    """The libraries that were built elsewhere and refused, in words; the first few of them."""
    found = [
        f"the {'prebuilt library' if each.resort == 'prebuilt' else 'layer entry'} {each.subject} "
        f"was refused: {each.reason}"
        for each in trace.decisions
        if each.verdict == "refused" and each.resort in ("prebuilt", "layer")
    ]
    if len(found) > 3:
        found[3:] = [f"and {len(found) - 3} more: opkiln explain {op.spec.name}"]
    return found


def loaded_here() -> dict[_Name, tuple[Loaded, float]]:
    """What this process has loaded and since when, by distribution, op and backend."""
    return {name: (loaded, _since.get(name, 0.0)) for name, loaded in list(_loaded.items())}
