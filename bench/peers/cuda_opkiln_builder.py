"""opkiln: the CUDA op as a package declares it, a builder class and a function."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from peers import axpb as shared


def bring() -> None:
    """Import what a program that uses opkiln imports."""
    from opkiln import CUDAOpBuilder  # noqa: F401


def builder() -> Any:
    """The op's builder."""
    from torch import Tensor

    import opkiln

    class AxpbBuilder(opkiln.CUDAOpBuilder):
        NAME = "axpb"
        NAMESPACE = shared.NAMESPACE
        BACKENDS = ("cuda",)
        root = str(shared.SOURCES)

        def sources(self) -> list[str]:
            return ["axpb.cu", "axpb_stable.cpp"]

    @opkiln.library(AxpbBuilder).op(gradient=False)
    def axpb(x: Tensor, a: float, b: float) -> Tensor:
        return a * x + b

    return AxpbBuilder()


def load() -> Any:
    """The namespace with the op's function, its library built first where it is not."""
    return builder().load()


def check(module: Any) -> None:
    """It is the op; the library's path is left for the floor to load."""
    assert module.axpb
    shared.check_op()
    maps = Path("/proc/self/maps").read_text().splitlines()
    (path,) = {line.split(maxsplit=5)[5] for line in maps if line.endswith("/axpb.so")}
    note_of_library().write_text(path)


def note_of_library() -> Path:
    """The file that holds the path of the library that was loaded last."""
    return Path(os.environ["BENCH_BUILD_DIR"]) / "axpb.path"
