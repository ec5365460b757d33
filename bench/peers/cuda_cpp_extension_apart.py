"""torch.utils.cpp_extension: the CUDA op in two texts, so that nvcc sees the kernel alone."""

from __future__ import annotations

from typing import Any

from peers import axpb, cuda_cpp_extension

bring = cuda_cpp_extension.bring
check = cuda_cpp_extension.check


def load() -> Any:
    """The extension module, built first where it is not."""
    return cuda_cpp_extension.load_inline(
        "axpb_torch_apart",
        cpp_sources=["#include <torch/extension.h>", axpb.text("axpb_torch.cpp")],
        cuda_sources=[axpb.text("axpb.cu")],
        no_implicit_headers=True,
    )
