"""A layer to ship: entries of the store, without traces of the machine that built them.

An entry of the user's own store says where and when it was made, from which files, and which
directories to watch. A shipped entry keeps what is the same everywhere: the declaration, the
target, the compilers, what it needs, and the digests of its sources. So the same inputs give the
same bytes. From the building machine, only the user's own flags and the paths of headers outside
the package remain.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Iterable
from typing import Any, NamedTuple

from opkiln.base.model import EXECUTABLE, OUTSIDE, place_of
from opkiln.errors import StoreError
from opkiln.machine.arch import cpu
from opkiln.machine.facts import UNSIGNED, Hasher
from opkiln.settings import LAYOUT
from opkiln.store import entry, inventory
from opkiln.store.entry import LOG, MANIFEST, SIDECAR, Leaf, examine, read_sidecar
from opkiln.store.key import deps_key

_KEPT = (
    "kind", "op", "distribution", "spec", "target", "needs", "toolchain", "schema", "payload",
    "size", "sha256",
)  # fmt: skip
_KEPT_OF_OBJECTS = (
    "kind", "source", "host", "group", "messages", "files", "deps", "schema", "payload", "size",
    "sha256",
)  # fmt: skip
_ANCHORS = ("src", "opkiln")  # found again wherever a package is installed
_ISA = re.compile(
    r"-m(?:arch|cpu)=.*|-m(?:avx|sse3|sse4|ssse3|fma|f16c|bmi|amx|popcnt|lzcnt|abm|aes|gfni|vaes|"
    r"v?pclmul|xsave|movbe|sha|adx|rdrnd|rdseed)[\w.-]*"
)


class LayerEntry(NamedTuple):
    """One entry of a layer. Its manifest and payload were checked against their digests."""

    place: str  # in the layer: v1/ops/<distribution>/<op>/<intent>/<build>/<deps>, v1/objects/…
    directory: str
    manifest: dict[str, Any]
    lists: dict[str, Any]  # of its sidecar

    @property
    def payload(self) -> str:
        return os.path.join(self.directory, self.manifest["payload"])

    @property
    def files(self) -> tuple[str, ...]:
        """The files to ship. The log is not one of them: it describes the build machine."""
        return tuple(sorted((MANIFEST, SIDECAR, *entry.list_files(self.manifest))))


def entries(layer_dir: str) -> tuple[LayerEntry, ...]:
    """The entries of a layer, sorted by place. StoreError if there are none, or one is damaged."""
    found = [
        _entry(layer_dir, directory)
        for _, top, depth in inventory.LEVELS
        for directory in inventory.directories(os.path.join(layer_dir, LAYOUT, top), depth)
    ]
    if not found:
        raise StoreError(f"{layer_dir} has no ops to ship", hint="opkiln build --all --out DIR")
    return tuple(sorted(found, key=lambda each: each.place))


def _entry(layer_dir: str, directory: str) -> LayerEntry:
    leaf = examine(directory, {}, Hasher(), listed=True, whole=False, own=False)
    try:
        if not isinstance(leaf, Leaf):
            raise ValueError(leaf.reason if leaf is not None else f"{MANIFEST} is missing")
        known = {MANIFEST, SIDECAR, LOG, *entry.list_files(leaf.manifest)}
        if more := sorted(set(os.listdir(directory)) - known):
            raise ValueError(f"it also has {', '.join(more)}")
        place = os.path.relpath(directory, layer_dir)
        if (told := identity(leaf.manifest)) != (*place.split("/")[2:4], place.split("/")[-1]):
            raise ValueError(f"it belongs at {'/'.join(told)}")
        try:
            lists = read_sidecar(directory)
        except ValueError as error:
            raise ValueError(f"{SIDECAR}: {error}") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = entry.describe_error(error)
        raise StoreError(f"{directory} cannot be shipped: {reason}") from error
    return LayerEntry(place, directory, leaf.manifest, lists)


def identity(manifest: dict[str, Any]) -> tuple[str, str, str]:
    """(distribution, op, deps_key): the place that a manifest belongs at; of an object, (the first
    two characters of its step's key, that key, deps_key)."""
    step = manifest.get("step")
    owner = (step[:2], step) if step else (manifest["distribution"], manifest["op"])
    return (*owner, deps_key(manifest["deps"]))


# Writing a layer


def export(payloads: Iterable[str], out: str) -> list[str]:
    """Copy finished libraries of the store to ``out``, and return their directories there. Each
    entry appears whole or not at all. One that is already there stays. Raises StoreError."""
    return [_export(payload, out) for payload in dict.fromkeys(payloads)]


def leaf_of(payload: str) -> str:
    """The entry that a library is in. Raises StoreError for one that is in a bundle."""
    if payload.startswith("/proc/"):
        raise StoreError(
            "a library that comes from a bundle cannot be exported again",
            why="a bundle in OPKILN_STORE_LAYERS has it, so it was not built here",
            hint="unset OPKILN_STORE_LAYERS    # or pass on that bundle",
        )
    return os.path.dirname(payload)


def _export(payload: str, out: str) -> str:
    source = leaf_of(payload)
    *_, distribution, op, intent, build, _ = source.split("/")
    try:
        manifest, lists = entry.read_manifest(source), entry.read_sidecar(source)
        if manifest["kind"] == inventory.OBJECT:
            own = {name: manifest[name] for name in _KEPT_OF_OBJECTS if name in manifest}
            manifest, part = {**own, "step": build}, "facts"
            lists["facts"] = [[*row[:4], *UNSIGNED] for row in lists["facts"]]
            place = os.path.join("objects", build[:2])
        else:
            manifest, part = _shipped_manifest(manifest), "inputs"
            _require_known_cpu(manifest, lists["inputs"]["steps"])
            place = os.path.join("ops", place_of(distribution, op), intent)
        final = os.path.join(out, LAYOUT, place, build, identity(manifest)[-1])
        if not os.path.isdir(final):
            _write(source, manifest, {part: lists[part], "schema": entry.SCHEMA}, final)
    except (OSError, ValueError, KeyError) as error:
        raise StoreError(f"{payload} cannot be exported to {out}: {error}") from error
    return final


def _require_known_cpu(manifest: dict[str, Any], steps: list[list[str]]) -> None:
    """Refuse a library that was compiled with CPU flags beyond its target. Raises StoreError. A
    machine chooses a library by its target. With such a flag the library could crash there with an
    illegal instruction."""
    target = manifest["target"]
    made_for = cpu.CPU(target["cpu"], tuple(target["cpu_features"]))
    known = set(cpu.flags(made_for, target["machine"], frozenset(cpu.probes(target["machine"]))))
    known |= {f"-m{feature}" for feature in cpu.requires(*made_for)}
    for argument in (part for step in steps for each in step for part in each.split(",")):
        flag = argument.removeprefix("-Xcompiler=")
        if _ISA.fullmatch(flag) and flag not in known:
            raise StoreError(
                f"op {manifest['op']} for {made_for} cannot be shipped",
                why=f"it was compiled with {flag}, so it may need a newer CPU than its target says",
                hint="unset CXXFLAGS    # or leave the flag out of cxx_args(); --target names CPUs",
            )


def _shipped_manifest(manifest: dict[str, Any]) -> dict[str, Any]:
    own = [
        # A header outside the package is compared only if the machine has it.
        [anchor if anchor in _ANCHORS else OUTSIDE, path, digest]
        for anchor, path, digest in manifest["deps"]["own"]
    ]
    # The entry's name is made of these. The library's own digest is one of them, because the same
    # sources give another library with other system headers.
    deps = {"own": own, "others": manifest["sha256"]}
    return {**{name: manifest[name] for name in _KEPT}, "deps": deps}


def _write(source: str, manifest: dict[str, Any], lists: dict[str, Any], final: str) -> None:
    parent = os.path.dirname(final)
    os.makedirs(parent, exist_ok=True)
    staged = os.path.join(parent, f".{secrets.token_hex(8)}")
    os.mkdir(staged)
    try:
        for name, body in ((MANIFEST, manifest), (SIDECAR, lists)):
            with open(os.path.join(staged, name), "wb") as file:
                file.write(entry.write_manifest(body))
        for name in entry.list_files(manifest):
            copy = os.path.join(staged, name)
            shutil.copyfile(os.path.join(source, name), copy)
            # Everybody may read it: the store's files are for one user, a layer's files are not.
            os.chmod(copy, 0o755 if manifest["kind"] == EXECUTABLE else 0o644)
        os.rename(staged, final)
    except BaseException:
        shutil.rmtree(staged, ignore_errors=True)
        raise
