"""How kernels are compiled for the CPU: by the emulator."""

from __future__ import annotations

import functools
import shutil
import subprocess
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from sample import sanitizers

import opkiln
from opkiln.errors import ToolchainError

if TYPE_CHECKING:
    from collections.abc import Iterator

PACKAGE = Path(opkiln.__file__).parent
EMULATOR = PACKAGE / "csrc" / "opkiln" / "emulator"


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


def compile_emulated(source: Path, library: Path, *flags: str) -> None:
    """A library of kernels that the emulator runs. g++ has it see every load and store, so that a
    race or an access out of bounds fails the launch; clang, and the sanitizers, only run it."""
    command = compile_command()
    checked = ["-fsanitize=alignment,bounds"]
    if "-fno-gnu-unique" in command and not sanitizers.flags():
        checked = [
            "-fsanitize=thread,alignment,bounds", "--param=tsan-distinguish-volatile=1",
            "-g1", "-gdwarf-4",
        ]  # fmt: skip
    made = library.with_suffix(".o")
    paths = (EMULATOR / "cuda", PACKAGE, PACKAGE / "csrc")
    compiling = [part for part in command if part != "-shared"]
    subprocess.run(
        [
            *compiling, *checked, *flags, "-DOPKILN_EMULATED", "-Wno-unknown-pragmas",
            "-Wno-attributes", *(f"-I{path}" for path in paths), "-c", source, "-o", made,
        ],
        check=True,
    )  # fmt: skip
    subprocess.run([*command, "-Wl,-Bsymbolic", made, _runtime(), "-o", library], check=True)


@functools.cache
def _runtime() -> Path:
    """The emulator's runtime, compiled once in a process."""
    directory = tempfile.TemporaryDirectory()
    _kept.append(directory)
    made = Path(directory.name) / "runtime.o"
    command = [part for part in compile_command() if part != "-shared"]
    subprocess.run([*command, "-c", EMULATOR / "runtime.cpp", "-o", made], check=True)
    return made


_kept: list[tempfile.TemporaryDirectory[str]] = []


def emulated(builder: type[opkiln.OpBuilder]) -> Any:
    """The functions of an op whose CUDA kernels the emulator runs on CPU tensors. They are an op of
    their own, because the version for the CPU may be loaded, too."""
    words = {"DISTRIBUTION": "emulated", "__module__": builder.__module__}
    made = type(f"Emulated{builder.__name__}", (builder,), words)
    try:
        return made(backend="emulated").jit_load(verbose=False)
    except ToolchainError as error:
        pytest.skip(f"kernels cannot be emulated here: {error.what}")


@contextmanager
def poisoned() -> Iterator[None]:
    """New tensors are full of NaN, or of the greatest numbers: what a kernel leaves out is seen."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
