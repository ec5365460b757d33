"""The library of ``cpu_adagrad``. Imports no torch: it is on the cache-hit path."""

from __future__ import annotations

from opkiln.builder import OpBuilder
from opkiln.builder.library import library


class CPUAdagradBuilder(OpBuilder):
    NAME = "cpu_adagrad"
    BUILD_VAR = "DS_BUILD_CPU_ADAGRAD"

    def sources(self) -> list[str]:
        return ["ops/cpu_adagrad/cpu.cpp"]


kit = library(CPUAdagradBuilder, functions="opkiln.ops.cpu_adagrad.functions")
