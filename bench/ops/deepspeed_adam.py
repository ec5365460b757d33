"""DeepSpeed's fused Adam, built from the sources that its package brings: a rival on the GPU.

    python bench/ops/deepspeed_adam.py [DIR]    # builds it, for a benchmark that follows

``DIR`` holds ``csrc/adam`` and ``csrc/includes``; otherwise it is that of the installed package.
Built by torch's own ``cpp_extension``, with the flags of DeepSpeed's builder: it takes a minute.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

CHUNK = 2048 * 32
FLAGS = ["-O3", "-DVERSION_GE_1_1", "-DVERSION_GE_1_3", "-DVERSION_GE_1_5"]


def built(folder: Path | None) -> Any:
    """The module with ``multi_tensor_adam``. Raises ImportError where there are no sources."""
    if folder is None:
        spec = find_spec("deepspeed")
        if spec is None or spec.origin is None:
            raise ImportError("deepspeed is not installed, and no --deepspeed DIR is given")
        folder = Path(spec.origin).parent / "ops"
    adam = folder / "csrc" / "adam"
    sources = [adam / "fused_adam_frontend.cpp", adam / "multi_tensor_adam.cu"]
    for source in sources:
        if not source.is_file():
            raise ImportError(f"there is no {source}")
    from torch.utils.cpp_extension import load

    return load(
        name="deepspeed_fused_adam",
        sources=[str(source) for source in sources],
        extra_include_paths=[str(adam), str(folder / "csrc" / "includes")],
        extra_cflags=FLAGS,
        extra_cuda_cflags=[*FLAGS, "-lineinfo", "--use_fast_math"],
    )


class DeepSpeedAdam:
    """What its ``FusedAdam.step`` does for fp32 parameters: lists in Python, then launches of up to
    36 tensors each. (Its front end needs the whole package, which takes seconds to import.)"""

    def __init__(self, module: Any, params: list[Tensor]) -> None:
        self._adam, self._params = module.multi_tensor_adam, params
        self._overflow = torch.zeros(1, dtype=torch.int32, device=params[0].device)
        self._states = {
            param: {name: torch.zeros_like(param.data) for name in ("exp_avg", "exp_avg_sq")}
            for param in params
        }
        self._steps = 0

    def step(self) -> None:
        grads, params, means, squares = [], [], [], []
        for param in self._params:
            if param.grad is None:
                continue
            if param.grad.data.is_sparse:
                raise RuntimeError("sparse")
            state = self._states[param]
            grads.append(param.grad.data)
            params.append(param.data)
            means.append(state["exp_avg"])
            squares.append(state["exp_avg_sq"])
        self._steps += 1
        self._adam(
            CHUNK, self._overflow, [grads, params, means, squares],
            1e-3, 0.9, 0.999, 1e-8, self._steps, 1, 1, 1e-2,
        )  # fmt: skip


if __name__ == "__main__":
    built(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
