"""The library of ``cpu_adam``. Imports no torch: it is on the cache-hit path."""

from __future__ import annotations

from opkiln.builder import OpBuilder
from opkiln.builder.library import library


class CPUAdamBuilder(OpBuilder):
    NAME = "cpu_adam"
    BUILD_VAR = "DS_BUILD_CPU_ADAM"

    def sources(self) -> list[str]:
        return ["ops/cpu_adam/cpu.cpp"]


kit = library(CPUAdamBuilder, functions="opkiln.ops.cpu_adam.functions")
