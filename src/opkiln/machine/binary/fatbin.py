"""Names the GPU images of NVIDIA fat binaries, and of HIP libraries.

nvcc puts one container per translation unit into ``.nv_fatbin``. The linker concatenates them. A
container is a header and entries. An entry is a header and an image: PTX, a cubin or LTO
intermediate code, compressed or not. The entry's header has everything that is needed here, so no
image is ever unpacked. Bit 20 of its flags is the ``a`` of sm_90a, bit 21 the ``f`` of sm_100f.
This holds for CUDA 12.4 to 13.4, in every compression mode. (A cubin's own ELF flags lost the mark
in CUDA 13.)
"""

from __future__ import annotations

from collections.abc import Iterator
from struct import Struct

from opkiln.errors import LoadError
from opkiln.machine.binary import elf
from opkiln.machine.binary.source import ByteSource, File, open_source
from opkiln.machine.nvrtc import container

_ENTRY = Struct("<HHIQ12xI8xQ")  # kind, version, sizes of its header and image, arch, flags
_SMALLEST_ENTRY = 64

_PREFIXES = {2: "sm_", 1: "compute_", 8: "lto_"}
_ORDER = tuple(_PREFIXES)
_MARKS = {mark: letter for letter, mark in container.MARKS.items()}
_MARKED = sum(_MARKS)


def images(file: File) -> tuple[str, ...]:
    """The images that a library's kernels are registered with: ``("sm_80", "compute_90a")``.

    Lists the images of all translation units: machine code first, each kind in numeric order,
    without duplicates; empty if there are none. Skips entries that are not PTX, machine code or LTO
    code. Raises LoadError if the file is not an ELF file, or is damaged.

    There are two traps. For code compiled for separate linking (``-rdc=true``), only the output of
    the device link counts. Its inputs, and libcudadevrt's images of every architecture, stay in the
    file and never run. And ``nvcc -shared`` does such a link for its default architecture even if
    there is nothing to link. That adds an image without code, which counts here. ``-nodlink``, or a
    link by the host compiler, adds none.
    """
    found: set[tuple[int, int, str]] = set()
    with open_source(file) as source:
        for start, inside in elf.sections(source, ".nv_fatbin"):
            found.update(_containers(inside, start, "section .nv_fatbin"))
    ordered = sorted(found, key=lambda image: (_ORDER.index(image[0]), image[1:]))
    return tuple(f"{_PREFIXES[kind]}{number}{mark}" for kind, number, mark in ordered)


def _containers(source: ByteSource, at: int, what: str) -> Iterator[tuple[int, int, str]]:
    while (at := source.skip_padding(at, what)) < source.size:
        magic, version, header, size = source.unpack(container.CONTAINER, at, f"{what}: fat binary")
        if magic != container.MAGIC:
            raise source.damage(
                f"{what}: {magic:#010x} at {at:#x} is not the start of a fat binary"
            )
        if version != 1 or header < container.CONTAINER.size:
            raise source.damage(
                f"{what}: fat binary at {at:#x} has version {version}, a header of {header} bytes"
            )
        end = at + header + size
        if end > source.size:
            raise source.damage(f"{what}: fat binary at {at:#x} reaches past the section's end")
        yield from _entries(source.until(end), at + header, what)
        at = end


def _entries(source: ByteSource, at: int, what: str) -> Iterator[tuple[int, int, str]]:
    while at < source.size:
        kind, version, header, size, number, flags = source.unpack(_ENTRY, at, f"{what}: image")
        if version >> 8 != 1 or header < _SMALLEST_ENTRY:
            raise source.damage(
                f"{what}: image at {at:#x} has version {version:#x}, a header of {header} bytes"
            )
        if at + header + size > source.size:
            raise source.damage(f"{what}: image at {at:#x} reaches past its fat binary's end")
        if kind in _PREFIXES:
            mark = _MARKS.get(flags & _MARKED)
            if mark is None or not 10 <= number <= 999:
                raise source.damage(
                    f"{what}: image at {at:#x} is for architecture {number}, flags {flags:#x}"
                )
            yield kind, number, mark
        at += header + size


# HIP: clang's offload bundles in ``.hip_fatbin``. A bundle begins with a table of (offset, size,
# target id). One entry, which is empty, is the host's. ``--offload-compress`` packs the whole
# bundle; then the table is at the beginning of the unpacked data.

_BUNDLE_MAGIC = b"__CLANG_OFFLOAD_BUNDLE__"
_COUNT = Struct("<Q")
_BUNDLE_ENTRY = Struct("<QQQ")  # offset, size, length of the target id that follows
_LONGEST_ID = 4096

