"""The one decision: what serves an op here.

    decide(request) -> Serve an artifact | Build a plan | run the Reference | Refuse
                       | Ask the compilers | Fetch from the remote tiers

The order is: what all ranks of the job agreed on, what a package was installed with, what a receipt
remembers, the user's own layers, listed layers, the remote tiers, a build, the reference.

Deciding reads files. It starts no program, writes nothing and connects to no host: that is the
work of ``loading.loader``. If something cannot be opened or built, the loader notes that in the
request, and ``decide`` is called again.
"""

from __future__ import annotations

import os
import sys

from opkiln.base.digest import forget_mounts
from opkiln.base.model import CARRIED, CPU, ONE_CALL, SHARED, XPU, Artifact, OpSpec, place_of
from opkiln.decision import receipt, terms
from opkiln.decision.terms import LOAD, SHIP, Reference, Refuse, Request, Serve, Trace
from opkiln.errors import (
    BuildError,
    LoadError,
    OpkilnError,
    ReloadError,
    SealedError,
    StoreError,
    ToolchainError,
)
from opkiln.settings import LAYOUT

# Errors for which the reference may serve instead. All others must be corrected.
_EXCUSES = (BuildError, LoadError, StoreError, ToolchainError)


def decide(request: Request) -> terms.Outcome | terms.Ask | terms.Fetch:
    """The outcome for a request, with every candidate and why it was taken or refused."""
    trace = Trace()
    if request.use == LOAD and request.agreed and (pin := terms.find_pin(request.op)) is not None:
        return _decide_agreed(request, pin, trace)
    try:
        return _find_native(request, trace)
    except OpkilnError as error:
        return _fall_back(request, error, trace)


def _decide_agreed(request: Request, pin: terms.Pin, trace: Trace) -> Serve | Reference | Refuse:
    """Serve what all ranks of the job agreed on. If that is not possible, nothing else serves."""
    name, artifact = request.op.spec.name, pin.artifact
    hint = "opkiln.ensure(...)    # on all ranks, to agree again"
    other = "set of sources or flags" if pin.spec != request.op.spec else ""
    if not other and pin.find_change is not None:
        other = pin.find_change(request.op)
    if other:
        why = f"it was declared anew since then, with another {other}"
        error = LoadError(f"the ranks agreed on another op {name}", why=why, hint=hint)
    elif artifact is None:
        error = LoadError(f"all ranks agreed on the reference of op {name}", why=pin.reason)
        if not (reason := terms.why_no_reference(request)):
            trace.add("fallback", "taken", "all ranks of the job agreed on the reference")
            return Reference(error, trace)
        error = LoadError(error.what, why=f"{reason}\n{pin.reason}", hint=hint)
    else:
        failed = request.cannot_open.get(artifact.path)
        reason = failed.why if failed is not None else terms.pin_fault(artifact)
        if not reason:
            agreed = f"all ranks of the job agreed on it, SHA-256 {artifact.sha256[:16]}"
            trace.add("store", "taken", agreed, artifact.path)
            return Serve(artifact, trace)
        what = f"the library of op {name} that all ranks agreed on cannot be opened here"
        error = LoadError(what, why=reason, hint=hint)
    trace.add("store", "refused", error.why, "" if artifact is None else artifact.path)
    return Refuse(error, trace)


def _find_native(request: Request, trace: Trace) -> Serve | terms.Build | terms.Ask | terms.Fetch:
    """How a native version can be had. Raises OpkilnError if it cannot."""
    op, spec = request.op, request.op.spec
    if request.use == LOAD:
        if terms.prefers_reference(request):
            raise LoadError(f"op {spec.title} runs as its reference", why="OPKILN_MODE=reference")
        if spec.backend != CPU:
            from opkiln.decision import archs

            archs.require_coverage(op, request.wanted)
        if spec.backend == XPU:
            from opkiln.decision import archs

            archs.require_sycl_device(spec)
    if request.use != SHIP:
        if (found := _find_installed(request, trace)) is not None:
            return Serve(found, trace)
        if (found := _recall(request, trace)) is not None:
            return Serve(found, trace)
    if request.survey is None:
        forget_mounts()
    from opkiln.base.lazy import imports

    with imports():
        from opkiln.decision import search
    return search.search(request, trace)


def _find_installed(request: Request, trace: Trace) -> Artifact | None:
    if not terms.uses_installed() or not (layers := _installed_layers(request.op.spec)):
        return None
    from opkiln.decision import prebuilt

    return prebuilt.find(request, layers, trace, prebuilt.PREBUILT)


def _installed_layers(spec: OpSpec) -> list[str]:
    """The installed layers that have entries of an op. Costs a few look-ups if there are none."""
    if spec.distribution == ONE_CALL:
        return []
    found = [os.path.join(spec.root, CARRIED, LAYOUT)]
    for directory in sys.path:
        if os.path.isabs(directory):  # not the working directory, whatever that is
            shared = os.path.join(directory, SHARED)
            found += [os.path.join(shared, name, LAYOUT) for name in _list_names(shared)]
    below = os.path.join("ops", place_of(spec.distribution, spec.name))
    return [layer for layer in found if os.path.isdir(os.path.join(layer, below))]


def _list_names(directory: str) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except OSError:
        return []  # not there, or not a directory


def _recall(request: Request, trace: Trace) -> Artifact | None:
    found = receipt.recall(request)
    if found is None:
        return None
    if error := request.cannot_open.get(found.path):
        trace.add("store", "refused", error.why, found.path)
        return None
    trace.add("store", "taken", "nothing it rests on has changed", found.path)
    return found


def _fall_back(request: Request, error: OpkilnError, trace: Trace) -> Reference | Refuse:
    """Serve the reference if it may serve, else refuse."""
    first = next(iter(request.cannot_open.values()), error)
    if first is not error and error is request.build_error:
        # The problem is that an entry cannot be opened, not that it cannot be built again.
        why = f"{first.why}\nand it cannot be built again: {error.what}"
        cause, error = error, LoadError(first.what, why=why, hint=first.hint or error.hint)
        error.__cause__ = cause
    if not trace.refusals():
        trace.add("target", "refused", f"{error.what}: {error.why}" if error.why else error.what)
    if not isinstance(error, _EXCUSES) or isinstance(error, (ReloadError, SealedError)):
        return Refuse(error, trace)
    if reason := terms.why_no_reference(request):
        trace.add("fallback", "refused", reason)
        return Refuse(error, trace)
    trace.add("fallback", "taken", "the pure-PyTorch reference serves")
    return Reference(error, trace)
