"""tvm-ffi: the CUDA op from two files, so that nvcc sees the kernel alone."""

from __future__ import annotations

from typing import Any

from peers import axpb, cuda_tvm_ffi

bring = cuda_tvm_ffi.bring
check = cuda_tvm_ffi.check


def load() -> Any:
    """The module, built first where it is not."""
    import tvm_ffi.cpp

    sources = [str(axpb.SOURCES / name) for name in ("axpb.cu", "axpb_tvm.cpp")]
    return tvm_ffi.cpp.load(name="axpb_tvm_apart", sources=sources)
