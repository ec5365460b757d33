"""The library of ``cpu_adam``. Imports no torch: it is on the cache-hit path."""

from __future__ import annotations

from opkiln.builder.library import library
from opkiln.ops.optimizing.builders import HostBuilder


class CPUAdamBuilder(HostBuilder):
    NAME = "cpu_adam"
    BUILD_VAR = "DS_BUILD_CPU_ADAM"


kit = library(CPUAdamBuilder, functions="opkiln.ops.cpu_adam.functions")
