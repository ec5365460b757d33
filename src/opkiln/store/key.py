"""Makes the keys of an entry, and compares the facts that it rests on.

- ``intent_key``: spec, target and ABI tag. Computing it needs no compiler.
- ``build_key``: the plan's steps and environment, and the toolchain's identity.
- ``deps_key``: the facts (``machine/facts.py``) of all that the steps read, looked up and listed.

A machine without a compiler, or one to which a library was shipped, does not have all of these
files. There only the *author's* count: those of the package, and those below directories that its
declaration names.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from opkiln.base.build_model import Plan, Step, Target
from opkiln.base.digest import Signature, key
from opkiln.base.lazy import Record
from opkiln.base.model import OUTSIDE, PACKAGE, PLAN_VERSION, ROCM, OpSpec
from opkiln.machine import facts
from opkiln.machine.facts import ABSENT, FILE, GONE, HIDDEN, PROGRAM, RUNS, Hasher, split_names

# Fields of a spec that do not affect the build, or that follow from another field: an emulated op
# has the emulator's runtime among its sources.
UNKEYED = ("root", "declared_by", "schemas", "emulated")


def intent_key(spec: OpSpec, target: Target) -> str:
    """What to build: the author's declaration, and the target."""
    return key("intent", (declaration_fields(spec), tuple(target)))


def spec_key(spec: OpSpec) -> str:
    """The author's declaration, for any target."""
    return key("spec", declaration_fields(spec))


def declaration_fields(spec: OpSpec) -> tuple[Any, ...]:
    """A declaration as it enters the key."""
    return tuple(value for field, value in anchored_fields(spec).items() if field not in UNKEYED)


def anchored_fields(spec: OpSpec) -> dict[str, Any]:
    """The fields of a declaration, without the paths where its package and opkiln are installed."""
    root, ours = spec.root.rstrip("/") + "/", PACKAGE + "/"

    def anchor_text(text: str) -> str:
        # Authors write absolute paths. Below the root they mean "in my package", wherever that is
        # installed.
        return text.replace(root, "{src}/").replace(ours, "{opkiln}/") if "/" in text else text

    return {
        field: tuple(anchor_text(item) if isinstance(item, str) else item for item in value)
        if isinstance(value, tuple)
        else value
        for field, value in zip(spec._fields, spec, strict=True)
    }


def step_inputs(plan: Plan, step: Step) -> tuple[Any, ...]:
    """A step as it enters the key: without the paths of the compilers and their launcher. The
    toolchain's identity represents the compilers, wherever they are installed. A launcher only
    changes how fast the result comes."""
    device = plan.toolchain.device
    tools = {plan.toolchain.cxx, plan.toolchain.launcher}
    if device is not None:
        tools |= {device.path, device.host}
    arguments = tuple(argument for argument in step.argv if argument not in tools)
    return (step.kind, step.output, arguments)


def build_key(plan: Plan) -> str:
    """How to build it: the steps, their environment and the toolchain."""
    steps = tuple(step_inputs(plan, step) for step in plan.steps)
    return key("build", (PLAN_VERSION, steps, plan.environment, _identity(plan)))


def _identity(plan: Plan) -> tuple[str, ...]:
    tools = plan.toolchain
    parts = [tools.identity]
    if tools.device is not None:
        parts.append(tools.device.identity)
    if plan.target.backend == ROCM and tools.torch is not None:
        from opkiln.machine.toolchain import staged_copy

        parts.append(staged_copy.hipify_identity(tools.torch))  # the translator of the sources
    return tuple(parts)


def step_key(plan: Plan, step: Step) -> str:
    """The key of one object. Every op, target and build that compiles it the same way shares it."""
    made = (PLAN_VERSION, step_inputs(plan, step), plan.environment, _identity(plan))
    # An inline source is not a file, so it is not in the dependencies. Its text is in the key.
    text = dict(plan.spec.inline).get(step.source)
    return key("object", (made, plan.target.abi_tag, text))


_AUTHORS = ("src", "opkiln", OUTSIDE)


class Fact(Record):
    """What was known of a path. The path is relative to its anchor, so that it is found again if
    the package or torch is installed elsewhere."""

    kind: str
    anchor: str
    path: str
    value: str  # of several names: ``facts.join_names``
    signature: Signature

    @property
    def sha256(self) -> str:
        """The digest of an author's file; empty for other facts."""
        is_file = self.kind in (FILE, PROGRAM) and self.anchor in _AUTHORS
        return self.value.rstrip(RUNS) if is_file else ""


# Keeping them


