"""The full search: an entry of the store's layers, built for this request or fit for it; else a
plan for a build of its own."""

from __future__ import annotations

import os
import time

from opkiln import facts, images
from opkiln import plan as plans
from opkiln.arch import cpu
from opkiln.decision import archs, policy, prebuilt
from opkiln.decision.target import features, require_cpu
from opkiln.decision.terms import LOAD, Build, Serve
from opkiln.errors import BuildError, SpecError, ToolchainError
from opkiln.facts import Hasher
from opkiln.model import ABI_NONE, ABI_STABLE, CPU, CUDA, ROCM, STABLE_VERSION, Artifact
from opkiln.settings import settings
from opkiln.store import key
from opkiln.toolchain import choice, torch_sdk

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from opkiln.build_model import Plan, Target, Toolchain
    from opkiln.decision.terms import Request, Trace
    from opkiln.facts import Evidence
    from opkiln.model import OpSpec
    from opkiln.store.layers import Store


def search(request: Request, trace: Trace) -> Serve | Build:
    """The store's layers by key and by fit, then a plan for a build. Raises OpkilnError."""
    spec, store = request.op.spec, request.store
    plans.check(spec)  # before its name becomes part of a path
    if request.use == LOAD:
        require_cpu(spec, request.target)
    images.forget()
    with facts.collecting() as read:
        compilers = _Compilers(request, trace)
        found = compilers.look(read)
    if found is not None:
        return Serve(found, trace, read)
    trace.add("store", "none", "no entry for these sources, flags and compiler", store.root or "")
    read.complete = False
    if settings.remotes and not request.for_elsewhere:
        found = _fetched(request, compilers.fitted, trace)
        if found is not None:
            return Serve(found, trace, read)
    try:
        decided = compilers.build()
    except ToolchainError as error:
        # No compiler here can be used, so any build of the sources as they are will do.
        seen = compilers.unusable or compilers.looked_at_any
        found = None if seen else built(request, request.target, None, trace)
        if found is None:
            if compilers.unusable is None and request.build_error is None:
                why = "; ".join(error.why.splitlines())
                trace.add("build", "refused", f"{error.what}: {why}" if why else error.what)
            raise
        decided = found
    return decided if isinstance(decided, Build) else Serve(decided, trace, read)


class _Compilers:
    """What is known of the compilers here, and what follows for one request."""

    def __init__(self, request: Request, trace: Trace) -> None:
        self.request, self.trace = request, trace
        self.forbidden = policy.why_not_compile(request)
        self.unusable: ToolchainError | None = None  # why they cannot make what is wanted
        self.looked_at_any = False  # whether any build of the sources would have served
        target, memory = request.target, request.store.memory
        self.tools = choice.recall(memory, target.backend, target.machine, request.op.spec)
        self.fitted = target
        if self.tools is not None:
            try:
                self.fitted = archs.fitted(request.op, request.wanted, target, self.tools)
            except ToolchainError as error:
                trace.add("build", "refused", f"{error.what}: {error.why}")
                self.tools, self.unusable = None, error

    def look(self, read: Evidence) -> Artifact | None:
        """An entry of the store's layers."""
        request, trace, target = self.request, self.trace, self.request.target
        found = None
        spec = request.op.spec
        may_ask = self.tools is None and not self.forbidden and self.unusable is None
        any_will_do = choice.stands_in(target.backend, spec)
        if may_ask and not any_will_do and choice.available(target.backend, target.machine, spec):
            # Which entries are its own is only known after it was asked.
            trace.add("store", "none", "the compiler is not known yet", request.store.root or "")
        else:
            found = built(request, self.fitted, self.tools, trace)
            if found is None and any_will_do and self.tools is not None:
                found = built(request, target, None, trace)
            self.looked_at_any = self.tools is None or any_will_do
            if self.tools is None and (self.forbidden or self.unusable):
                read.complete = False  # where a compiler may be used, another build may be right
        if found is None and not request.for_elsewhere:
            found = elsewhere(request, trace)
        return found

    def build(self) -> Artifact | Build:
        """The plan, or an entry that is found once the compilers are known. Raises OpkilnError."""
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
            self.tools = _asked(request, target.backend, target.machine)
            self.fitted = archs.fitted(request.op, request.wanted, target, self.tools)
            found = built(request, self.fitted, self.tools, trace)
            if found is not None:
                return found
        return Build(plan_for(spec, self.fitted, self.tools), trace)


