"""The front that every load goes through: decide, build if need be, open, register.

    load -> loaded? -> decide -> Serve     -> open -> call
                          ^  \\-> Build     -> open
                          |   \\-> Reference, Refuse
                          \\__ could not be opened, or built: decide again

Safe to call from many threads and after a fork. The hit path imports nothing third-party but torch,
takes no lock on disk, starts no process and writes nothing.
"""

from __future__ import annotations

import os
import time
from contextlib import contextmanager, nullcontext
from typing import Any

from opkiln.base.model import EXECUTABLE, LIBRARY, Artifact, Op
from opkiln.base.trust import usable_by_owner
from opkiln.decision import receipt, terms
from opkiln.decision.decide import decide
from opkiln.decision.terms import Ask, Build, Fetch, Reference, Refuse, Request, Serve, Trace
from opkiln.errors import (
    FallbackWarning,
    LoadError,
    OpkilnError,
    ReloadError,
    SettingWarning,
    StoreWarning,
    warn_caller,
)
from opkiln.loading import native, register
from opkiln.loading.here import Loaded, here
from opkiln.loading.native import ensure_own_file, open_artifact, prepare_beside
from opkiln.settings import origin_of, override, settings, unknown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from opkiln.base.build_model import Target
    from opkiln.decision.terms import Outcome
    from opkiln.loading.here import Name
    from opkiln.store.layers import Store


# Called with each op that is about to be decided on; ``opkiln.cluster`` pins there what the ranks
# of a job share. It may raise OpkilnError.
before_load: Callable[[Op], None] | None = None


def load(
    op: Op, *, again: bool = False, must_be_native: bool = False, verbose: bool = True
) -> Loaded:
    """Serve an op by the first resort that can.

    ``again`` looks at the sources anew, although the op is loaded. ``must_be_native`` makes an
    error of what would fall back. If not ``verbose``, no progress is shown, unless the user set
    otherwise. Raises OpkilnError where nothing can serve.
    """
    known = None if again else _find_loaded(op, must_be_native)
    if known is not None:
        return known
    mine = here.op(op.name)
    failures = mine.failures
    with mine.lock:
        known = None if again else _find_loaded(op, must_be_native)
        if known is None:
            mine.raise_failure(op, failures)
            for text in () if loaded_here() else unknown():  # variables: most likely misspelt
                warn_caller(text, SettingWarning)
            if settings.record:
                from opkiln.loading import recording

                recording.note(settings.record, op)
            silent = not verbose and origin_of("progress")[1] == "default"
            try:
                with override(progress="quiet") if silent else nullcontext():
                    if before_load is not None:
                        before_load(op)
                    known = mine.loaded = _serve(op, must_be_native, again)
            except OpkilnError as error:
                if error.concerns_all:
                    mine.failures, mine.failed = mine.failures + 1, (op, error)
                raise
            mine.since = time.time()
        return known


def _find_loaded(op: Op, must_be_native: bool) -> Loaded | None:
    """What is loaded under this name, if it is what is asked for: a notebook may have redefined
    the builder with other flags, or another gradient."""
    known = here.op(op.name).loaded
    if known is None or (must_be_native and known.artifact is None):
        return None
    # Not the filter, which is another object for each builder.
    same = known.op.spec == op.spec and known.op.asked == op.asked
    return known if same and known.op.registration == op.registration else None


def _serve(op: Op, must_be_native: bool, again: bool) -> Loaded:
    functions = None
    if op.registration is not None:
        told = op.registration
        functions = register.Functions(op.spec.name, told.namespace, told.names)
    # No reference replaces a library that registered itself. And whoever asks for edited sources
    # wants those, or the error.
    mine = here.op(op.name)
    older = bool(mine.libraries)
    keeps = older and (again or mine.lasts)
    request = Request(op, must_be_native=must_be_native or keeps)
    for _ in range(_ATTEMPTS):
        outcome = resolve(request)
        if isinstance(outcome, Refuse):
            raise outcome.error
        if isinstance(outcome, Reference):
            if older:
                native.unregister(op.spec.distribution, op.spec.name, op.spec.backend)
            _tell_fallback(op, outcome)
            return Loaded(functions, None, outcome.trace, op)
        try:
            artifact = outcome.artifact if isinstance(outcome, Serve) else _build(request, outcome)
        except OpkilnError as error:
            request.build_error = error
            continue
        try:
            opened = _open(op, artifact)
        except ReloadError:
            raise
        except LoadError as error:
            if not os.path.exists(artifact.path):
                continue  # a collector was faster: decide anew
            if isinstance(outcome, Build):
                request.build_error = error
            request.cannot_open[artifact.path] = error
            continue
        if isinstance(outcome, Serve) and outcome.read is not None:
            receipt.write(request, artifact, outcome.read)
        value = opened if functions is None else functions
        return Loaded(value, artifact, outcome.trace, op)
    raise LoadError(
        f"op {op.spec.title} cannot be loaded",
        why=f"what was found or built was gone when it was opened, {_ATTEMPTS} times",
        hint="opkiln cache verify",
    )


