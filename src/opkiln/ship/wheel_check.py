"""Whether a wheel is what was written: every file in it, and every byte around the files.

An installer checks little of a wheel, and nothing of a wheel that it has in its cache. Whoever
hands one on, or takes one, checks it here: each file against RECORD, each entry's manifest against
its own digest and place, each payload against its manifest. A wheel that opkiln itself wrote is
also held against the one form in which it writes archives. Who changed all of it at once is not
found out this way: that takes a signature.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import os
import struct
import zipfile
import zlib
from typing import Any, NamedTuple

from opkiln.digest import sha256_file
from opkiln.errors import LoadError
from opkiln.model import EXECUTABLE
from opkiln.settings import LAYOUT
from opkiln.ship import wheel_zip
from opkiln.ship.contents import named
from opkiln.ship.wheel import GENERATOR
from opkiln.store.entry import MANIFEST, SIDECAR, parse_manifest, write_manifest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import BinaryIO

_CHUNK = 1 << 20
_LARGEST_READ = 64 << 20  # of what is read whole: RECORD, manifests

# All that reading a damaged archive has been seen to raise, or may.
_UNREADABLE = (
    zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError,
    struct.error, OverflowError, MemoryError, IndexError, csv.Error,
)  # fmt: skip


class _Recorded(NamedTuple):
    """What RECORD says of a file."""

    sha256: str
    size: int


class _Refused(Exception):
    """Why a wheel is not what was written."""


def verify_wheel(path: str) -> int:
    """How many entries a wheel holds, if it is whole. LoadError names what is not, and the digests.

    Any wheel that holds prebuilt ops can be checked. Of one that opkiln did not write itself (a
    package that carries its ops) the times and modes in the archive are not looked at.
    """
    try:
        with open(path, "rb") as file:
            try:
                return _verify(file, os.path.basename(path))
            except _UNREADABLE as error:
                raise _Refused(f"it is no whole zip archive: {error}") from error
    except OSError as error:
        raise LoadError(f"{path} cannot be read: {error.strerror or error}") from error
    except _Refused as refused:
        raise LoadError(
            f"{path} is refused: {refused}",
            why=f"it was changed after it was written; the whole file has the SHA-256 "
            f"{sha256_file(path)}",
            hint=f"sha256sum {path}    # compare it with where it comes from, and get it again",
        ) from refused


def _verify(file: BinaryIO, base: str) -> int:
    with zipfile.ZipFile(file) as archive:
        members = [each for each in archive.infolist() if not each.filename.endswith("/")]
        for each in members:
            # The others are as good, but no tool writes wheels with them, and each has a reader
            # with errors of its own.
            if each.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise _Refused(f"{each.filename} is packed by method {each.compress_type}")
        by_name = {each.filename: each for each in members}
        if len(by_name) != len(members):
            raise _Refused("it has two files of one name")
        info = _info_directory(by_name, base)
        recorded = _read_record(archive, by_name, info)
        for name in sorted(recorded.keys() | by_name.keys()):
            if name not in by_name:
                digest = recorded[name].sha256
                raise _Refused(f"{name} is missing; RECORD has it with the SHA-256 {digest}")
            _check_file(archive, by_name[name], recorded, info)
        tags, generator = _read_wheel(archive, by_name, info)
        if not any(base.endswith(f"-{tag}.whl") for tag in tags):
            raise _Refused(f"its name is not that of a wheel for {' or '.join(tags)}")
        payloads = _check_entries(archive, by_name, recorded)
        if generator.split(" ")[0] == GENERATOR:
            _check_framing(file, members, payloads)
        return len(payloads)


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
            raise _Refused(f"{info}/RECORD has a line that is none: {','.join(row)}")
        name, digest, size = row
        algorithm, _, encoded = digest.partition("=")
        if name == f"{info}/RECORD":
            if digest or size:
                raise _Refused(f"{name} has a digest of its own")
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
        raise _Refused(f"{name} has the SHA-256 {found}, and RECORD says {expected.sha256}")


def _digest(archive: zipfile.ZipFile, member: zipfile.ZipInfo, most: int) -> tuple[str, int]:
    """(SHA-256, size) of a member, read no further than a byte past ``most``."""
    digest, size = hashlib.sha256(), 0
    with archive.open(member) as data:
        while size <= most and (chunk := data.read(min(_CHUNK, most + 1 - size))):
            digest.update(chunk)
            size += len(chunk)
    return digest.hexdigest(), size


def _read_wheel(
    archive: zipfile.ZipFile, by_name: dict[str, zipfile.ZipInfo], info: str
) -> tuple[list[str], str]:
    """(tags, generator)."""
    tags, generator = [], ""
    for line in _read(archive, by_name, f"{info}/WHEEL").decode().splitlines():
        key, _, value = line.partition(": ")
        if key == "Tag":
            tags.append(value)
        elif key == "Generator":
            generator = value
    return tags, generator


def _check_entries(
    archive: zipfile.ZipFile, by_name: dict[str, zipfile.ZipInfo], recorded: dict[str, _Recorded]
) -> dict[str, bool]:
    """Each entry: its manifest, whether it lies where that says, its payload and its lists.

    Gives the names of the payloads, and whether each is a program.
    """
    payloads = {}
    for name in sorted(by_name):
        leaf, _, file = name.rpartition("/")
        if file != MANIFEST or f"/{LAYOUT}/ops/" not in f"/{leaf}/":
            continue
        try:
            manifest = _parse(_read(archive, by_name, name))
            _parse(_read(archive, by_name, f"{leaf}/{SIDECAR}"))
            payload = f"{leaf}/{manifest['payload']}"
            entry = named(manifest)
            expected = _Recorded(manifest["sha256"], manifest["size"])
            program = manifest["kind"] == EXECUTABLE
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            digest = recorded[name].sha256
            raise _Refused(f"{leaf}: {error} ({MANIFEST} has the SHA-256 {digest})") from error
        parts = leaf.split("/")
        if entry != (*parts[-5:-3], parts[-1]):
            digest = recorded[name].sha256
            there = "/".join(entry)
            raise _Refused(f"{name} (SHA-256 {digest}) is of the entry {there}, elsewhere")
        found = recorded.get(payload)
        if found != expected:
            told = "is missing" if found is None else f"has the SHA-256 {found.sha256}"
            raise _Refused(f"{payload} {told}, and its manifest says {expected.sha256}")
        known = {name, payload, f"{leaf}/{SIDECAR}"}
        if more := sorted(each for each in by_name if each.startswith(f"{leaf}/")
                          and each not in known):  # fmt: skip
            raise _Refused(f"{more[0]} (SHA-256 {recorded[more[0]].sha256}) is no part of an entry")
        payloads[payload] = program
    return payloads


def _parse(data: bytes) -> dict[str, Any]:
    manifest = parse_manifest(data)
    # Its digest is that of its body: what is around the body is looked at here.
    if write_manifest(manifest) != data:
        raise ValueError("it is not as manifests are written")
    return manifest


def _check_framing(
    file: BinaryIO, members: list[zipfile.ZipInfo], payloads: dict[str, bool]
) -> None:
    listed = [
        wheel_zip.Member(
            each.filename,
            wheel_zip.mode(executable=payloads.get(each.filename, False)),
            each.CRC,
            each.compress_size,
            each.file_size,
            each.header_offset,
        )
        for each in members
    ]
    if reason := wheel_zip.check(file, listed):
        raise _Refused(reason)
