"""A library: its header, sections, dynamic tables and hash table."""

from __future__ import annotations

from opkiln.binary import elf, symbols
from opkiln.errors import LoadError


def one(data: bytes) -> None:
    for read in (
        lambda: elf.read(data),
        lambda: elf.defined(data),
        lambda: symbols.missing(data, ("f", "torch_call_dispatcher", "")),
    ):
        try:
            read()
        except LoadError:
            pass
