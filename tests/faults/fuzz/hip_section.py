"""The AMD images of a library: a whole file, its section, or what a packed bundle unpacks to."""

from __future__ import annotations

from sample import binaries

from opkiln.errors import LoadError
from opkiln.machine.binary.fatbin import hip_images


def one(data: bytes) -> None:
    for file in (data, binaries.hip(data), binaries.hip(binaries.packed(data))):
        try:
            hip_images(file)
        except LoadError:
            pass
