"""The store's layers: an entry that was built for this request, or one that fits it."""

from __future__ import annotations

import os

from opkiln import evidence
from opkiln import plan as plans
from opkiln.arch import cpu
from opkiln.decision import archs, policy, prebuilt
from opkiln.decision.target import features
from opkiln.model import CPU, CUDA, ROCM, Artifact
from opkiln.store import key
from opkiln.store.recheck import Hasher

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from opkiln.decision.terms import Request, Trace
    from opkiln.model import Target, Toolchain
    from opkiln.store.layers import Store


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
        evidence.incomplete()  # that there is no device compiler cannot be checked by a few facts
    for candidate in _covering(request, target, toolchain):
        if candidate is not target:
            evidence.incomplete()  # a build for the very target would be better
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
        trace.add("store", "taken", reason, leaf.directory)
        if toolchain is None:
            evidence.file(os.path.dirname(os.path.dirname(leaf.directory)))
        return Artifact(leaf.payload, leaf.manifest["sha256"], "store")
    return None


def elsewhere(request: Request, trace: Trace) -> Artifact | None:
    """The best of listed layers, and of what was imported into the user's own."""
    evidence.incomplete()
    layers = request.store.location.layers
    listed = []
    for layer in layers:
        if layer.listed and os.path.lexists(layer.root):
            listed.append(layer.root)
        elif layer.listed:
            trace.add(prebuilt.LAYER, "none", _no_layer(layer.root), os.path.dirname(layer.root))
    own = [layer.root for layer in layers if not layer.listed]
    return prebuilt.find(request, listed, trace, prebuilt.LAYER, own)


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
