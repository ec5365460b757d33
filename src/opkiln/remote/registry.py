"""OCI registries, and OCI layouts, which are the same in a directory.

A blob is the only layer of an artifact, whose manifest has the tag <op>-<key>. `oras pull`,
`skopeo copy` and every other tool of registries can handle it. The registry takes a manifest only
if its blobs are there, so the PUT of the manifest publishes. A tag may be overwritten, so several
machines may publish the same.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import random
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlencode

from opkiln.remote import credentials, plain, tier, web
from opkiln.remote.patience import Deadline

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
ARTIFACT = "application/vnd.opkiln.bundle.v1"
LAYER = "application/vnd.opkiln.bundle.v1+zip"
_EMPTY_TYPE, _EMPTY = "application/vnd.oci.empty.v1+json", b"{}"
_TITLE = "org.opencontainers.image.title"  # the file's name for `oras pull`
_TAG = "org.opencontainers.image.ref.name"
_SIGNATURES = "org.opkiln.signatures"
_LABEL = "org.opkiln."
_ATTEMPTS = 5  # to publish


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _descriptor(kind: str, sha256: str, size: int) -> dict[str, Any]:
    return {"mediaType": kind, "digest": f"sha256:{sha256}", "size": size}


def _tag(listed: dict[str, Any]) -> Any:
    return listed.get("annotations", {}).get(_TAG)


def write_manifest(what: tier.Publication) -> bytes:
    """The manifest of an artifact. The same artifact gives the same bytes."""
    labels = {f"{_LABEL}{name}": text for name, text in what.labels.items()}
    signed = {_SIGNATURES: what.signatures} if what.signatures else {}
    title = f"{what.labels.get('op', 'op')}.opkiln"
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "artifactType": ARTIFACT,
        "config": _descriptor(_EMPTY_TYPE, _sha256(_EMPTY), len(_EMPTY)),
        "layers": [{**_descriptor(LAYER, what.sha256, what.size), "annotations": {_TITLE: title}}],
        "annotations": {**labels, **signed},
    }
    return json.dumps(manifest, indent=1, sort_keys=True).encode()


def read_manifest(data: bytes) -> tier.Publication:
    """The publication that a manifest describes. Raises Unusable for another kind of artifact."""
    with tier.refuse_malformed("its manifest", tier.Unusable):
        manifest: dict[str, Any] = json.loads(data)
        (layer,) = manifest["layers"]
        if layer["mediaType"] != LAYER:
            raise ValueError(f"its layer is {layer['mediaType']!r}")
        algorithm, _, sha256 = layer["digest"].partition(":")
        if algorithm != "sha256":
            raise ValueError(f"its digest is {layer['digest']!r}")
        notes = dict(manifest["annotations"])
        signatures = notes.pop(_SIGNATURES, "")
        labels = {name[len(_LABEL) :]: text for name, text in notes.items()}
        return tier.parse_publication(sha256, layer["size"], signatures, labels)


class Registry:
    """A repository of a registry: a ``Tier``."""

    def __init__(self, url: str) -> None:
        scheme, _, rest = url.partition("://")
        rest, _, query = rest.partition("?")
        host, _, prefix = rest.partition("/")
        if not (repository := prefix.strip("/")):
            raise tier.Unreachable(f"{url} names no repository", hint=f"{url.rstrip('/')}/opkiln")
        self._v2 = f"/v2/{repository}"
        self._pull = f"repository:{repository}:pull"
        self._push = f"repository:{repository}:pull,push"
        base = f"{'http' if scheme == 'oci+http' else 'https'}://{host}/"
        tokens = query.removeprefix("tokens=").lower()
        self._client = web.Client(
            base, credentials.registry_login, credentials.registry_files, tokens
        )

    def look_up(self, name: str, deadline: Deadline) -> tier.Publication | None:
        path = f"{self._v2}/manifests/{name}"
        pieces = self._client.read(path, 0, deadline, accept=MANIFEST, scope=self._pull)
        try:
            return read_manifest(tier.read_small(pieces))
        except tier.Absent:
            return None

    def read(self, sha256: str, start: int, deadline: Deadline) -> Iterator[tuple[int, bytes]]:
        try:
            path = f"{self._v2}/blobs/sha256:{sha256}"
            yield from self._client.read(path, start, deadline, scope=self._pull)
        except tier.Absent as error:
            raise tier.Absent(sha256) from error

    def write(self, name: str, file: str, what: tier.Publication, deadline: Deadline) -> None:
        # If several publish the same at once, docker-registry may tell one of them that a digest
        # is wrong or a blob unknown: it is just moving the blob into place for another.
        for attempts_left in reversed(range(_ATTEMPTS)):
            try:
                self._publish(name, file, what, deadline)
            except web.UnexpectedStatus:
                if not attempts_left:
                    raise
                time.sleep(random.uniform(0.05, 0.5))  # noqa: S311 (so that they do not meet again)
            else:
                return

    def _publish(self, name: str, file: str, what: tier.Publication, deadline: Deadline) -> None:
        self._upload(what.sha256, file, deadline)
        self._upload(_sha256(_EMPTY), _EMPTY, deadline)
        with self._client.request(
            "PUT", f"{self._v2}/manifests/{name}", deadline, headers={"Content-Type": MANIFEST},
            body=write_manifest(what), scope=self._push,
        ) as response:  # fmt: skip
            web.expect(response, 201)

    def _upload(self, sha256: str, data: bytes | str, deadline: Deadline) -> None:
        blob = f"{self._v2}/blobs/sha256:{sha256}"
        with self._client.request("HEAD", blob, deadline, scope=self._push) as response:
            if response.status == 200:
                return
        begin = f"{self._v2}/blobs/uploads/"
        with self._client.request("POST", begin, deadline, scope=self._push) as response:
            web.expect(response, 202)
            place = response.headers["Location"] or ""
        place += ("&" if "?" in place else "?") + urlencode({"digest": f"sha256:{sha256}"})
        with self._client.request(
            "PUT", place, deadline, headers={"Content-Type": "application/octet-stream"}, body=data,
            scope=self._push,
        ) as response:  # fmt: skip
            web.expect(response, 201)


class OciLayout:
    """An OCI layout in a directory: a ``Tier`` without a network.

    `skopeo copy --all docker://registry/prefix:TAG oci:DIRECTORY:TAG` writes one, and `oras` too.
    """

    def __init__(self, root: str) -> None:
        self._root = root
        self._files = plain.Folder(root)

    def look_up(self, name: str, deadline: Deadline) -> tier.Publication | None:
        for each in self._index()["manifests"]:
            if _tag(each) == name:
                sha256 = each["digest"].partition(":")[2]
                return read_manifest(tier.read_small(self.read(sha256, 0, deadline)))
        return None

    def read(self, sha256: str, start: int, deadline: Deadline) -> Iterator[tuple[int, bytes]]:
        return self._files.read(_blob(sha256), start, deadline)

    def write(self, name: str, file: str, what: tier.Publication, deadline: Deadline) -> None:
        manifest = write_manifest(what)
        blobs: list[tuple[str, int, bytes | str]] = [(what.sha256, what.size, file)]
        blobs += [(_sha256(each), len(each), each) for each in (_EMPTY, manifest)]
        for sha256, size, data in blobs:
            if not self._files.has(_blob(sha256), size, deadline):
                self._files.write(_blob(sha256), data, deadline)
        version = json.dumps({"imageLayoutVersion": "1.0.0"}).encode()
        self._files.write("oci-layout", version, deadline)
        entry = {
            **_descriptor(MANIFEST, _sha256(manifest), len(manifest)),
            "artifactType": ARTIFACT,
            "annotations": {_TAG: name},
        }
        # One file lists all tags. Without the lock, one of two publishers would lose its tag.
        with open(os.path.join(self._root, ".lock"), "ab") as lock:
            fcntl.lockf(lock, fcntl.LOCK_EX)
            index = self._index()
            others = [each for each in index["manifests"] if _tag(each) != name]
            index["manifests"] = [*others, entry]
            self._files.write("index.json", json.dumps(index, indent=1).encode(), deadline)

    def _index(self) -> dict[str, Any]:
        path = os.path.join(self._root, "index.json")
        try:
            with open(path, "rb") as file, tier.refuse_malformed(path):
                return dict(json.load(file))
        except FileNotFoundError:
            return {"schemaVersion": 2, "manifests": []}


def _blob(sha256: str) -> str:
    if "/" in sha256:
        raise tier.Unreachable(f"{sha256!r} is not a digest")
    return f"blobs/sha256/{sha256}"
