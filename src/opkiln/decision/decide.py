"""The one decision: what serves an op here.

    decide(request) -> Serve an artifact | Build a plan | run the Reference | Refuse

Everybody who wants to know asks this function: a load, which then acts on the answer, and
``explain``, ``check``, ``report``, ``is_compatible`` and builds for other machines, which look. The
order is: what a package was installed with, what a receipt remembers, the user's own layers,
listed layers, a build, the reference.

A load that fails to open or to build what was decided notes that in its request and asks again.
Deciding compiles nothing. It may ask the compilers what they are, which is remembered.
"""

from __future__ import annotations

import os
import sys

from opkiln.decision import policy, receipt
from opkiln.decision.terms import (
    LOAD,
    SHIP,
    Build,
    Outcome,
    Reference,
    Refuse,
    Request,
    Serve,
    Trace,
)
from opkiln.errors import (
    BuildError,
    LoadError,
    OpkilnError,
    ReloadError,
    SealedError,
    SpecError,
    StoreError,
    ToolchainError,
    UsageError,
)
from opkiln.model import (
    ABI_NONE,
    ABI_STABLE,
    CARRIED,
    CPU,
    ONE_CALL,
    SHARED,
    STABLE_VERSION,
)
from opkiln.settings import LAYOUT

TYPE_CHECKING = False
if TYPE_CHECKING:
    from opkiln.evidence import Evidence
    from opkiln.model import Artifact, OpSpec, Plan, Target, Toolchain
    from opkiln.store.layers import Store

# What the reference may stand in for. Anything else is a mistake that somebody must mend.
_EXCUSES = (BuildError, LoadError, StoreError, ToolchainError)


def decide(request: Request) -> Outcome:
    """What serves a request, with every candidate and why it was taken or refused."""
    trace = Trace()
    try:
        return _native(request, trace)
    except OpkilnError as error:
        return _otherwise(request, error, trace)


def look(request: Request) -> Outcome:
    """``decide``, for those who only look. Raises UsageError for a mistake in the declaration, the
    call or a setting, which is not an outcome to report but something to mend."""
    outcome = decide(request)
    if isinstance(outcome, Refuse) and isinstance(outcome.error, UsageError):
        raise outcome.error
    return outcome


def _native(request: Request, trace: Trace) -> Serve | Build:
    """Serve or build. Raises OpkilnError where neither can be."""
    op, spec = request.op, request.op.spec
    if request.use == LOAD:
        if policy.prefers_reference(request):
            raise LoadError(f"op {spec.name} runs as its reference", why="OPKILN_MODE=reference")
        if spec.backend != CPU:
            from opkiln.decision import archs, target

            archs.require_coverage(op, request.wanted)
            target.require_sycl_device(spec)
    if request.use != SHIP:
        if (found := _installed(request, trace)) is not None:
            return Serve(found, trace)
        if (found := _remembered(request, trace)) is not None:
            return Serve(found, trace)
    return _searched(request, trace)


def _installed(request: Request, trace: Trace) -> Artifact | None:
    if not policy.uses_installed() or not (layers := _installed_layers(request.op.spec)):
        return None
    from opkiln.decision import prebuilt

    return prebuilt.find(request, layers, trace, prebuilt.PREBUILT)


def _installed_layers(spec: OpSpec) -> list[str]:
    """The installed layers that have something for an op. A few look-ups where there are none."""
    if spec.distribution == ONE_CALL:
        return []
    found = [os.path.join(spec.root, CARRIED, LAYOUT)]
    for directory in sys.path:
        if os.path.isabs(directory):  # not the working directory, whatever that is
            shared = os.path.join(directory, SHARED)
            found += [os.path.join(shared, name, LAYOUT) for name in _names(shared)]
    below = os.path.join("ops", spec.distribution, spec.name)
    return [layer for layer in found if os.path.isdir(os.path.join(layer, below))]


def _names(directory: str) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except OSError:
        return []  # not there, or not a directory


