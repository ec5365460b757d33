"""The library of ``cpu_lion``. Imports no torch: it is on the cache-hit path."""

from __future__ import annotations

from opkiln.builder import OpBuilder
from opkiln.builder.library import library


class CPULionBuilder(OpBuilder):
    NAME = "cpu_lion"
    BUILD_VAR = "DS_BUILD_CPU_LION"

    def sources(self) -> list[str]:
        return ["ops/cpu_lion/cpu.cpp"]


kit = library(CPULionBuilder, functions="opkiln.ops.cpu_lion.functions")
