"""The one-call form with CUDA sources on a GPU. Needs torch with CUDA and nvcc, and no pytest.

PYTHONPATH=src python tests/gpu/extension.py
"""

from __future__ import annotations

import ctypes
import sys
import tempfile
import time
from pathlib import Path

import torch

import opkiln

KERNEL = """
__global__ void add_one(float* x, long n) {
  long i = blockIdx.x * static_cast<long>(blockDim.x) + threadIdx.x;
  if (i < n) x[i] += 1.0f;
}
"""


def plain() -> None:
    """A .cu without torch, as a ctypes library."""
    with tempfile.TemporaryDirectory() as directory:
        source = Path(directory) / "add_one.cu"
        source.write_text(
            KERNEL
            + """
extern "C" int run(float* x, long n, void* stream) {
  add_one<<<(n + 255) / 256, 256, 0, static_cast<cudaStream_t>(stream)>>>(x, n);
  return cudaGetLastError();
}
"""
        )
        library = opkiln.load("plain_add_one", [str(source)], is_python_module=False, abi="none")
    x = torch.zeros(1000, device="cuda")
    stream = torch.cuda.current_stream().cuda_stream
    status = library.run(
        ctypes.c_void_p(x.data_ptr()), ctypes.c_long(x.numel()), ctypes.c_void_p(stream)
    )
    assert status == 0, status
    assert x.sum().item() == 1000


def full() -> None:
    """torch's own headers in a .cu, and a pybind module."""
    module = opkiln.load_inline(
        "full_add_one",
        cpp_sources="torch::Tensor add_one_(torch::Tensor x);",
        cuda_sources=KERNEL
        + """
#include <c10/cuda/CUDAStream.h>
torch::Tensor add_one_(torch::Tensor x) {
  add_one<<<(x.numel() + 255) / 256, 256, 0, c10::cuda::getCurrentCUDAStream()>>>(
      x.data_ptr<float>(), x.numel());
  return x;
}
""",
        functions=["add_one_"],
    )
    with torch.cuda.stream(torch.cuda.Stream()):
        assert module.add_one_(torch.zeros(1000, device="cuda")).sum().item() == 1000


def main() -> int:
    for check in (plain, full):
        began = time.perf_counter()
        check()
        print(f"PASS {check.__name__}: {check.__doc__} {time.perf_counter() - began:.2f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
