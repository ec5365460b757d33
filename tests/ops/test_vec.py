"""The vector types and the flat index space that CPU kernels share, on each instruction set.

``build/test_other_cpu.py`` runs the same program on the other architecture.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from instruction_sets import LEVELS, skip_unless_runnable
from sample import pool

import opkiln

HERE = Path(__file__).parent
HEADERS = Path(opkiln.__file__).parent / "csrc"
LANES = {"portable": 4, "avx2": 8, "avx512": 16, "neon": 4}


@pytest.mark.parametrize("level", LEVELS)
def test_vec_agrees_with_scalar_arithmetic(level: str) -> None:
    skip_unless_runnable(level)
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    flags = [f"-march={level}", "-std=c++20", "-O2", f"-I{HEADERS}"]
    program = pool.program([compiler, *flags, str(HERE / "vec_check.cpp")])
    run = subprocess.run([program], check=False, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout
    assert f"{LANES[LEVELS[level][0]]} lanes" in run.stdout
