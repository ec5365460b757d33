"""Why an op is served as it is, and what changed since it was last built."""

from __future__ import annotations

import os
import time
from typing import Any, NamedTuple

from opkiln import settings as settings_module
from opkiln.base.build_model import Plan
from opkiln.base.model import Artifact, Op, display_name, place_of
from opkiln.building.asking import plan_here
from opkiln.building.build import inputs
from opkiln.building.observing import limits
from opkiln.decision.prebuilt import fetched_from
from opkiln.decision.terms import Build, Candidate, Refuse, Request, Serve, summary
from opkiln.errors import OpkilnError, UsageError
from opkiln.loading import loader
from opkiln.loading.here import Loaded
from opkiln.machine.facts import Hasher
from opkiln.machine.toolchain import choice, probing
from opkiln.plan import plan as plans
from opkiln.store import entry, key
from opkiln.store.key import find_changes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from opkiln.decision.terms import Outcome
    from opkiln.store.layers import Store


class Explanation(NamedTuple):
    """``str()`` of it is what `opkiln explain` prints."""

    op: str  # the op's name
    verdict: str  # cached, would compile, would fall back: why, …; or what serves this process
    candidates: tuple[Candidate, ...]  # what could serve, in the order of the search
    keys: dict[str, str]  # what its entry is found by, and what is told of it
    changes: tuple[str, ...]  # since the newest entry, when that one does not serve
    dropped: tuple[str, ...]  # variables that no compiler gets to see
    loaded: bool  # whether the candidates are those of this process's own load
    since: float = 0.0  # when that was; 0 where it is not loaded
    new_process: str = ""  # what a load in a new process would come to, where it is loaded here
    notes: tuple[str, ...] = ()  # what calls in this process came to

    def __str__(self) -> str:
        op = display_name(self.op)
        lines = [*(f"{op}: {each}" for each in self.notes), f"{op}: {self.verdict}"]
        lines += [f"  {each}".replace("\n", "\n    ") for each in self.candidates]
        if self.new_process:
            lines.append(f"a new process: {self.new_process}")
        if self.changes:
            lines += ["changed since it was last built:", *(f"  {each}" for each in self.changes)]
        if self.dropped:
            lines.append("kept away from compilers: " + ", ".join(self.dropped))
        lines += [f"{name + ':':8} {value}" for name, value in self.keys.items()]
        return "\n".join(lines)


class Explanations(NamedTuple):
    """Those of an op's variants, and what is told of the op as a whole."""

    op: str  # the op's name
    variants: tuple[Explanation, ...]  # one for each variant
    notes: tuple[str, ...] = ()  # what calls in this process came to

    def __str__(self) -> str:
        return "\n".join([*(f"{self.op}: {each}" for each in self.notes), *map(str, self.variants)])


def explain(op: Op) -> Explanation:
    """Look at an op without building or loading it. Raises UsageError."""
    known, since = loader.loaded_here().get(op.name, (None, 0.0))
    request = Request(op)
    outcome = look_at(request)
    status, reason, _ = summary(outcome)
    would = f"{status}: {reason}" if reason else status
    keys, changes = {}, []
    try:
        plan = outcome.plan if isinstance(outcome, Build) else plan_here(request)
    except OpkilnError as error:
        outcome.trace.add("build", "refused", f"{error.what}: {error.why}")
    else:
        keys = {"intent": key.intent_key(op.spec, plan.target), "build": key.build_key(plan)}
        if how := choice.reason(plan.toolchain, op.spec):
            keys["device"] = how
        if limits.named(plan.toolchain):
            keys["launcher"] = plan.toolchain.launcher or os.path.realpath(plan.toolchain.cxx)
        if why := probing.why_unobserved(request.store.memory, plan.toolchain.cxx):
            keys["inputs"] = f"not observed, so each process compiles for itself: {why}"
        if not isinstance(outcome, Serve):
            changes = _changes(plan, request.store)
    if isinstance(outcome, Serve):
        keys |= _told_by(outcome.artifact)
    return Explanation(
        op=op.spec.name,
        verdict=would if known is None else _serving(known, since),
        candidates=tuple((outcome if known is None else known).trace.candidates),
        keys=keys,
        changes=tuple(changes),
        dropped=settings_module.dropped_variables(),
        loaded=known is not None,
        since=since,
        new_process="" if known is None else would,
    )


