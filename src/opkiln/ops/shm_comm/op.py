"""Collectives among the ranks of one host, through shared memory."""

from __future__ import annotations

from opkiln.builder.library import library

kit = library(
    "shm_comm",
    "cpu.cpp",
    functions="opkiln.ops.shm_comm.functions",
    namespace="opkiln",
)
