"""The GPU images of a library: a whole file, or what is in its section."""

from __future__ import annotations

from sample import binaries

from opkiln.binary import fatbin
from opkiln.errors import LoadError


def one(data: bytes) -> None:
    for file in (data, binaries.cuda(data), binaries.cuda(data, name="__nv_relfatbin")):
        for read in (fatbin.images, fatbin.relocatable_images):
            try:
                found = read(file)
            except LoadError:
                continue
            assert len(set(found)) == len(found)
