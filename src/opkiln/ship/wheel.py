"""A wheel of prebuilt ops: a layer that an installer puts where opkiln finds it.

    opkiln_prebuilt/<wheel_name>/v1/ops/…       the layer, as the store reads it
    <wheel_name>-<version>.dist-info/           METADATA, WHEEL, sboms/opkiln.cdx.json, RECORD

``opkiln_prebuilt`` is a directory without code that many wheels share. The same layer gives the
same bytes.
"""

from __future__ import annotations

import base64
import csv
import io
import json
import os
import re
import shlex
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple
from urllib.parse import quote

from packaging.utils import InvalidName, canonicalize_name
from packaging.version import InvalidVersion, Version

from opkiln import __version__
from opkiln.base.model import EXECUTABLE, SHARED
from opkiln.errors import StoreError, UsageError
from opkiln.ship.audit import ANY_PYTHON, FULL_TAG, STABLE_TAG, python_tag, tag_for
from opkiln.store import layer, publish
from opkiln.store.layer import LayerEntry
from opkiln.store.zip_format import DEFLATED, LARGEST, MOST_MEMBERS, AddedMember, Writer, chunks

SBOM = "sboms/opkiln.cdx.json"


class _Batch(NamedTuple):
    """The options that all wheels of one call share."""

    stage: str  # where they are until all are written
    version: str
    requires: tuple[str, ...]
    max_size: int | None


def write_wheel(
    layer_dir: str,
    out_dir: str,
    *,
    name: str,
    version: str,
    requires: Sequence[str] = (),
    max_size: int | None = None,
) -> list[str]:
    """Write a layer's ops as wheels, one for each machine, and return their paths.

    ``requires`` are requirements in the form of a wheel's metadata. With ``max_size`` (bytes), ops
    that are too large together are split into several wheels: by backend, then by target, then one
    by one; the names of the wheels say which. No wheel appears before all are written.

    Raises UsageError for an invalid name or version, for ops that no single tag fits and for an op
    that is too large by itself; StoreError for a layer that is empty or damaged, or if nothing can
    be written; LoadError for a payload that is not a library.
    """
    check_names(name, version, requires)
    by_machine: dict[str, list[LayerEntry]] = {}
    for entry in layer.entries(layer_dir):
        by_machine.setdefault(entry.manifest["target"]["machine"], []).append(entry)
    written: list[str] = []
    try:
        os.makedirs(out_dir, exist_ok=True)
        # In the same file system, so that a rename puts each wheel into its place.
        with tempfile.TemporaryDirectory(prefix=".opkiln-", dir=out_dir) as stage:
            batch = _Batch(stage, version, tuple(requires), max_size)
            for _, entries in sorted(by_machine.items()):
                written += _fit(batch, name, entries)
            for each in written:
                os.replace(os.path.join(stage, each), os.path.join(out_dir, each))
        publish.sync(out_dir)
    except OSError as error:
        raise StoreError(
            f"no wheel can be written to {out_dir}: {error.strerror or error}",
            hint=f"ls -ld {shlex.quote(out_dir)}; df -h {shlex.quote(out_dir)}",
        ) from error
    return [os.path.join(out_dir, each) for each in written]


def wheel_name(name: str) -> str:
    """A distribution's name as it appears in the name of a wheel: ``opkiln_ops``."""
    return canonicalize_name(name).replace("-", "_")


def check_names(name: str, version: str, requires: Sequence[str] = ()) -> None:
    """Refuse an invalid name, version or requirement. Raises UsageError."""
    try:
        canonicalize_name(name, validate=True)
    except InvalidName:
        raise UsageError(
            f"{name!r} cannot be the name of a wheel",
            why="a name has letters and digits, with -, _ or . between them",
        ) from None
    try:
        normal: str | None = str(Version(version))
    except InvalidVersion:
        normal = None
    if normal != version:
        raise UsageError(
            f"{version!r} cannot be the version of a wheel",
            why="a version has the form 1.2, 1.2rc1, 1.2.post1, 1.2.dev1 or 1.2+tag.1 (PEP 440)",
            hint=f"use its normal form: {normal}" if normal else "",
        )
    for each in requires:
        if not each.strip() or "\n" in each or "\r" in each:
            raise UsageError(f"{each!r} cannot be a requirement of a wheel")


def _split_keys(entry: LayerEntry) -> tuple[str, str, str, str]:
    """The parts of a name by which ops are split into several wheels, from coarse to fine."""
    target = entry.manifest["target"]
    made_for = "-".join(target["archs"]) or target["cpu"]
    return target["backend"], made_for, entry.manifest["op"], entry.place.split("/")[-3][:8]


