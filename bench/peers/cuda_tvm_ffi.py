"""tvm-ffi: the CUDA op by its load_inline, kernel and function in one text."""

from __future__ import annotations

from typing import Any

from peers import axpb


def bring() -> None:
    """Import what a program that compiles with tvm-ffi imports."""
    import tvm_ffi.cpp  # noqa: F401


def load() -> Any:
    """The module, built first where it is not."""
    import tvm_ffi.cpp

    return tvm_ffi.cpp.load_inline(
        name="axpb_tvm", cuda_sources=[axpb.text("axpb.cu"), axpb.text("axpb_tvm.cpp")]
    )


def check(module: Any) -> None:
    """It is the op; its result goes into a tensor that the caller gives."""
    import torch

    def called(x: Any, a: float, b: float) -> Any:
        y = torch.empty_like(x)
        module.axpb(x, y, a, b)
        return y

    assert module.axpb
    if axpb.has_gpu():
        axpb.check(called)