_PACKED_MAGIC = b"CCOB"
_PACKED = Struct("<4sHH")  # magic, version, method
# By version: the sizes of the packed bundle and of the unpacked data, then an 8-byte hash.
_PACKED_SIZES = {2: Struct("<II8x"), 3: Struct("<QQ8x")}
_ZLIB, _ZSTD = 0, 1
# How much of a packed bundle is unpacked to read its table, in bytes.
_LARGEST_TABLE = 1 << 20


def hip_images(file: File) -> tuple[str, ...]:
    """The AMD targets that a file contains code for: ``("gfx90a:sramecc+", "gfx1030")``. In numeric
    order, without duplicates; empty if there are none. Raises LoadError if the file is not an ELF
    file, is damaged, or has bundles that are packed with zstd."""
    found: set[str] = set()
    with open_source(file) as source:
        for start, inside in elf.sections(source, ".hip_fatbin"):
            found |= _bundles(inside, start, "section .hip_fatbin")
    return tuple(sorted(found, key=lambda target: (len(target.partition(":")[0]), target)))


def _bundles(source: ByteSource, at: int, what: str) -> set[str]:
    found: set[str] = set()
    while (at := source.skip_padding(at, what)) < source.size:
        magic = source.read(at, min(len(_BUNDLE_MAGIC), source.size - at), what)
        if magic == _BUNDLE_MAGIC:
            targets, at = _table(source, at, source.size, what)
        elif magic.startswith(_PACKED_MAGIC):
            targets, at = _packed_table(source, at, what)
        else:
            raise source.damage(
                f"{what}: {magic[:8]!r} at {at:#x} is not the start of an offload bundle"
            )
        found |= targets
    return found


def _table(source: ByteSource, start: int, end: int, what: str) -> tuple[set[str], int]:
    """(targets, end) of the bundle at ``start``, which must not reach past ``end``."""
    at = start + len(_BUNDLE_MAGIC)
    (count,) = source.unpack(_COUNT, at, what)
    at += _COUNT.size
    if at + count * _BUNDLE_ENTRY.size > end:
        raise source.damage(f"{what}: no room for the {count} images at {start:#x}")
    after = at
    targets = set()
    for _ in range(count):
        offset, size, length = source.unpack(_BUNDLE_ENTRY, at, what)
        if start + offset + size > end or length > _LONGEST_ID:
            raise source.damage(f"{what}: the image at {at:#x} is not inside the bundle")
        at += _BUNDLE_ENTRY.size
        target = _target(source.read(at, length, what))
        if target is None:
            raise source.damage(f"{what}: no target id at {at:#x}")
        targets.add(target)
        at += length
        after = max(after, at, start + offset + size)
    return targets - {""}, after


def _target(words: bytes) -> str | None:
    """``gfx90a:xnack-`` for ``hipv4-amdgcn-amd-amdhsa--gfx90a:xnack-``; empty for the host's entry,
    None for an invalid one."""
    text = words.decode("ascii", "replace")
    if not text.isascii() or not text.isprintable():
        return None
    if text.startswith("host-"):
        return ""
    # The kind, the four parts of the triple, and a target that may itself contain dashes.
    parts = text.split("-", 5)
    return parts[5] if len(parts) == 6 and parts[5] else None


def _packed_table(source: ByteSource, start: int, what: str) -> tuple[set[str], int]:
    """(targets, end) of the packed bundle at ``start``."""
    _, version, method = source.unpack(_PACKED, start, what)
    sizes = _PACKED_SIZES.get(version)
    if sizes is None:
        raise source.damage(f"{what}: packed bundle at {start:#x} has unknown version {version}")
    packed, unpacked = source.unpack(sizes, start + _PACKED.size, what)
    body = start + _PACKED.size + sizes.size
    after = start + packed
    if not body <= after <= source.size:
        raise source.damage(f"{what}: packed bundle at {start:#x} cannot have {packed} bytes")
    if method == _ZSTD:
        raise LoadError(
            f"{source.name} has HIP images packed with zstd, which cannot be listed",
            why=f"{what}: packed bundle at {start:#x}",
            hint="compile with --no-offload-compress",
        )
    if method != _ZLIB:
        raise source.damage(f"{what}: packed bundle at {start:#x} has unknown method {method}")
    import zlib

    data = source.read(body, min(_LARGEST_TABLE, after - body), what)
    try:
        table = zlib.decompressobj().decompress(data, _LARGEST_TABLE)
    except zlib.error as error:
        raise source.damage(f"{what}: packed bundle: {error}") from error
    inside = ByteSource(source.name, len(table), held=table)
    if inside.read(0, len(_BUNDLE_MAGIC), f"{what}: packed bundle") != _BUNDLE_MAGIC:
        raise source.damage(f"{what}: packed bundle at {start:#x} unpacks to something else")
    targets, _ = _table(inside, 0, unpacked, f"{what}: packed bundle")
    return targets, after
