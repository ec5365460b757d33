"""The full search: an entry of the store's layers that was built for this request or fits it, else
the plan of a build."""

from __future__ import annotations

import os

from opkiln.base.build_model import Toolchain
from opkiln.base.model import ABI_NONE, ABI_STABLE, CPU, CUDA, ROCM, STABLE_VERSION, Artifact
from opkiln.decision import archs, prebuilt, terms
from opkiln.decision.archs import features, missing_here, require_cpu
from opkiln.decision.terms import LOAD, Ask, Build, Fetch, Serve
from opkiln.errors import BuildError, SpecError, ToolchainError
from opkiln.machine import facts
from opkiln.machine.arch import cpu
from opkiln.machine.facts import Hasher
from opkiln.machine.toolchain import choice, torch_sdk
from opkiln.plan import plan as plans
from opkiln.settings import LAYOUT, settings
from opkiln.store import key

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from opkiln.base.build_model import Plan, Target
    from opkiln.base.model import OpSpec
    from opkiln.decision.terms import Request, Trace
    from opkiln.errors import OpkilnError


def search(request: Request, trace: Trace) -> Serve | Build | Ask | Fetch:
    """An entry, found by key or by fit; else a plan, or what must be asked first. Raises
    OpkilnError."""
    spec, target = request.op.spec, request.target
    plans.check(spec)  # before its name becomes part of a path
    if request.use == LOAD:
        require_cpu(spec, target)
    if request.tiers is not None:
        trace.candidates += request.tiers.candidates
    with facts.collect(keep=request.survey is None) as read:
        compilers = _Compilers(request, trace)
        found = compilers.find()
    if missing_here(target):
        read.complete = False  # a load would refuse it
    if found is not None:
        return Serve(found, trace, read)
    if not request.for_elsewhere:
        with facts.collect(keep=request.survey is None) as beyond:
            found = find_fitting(request, trace)
        if found is not None:
            return Serve(found, trace, beyond)
    trace.add("store", "none", "no entry for these sources, flags and compiler",
              request.store.root or "")  # fmt: skip
    if settings.remotes and not request.for_elsewhere:
        if not request.fetches:
            _note_unasked(trace)
        elif request.tiers is None:
            return Fetch(compilers.fitted, trace)
    if compilers.refusal is not None:
        if compilers.reason:
            trace.add("build", "refused", compilers.reason)
        raise compilers.refusal
    if compilers.tools is None:
        return Ask(trace)
    return Build(plan_for(spec, compilers.fitted, compilers.tools), trace, read)


class _Compilers:
    """What is known of the compilers here, and what it means for one request."""

    def __init__(self, request: Request, trace: Trace) -> None:
        self.request, self.trace = request, trace
        self.refusal, self.reason = _refusal(request)  # why nothing can be built
        target = request.target
        self.tools = request.recall_compilers()
        if self.tools is None and isinstance(request.compilers, Toolchain):
            self.tools = request.compilers
            facts.note_incomplete()  # what they said is not remembered
        self.fitted = target
        if self.tools is not None:
            try:
                self.fitted = archs.fit_target(request.op, request.wanted, target, self.tools)
            except ToolchainError as error:
                trace.add("build", "refused", f"{error.what}: {error.why}")
                self.tools, self.refusal = None, self.refusal or error

    def find(self) -> Artifact | None:
        """An entry of the user's own layers."""
        request, target, spec = self.request, self.request.target, self.request.op.spec
        any_will_do = choice.stands_in(target.backend, spec)
        if self.tools is None:
            if self.refusal is not None:
                facts.note_incomplete()  # where a compiler may be used, another build may be right
            elif not any_will_do and choice.available(target.backend, target.machine, spec):
                return None  # which entries are its own is only known after it was asked
        found = find_built(request, self.fitted, self.tools, self.trace)
        if found is None and any_will_do and self.tools is not None:
            found = find_built(request, target, None, self.trace)
        return found


def _refusal(request: Request) -> tuple[OpkilnError | None, str]:
    """(the error if nothing can be built for a request, its short form); (None, "") if it may."""
    if request.build_error is not None:
        return request.build_error, request.build_error.what
    if forbidden := terms.why_not_compile(request):
        return terms.refusal(request.op.spec, forbidden), forbidden
    if isinstance(error := request.compilers, ToolchainError):
        return error, ": ".join(filter(None, (error.what, "; ".join(error.why.splitlines()))))
    return None, ""


