"""torch.utils.cpp_extension: the CUDA op by its load_inline, kernel and function in one text."""

from __future__ import annotations

import os
from typing import Any

from peers import axpb


def bring() -> None:
    """Import what a program that uses it imports."""
    import torch.utils.cpp_extension  # noqa: F401


def load() -> Any:
    """The extension module, built first where it is not."""
    return load_inline(
        "axpb_torch",
        cpp_sources=["torch::Tensor axpb(torch::Tensor x, double a, double b);"],
        cuda_sources=[axpb.text("axpb.cu"), axpb.text("axpb_torch.cpp")],
    )


def load_inline(name: str, **sources: Any) -> Any:
    """Its load_inline with a directory of the bench's; an error at once where it cannot link."""
    import torch
    from torch.utils.cpp_extension import load_inline

    if torch.version.cuda is None:
        raise RuntimeError("it links libtorch_cuda, which a CPU torch does not have")
    directory = os.path.join(os.environ["BENCH_BUILD_DIR"], name)
    os.makedirs(directory, exist_ok=True)
    return load_inline(name=name, functions=["axpb"], build_directory=directory, **sources)


def check(module: Any) -> None:
    """It is the op."""
    assert module.axpb
    if axpb.has_gpu():
        axpb.check(module.axpb)
