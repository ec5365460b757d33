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
from typing import NamedTuple

from opkiln.bundles.layer import named
from opkiln.digest import LARGEST_BUNDLE, sha256_file
from opkiln.errors import LoadError
from opkiln.settings import LAYOUT
from opkiln.store.entry import MANIFEST, SIDECAR, parse_manifest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import BinaryIO

_CHUNK = 1 << 20
_LARGEST_READ = 64 << 20  # bytes, of files that are read whole: RECORD, manifests

# What reading a damaged archive may raise.
_UNREADABLE = (
    zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError,
    struct.error, OverflowError, MemoryError, IndexError, csv.Error,
)  # fmt: skip


class _Recorded(NamedTuple):
    """What RECORD says about a file."""

    sha256: str
    size: int


class _Refused(Exception):
    """Why a wheel is not what was written."""


def verify_wheel(path: str) -> int:
    """The number of entries in an intact wheel. LoadError names what is damaged, with the digests.

    Any wheel with prebuilt ops can be checked, whichever tool wrote it. Times, modes and the other
    bytes around the files, which RECORD does not cover, are not checked.
    """
    try:
        with open(path, "rb") as file:
            try:
                return _verify(file, os.path.basename(path))
            except _UNREADABLE as error:
                raise _Refused(f"it is not an intact zip archive: {error}") from error
    except OSError as error:
        raise LoadError(f"{path} cannot be read: {error.strerror or error}") from error
    except _Refused as refused:
        raise LoadError(
            f"{path} is refused: {refused}",
            why=f"it was changed after it was written; the whole file has the SHA-256 "
            f"{sha256_file(path, LARGEST_BUNDLE)}",
            hint=f"sha256sum {shlex.quote(path)}    # compare it with the original; get that again",
        ) from refused


def _verify(file: BinaryIO, base: str) -> int:
    with zipfile.ZipFile(file) as archive:
        members = [each for each in archive.infolist() if not each.filename.endswith("/")]
        for each in members:
            if each.filename.startswith("/") or ".." in each.filename.split("/"):
                raise _Refused(f"{each.filename} leads out of the wheel")
            # No tool writes wheels with another method, and the reader of each method raises other
            # errors.
            if each.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise _Refused(f"{each.filename} is packed by method {each.compress_type}")
        by_name = {each.filename: each for each in members}
        if len(by_name) != len(members):
            raise _Refused("it has two files with the same name")
        info = _info_directory(by_name, base)
        recorded = _read_record(archive, by_name, info)
        for name in sorted(recorded.keys() | by_name.keys()):
            if name not in by_name:
                digest = recorded[name].sha256
                raise _Refused(f"{name} is missing; RECORD has it with the SHA-256 {digest}")
            _check_file(archive, by_name[name], recorded, info)
        wheel = _read(archive, by_name, f"{info}/WHEEL").decode().splitlines()
        tags = [line.removeprefix("Tag: ") for line in wheel if line.startswith("Tag: ")]
        if not any(base.endswith(f"-{tag}.whl") for tag in tags):
            raise _Refused(f"its name is not that of a wheel for {' or '.join(tags)}")
        return _check_entries(archive, by_name, recorded)


def _info_directory(by_name: dict[str, zipfile.ZipInfo], base: str) -> str:
    info = "-".join(base.split("-")[:2]) + ".dist-info"
    found = sorted({name.partition("/")[0] for name in by_name if ".dist-info/" in name})
    if found != [info]:
        raise _Refused(f"it has {', '.join(found) or 'no .dist-info'}, and should have {info}")
    return info


def _read(archive: zipfile.ZipFile, by_name: dict[str, zipfile.ZipInfo], name: str) -> bytes:
    if name not in by_name:
        raise _Refused(f"{name} is missing")
    try:
        with archive.open(by_name[name]) as member:
            data = member.read(_LARGEST_READ + 1)
    except _UNREADABLE as error:
        raise _Refused(f"{name} cannot be unpacked: {error}") from error
    if len(data) > _LARGEST_READ:
        raise _Refused(f"{name} has more than {_LARGEST_READ} bytes")
    return data