def find_built(
    request: Request, target: Target, toolchain: Toolchain | None, trace: Trace
) -> Artifact | None:
    """An entry of the user's own layers: the build that this toolchain would make. Without a
    toolchain, any build of the sources as they are now. Writes nothing."""
    spec, store = request.op.spec, request.store
    places = plans.anchors_of(spec, toolchain)
    hasher = Hasher() if request.survey is None else request.survey.hasher
    if toolchain is None and spec.backend != CPU:
        facts.note_incomplete()  # that there is no device compiler cannot be checked by a few facts
    for candidate in _list_targets(request, target, toolchain):
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
        lacks = cpu.missing_features(needs["cpu"], tuple(needs["cpu_features"]), features())
        if lacks and request.runs_here:
            trace.add("store", "refused", f"needs {', '.join(lacks)}, which this CPU lacks",
                      leaf.directory)  # fmt: skip
            continue
        if lacks or candidate is not target:
            # A load would refuse it, or a build for the very target is better.
            facts.note_incomplete()
        reason = "its sources, flags and compiler are today's"
        if candidate.archs != target.archs:
            reason += f"; its code for {';'.join(candidate.archs)} runs here"
        if origin := prebuilt.fetched_from(leaf.manifest):
            reason += f"; {origin}"
        trace.add("store", "taken", reason, leaf.directory)
        if toolchain is None:
            facts.note_file(os.path.dirname(os.path.dirname(leaf.directory)))
        return Artifact(leaf.payload, leaf.manifest["sha256"], "store")
    return None


def find_fitting(request: Request, trace: Trace) -> Artifact | None:
    """The entry that fits best, of the listed layers and of those imported into the user's own."""
    facts.note_incomplete()
    layers = request.store.location.layers
    listed = []
    for layer in layers:
        if layer.listed and os.path.lexists(layer.root):
            listed.append(layer.root)
        elif layer.listed:
            trace.add(
                prebuilt.LAYER, "none", _why_no_layer(layer.root), os.path.dirname(layer.root)
            )
    own = [layer.root for layer in layers if not layer.listed]
    return prebuilt.find(request, listed, trace, prebuilt.LAYER, own)


def _note_unasked(trace: Trace) -> None:
    unasked = terms.why_no_tier_is_asked()
    why = f"no load asks it: {unasked}" if unasked else "only a load or a build connects"
    for url in settings.remotes:
        trace.add("remote", "none", f"not asked: {why}", url)


def _why_no_layer(root: str) -> str:
    exists = os.path.lexists(os.path.dirname(root))
    why = f"it is not a layer: it has no {LAYOUT}" if exists else "it does not exist"
    return f"OPKILN_STORE_LAYERS names it, and {why}"


def _list_targets(
    request: Request, target: Target, toolchain: Toolchain | None
) -> Iterator[Target]:
    """The target, then those of entries that differ from it only in their architectures, and run
    on this machine's devices. If a list of architectures was asked for, no others count."""
    yield target
    op, spec = request.op, request.op.spec
    if spec.backend not in (CUDA, ROCM) or not request.wanted.native:
        return
    ways: dict[str, list[Target]] = {way: [] for way in archs.WAYS}
    for intent, needs in request.store.targets(spec.distribution, spec.name):
        other = target._replace(archs=tuple(needs.get("archs", ())))
        if other.archs == target.archs or key.intent_key(spec, other) != intent:
            continue
        # What the op's filter removes does not come back this way.
        if archs.keeps_all(op, other.archs) and (way := archs.coverage(spec.backend, other.archs)):
            ways[way].append(other)
    # The driver recompiles PTX at every start, so PTX is only better than nothing.
    if toolchain is not None and not terms.why_not_compile(request):
        del ways[archs.PTX]
    for found in ways.values():
        yield from found


def plan_for(spec: OpSpec, target: Target, toolchain: Toolchain) -> Plan:
    """The plan. Raises SpecError if a source is missing, BuildError if there is no fitting torch or
    if the sources are in a zip file (``python app.pyz``)."""
    plans.check(spec)
    for source in () if spec.inline else spec.sources:
        if not os.path.isfile(os.path.join(spec.root, source)):
            from pathlib import PurePath

            above = (spec.root, *map(str, PurePath(spec.root).parents))
            if archive := next(filter(os.path.isfile, above), ""):
                raise BuildError(
                    f"op {spec.title} cannot be compiled: its sources are inside {archive}",
                    why="a compiler reads files on disk, and these are packed in a zip file",
                    hint="install the package with pip, which unpacks it; do not import the zip",
                )
            there = os.path.exists(os.path.join(spec.root, source))
            raise SpecError(
                f"op {spec.title}: the source {source} "
                f"{'is not a regular file' if there else 'does not exist'}",
                why=f"sources are looked for in {spec.root}",
                hint="check its name; in a wheel, list it in the package's data files",
            )
    if spec.abi != ABI_NONE:
        torch = toolchain.torch
        if torch is None:
            raise BuildError(
                f"op {spec.title} needs torch to be built", why="torch is not installed",
                hint="pip install torch",
            )  # fmt: skip
        if spec.abi == ABI_STABLE and not torch_sdk.has_stable_abi(torch):
            raise BuildError(
                f"op {spec.title} needs torch {STABLE_VERSION} or later to be built",
                why=f"torch {torch.version} lacks the stable ABI's headers",
                hint=f"pip install 'torch>={STABLE_VERSION}'",
            )
    return plans.make(spec, target, toolchain)
