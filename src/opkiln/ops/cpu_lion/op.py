"""The library of ``cpu_lion``. Imports no torch: it is on the cache-hit path."""

from __future__ import annotations

from opkiln.builder.library import library
from opkiln.ops.optimizing.builders import HostBuilder


class CPULionBuilder(HostBuilder):
    NAME = "cpu_lion"
    BUILD_VAR = "DS_BUILD_CPU_LION"


kit = library(CPULionBuilder, functions="opkiln.ops.cpu_lion.functions")