def _remembered(request: Request, trace: Trace) -> Artifact | None:
    found = receipt.recall(request)
    if found is None:
        return None
    if error := request.cannot_open.get(found.path):
        trace.add("store", "refused", error.why, found.path)
        return None
    trace.add("store", "taken", "nothing it rests on has changed", found.path)
    return found


def _searched(request: Request, trace: Trace) -> Serve | Build:
    """The store's layers by key and by fit, then a plan for a build."""
    from opkiln import evidence
    from opkiln import plan as plans

    spec, store = request.op.spec, request.store
    plans.check(spec)  # before its name becomes part of a path
    if request.use == LOAD:
        from opkiln.decision.target import require_cpu

        require_cpu(spec, request.target)
    with evidence.collecting() as read:
        compilers = _Compilers(request, trace)
        found = compilers.look(read)
    if found is not None:
        return Serve(found, trace, read)
    trace.add("store", "none", "no entry for these sources, flags and compiler", store.root or "")
    read.complete = False
    try:
        decided = compilers.build()
    except ToolchainError as error:
        # No compiler here can be used, so any build of the sources as they are will do.
        found = None if compilers.unusable else _any_build(request, trace)
        if found is None:
            if compilers.unusable is None and request.build_error is None:
                why = "; ".join(error.why.splitlines())
                trace.add("build", "refused", f"{error.what}: {why}" if why else error.what)
            raise
        decided = found
    return decided if isinstance(decided, Build) else Serve(decided, trace, read)


def _any_build(request: Request, trace: Trace) -> Artifact | None:
    from opkiln.decision import search

    return search.built(request, request.target, None, trace)


class _Compilers:
    """What is known of the compilers here, and what follows for one request."""

    def __init__(self, request: Request, trace: Trace) -> None:
        from opkiln.decision import archs
        from opkiln.toolchain import choice

        self.request, self.trace = request, trace
        self.forbidden = policy.why_not_compile(request)
        self.unusable: ToolchainError | None = None  # why they cannot make what is wanted
        target, memory = request.target, request.store.memory
        self.tools = choice.recall(memory, target.backend, target.machine)
        self.fitted = target
        if self.tools is not None:
            try:
                self.fitted = archs.fitted(request.op, request.wanted, target, self.tools)
            except ToolchainError as error:
                trace.add("build", "refused", f"{error.what}: {error.why}")
                self.tools, self.unusable = None, error

    def look(self, read: Evidence) -> Artifact | None:
        """An entry of the store's layers."""
        from opkiln.decision import search
        from opkiln.toolchain import choice

        request, trace, target = self.request, self.trace, self.request.target
        found = None
        may_ask = self.tools is None and not self.forbidden and self.unusable is None
        if may_ask and choice.available(target.backend, target.machine):
            # Which entries are its own is only known after it was asked.
            trace.add("store", "none", "the compiler is not known yet", request.store.root or "")
        else:
            found = search.built(request, self.fitted, self.tools, trace)
            if self.tools is not None:
                choice.add_evidence(request.store.memory, target.backend, self.tools)
            elif self.forbidden or self.unusable:
                read.complete = False  # where a compiler may be used, another build may be right
        if found is None and not request.for_elsewhere:
            found = search.elsewhere(request, trace)
        return found

    def build(self) -> Artifact | Build:
        """The plan, or an entry that is found once the compilers are known. Raises OpkilnError."""
        from opkiln.decision import archs, search

        request, trace, target = self.request, self.trace, self.request.target
        spec = request.op.spec
        if request.build_error is not None:
            trace.add("build", "refused", request.build_error.what)
            raise request.build_error
        if self.forbidden:
            trace.add("build", "refused", self.forbidden)
            raise policy.refusal(spec, self.forbidden)
        if self.unusable is not None:
            raise self.unusable
        if self.tools is None:
            self.tools = _asked(request.store, target.backend, target.machine)
            self.fitted = archs.fitted(request.op, request.wanted, target, self.tools)
            found = search.built(request, self.fitted, self.tools, trace)
            if found is not None:
                return found
        return Build(plan_for(spec, self.fitted, self.tools), trace)


