"""What ``shm_comm`` is compiled from. Imports no torch: commands know the op by it."""

from __future__ import annotations

from opkiln.builder.library import library

kit = library(
    "shm_comm",
    "cpu.cpp",
    functions="opkiln.ops.shm_comm.functions",
    namespace="opkiln",
)
