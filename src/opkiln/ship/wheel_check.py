"""Checks that every file of a wheel is as it was written.

Installers check little of a wheel, and nothing of one in their cache. This checks each file against
RECORD, each entry's manifest against its own digest and place, and each payload against its
manifest. It does not detect an attacker who changes all of these together. Only a signature does.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import os
import shlex
import struct
import zipfile
import zlib

from opkiln.base.digest import LARGEST_BUNDLE, sha256_file
from opkiln.errors import LoadError
from opkiln.settings import LAYOUT
from opkiln.store.entry import MANIFEST, SIDECAR, parse_manifest
from opkiln.store.layer import identity

_CHUNK = 1 << 20
_LARGEST_READ = 64 << 20  # bytes, of files that are read whole: RECORD, manifests

# The errors that reading a damaged archive may raise.
_UNREADABLE = (
    zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError,
    struct.error, OverflowError, MemoryError, IndexError, csv.Error,
)  # fmt: skip


class _BadWheel(Exception):
    """Says how a wheel differs from what was written."""


def verify_wheel(path: str) -> int:
    """The number of entries in an intact wheel. LoadError names what is damaged, with the digests.

    Any wheel with prebuilt ops can be checked, whichever tool wrote it. Times, modes and the other
    bytes around the files, which RECORD does not cover, are not checked.
    """
    try:
        with open(path, "rb") as file:
            try:
                return _WheelFile(zipfile.ZipFile(file), os.path.basename(path)).verify()
            except _UNREADABLE as error:
                raise _BadWheel(f"it is not an intact zip archive: {error}") from error
    except OSError as error:
        raise LoadError(f"{path} cannot be read: {error.strerror or error}") from error
    except _BadWheel as refused:
        raise LoadError(
            f"{path} is refused: {refused}",
            why=f"it was changed after it was written; the whole file has the SHA-256 "
            f"{sha256_file(path, LARGEST_BUNDLE)}",
            hint=f"sha256sum {shlex.quote(path)}    # compare it with the original; get that again",
        ) from refused


class _WheelFile:
    """A wheel that is checked, by the name of its file."""

    def __init__(self, archive: zipfile.ZipFile, base: str) -> None:
        self._archive, self._base = archive, base
        self._info = "-".join(base.split("-")[:2]) + ".dist-info"
        self._members: dict[str, zipfile.ZipInfo] = {}
        # Each file in RECORD: (SHA-256, size).
        self._recorded: dict[str, tuple[str, int]] = {}

    def verify(self) -> int:
        """The number of entries. Raises _BadWheel."""
        self._list_members()
        self._read_record()
        for name in sorted(self._recorded.keys() | self._members.keys()):
            self._check_file(name)
        wheel = self._read(f"{self._info}/WHEEL").decode().splitlines()
        tags = [line.removeprefix("Tag: ") for line in wheel if line.startswith("Tag: ")]
        if not any(self._base.endswith(f"-{tag}.whl") for tag in tags):
            raise _BadWheel(f"its name is not that of a wheel for {' or '.join(tags)}")
        leaves = [
            leaf
            for leaf, _, file in (name.rpartition("/") for name in sorted(self._members))
            if file == MANIFEST and f"/{LAYOUT}/ops/" in f"/{leaf}/"
        ]
        for leaf in leaves:
            self._check_entry(leaf)
        return len(leaves)

    def _list_members(self) -> None:
        for each in self._archive.infolist():
            name = each.filename
            if name.endswith("/"):
                continue
            if name.startswith("/") or ".." in name.split("/"):
                raise _BadWheel(f"{name} leads out of the wheel")
            # No tool writes wheels with another method, and the reader of each method raises other
            # errors.
            if each.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise _BadWheel(f"{name} is packed by method {each.compress_type}")
            if name in self._members:
                raise _BadWheel("it has two files with the same name")
            self._members[name] = each
        found = sorted({name.partition("/")[0] for name in self._members if ".dist-info/" in name})
        if found != [self._info]:
            has = ", ".join(found) or "no .dist-info"
            raise _BadWheel(f"it has {has}, and should have {self._info}")

    def _read(self, name: str) -> bytes:
        if name not in self._members:
            raise _BadWheel(f"{name} is missing")
        try:
            with self._archive.open(self._members[name]) as member:
                data = member.read(_LARGEST_READ + 1)
        except _UNREADABLE as error:
            raise _BadWheel(f"{name} cannot be unpacked: {error}") from error
        if len(data) > _LARGEST_READ:
            raise _BadWheel(f"{name} has more than {_LARGEST_READ} bytes")
        return data

    def _read_record(self) -> None:
        record = f"{self._info}/RECORD"
        for row in csv.reader(self._read(record).decode().splitlines()):
            if len(row) != 3 or row[0] in self._recorded:
                raise _BadWheel(f"{record} has an invalid line: {','.join(row)}")
            name, digest, size = row
            algorithm, _, encoded = digest.partition("=")
            if name == record:
                if digest or size:
                    raise _BadWheel(f"{name} lists a digest of itself")
                continue
            if algorithm != "sha256":
                raise _BadWheel(f"{record} has no SHA-256 of {name}")
            try:
                padded = encoded + "=" * (-len(encoded) % 4)
                raw = base64.b64decode(padded, altchars=b"-_", validate=True)
                self._recorded[name] = raw.hex(), int(size)
            except ValueError as error:
                raise _BadWheel(f"{record} has no digest and size of {name}: {error}") from error

    def _check_file(self, name: str) -> None:
        if name == f"{self._info}/RECORD":
            return
        if name not in self._recorded:
            raise _BadWheel(f"{name} is not in RECORD")
        expected, most = self._recorded[name]
        if name not in self._members:
            raise _BadWheel(f"{name} is missing; RECORD has it with the SHA-256 {expected}")
        digest, size = hashlib.sha256(), 0
        try:
            with self._archive.open(self._members[name]) as data:
                while size <= most and (chunk := data.read(min(_CHUNK, most + 1 - size))):
                    digest.update(chunk)
                    size += len(chunk)
        except _UNREADABLE as error:
            raise _BadWheel(
                f"{name} cannot be unpacked ({error}); RECORD has it with the SHA-256 {expected}"
            ) from error
        if (digest.hexdigest(), size) != (expected, most):
            raise _BadWheel(f"{name} has the SHA-256 {digest.hexdigest()}; RECORD says {expected}")

    def _check_entry(self, leaf: str) -> None:
        """Check an entry's manifest, place, payload and files."""
        name = f"{leaf}/{MANIFEST}"
        digest, _ = self._recorded[name]
        try:
            manifest = parse_manifest(self._read(name))
            parse_manifest(self._read(f"{leaf}/{SIDECAR}"))
            payload = f"{leaf}/{manifest['payload']}"
            entry = identity(manifest)
            expected = manifest["sha256"], manifest["size"]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise _BadWheel(f"{leaf}: {error} ({MANIFEST} has the SHA-256 {digest})") from error
        parts = leaf.split("/")
        if entry != (*parts[-5:-3], parts[-1]):
            there = "/".join(entry)
            raise _BadWheel(f"{name} (SHA-256 {digest}) belongs to another entry, {there}")
        found = self._recorded.get(payload)
        if found != expected:
            told = "is missing" if found is None else f"has the SHA-256 {found[0]}"
            raise _BadWheel(f"{payload} {told}; its manifest says {expected[0]}")
        known = {name, payload, f"{leaf}/{SIDECAR}"}
        inside = (each for each in self._members if each.startswith(f"{leaf}/"))
        if more := sorted(each for each in inside if each not in known):
            raise _BadWheel(
                f"{more[0]} (SHA-256 {self._recorded[more[0]][0]}) is not part of an entry"
            )
