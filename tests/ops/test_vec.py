"""The vector types and the flat index space that CPU kernels share, on each instruction set."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from instruction_sets import skip_unless_runnable

import opkiln

HERE = Path(__file__).parent
HEADERS = Path(opkiln.__file__).parent / "csrc"


def run_check(compiler: list[str], runner: list[str], tmp_path: Path) -> str:
    program = tmp_path / "vec_check"
    subprocess.run(
        [*compiler, "-std=c++20", "-O2", f"-I{HEADERS}", HERE / "vec_check.cpp", "-o", program],
        check=True,
    )
    run = subprocess.run([*runner, program], check=False, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout
    return run.stdout


@pytest.mark.parametrize(
    ("level", "lanes"), [("x86-64-v2", 4), ("x86-64-v3", 8), ("x86-64-v4", 16)]
)
def test_vec_agrees_with_scalar_arithmetic(level: str, lanes: int, tmp_path: Path) -> None:
    skip_unless_runnable(level)
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    assert f"{lanes} lanes" in run_check([compiler, f"-march={level}"], [], tmp_path)


def test_vec_agrees_with_scalar_arithmetic_on_aarch64(tmp_path: Path) -> None:
    compiler, emulator = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64")
    if compiler is None or emulator is None:
        pytest.skip("needs the packages g++-aarch64-linux-gnu and qemu-user")
    assert "4 lanes" in run_check([compiler, "-static"], [emulator], tmp_path)