def planned(request: Request) -> Plan:
    """The plan that a build here would run, whether or not one is needed. Raises OpkilnError."""
    from opkiln.decision import archs
    from opkiln.toolchain import choice

    spec, target = request.op.spec, request.target
    tools = choice.choose(request.store.memory, spec.backend, target.machine)
    return plan_for(spec, archs.fitted(request.op, request.wanted, target, tools), tools)


def _otherwise(request: Request, error: OpkilnError, trace: Trace) -> Reference | Refuse:
    """The reference, where it may serve."""
    first = next(iter(request.cannot_open.values()), error)
    if first is not error and error is request.build_error:
        # What is wrong is that an entry cannot be opened, not that it cannot be built again.
        why = f"{first.why}\nand it cannot be built again: {error.what}"
        cause, error = error, LoadError(first.what, why=why, hint=first.hint or error.hint)
        error.__cause__ = cause
    if not trace.refusals():
        trace.add("target", "refused", f"{error.what}: {error.why}" if error.why else error.what)
    if not isinstance(error, _EXCUSES) or isinstance(error, (ReloadError, SealedError)):
        return Refuse(error, trace)
    if reason := policy.why_no_reference(request):
        trace.add("fallback", "refused", reason)
        return Refuse(error, trace)
    trace.add("fallback", "taken", "the pure-PyTorch reference serves")
    return Reference(error, trace)


def _asked(store: Store, backend: str, architecture: str) -> Toolchain:
    """The compilers for a build. Of many processes that know none, one asks and the others wait.

    Raises ToolchainError, and StoreError for a store that has become somebody else's.
    """
    from opkiln.store import location, lock
    from opkiln.toolchain import choice

    location.claim(store.root)
    if store.root is None:
        return choice.choose(store.memory, backend, architecture)
    waited = False

    def waiting(_: lock.Waiting) -> None:
        nonlocal waited
        waited = True

    def arrived() -> Toolchain | None:
        return choice.recall(store.memory, backend, architecture)

    with lock.turn(store.root, f"compilers-{backend}-{architecture}", arrived, waiting) as got:
        if not isinstance(got, lock.Turn):
            return got
        if not waited:
            return choice.choose(store.memory, backend, architecture)
    # The other process asked a compiler that was installed so recently that its answer is not
    # believed. Asking one after the other would only take longer.
    return choice.choose(store.memory, backend, architecture)


def plan_for(spec: OpSpec, target: Target, toolchain: Toolchain) -> Plan:
    """The plan, if its sources and its torch are there. Raises BuildError, SpecError.

    Sources in a zip (``python app.pyz``) are a BuildError: a reference can serve.
    """
    from opkiln import plan as plans
    from opkiln.toolchain import torch_sdk

    plans.check(spec)
    for source in () if spec.inline else spec.sources:
        if not os.path.isfile(os.path.join(spec.root, source)):
            if archive := _archive_of(spec.root):
                raise BuildError(
                    f"op {spec.name} cannot be compiled: its sources are inside {archive}",
                    why="a compiler reads files on disk, and these are packed in a zip file",
                    hint="pip install the package, which unpacks it, instead of importing the zip",
                )
            raise SpecError(
                f"op {spec.name}: the source {source} does not exist",
                why=f"sources are looked for in {spec.root}",
                hint="check its name; in a wheel, list it in the package's data files",
            )
    if spec.abi != ABI_NONE:
        torch = toolchain.torch
        if torch is None:
            raise BuildError(
                f"op {spec.name} needs torch to be built", why="torch is not installed",
                hint="pip install torch",
            )  # fmt: skip
        if spec.abi == ABI_STABLE and not torch_sdk.has_stable_abi(torch):
            raise BuildError(
                f"op {spec.name} needs torch {STABLE_VERSION} or later to be built",
                why=f"torch {torch.version} lacks the stable ABI's headers",
                hint=f"pip install 'torch>={STABLE_VERSION}'",
            )
    return plans.make(spec, target, toolchain)


def _archive_of(directory: str) -> str:
    """The file that a directory is inside of, where it is one of a zip that is imported from."""
    while directory != os.path.dirname(directory):
        if os.path.isfile(directory):
            return directory
        directory = os.path.dirname(directory)
    return ""