def look_at(request: Request) -> Outcome:
    """``loader.look``. Raises UsageError for a mistake in the declaration, the call or a setting,
    which is not an outcome to report but something to mend."""
    outcome = loader.look(request)
    if isinstance(outcome, Refuse) and isinstance(outcome.error, UsageError):
        raise outcome.error
    return outcome


def _told_by(artifact: Artifact) -> dict[str, str]:
    """What an entry says of itself: whether its inputs were observed here, and which remote tier it
    came from."""
    directory = os.path.dirname(artifact.path)
    try:
        manifest, lists = entry.read_manifest(directory), entry.read_sidecar(directory)
    except (OSError, ValueError):
        return {}  # it is in a bundle, or was removed meanwhile
    told = {"inputs": "observed" if "facts" in lists else "", "origin": fetched_from(manifest)}
    return {name: text for name, text in told.items() if text}


_FOUND = {"prebuilt": "which came with its package", "layer": "which a listed layer has",
          "store": "which the store had", "built": "which it built"}  # fmt: skip


def _serving(known: Loaded, since: float) -> str:
    """What serves an op in this process, since when, and where that came from."""
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(since))
    artifact = known.artifact
    if artifact is None:
        why = "; ".join(known.trace.refusals())
        return f"its pure-PyTorch reference serves in this process since {when}: {why}"
    found = _FOUND.get(artifact.origin, artifact.origin)
    return f"loaded in this process since {when}, served by {artifact.path}, {found}"


def _changes(plan: Plan, store: Store) -> list[str]:
    newest = _newest(plan, store)
    if newest is None:
        return []
    try:
        manifest = entry.read_manifest(newest)
        places = plans.anchors_of(plan.spec, plan.toolchain)
        lists = entry.read_sidecar(newest)
        edited = find_changes(manifest["deps"], lists.get("facts"), places, Hasher())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return [f"the newest entry, {newest}, cannot be read: {entry.describe_error(error)}"]
    return [*difference(lists["inputs"], inputs(plan)), *edited]


def _newest(plan: Plan, store: Store) -> str | None:
    """The newest entry for the same backend; one for the same architectures before any other.

    Entries for two targets are not two states of one.
    """
    found: list[tuple[bool, float, str]] = []
    for layer in store.location.layers:
        base = os.path.join(layer.root, "ops", place_of(plan.spec.distribution, plan.spec.name))
        for directory, _, files in os.walk(base):
            if entry.MANIFEST not in files:
                continue
            try:
                target = entry.read_manifest(directory)["target"]
                backend, archs = target["backend"], tuple(target["archs"])
            except (OSError, ValueError, KeyError, TypeError):
                backend, archs = plan.target.backend, None  # it cannot be read: that is told
            if backend == plan.target.backend:
                same = archs == plan.target.archs
                found.append((same, os.stat(directory).st_mtime, directory))
    return max(found)[2] if found else None


def difference(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """What differs between the inputs of two builds, in words."""
    changes: list[str] = []
    for part in ("spec", "target"):
        for name, now in after[part].items():
            then = before[part].get(name)
            if _plain(then) != _plain(now):
                changes.append(f"{part} {name}: {_words(then)} -> {_words(now)}")
    for family, now in after["toolchain"].items():
        then = before["toolchain"].get(family, {"version": "none"})
        if then["version"] != now["version"]:
            changes.append(f"compiler {family}: {then['version']} -> {now['version']}")
        elif then != now:
            changes.append(f"compiler {family}: {now['version']}, but its programs are others now")
    if not changes and before["steps"] != after["steps"]:
        for then, now in zip(before["steps"], after["steps"], strict=False):
            gone, new = set(then) - set(now), set(now) - set(then)
            changes += [f"flag {flag} is new" for flag in sorted(new)]
            changes += [f"flag {flag} is gone" for flag in sorted(gone)]
    return list(dict.fromkeys(changes))


def _plain(value: Any) -> Any:
    """A value as it looks after a trip through JSON."""
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _words(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return " ".join(str(item) for item in value) or "none"
    return str(value)
