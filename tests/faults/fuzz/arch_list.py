"""Lists of architectures and names of CPUs, as people and variables write them."""

from __future__ import annotations

from sample.levels import X86_64

from opkiln.errors import ArchError
from opkiln.machine.arch import cpu, cuda, hip


def one(data: bytes) -> None:
    text = data.decode("utf-8", "surrogateescape")
    for parse in (
        cuda.parse,
        hip.parse,
        lambda text: cpu.parse(text, X86_64, frozenset()),
    ):
        try:
            parse(text)
        except ArchError:
            pass
