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


def others() -> list[str]:
    """The levels that run here, but for that whose instruction set the build for this machine uses:
    all other tests of an op run that."""
    return [level for level in LEVELS if not missing(level)][:-1]


def not_native() -> list[Any]:
    """Every level, for a test. The build for this machine's own is tried in full runs."""
    found = [level for level in LEVELS if missing(level)] + others()
    return [pytest.param(each, marks=() if each in found else pytest.mark.full) for each in LEVELS]
