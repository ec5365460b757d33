"""The GPU images of a library: a whole file, or what is in its section."""

from __future__ import annotations

from sample import binaries

from opkiln.errors import LoadError
from opkiln.machine.binary import fatbin


def one(data: bytes) -> None:
    for file in (data, binaries.cuda(data)):
        try:
            found = fatbin.images(file)
        except LoadError:
            continue
        assert len(set(found)) == len(found)
