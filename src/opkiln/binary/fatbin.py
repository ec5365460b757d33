"""Names the GPU images of NVIDIA fat binaries.

nvcc puts one container per translation unit into ``.nv_fatbin``. The linker concatenates them. A
container is a header and entries. An entry is a header and an image: PTX, a cubin or LTO
intermediate code, compressed or not. The entry's header has everything that is needed here, so no
image is ever unpacked. Bit 20 of its flags is the ``a`` of sm_90a, bit 21 the ``f`` of sm_100f.
This holds for CUDA 12.4 to 13.4, in every compression mode. (A cubin's own ELF flags lost the mark
in CUDA 13.)
"""

from __future__ import annotations

from struct import Struct

from opkiln.binary import elf
from opkiln.binary.source import opened

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from opkiln.binary.source import File, Source

_CONTAINER = Struct("<IHHQ")  # magic, version, size of this header, size of all entries
_ENTRY = Struct("<HHIQ12xI8xQ")  # kind, version, sizes of its header and image, arch, flags
_SMALLEST_ENTRY = 64
_MAGIC = 0xBA55ED50

_PREFIXES = {2: "sm_", 1: "compute_", 8: "lto_"}
_ORDER = tuple(_PREFIXES)
_MARKS = {0: "", 1 << 20: "a", 1 << 21: "f"}
_MARKED = (1 << 20) | (1 << 21)


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
    with opened(file) as source:
        for start, inside in elf.sections(source, ".nv_fatbin"):
            found.update(_containers(inside, start, "section .nv_fatbin"))
    ordered = sorted(found, key=lambda image: (_ORDER.index(image[0]), image[1:]))
    return tuple(f"{_PREFIXES[kind]}{number}{mark}" for kind, number, mark in ordered)


def _containers(source: Source, at: int, what: str) -> Iterator[tuple[int, int, str]]:
    while (at := source.past_padding(at, what)) < source.size:
        magic, version, header, size = source.unpack(_CONTAINER, at, f"{what}: fat binary")
        if magic != _MAGIC:
            raise source.damaged(
                f"{what}: {magic:#010x} at {at:#x} is not the start of a fat binary"
            )
        if version != 1 or header < _CONTAINER.size:
            raise source.damaged(
                f"{what}: fat binary at {at:#x} has version {version}, a header of {header} bytes"
            )
        end = at + header + size
        if end > source.size:
            raise source.damaged(f"{what}: fat binary at {at:#x} reaches past the section's end")
        yield from _entries(source.until(end), at + header, what)
        at = end


def _entries(source: Source, at: int, what: str) -> Iterator[tuple[int, int, str]]:
    while at < source.size:
        kind, version, header, size, number, flags = source.unpack(_ENTRY, at, f"{what}: image")
        if version >> 8 != 1 or header < _SMALLEST_ENTRY:
            raise source.damaged(
                f"{what}: image at {at:#x} has version {version:#x}, a header of {header} bytes"
            )
        if at + header + size > source.size:
            raise source.damaged(f"{what}: image at {at:#x} reaches past its fat binary's end")
        if kind in _PREFIXES:
            mark = _MARKS.get(flags & _MARKED)
            if mark is None or not 10 <= number <= 999:
                raise source.damaged(
                    f"{what}: image at {at:#x} is for architecture {number}, flags {flags:#x}"
                )
            yield kind, number, mark
        at += header + size
