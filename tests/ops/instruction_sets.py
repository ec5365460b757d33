"""Which x86-64 levels this machine can run."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

# A level's instruction set, as kernels name it, and what /proc/cpuinfo must list for it.
LEVELS = {
    "x86-64-v2": ("portable", {"sse4_2"}),
    "x86-64-v3": ("avx2", {"avx2", "fma", "f16c"}),
    "x86-64-v4": ("avx512", {"avx512f", "avx512bw", "avx512vl", "avx512dq"}),
}


def skip_unless_runnable(level: str) -> None:
    if platform.machine() != "x86_64":
        pytest.skip(f"{level} is not for {platform.machine()}")
    missing = LEVELS[level][1].difference(Path("/proc/cpuinfo").read_text().split())
    if missing:
        pytest.skip(f"this CPU cannot run {level}: it lacks {', '.join(sorted(missing))}")