def _read_record(
    archive: zipfile.ZipFile, by_name: dict[str, zipfile.ZipInfo], info: str
) -> dict[str, _Recorded]:
    recorded: dict[str, _Recorded] = {}
    for row in csv.reader(_read(archive, by_name, f"{info}/RECORD").decode().splitlines()):
        if len(row) != 3 or row[0] in recorded:
            raise _Refused(f"{info}/RECORD has an invalid line: {','.join(row)}")
        name, digest, size = row
        algorithm, _, encoded = digest.partition("=")
        if name == f"{info}/RECORD":
            if digest or size:
                raise _Refused(f"{name} lists a digest of itself")
            continue
        if algorithm != "sha256":
            raise _Refused(f"{info}/RECORD has no SHA-256 of {name}")
        try:
            padded = encoded + "=" * (-len(encoded) % 4)
            raw = base64.b64decode(padded, altchars=b"-_", validate=True)
            recorded[name] = _Recorded(raw.hex(), int(size))
        except ValueError as error:
            raise _Refused(f"{info}/RECORD has no digest and size of {name}: {error}") from error
    return recorded


def _check_file(
    archive: zipfile.ZipFile, member: zipfile.ZipInfo, recorded: dict[str, _Recorded], info: str
) -> None:
    name = member.filename
    if name == f"{info}/RECORD":
        return
    if name not in recorded:
        raise _Refused(f"{name} is not in RECORD")
    expected = recorded[name]
    try:
        found, size = _digest(archive, member, expected.size)
    except _UNREADABLE as error:
        raise _Refused(
            f"{name} cannot be unpacked ({error}); RECORD has it with the SHA-256 {expected.sha256}"
        ) from error
    if (found, size) != expected:
        raise _Refused(f"{name} has the SHA-256 {found}; RECORD says {expected.sha256}")


def _digest(archive: zipfile.ZipFile, member: zipfile.ZipInfo, most: int) -> tuple[str, int]:
    """(SHA-256, size) of a member, read no further than a byte past ``most``."""
    digest, size = hashlib.sha256(), 0
    with archive.open(member) as data:
        while size <= most and (chunk := data.read(min(_CHUNK, most + 1 - size))):
            digest.update(chunk)
            size += len(chunk)
    return digest.hexdigest(), size


def _check_entries(
    archive: zipfile.ZipFile, by_name: dict[str, zipfile.ZipInfo], recorded: dict[str, _Recorded]
) -> int:
    """The number of entries. Checks of each: its manifest, place, payload and files."""
    entries = 0
    for name in sorted(by_name):
        leaf, _, file = name.rpartition("/")
        if file != MANIFEST or f"/{LAYOUT}/ops/" not in f"/{leaf}/":
            continue
        try:
            manifest = parse_manifest(_read(archive, by_name, name))
            parse_manifest(_read(archive, by_name, f"{leaf}/{SIDECAR}"))
            payload = f"{leaf}/{manifest['payload']}"
            entry = named(manifest)
            expected = _Recorded(manifest["sha256"], manifest["size"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            digest = recorded[name].sha256
            raise _Refused(f"{leaf}: {error} ({MANIFEST} has the SHA-256 {digest})") from error
        parts = leaf.split("/")
        if entry != (*parts[-5:-3], parts[-1]):
            digest = recorded[name].sha256
            there = "/".join(entry)
            raise _Refused(f"{name} (SHA-256 {digest}) belongs to another entry, {there}")
        found = recorded.get(payload)
        if found != expected:
            told = "is missing" if found is None else f"has the SHA-256 {found.sha256}"
            raise _Refused(f"{payload} {told}; its manifest says {expected.sha256}")
        known = {name, payload, f"{leaf}/{SIDECAR}"}
        if more := sorted(each for each in by_name if each.startswith(f"{leaf}/")
                          and each not in known):  # fmt: skip
            raise _Refused(
                f"{more[0]} (SHA-256 {recorded[more[0]].sha256}) is not part of an entry"
            )
        entries += 1
    return entries
