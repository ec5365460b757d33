"""How kernels are compiled for the CPU, against what stands in for CUDA's runtime."""

from __future__ import annotations

import shutil

import pytest
from sample import sanitizers


def compile_command() -> list[str]:
    """A C++ compiler and the flags for a library of kernels; skips where there is no compiler.

    Two stand-ins have a ``threadIdx`` each, one per thread and one per fiber. g++ makes such names
    unique in a process, however a library is opened, and the second to be loaded would crash.
    """
    common = ["-std=c++20", "-O1", "-fPIC", "-shared", *sanitizers.flags()]
    if gcc := shutil.which("g++"):
        return [gcc, *common, "-fno-gnu-unique"]
    if clang := shutil.which("clang++"):
        return [clang, *common]
    pytest.skip("there is no C++ compiler")