def manifest_facts(found: Iterable[Fact]) -> dict[str, Any]:
    """The facts as a manifest names them: the author's files, and a digest of all others."""
    listed = tuple(found)
    own = {fact[1:3]: fact.sha256 for fact in listed if fact.sha256}
    others = tuple(fact[:4] for fact in listed if not fact.sha256 or fact.value != fact.sha256)
    return {
        "own": [[anchor, path, sha256] for (anchor, path), sha256 in own.items()],
        "others": key("facts", others),
    }


def deps_key(recorded: Mapping[str, Any]) -> str:
    """The key of what a manifest's ``deps`` name: the name of its entry."""
    return key("deps", (tuple(map(tuple, recorded["own"])), recorded["others"]))


def read(rows: Iterable[list[Any]]) -> tuple[Fact, ...]:
    """The facts of a sidecar."""
    return tuple(
        Fact(kind, anchor, path, value, Signature(*signature))
        for kind, anchor, path, value, *signature in rows
    )


def rows(found: Iterable[Fact]) -> list[list[Any]]:
    """The facts as a sidecar has them."""
    return [[*fact[:4], *fact.signature] for fact in found]


def sign(found: Iterable[Fact], places: Mapping[str, str], hasher: Hasher) -> Iterator[Fact]:
    """The facts of another machine, those that hold here with signatures of this one."""
    for fact in found:
        now, signature = "", fact.signature
        with suppress(OSError):
            path = _path_of(fact, places)
            now, signature = facts.ask_again(fact.kind, path, fact.value, hasher)
        yield fact._replace(signature=signature) if now == fact.value else fact


# Asking again


def find_changes(
    recorded: Mapping[str, Any],
    rows: Iterable[list[Any]] | None,
    places: Mapping[str, str],
    hasher: Hasher,
) -> list[str]:
    """The facts of an entry that no longer hold, in words. Raises OSError, KeyError. ``recorded``
    is a manifest's ``deps``, ``rows`` are its sidecar's facts. Without them, only the author's
    files count."""
    facts.start_entry()
    if rows is None:
        return _changed_files(recorded["own"], places, hasher)
    return find_broken(read(_list_doubtful(rows, places, hasher)), places, hasher)


def _list_doubtful(
    rows: Iterable[list[Any]], places: Mapping[str, str], hasher: Hasher
) -> Iterator[list[Any]]:
    """The facts of a sidecar whose signatures do not certainly hold. Most do, and each costs one
    look and no object."""
    collected = facts.is_collected()
    for row in rows:
        path = f"{places.get(row[1], '')}/{row[2]}" if row[1] in places else row[2]
        try:
            if not collected and row[2] and hasher.recorded_holds(path, row[4:]):
                continue
        except OSError:
            pass  # it is gone, which is told in words
        yield row


def find_broken(listed: Iterable[Fact], places: Mapping[str, str], hasher: Hasher) -> list[str]:
    """The facts that no longer hold, in words. Raises OSError."""
    found = []
    for fact in listed:
        path = _path_of(fact, places)
        if _holds(fact.signature, path):
            now, signature = fact.value, fact.signature
        else:
            now, signature = hasher.ask_again(fact.kind, path, fact.value)
        if now == fact.value:
            facts.note_entry(fact.kind, path, fact.value, signature)
        elif fact.kind == ABSENT:
            new = {*split_names(fact.value)} - {*split_names(now)}
            found += [f"{os.path.join(path, name)} is new" for name in sorted(new)]
        else:
            found.append(f"{fact.path} {_CHANGES.get(now, 'changed')}")
    return found


def _path_of(fact: Fact, places: Mapping[str, str]) -> str:
    place = places.get(fact.anchor, "")
    # Not with a slash at the end, which would follow a link.
    return os.path.join(place, fact.path) if fact.path else place


_CHANGES = {GONE: "is gone", HIDDEN: "cannot be read"}


def _holds(signature: Signature, path: str) -> bool:
    try:
        return signature.holds(path)
    except OSError:
        return False


def _changed_files(
    own: Iterable[tuple[str, str, str]], places: Mapping[str, str], hasher: Hasher
) -> list[str]:
    """The author's files that changed. One outside of the package counts only if it exists."""
    found = []
    for anchor, path, sha256 in own:
        full = os.path.join(places[anchor], path)
        try:
            now, signature = hasher(full)
            facts.note_entry(FILE, full, sha256, signature)
        except (FileNotFoundError, NotADirectoryError, PermissionError) as error:
            if anchor == OUTSIDE:
                continue
            if not isinstance(error, FileNotFoundError):
                raise
            now = GONE
        if now != sha256:
            found.append(f"{path} {'is gone' if now == GONE else 'changed'}")
    return found