def built(
    request: Request, target: Target, toolchain: Toolchain | None, trace: Trace
) -> Artifact | None:
    """An entry of the user's own layers: the build that this toolchain would make.

    Without a toolchain, any build of the sources as they are now. Writes nothing.
    """
    spec, store = request.op.spec, request.store
    places = plans.anchors_of(spec, toolchain)
    hasher = Hasher()
    if toolchain is None and spec.backend != CPU:
        facts.incomplete()  # that there is no device compiler cannot be checked by a few facts
    for candidate in _covering(request, target, toolchain):
        if candidate is not target:
            facts.incomplete()  # a build for the very target would be better
        build = None
        if toolchain is not None:
            build = key.build_key(plans.make(spec, candidate, toolchain))
        intent = key.intent_key(spec, candidate)
        leaf, refused = store.find_op(spec.distribution, spec.name, intent, build, places, hasher)
        for each in refused:
            trace.add("store", "refused", each.reason, each.directory)
        if leaf is None:
            continue
        if error := request.cannot_open.get(leaf.payload):
            trace.add("store", "refused", error.why, leaf.payload)
            continue
        needs = leaf.manifest["target"]
        lacks = cpu.lacking(needs["cpu"], tuple(needs["cpu_features"]), features())
        if lacks and request.runs_here:
            trace.add("store", "refused", f"needs {', '.join(lacks)}, which this CPU lacks",
                      leaf.directory)  # fmt: skip
            continue
        reason = "its sources, flags and compiler are today's"
        if candidate.archs != target.archs:
            reason += f"; its code for {';'.join(candidate.archs)} runs here"
        if origin := prebuilt.fetched_from(leaf.manifest):
            reason += f"; {origin}"
        trace.add("store", "taken", reason, leaf.directory)
        if toolchain is None:
            facts.file(os.path.dirname(os.path.dirname(leaf.directory)))
        return Artifact(leaf.payload, leaf.manifest["sha256"], "store")
    return None


def elsewhere(request: Request, trace: Trace) -> Artifact | None:
    """The best of listed layers, and of what was imported into the user's own."""
    facts.incomplete()
    layers = request.store.location.layers
    listed = []
    for layer in layers:
        if layer.listed and os.path.lexists(layer.root):
            listed.append(layer.root)
        elif layer.listed:
            trace.add(prebuilt.LAYER, "none", _no_layer(layer.root), os.path.dirname(layer.root))
    own = [layer.root for layer in layers if not layer.listed]
    return prebuilt.find(request, listed, trace, prebuilt.LAYER, own)


def _fetched(request: Request, target: Target, trace: Trace) -> Artifact | None:
    """What the remote tiers have, once it is in the store."""
    if request.fetch is None:
        unasked = policy.why_no_tier_is_asked()
        reason = f"no load asks it: {unasked}" if unasked else "only a load or a build connects"
        for url in settings.remotes:
            trace.add("remote", "none", f"not asked: {reason}", url)
        return None
    found = request.fetch(request, target, trace)
    request.since = time.monotonic()  # what the tiers took is not the compiler's time
    return elsewhere(request, trace) if found else None


def _no_layer(root: str) -> str:
    place = os.path.dirname(root)
    if not os.path.lexists(place):
        return "OPKILN_STORE_LAYERS names it, and it does not exist"
    return (
        f"OPKILN_STORE_LAYERS names it, and it is not a layer: it has no {os.path.basename(root)}"
    )


def _covering(request: Request, target: Target, toolchain: Toolchain | None) -> Iterator[Target]:
    """The target, then those of other architectures whose binaries this machine also covers.

    Only for ``native``: a list of architectures that was named is the one that is wanted.
    """
    yield target
    if request.op.spec.backend in (CUDA, ROCM) and request.wanted.native:
        yield from _of_other_archs(request, target, request.store, toolchain)


