"""Checks that a wheel is as it was written: every file in it, and every byte around the files.

Installers check little of a wheel, and nothing of one in their cache. This checks each file against
RECORD, each entry's manifest against its own digest and place, and each payload against its
manifest. A wheel that opkiln wrote is also compared with the one form in which opkiln writes
archives. It does not detect an attacker who changes all of these together. Only a signature does.
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
from typing import Any, NamedTuple

from opkiln.bundles.layer import named
from opkiln.digest import LARGEST_BUNDLE, sha256_file
from opkiln.errors import LoadError
from opkiln.model import EXECUTABLE
from opkiln.settings import LAYOUT
from opkiln.ship.wheel import GENERATOR
from opkiln.store import zip_format
from opkiln.store.entry import MANIFEST, SIDECAR, parse_manifest, write_manifest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
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

    Any wheel with prebuilt ops can be checked. If another tool wrote it (a package that carries its
    ops), the times and modes in the archive are not checked.
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
    """Check each entry: its manifest, its place, its payload and its files.

    Returns the names of the payloads, and whether each is a program.
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
        payloads[payload] = program
    return payloads


def _parse(data: bytes) -> dict[str, Any]:
    manifest = parse_manifest(data)
    # The digest covers the manifest's body. This covers the bytes around it.
    if write_manifest(manifest) != data:
        raise ValueError("its manifest is not in the form that opkiln writes")
    return manifest


def _check_framing(
    file: BinaryIO, members: list[zipfile.ZipInfo], payloads: dict[str, bool]
) -> None:
    """Compare every byte around the members' data with what ``zip_format.Writer`` writes.

    It also checks what readers of ZIP files ignore: bytes and bits after the end of deflated data.
    """
    headers = [
        zip_format.Header(
            each.filename, each.file_size, each.CRC, each.header_offset, each.compress_size,
            zip_format.DEFLATED,
            zip_format.mode_of(executable=payloads.get(each.filename, False)),
        )
        for each in members
    ]  # fmt: skip
    at = 0
    for header in headers:
        if header.offset != at:
            raise _Refused(f"{header.name} begins at {header.offset}, not at {at}")
        file.seek(at)
        expected = zip_format.local_header(header)
        if file.read(len(expected)) != expected:
            raise _Refused(f"the header of {header.name} is not as it was written")
        if not _ends_there(file, header.packed, header.size):
            raise _Refused(f"{header.name} has extra bytes or bits after its end")
        at += len(expected) + header.packed
    file.seek(at)
    rest = zip_format.directory(headers)
    if file.read(len(rest) + 1) != rest:
        raise _Refused("its directory is not as it was written")


def _ends_there(file: BinaryIO, packed: int, size: int) -> bool:
    """Whether the deflated data at the file's position fill all of their ``packed`` bytes.

    The unused bits of the last byte must be zeros, as every writer leaves them. Raises zlib.error,
    OSError.
    """
    inflate = zlib.decompressobj(-15)
    length, left = 0, packed - 1
    while left > 0 and (piece := file.read(min(left, _CHUNK))):
        left -= len(piece)
        while piece and not inflate.eof and length <= size:
            length += len(inflate.decompress(piece, _CHUNK))
            piece = inflate.unconsumed_tail
    last = file.read(1)
    if left or not last or inflate.eof or length > size:
        return False

    def ending(byte: int) -> tuple[bytes, bool]:
        rest = inflate.copy()
        return rest.decompress(bytes([byte]), _CHUNK), rest.eof

    end = ending(last[0])
    if length + len(end[0]) != size or not end[1]:
        return False
    # If clearing a bit of the last byte leaves the data the same, the bit is not part of the data.
    bits = (1 << bit for bit in range(8) if last[0] & 1 << bit)
    return all(_differs(ending, last[0] & ~bit, end) for bit in bits)


def _differs(
    ending: Callable[[int], tuple[bytes, bool]], last: int, end: tuple[bytes, bool]
) -> bool:
    try:
        return ending(last) != end
    except zlib.error:
        return True
