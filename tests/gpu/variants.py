"""Variants and tuning of a decorated op on a GPU: one line per check. Needs torch, no pytest.

    PYTHONPATH=src python tests/gpu/variants.py
    OPKILN_CUDA=nvrtc PYTHONPATH=src python tests/gpu/variants.py

The exit code is 0 when every check passed or says why it could not be made, otherwise 1. It builds
into a store of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from typing import Any

import torch
from checks import main
from torch import Tensor

import opkiln
from opkiln.builder import tuning  # noqa: F401 (a child of this script takes it from here)
from opkiln.loading import loader

# Rows are scaled by WIDTH, their length: a wrong variant gives a wrong result. BLOCK 32 has each
# thread wait, so that 256 is faster whatever the GPU.
SOURCE = """
#include <opkiln/op.h>
__global__ void scale_rows(const T* x, T* out, int64_t count) {
#if BLOCK == 32
  const long long began = clock64();
  while (clock64() - began < 200000) {}
#endif
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < count) out[i] = static_cast<T>(WIDTH) * x[i];
}
opk::Tensor widened(const opk::Tensor& x) {
  opk::check_contiguous(x);
  opk::Tensor out = opk::empty_like(x);
  const T* a = x.data<const T>();
  const int64_t count = x.numel();
  opk::launch(scale_rows, (count + BLOCK - 1) / BLOCK, BLOCK, 0, a, out.data<T>(), count);
  return out;
}
OPKILN_OP(widened, cuda);
"""
WIDTHS = {"WIDTH": (64, 128), "T": ("float", "double")}


def declared(name: str, **more: Any) -> Any:
    def function(x: Tensor) -> Tensor:
        return x * x.shape[-1]

    function.__name__ = function.__qualname__ = name
    function.__module__ = "variants"  # also if it is run: a choice belongs to a package's op
    text = SOURCE.replace("widened", name)
    if "tune" not in more:
        text = text.replace("BLOCK", "256")
    op = opkiln.op(source={"cuda": text}, namespace="on_gpu", variants=WIDTHS, **more)(function)
    op.variant(lambda x: {"WIDTH": x.shape[-1],
                          "T": "float" if x.dtype == torch.float32 else "double"})  # fmt: skip
    return op


widened = declared("widened")
tuned = declared("tuned", tune={"BLOCK": (32, 256)})


def rows(count: int, width: int = 64, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(count, width, device="cuda", dtype=dtype)


def check_a_call_builds_its_variant_alone() -> str:
    began = time.perf_counter()
    widened.check(rows(3))
    names = {op for _, op, _ in loader.loaded_here() if op.startswith("widened")}
    assert names == {"widened__WIDTH_64_T_float"}, names
    return f"{time.perf_counter() - began:.2f} s"


def check_every_variant_is_right() -> None:
    for width in (64, 128):
        for dtype in (torch.float32, torch.float64):
            for count in (0, 1, 7, 1000):
                widened.check(rows(count, width, dtype))
    assert widened.load("cuda"), widened.explain("cuda")


def check_compiled_graphs_choose_when_they_run() -> None:
    step = torch.compile(
        lambda x: widened(x) + 1, fullgraph=True, dynamic=True, backend="aot_eager"
    )
    for width in (64, 128, 64):
        x = rows(5, width)
        torch.testing.assert_close(step(x), x * width + 1)
    x = rows(5).requires_grad_()
    widened(x).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full_like(x, 64.0))


def check_tuning_takes_the_fast_block_and_keeps_it() -> str:
    x = rows(1000)
    torch.testing.assert_close(tuned(x), x * 64)
    (note,) = tuned.explain("cuda", WIDTH=64, BLOCK=32).notes
    assert note.startswith("BLOCK=256 for WIDTH=64, T=float, float32[1024, 64]"), note
    assert "measured in this process" in note, note
    assert torch.cuda.get_device_name() in note, note
    return note


def check_other_processes_read_the_choice() -> None:
    code = (
        "import variants, torch\n"
        "variants.tuning._time = None  # a call of it would fail\n"
        "x = variants.rows(900)\n"
        "torch.testing.assert_close(variants.tuned(x), x * 64)\n"
        "print(*variants.tuned.explain('cuda', WIDTH=64, BLOCK=32).notes)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False,
        cwd=os.path.dirname(os.path.abspath(__file__)), env=dict(os.environ),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "BLOCK=256" in done.stdout, done.stdout
    assert "kept in the store" in done.stdout, done.stdout


def check_nothing_is_measured_while_a_graph_is_captured() -> None:
    x = rows(5000, 128)
    tuned.load("cuda", WIDTH=128, T="float")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = tuned(x)
    graph.replay()
    torch.testing.assert_close(got, x * 128)
    note = tuned.explain("cuda", WIDTH=128, BLOCK=32).notes[-1]
    assert "BLOCK=32" in note, note
    assert "while a CUDA graph is captured" in note, note
    torch.testing.assert_close(tuned(x), x * 128)
    assert "measured in this process" in tuned.explain("cuda", WIDTH=128, BLOCK=32).notes[-1]


def check_the_choice_costs_little() -> str:
    plain_text = SOURCE.replace("widened", "plain").replace("BLOCK", "256").replace("WIDTH", "64")

    @opkiln.op(source={"cuda": plain_text.replace("T*", "float*").replace("<T>", "<float>")
                       .replace("<const T>", "<const float>")}, namespace="on_gpu")  # fmt: skip
    def plain(x: Tensor) -> Tensor:
        return x * 64

    x = rows(1)
    times = dict.fromkeys(("plain", "varied", "tuned"), 1e9)
    for function in (plain, widened, tuned):
        function(x)
    for _ in range(50):
        for name, function in zip(times, (plain, widened, tuned), strict=True):
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(200):
                function(x)
            times[name] = min(times[name], (time.perf_counter() - began) / 200)
    return ", ".join(f"{name} {value * 1e6:.2f} us" for name, value in times.items())


if __name__ == "__main__":
    sys.modules["variants"] = sys.modules["__main__"]
    with tempfile.TemporaryDirectory() as store:
        os.environ.setdefault("OPKILN_CACHE_DIR", store)
        sys.exit(main([value for name, value in list(globals().items()) if
                       name.startswith("check_")], __doc__))  # fmt: skip
