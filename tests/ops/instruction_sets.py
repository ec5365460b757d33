"""The instruction sets that this machine's kernels are built for, and which of them it can run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sample.levels import ARM_V8, IS_X86, X86_V2, X86_V3, X86_V4

# A level's instruction set, as kernels name it, and what /proc/cpuinfo must list for it.
LEVELS = {
    X86_V2: ("portable", {"sse4_2"}),
    X86_V3: ("avx2", {"avx2", "fma", "f16c"}),
    X86_V4: ("avx512", {"avx512f", "avx512bw", "avx512vl", "avx512dq"}),
} if IS_X86 else {ARM_V8: ("neon", {"asimd"})}  # fmt: skip


def missing(level: str) -> str:
    """What this CPU lacks to run a level."""
    lacks = LEVELS[level][1].difference(Path("/proc/cpuinfo").read_text().split())
    return ", ".join(sorted(lacks))


def skip_unless_runnable(level: str) -> None:
    if lacks := missing(level):
        pytest.skip(f"this CPU cannot run {level}: it lacks {lacks}")


def not_native() -> list[Any]:
    """The levels whose instruction set the build for this machine does not use. That of the one
    that it uses is what all other tests of an op run, so its own build is tried in full runs."""
    native = [level for level in LEVELS if not missing(level)][-1:]
    return [pytest.param(each, marks=pytest.mark.full if each in native else ()) for each in LEVELS]