def _fit(batch: _Batch, name: str, entries: list[LayerEntry], level: int = 0) -> Iterator[str]:
    """Stage these entries as one wheel, or as several that are small enough, split by the part of
    this level."""
    wheel, size = _stage(batch, name, entries)
    if batch.max_size is None or size <= batch.max_size:
        yield wheel
        return
    os.unlink(os.path.join(batch.stage, wheel))
    if len(entries) == 1:
        backend, made_for, op, _ = _split_keys(entries[0])
        raise UsageError(
            f"op {op} for {backend} {made_for} makes a wheel of {size} bytes; {batch.max_size} are "
            "allowed",
            why=f"its library has {entries[0].manifest['size']} bytes; an op cannot be split",
            hint="opkiln build OP --target cuda:9.0a --wheel DIR    # fewer architectures at once",
        )
    groups: dict[str, list[LayerEntry]] = {}
    for entry in entries:
        groups.setdefault(_split_keys(entry)[level], []).append(entry)
    for part, group in sorted(groups.items()):
        suffix = re.sub(r"[^a-z0-9]+", "-", part.replace(".", "").lower()).strip("-")
        yield from _fit(batch, f"{name}-{suffix}", group, level + 1)


def _stage(batch: _Batch, name: str, entries: list[LayerEntry]) -> tuple[str, int]:
    """Write one wheel; (its name, its size)."""
    _require_one_python(entries)
    tag = tag_for(entries)
    wheel = f"{wheel_name(name)}-{batch.version}-{tag}.whl"
    with open(os.path.join(batch.stage, wheel), "xb") as out:
        archive = Writer(out)
        _write(archive, batch, name, tag, entries)
        archive.close()
        size = out.tell()
        out.flush()
        os.fsync(out.fileno())
    if size > LARGEST or 3 * len(entries) > MOST_MEMBERS:
        raise UsageError(
            f"{len(entries)} ops make a wheel of {size} bytes: too large for a zip file",
            hint="opkiln build --wheel DIR --max-wheel-size 1G",
        )
    return wheel, size


def _require_one_python(entries: list[LayerEntry]) -> None:
    """Refuse ops for one Python beside ops for another one or for any. Raises UsageError."""
    tags: dict[str, list[str]] = {}
    for entry in entries:
        tag = python_tag(entry.manifest["target"]["abi_tag"]) or ANY_PYTHON
        tags.setdefault(tag, []).append(entry.manifest["op"])
    if len(tags) > 1:
        raise UsageError(
            "these ops cannot be in one wheel: they are for different Pythons",
            why="\n".join(f"{tag}: {', '.join(ops)}" for tag, ops in sorted(tags.items())),
            hint="opkiln build OP --wheel DIR    # one kind at a time",
        )


def _write(archive: Writer, batch: _Batch, name: str, tag: str, entries: list[LayerEntry]) -> None:
    below = f"{SHARED}/{wheel_name(name)}"
    info = f"{wheel_name(name)}-{batch.version}.dist-info"
    added = []
    for entry in entries:
        for file in entry.files:
            payload = file == entry.manifest["payload"]
            program = payload and entry.manifest["kind"] == EXECUTABLE
            path = os.path.join(entry.directory, file)
            put = archive.add(
                f"{below}/{entry.place}/{file}", chunks(path), method=DEFLATED, executable=program
            )
            if payload and put.sha256.hex() != entry.manifest["sha256"]:
                raise StoreError(f"{path} was changed while it was put into a wheel")
            added.append(put)
    ops = sorted({entry.manifest["op"] for entry in entries})
    wheel = (
        f"Wheel-Version: 1.0\nGenerator: opkiln {__version__}\nRoot-Is-Purelib: false\nTag: {tag}\n"
    )
    files = {
        "METADATA": _metadata(name, batch, ops),
        SBOM: sbom(entries, below, name=name, version=batch.version),
        "WHEEL": wheel.encode(),
    }
    for file, data in files.items():
        added.append(archive.add(f"{info}/{file}", [data], method=DEFLATED))
    archive.add(f"{info}/RECORD", [_record(added, f"{info}/RECORD")], method=DEFLATED)


def _metadata(name: str, batch: _Batch, ops: list[str]) -> bytes:
    lines = [
        "Metadata-Version: 2.4",
        f"Name: {name}",
        f"Version: {batch.version}",
        f"Summary: Operators precompiled for opkiln: {', '.join(ops)}",
        "Requires-Python: >=3.11",
        *(f"Requires-Dist: {each.strip()}" for each in batch.requires),
    ]
    return ("\n".join(lines) + "\n").encode()


