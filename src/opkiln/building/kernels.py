"""Summarizes the output of ``ptxas -v``, one line for each kernel."""

from __future__ import annotations

import re
from typing import NamedTuple

from opkiln.machine.binary.elf import demangle

_ENTRY = re.compile(r"Compiling entry function '([^']+)' for '(\w+)'")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")


class Kernel(NamedTuple):
    """The resources that one kernel uses on one architecture."""

    name: str  # mangled
    arch: str  # sm_90a
    registers: int  # per thread
    shared: int  # bytes per block, known at compile time
    stores: int  # bytes that a thread spills
    loads: int  # bytes that it reads back

    def __str__(self) -> str:
        spilled = "no spills"
        if self.stores or self.loads:
            spilled = f"{self.stores} bytes spilled and {self.loads} read back"
        return (
            f"{demangle(self.name)} for {self.arch}: {self.registers} registers, "
            f"{self.shared} bytes of shared memory, {spilled}"
        )


def read(output: str) -> list[Kernel]:
    """The kernels in the output of a compile, in its order. Other lines are skipped."""
    found: list[Kernel] = []
    entry, spills = None, None
    for line in output.splitlines():
        if match := _ENTRY.search(line):
            entry, spills = match, None
        elif entry and (match := _SPILLS.search(line)):
            spills = match
        elif entry and spills and (match := _REGISTERS.search(line)):
            shared = _SHARED.search(line)
            found.append(
                Kernel(
                    name=entry[1],
                    arch=entry[2],
                    registers=int(match[1]),
                    shared=int(shared[1]) if shared else 0,
                    stores=int(spills[1]),
                    loads=int(spills[2]),
                )
            )
            entry = None  # the lines after this are about functions that it calls
    return found
