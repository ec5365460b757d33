"""Reads stores and bundles by what docs/reference/formats.md says. Imports nothing of opkiln."""

from __future__ import annotations

import base64
import hashlib
import json
import struct
import zlib
from pathlib import Path
from typing import Any, NamedTuple

_LOCAL = struct.Struct("<4sHHHHHIIIHH")
_CENTRAL = struct.Struct("<4sHHHHHHIIIHHHHHII")
_END = struct.Struct("<4sHHHHIIH")
DECLARATION = (
    "name", "distribution", "sources", "include_dirs", "cxx_args", "ldflags", "libraries", "kind",
    "abi", "std", "vectorize", "backend", "device_args", "device_libraries", "kernels", "inline",
)  # fmt: skip
TARGET = (
    "backend", "system", "machine", "cpu", "cpu_features", "abi_tag", "debug", "flags", "archs",
)  # fmt: skip


class Refused(Exception):
    """A file is not as the page says."""


class Entry(NamedTuple):
    """One entry, whose digests were all checked."""

    place: str  # v1/ops/DISTRIBUTION/OP/INTENT/BUILD/DEPS
    manifest: dict[str, Any]
    sidecar: dict[str, Any]
    payload: bytes


# "Encoding of a key"


def encode(value: Any) -> bytes:
    if value is None:
        return b"n"
    if isinstance(value, bool):
        return b"t" if value else b"f"
    if isinstance(value, int):
        return b"i%d;" % value
    if isinstance(value, str):
        data = value.encode("utf-8", "surrogatepass")
        return b"s%d:%s" % (len(data), data)
    assert isinstance(value, (list, tuple)), type(value)
    return b"(%d:%s" % (len(value), b"".join(map(encode, value)))


def key(kind: str, value: Any) -> str:
    return hashlib.sha256(encode((1, kind, value))).hexdigest()[:40]


# "The manifest file"


def body(data: bytes) -> dict[str, Any]:
    inner = data[88:-2]
    digest = hashlib.sha256(inner).hexdigest()
    if data != b'{"sha256":"%s","manifest":%s}\n' % (digest.encode(), inner):
        raise Refused("the digest of a manifest")
    found = json.loads(inner)
    if not isinstance(found, dict) or found.get("schema") != 2:
        raise Refused("the schema of a manifest")
    if json.dumps(found, separators=(",", ":"), sort_keys=True).encode() != inner:
        raise Refused("the form of a manifest")
    return found


# "Entry", "The keys", "Dependencies"


def dependencies(facts: list[list[Any]]) -> dict[str, Any]:
    """What the manifest of an entry says of the facts in its sidecar."""
    own, others = [], []
    for kind, anchor, path, value, *_ in facts:
        mine = kind in ("file", "program") and anchor in ("src", "opkiln", "outside")
        if mine and [anchor, path, value.rstrip("*")] not in own:
            own.append([anchor, path, value.rstrip("*")])
        if not mine or value.endswith("*"):
            others.append([kind, anchor, path, value])
    return {"own": own, "others": key("facts", others)}


def entry(place: str, manifest: bytes, sidecar: bytes, payload: bytes) -> Entry:
    found, lists = body(manifest), body(sidecar)
    _, _, distribution, op, intent, _, deps = place.split("/")
    if (found["distribution"], found["op"]) != (distribution, op):
        raise Refused("the path of an entry")
    if (len(payload), hashlib.sha256(payload).hexdigest()) != (found["size"], found["sha256"]):
        raise Refused("the payload")
    if key("deps", (found["deps"]["own"], found["deps"]["others"])) != deps:
        raise Refused("DEPS")
    declared = {**lists["inputs"]["spec"], "inline": ()}
    declaration = [declared[name] for name in DECLARATION]
    target = [found["target"][name] for name in TARGET]
    if key("spec", declaration) != found["spec"]:
        raise Refused("the key of the declaration")
    if key("intent", (declaration, target)) != intent:
        raise Refused("INTENT")
    if "facts" in lists and dependencies(lists["facts"]) != found["deps"]:
        raise Refused("deps")
    return Entry(place, found, lists, payload)


def store(root: Path) -> list[Entry]:
    """Every entry of a store or layer."""
    found = []
    for leaf in sorted((root / "v1" / "ops").glob("*/*/*/*/*")):
        manifest = (leaf / "manifest.json").read_bytes()
        payload = (leaf / body(manifest)["payload"]).read_bytes()
        sidecar = (leaf / "inputs.json").read_bytes()
        found.append(entry(str(leaf.relative_to(root)), manifest, sidecar, payload))
    return found


# "Bundle"


class Bundle(NamedTuple):
    """A whole bundle."""

    entries: list[Entry]
    index_digest: str
    signatures: list[list[str]]


def bundle(file: Path) -> Bundle:
    """A bundle of which every byte was compared with what its index says."""
    data = file.read_bytes()
    name = b"opkiln-bundle.json"
    size = _LOCAL.unpack_from(data)[8]
    if data[30 : 30 + len(name)] != name:
        raise Refused("the first member")
    index = data[48 : 48 + size]
    listed = body(index)
    if listed["kind"] != "bundle":
        raise Refused("the kind of the index")
    at = 48 + size
    members = [("opkiln-bundle.json", index)]
    for path, length, digest in listed["members"]:
        begin = at + 30 + len(path.encode())
        content = data[begin : begin + length]
        if hashlib.sha256(content).hexdigest() != digest:
            raise Refused(path)
        members.append((path, content))
        at = begin + length
    signed: list[list[str]] = []
    last = b"opkiln-bundle.sig.json"
    if data[at + 30 : at + 30 + len(last)] == last:
        length = _LOCAL.unpack_from(data, at)[8]
        content = data[at + 30 + len(last) :][:length]
        signed = body(content)["signatures"]
        members.append((last.decode(), content))
    if data != archive(members):
        raise Refused("a byte outside of the members")
    files = dict(members)
    leaves = dict.fromkeys(path.rpartition("/")[0] for path, *_ in listed["members"])
    entries = []
    for leaf in leaves:
        manifest = files[f"{leaf}/manifest.json"]
        payload = files[f"{leaf}/{body(manifest)['payload']}"]
        entries.append(entry(leaf, manifest, files[f"{leaf}/inputs.json"], payload))
    return Bundle(entries, hashlib.sha256(index).hexdigest(), signed)


def archive(members: list[tuple[str, bytes]]) -> bytes:
    """The one ZIP file with these members."""
    data, directory = b"", b""
    for path, content in members:
        name, crc, size = path.encode(), zlib.crc32(content), len(content)
        common = (0x0800, 0, 0, 0x21, crc, size, size, len(name), 0)
        directory += _CENTRAL.pack(
            b"PK\1\2", 0x0314, 20, *common, 0, 0, 0, 0x81A40000, len(data)
        ) + name  # fmt: skip
        data += _LOCAL.pack(b"PK\3\4", 20, *common) + name + content
    end = _END.pack(b"PK\5\6", 0, 0, len(members), len(members), len(directory), len(data), 0)
    return data + directory + end


# "Signatures"


def signed_by(found: Bundle) -> list[str]:
    """The keys whose signatures are good."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    message = f"opkiln bundle signature 1\n{found.index_digest}\n".encode()
    for word, signature in found.signatures:
        public = base64.b64decode(word.removeprefix("ed25519:"))
        Ed25519PublicKey.from_public_bytes(public).verify(base64.b64decode(signature), message)
    return [word for word, _ in found.signatures]