def _record(added: list[AddedMember], itself: str) -> bytes:
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    for each in added:
        digest = base64.urlsafe_b64encode(each.sha256).rstrip(b"=").decode()
        rows.writerow((each.name, f"sha256={digest}", each.size))
    rows.writerow((itself, "", ""))
    return text.getvalue().encode()


# The bill of materials: CycloneDX 1.6, in the place that PEP 770 defines. It lists each library
# with its digest, and what went into it: the compilers, the CUDA runtime if it is linked
# statically, torch's headers. The same layer gives the same bytes, so the document has no serial
# number and no time.

# Static libraries, by the link argument: (name, the compiler that has the same version).
_STATIC = {"-lcudart_static": ("cudart_static", "nvcc")}

Component = dict[str, Any]


def sbom(entries: Iterable[LayerEntry], below: str, *, name: str, version: str) -> bytes:
    """The document for a wheel of this name that has these entries at the path ``below``."""
    purl = f"pkg:pypi/{canonicalize_name(name)}@{quote(version)}"
    libraries: list[Component] = []
    parts: dict[str, Component] = {}
    depends = {purl: set[str]()}
    for entry in entries:
        library = _library(entry, below)
        libraries.append(library)
        depends[purl].add(library["bom-ref"])
        used = depends[library["bom-ref"]] = set()
        for part in _parts(entry):
            parts[part["bom-ref"]] = part
            depends[part["bom-ref"]] = set()
            used.add(part["bom-ref"])
    root = {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}
    tool = {"type": "application", "name": "opkiln", "version": __version__}
    components = [*libraries, *parts.values()]
    document = {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"tools": {"components": [tool]}, "component": root},
        "components": sorted(components, key=lambda each: str(each["bom-ref"])),
        "dependencies": [
            {"ref": ref, "dependsOn": sorted(used)} if used else {"ref": ref}
            for ref, used in sorted(depends.items())
        ],
    }
    return (json.dumps(document, indent=2, sort_keys=True) + "\n").encode()


def _library(entry: LayerEntry, below: str) -> Component:
    manifest = entry.manifest
    target = manifest["target"]
    path = f"{below}/{entry.place}/{manifest['payload']}"
    told = {
        "abi": target["abi_tag"],
        "archs": ";".join(target["archs"]),
        "backend": target["backend"],
        "cpu": " ".join((target["cpu"], *target["cpu_features"])),
        "distribution": manifest["distribution"],
        "machine": target["machine"],
        "path": path,
    }
    hashes = [{"alg": "SHA-256", "content": manifest["sha256"]}]
    return _component("library", path, manifest["op"], told, hashes=hashes)


def _parts(entry: LayerEntry) -> Iterator[Component]:
    """The parts of a library besides its author's sources."""
    inputs = entry.lists.get("inputs", {})
    compilers: dict[str, dict[str, str]] = inputs.get("toolchain", {})
    for family, known in sorted(compilers.items()):
        # CycloneDX's word for a part that is not installed is "excluded".
        yield _component(
            "application", f"compiler:{family}:{known['identity']}", family,
            {"identity": known["identity"]}, version=known["version"], scope="excluded",
        )  # fmt: skip
    linked = {argument for step in inputs.get("steps", ())[-1:] for argument in step}
    for argument, (name, family) in _STATIC.items():
        if argument in linked and family in compilers:
            version = compilers[family]["version"]
            ref = f"static:{name}:{version}"
            yield _component("library", ref, name, {"linked": "static"}, version=version)
    tag = str(entry.manifest["target"]["abi_tag"])
    if tag.startswith(FULL_TAG):
        yield _torch(tag, inputs.get("torch", {}).get("version", ""))


def _torch(tag: str, version: str) -> Component:
    """torch, whose headers were compiled."""
    stable = tag.startswith(STABLE_TAG)
    named = tag.removeprefix(STABLE_TAG if stable else FULL_TAG).partition("-")[0]
    if not stable:
        version = version or named  # a stable op's tag names the oldest torch that it runs with
    told = {"used": "headers", "stable-abi": named if stable else ""}
    known = {"version": version, "purl": f"pkg:pypi/torch@{quote(version)}"} if version else {}
    ref = ":".join(filter(None, ("headers:torch", version, told["stable-abi"])))
    return _component("library", ref, "torch", told, **known)


def _component(kind: str, ref: str, name: str, told: dict[str, str], **more: Any) -> Component:
    """A part of the document. ``told`` are properties of opkiln's own; empty ones are left out."""
    properties = [{"name": f"opkiln:{key}", "value": text} for key, text in told.items() if text]
    return {"type": kind, "bom-ref": ref, "name": name, "properties": properties, **more}