_ATTEMPTS = 8  # each but the last removes a candidate, or follows a collector's removal of one


def forget(distribution: str, op: str) -> None:
    """Forget what is loaded of an op, for all its backends: it is declared anew."""
    native.unregister(distribution, op)
    for name, each in list(here.ops.items()):
        if name[:2] == (distribution, op):
            each.loaded, each.is_told, each.opened = None, False, {}


def forget_references() -> None:
    """Forget the ops that their references serve: the next load of each decides again."""
    here.served = {}
    for each in list(here.ops.values()):
        if each.loaded is not None and each.loaded.artifact is None:
            each.loaded = None


@contextmanager
def set_aside() -> Iterator[None]:
    """Within the block nothing is loaded of the ops that have a reference, and torch has none of
    their kernels; after it, all is as before. For tests: other threads must not load or call."""
    before, here.served = here.served, {}
    aside = {
        name: each
        for name, each in here.ops.items()
        if each.loaded is not None and each.loaded.op.has_reference
    }
    for name in aside:
        del here.ops[name]
    loaded = [each.loaded for each in aside.values() if each.loaded is not None]
    try:
        with register.cover_kernels([each.op for each in loaded if each.artifact is not None]):
            yield
    finally:
        forget_references()
        # An op that the block itself has loaded natively stays so.
        for name, each in aside.items():
            if name not in here.ops or here.ops[name].loaded is None:
                here.ops[name] = each
        here.served = before


def resolve(request: Request) -> Outcome:
    """What serves a request that will be acted on: the remote tiers are asked, and there is a
    warning if a store that cannot be used is why nothing is found."""
    request.fetches = True
    outcome = look(request)
    if not isinstance(outcome, Serve):
        _warn_of_store(request.store)
    return outcome


def _warn_of_store(store: Store) -> None:
    """Warn once if the store could not be placed where the user asked."""
    text = "\n".join(store.location.notes)
    if text and text not in here.told:
        here.told.add(text)
        warn_caller(text, StoreWarning)


def look(request: Request) -> Outcome:
    """What serves a request, with every candidate and why it was taken or refused. The compilers
    are asked what they are, if that is not known."""
    while True:
        outcome = decide(request)
        if isinstance(outcome, Fetch):
            request.tiers = Trace()
            try:
                _fetch(request, outcome.target, request.tiers)
            except OpkilnError as error:
                return Refuse(error, request.tiers)
        elif isinstance(outcome, Ask):
            from opkiln.base.lazy import imports

            with imports():
                from opkiln.building import asking
            asking.ask(request)
        else:
            return outcome


def _fetch(request: Request, target: Target, trace: Trace) -> None:
    from opkiln.base.lazy import imports

    with imports():
        from opkiln.remote import fetch
    with usable_by_owner():
        fetch.fetch(request, target, trace)
    request.since = time.monotonic()  # what the tiers took is not the compiler's time


def obtain(request: Request) -> tuple[Artifact, Trace]:
    """The artifact, found or built and not opened, for a later load or another machine.

    torch is not imported for it. Raises OpkilnError.
    """
    outcome = resolve(request)
    if isinstance(outcome, Serve):
        if outcome.read is not None:
            receipt.write(request, outcome.artifact, outcome.read)
        return outcome.artifact, outcome.trace
    if not isinstance(outcome, Build):
        raise outcome.error
    return _build(request, outcome), outcome.trace