def _of_other_archs(
    request: Request, target: Target, store: Store, toolchain: Toolchain | None
) -> Iterator[Target]:
    """Targets of entries in the store that differ in their architectures alone and run here."""
    op, spec = request.op, request.op.spec
    ways: dict[str, list[Target]] = {way: [] for way in archs.WAYS}
    for intent, needs in store.targets(spec.distribution, spec.name):
        other = target._replace(archs=tuple(needs.get("archs", ())))
        if other.archs == target.archs or key.intent_key(spec, other) != intent:
            continue
        # What the op's filter removes does not come back this way.
        if archs.kept(op, other.archs) and (way := archs.coverage(spec.backend, other.archs)):
            ways[way].append(other)
    # The driver recompiles PTX at every start, so PTX is only better than nothing.
    if toolchain is not None and not policy.why_not_compile(request):
        del ways[archs.PTX]
    for found in ways.values():
        yield from found


def planned(request: Request) -> Plan:
    """The plan that a build here would run, whether or not one is needed. Raises OpkilnError."""
    spec, target = request.op.spec, request.target
    tools = choice.choose(request.store.memory, spec.backend, target.machine, spec)
    return plan_for(spec, archs.fitted(request.op, request.wanted, target, tools), tools)


def _asked(request: Request, backend: str, architecture: str) -> Toolchain:
    """The compilers for a build. Of many processes that know none, one asks and the others wait.

    Raises ToolchainError, BuildTimeout, and StoreError for a store that has become somebody else's.
    """
    from opkiln.engine import progress
    from opkiln.trust import usable_by_owner

    with usable_by_owner(), progress.shown(traced=False):
        asked = _ask_in_turn(request, backend, architecture)
    request.since = time.monotonic()
    return asked


def _ask_in_turn(request: Request, backend: str, architecture: str) -> Toolchain:
    from opkiln.engine import events
    from opkiln.guard import once_per_thread
    from opkiln.store import location, lock

    store, spec = request.store, request.op.spec
    location.claim(store.root)
    if store.root is None:
        return choice.choose(store.memory, backend, architecture, spec)
    waited = False

    def waiting(state: lock.Waiting) -> None:
        nonlocal waited
        waited = True
        holder = state.holder or lock.Holder(0, "", "")
        what = f"{events.COMPILERS}, but it is stopped" if state.stopped else events.COMPILERS
        events.emit(events.WAITING, op=request.op.spec.name, pid=holder.pid, host=holder.host,
                    seconds=state.seconds, what=what)  # fmt: skip

    def arrived() -> Toolchain | None:
        return choice.recall(store.memory, backend, architecture, spec)

    name = f"compilers-{backend}-{architecture}"
    what, limit = f"the list of compilers for {backend}", settings.build_timeout
    with (
        once_per_thread("asks the compilers"),
        lock.turn(
            store.root, name, arrived, waiting, what=what, limit=limit, since=request.since
        ) as got,
    ):
        if not isinstance(got, lock.Turn):
            return got
        if not waited:
            try:
                return choice.choose(store.memory, backend, architecture, spec)
            except ToolchainError as error:
                got.fail(error)
                raise
    # The other process asked a compiler that was installed so recently that its answer is not
    # believed. Asking one after the other would only take longer.
    return choice.choose(store.memory, backend, architecture, spec)


def plan_for(spec: OpSpec, target: Target, toolchain: Toolchain) -> Plan:
    """The plan, if its sources and its torch are there. Raises BuildError, SpecError.

    Sources in a zip (``python app.pyz``) are a BuildError: a reference can serve.
    """
    plans.check(spec)
    for source in () if spec.inline else spec.sources:
        if not os.path.isfile(os.path.join(spec.root, source)):
            if archive := _archive_of(spec.root):
                raise BuildError(
                    f"op {spec.name} cannot be compiled: its sources are inside {archive}",
                    why="a compiler reads files on disk, and these are packed in a zip file",
                    hint="install the package with pip, which unpacks it; do not import the zip",
                )
            there = os.path.exists(os.path.join(spec.root, source))
            raise SpecError(
                f"op {spec.name}: the source {source} "
                f"{'is not a regular file' if there else 'does not exist'}",
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
