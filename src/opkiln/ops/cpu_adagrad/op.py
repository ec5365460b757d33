"""The library of ``cpu_adagrad``. Imports no torch: it is on the cache-hit path."""

from __future__ import annotations

from opkiln.builder.library import library
from opkiln.ops.optimizing.builders import HostBuilder


class CPUAdagradBuilder(HostBuilder):
    NAME = "cpu_adagrad"
    BUILD_VAR = "DS_BUILD_CPU_ADAGRAD"


kit = library(CPUAdagradBuilder, functions="opkiln.ops.cpu_adagrad.functions")
