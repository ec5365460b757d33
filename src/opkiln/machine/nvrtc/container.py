"""Writes a CUDA fat binary: the container that the driver and every reader of images know.

The form is that of ``binary.fatbin``, which reads it: a header, then an entry for each image, not
compressed. The driver takes the image that fits the device.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from struct import Struct

CONTAINER = Struct("<IHHQ")  # magic, version, size of this header, size of all entries
# kind, version, size of this header, size of the image, compressed size, place of options, minor
# and major version, arch, place and length of a name, flags, unused, size when decompressed
_ENTRY = Struct("<HHIQIIHHIIIQQQ")
MAGIC = 0xBA55ED50
_KINDS = {"sm": 2, "compute": 1}
MARKS = {"": 0, "a": 1 << 20, "f": 1 << 21}
_64_BIT_LINUX = 0x11
_ALIGNMENT = 8


def pack(images: Iterable[tuple[str, bytes]]) -> bytes:
    """A container of images such as ``("sm_90a", cubin)`` and ``("compute_90", ptx)``."""
    entries = b"".join(_entry(name, image) for name, image in images)
    return CONTAINER.pack(MAGIC, 1, CONTAINER.size, len(entries)) + entries


def _entry(name: str, image: bytes) -> bytes:
    kind, _, number = name.partition("_")
    digits = number.rstrip("af")
    flags = _64_BIT_LINUX | MARKS[number[len(digits) :]]
    if kind == "compute":
        image = image.rstrip(b"\0") + b"\0"  # the driver reads PTX up to a zero
        told = re.search(rb"\.version\s+(\d+)\.(\d+)", image)
        version = (int(told[1]), int(told[2])) if told else (0, 0)
    else:
        version = (1, image[8])  # as nvcc has it: the version of the ABI, which the image names
    padded = image + b"\0" * (-len(image) % _ALIGNMENT)
    header = _ENTRY.pack(
        _KINDS[kind], 0x0101, _ENTRY.size, len(padded), 0, 0, version[1], version[0], int(digits),
        0, 0, flags, 0, 0,
    )  # fmt: skip
    return header + padded
