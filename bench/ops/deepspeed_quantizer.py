"""DeepSpeed's quantizer, built from the sources that its package brings: a rival on the GPU.

    python bench/ops/deepspeed_quantizer.py [DIR]    # builds it, for a benchmark that follows

``DIR`` holds ``csrc/quantization`` and ``csrc/includes``; otherwise it is that of the installed
package. Its kernels and their launches are DeepSpeed's; tensors are made here as its binding does.
"""

from __future__ import annotations

import sys
from ctypes import c_int, c_void_p
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import opkiln


def built(folder: Path | None) -> Any:
    """The library of deepspeed_quantizer.cu. Raises ImportError where there are no sources."""
    if folder is None:
        spec = find_spec("deepspeed")
        if spec is None or spec.origin is None:
            raise ImportError("deepspeed is not installed, and no --deepspeed DIR is given")
        folder = Path(spec.origin).parent / "ops"
    theirs = [folder / "csrc" / "quantization" / name for name in ("quantize.cu", "dequantize.cu")]
    for source in theirs:
        if not source.is_file():
            raise ImportError(f"there is no {source}")
    return opkiln.load(
        "deepspeed_quantizer",
        [str(each) for each in (*theirs, Path(__file__).with_suffix(".cu"))],
        extra_include_paths=[str(folder / "csrc" / "includes")],
        extra_cuda_cflags=["-O3", "-DBF16_AVAILABLE"],
        is_python_module=False,
        abi="none",
    )


class DeepSpeedQuantizer:
    """Symmetric levels of fp16, as its ``quantize`` and ``dequantize`` make them."""

    def __init__(self, library: Any, bits: int, group_size: int) -> None:
        self._library, self._bits, self._group_size = library, bits, group_size

    def quantize(self, x: Tensor) -> tuple[Tensor, Tensor]:
        groups = x.numel() // self._group_size
        values = x.new_empty(x.numel() * self._bits // 8, dtype=torch.int8)
        scales = x.new_empty((groups, 1), dtype=torch.float32)
        self._call(self._library.deepspeed_quantize, (values, scales, x), groups)
        return values, scales

    def dequantize(self, values: Tensor, scales: Tensor) -> Tensor:
        groups = scales.numel()
        out = values.new_empty(groups * self._group_size, dtype=torch.float16)
        self._call(self._library.deepspeed_dequantize, (out, values, scales), groups)
        return out

    def _call(self, function: Any, tensors: tuple[Tensor, ...], groups: int) -> None:
        pointers = [c_void_p(each.data_ptr()) for each in tensors]
        numbers = [c_int(each) for each in (groups, self._group_size, self._bits)]
        stream = c_void_p(torch.cuda.current_stream().cuda_stream)
        if error := function(*pointers, *numbers, stream):
            raise RuntimeError(f"CUDA's error {error}")


if __name__ == "__main__":
    built(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