def _build(request: Request, outcome: Build) -> Artifact:
    """Run the plan of a decision. Raises OpkilnError."""
    from opkiln.base.lazy import imports

    with imports():
        from opkiln.building import build as building
        from opkiln.run import progress
    with usable_by_owner(), progress.show_builds():
        built = building.build(outcome.plan, request.store, since=request.since)
    how = f"compiled {built.compiled} file(s) in {built.seconds:.1f} s"
    if built.unobserved:
        how += f"; it serves this process alone: {built.unobserved}"
    if built.origin != "built":
        how = "another process built it"
    outcome.trace.add("build", "taken", how, built.path)
    with usable_by_owner():
        _leave_receipt(request, outcome, built)
        if settings.push is not None and settings.remotes and built.origin == "built":
            from opkiln.remote import push

            push.publish_build(built)
    return built


def _leave_receipt(request: Request, outcome: Build, built: Artifact) -> None:
    """Look at what was just built as a search that finds it would, and remember the answer. By now
    the build's own directory is gone, which may have been in one that a compiler looked into."""
    from opkiln.machine import facts
    from opkiln.plan import plan
    from opkiln.store.entry import Leaf, examine

    places = plan.anchors_of(request.op.spec, outcome.plan.toolchain)
    with facts.collect(outcome.read):
        directory = os.path.dirname(built.path)
        found = examine(directory, places, facts.Hasher(), listed=False, whole=True)
    if isinstance(found, Leaf):
        receipt.write(request, built, outcome.read)


def _open(op: Op, artifact: Artifact) -> Any:
    """What opening the artifact gives; every op has a library of its own, even where two have the
    same bytes. Nothing is remembered of one that is refused. Raises LoadError."""
    spec = op.spec
    if spec.kind == EXECUTABLE:
        return artifact.path
    mine = here.op(op.name)
    opened, earlier = mine.opened, mine.libraries
    newest = bool(earlier) and earlier[-1].sha256 == artifact.sha256
    # Opening a library registers its ops over those before it. One that is not the newest any more
    # (an edit that was undone) must be opened again to come out on top.
    if artifact.sha256 in opened and (newest or spec.kind != LIBRARY):
        return opened[artifact.sha256]
    if earlier:
        artifact = prepare_beside(spec, artifact, earlier)
    artifact = ensure_own_file(op.name, artifact)
    value = open_artifact(spec, artifact.path, op.registration)
    if spec.kernels and spec.kind == LIBRARY:
        register.require_kernels(op)
    if not native.has_registered(spec):
        mine.lasts = True
    opened[artifact.sha256] = value
    earlier.append(artifact)
    mine.is_told = False
    return value


def _tell_fallback(op: Op, outcome: Reference) -> None:
    """Warn, once per op, that its reference serves; not if that is what the user asked for."""
    mine = here.op(op.name)
    if mine.is_told or settings.mode in (terms.REFERENCE, terms.NEEDED):
        return
    if (pin := terms.find_pin(op)) is not None and pin.passing:
        return
    mine.is_told = True
    error = outcome.error
    lines = [f"op {op.spec.title} runs as its pure-PyTorch reference: {error.what}"]
    lines += [f"  {line}" for line in (*error.why.splitlines(), *_passed_over(op, outcome.trace))]
    if error.hint:
        lines.append(f"hint: {error.hint}")
    warn_caller("\n".join(lines), FallbackWarning)


_ELSEWHERE = {
    "prebuilt": "prebuilt library",
    "layer": "layer entry",
    "remote": "artifact of",
}


def _passed_over(op: Op, trace: Trace) -> list[str]:
    """The libraries that were built elsewhere and refused, in words; the first few of them."""
    found = [
        f"the {_ELSEWHERE[each.resort]} {each.subject} was refused: {each.reason}"
        for each in trace.candidates
        if each.verdict == "refused" and each.resort in _ELSEWHERE
    ]
    if len(found) > 3:
        found[3:] = [f"and {len(found) - 3} more: opkiln explain {op.spec.name}"]
    return found


def loaded_here() -> dict[Name, tuple[Loaded, float]]:
    """What this process has loaded and since when, by distribution, op and backend."""
    return {
        name: (each.loaded, each.since)
        for name, each in list(here.ops.items())
        if each.loaded is not None
    }
