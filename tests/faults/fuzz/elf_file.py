"""A library: its header, sections, dynamic tables and hash table."""

from __future__ import annotations

from opkiln.errors import LoadError
from opkiln.machine.binary import elf


def one(data: bytes) -> None:
    for read in (
        lambda: elf.read(data),
        lambda: elf.defined_symbols(data),
        lambda: elf.missing_symbols(data, ("f", "torch_call_dispatcher", "")),
    ):
        try:
            read()
        except LoadError:
            pass
