"""The bill of materials of a wheel: CycloneDX 1.6, in the place that PEP 770 defines.

It lists each library with its digest, and what went into it: the compilers, the CUDA runtime if it
is linked statically, torch's headers. The same layer gives the same bytes, so the document has no
serial number and no time.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any
from urllib.parse import quote

from packaging.utils import canonicalize_name

from opkiln import __version__
from opkiln.ship.audit import FULL_TAG, STABLE_TAG
from opkiln.store.layer import LayerEntry

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
    """What went into a library besides its author's sources."""
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
