"""Ops built by NVRTC, with every toolkit hidden, and by nvcc: one line per check. Needs torch with
CUDA, g++ and nvcc, and no pytest.

    PYTHONPATH=src python tests/gpu/nvrtc.py

The exit code is 0 when every check passed or says why it could not be made, otherwise 1. Ops are
built into an empty store.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch
from checks import Skipped, main, refusal

import opkiln
from opkiln.loading import loader
from opkiln.machine.binary import elf, fatbin
from opkiln.machine.toolchain import nvrtc, toolkits
from opkiln.settings import override
from opkiln.store import entry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

GELU = """\
#include <opkiln/op.h>
using opk::Tensor;

namespace {
template <class T>
__global__ void __launch_bounds__(256)
    gelu_kernel(const T* x, const T* bias, T* out, int64_t count, int64_t columns) {
  const int64_t step = int64_t{256} * gridDim.x;
  for (int64_t i = blockIdx.x * int64_t{256} + threadIdx.x; i < count; i += step) {
    const float v = float(x[i]) + float(bias[i % columns]);
    out[i] = T(0.5f * v * (1.0f + erff(v * 0.70710678f)));
  }
}
}  // namespace

Tensor NAME(const Tensor& x, const Tensor& bias) {
  opk::check_contiguous(x, bias);
  Tensor out = opk::empty_like(x);
  const int64_t count = x.numel();
  OPK_DISPATCH(x, T, (TYPES), {
    opk::launch(gelu_kernel<T>, (count + 255) / 256, 256, 0, x.data<const T>(),
                bias.data<const T>(), out.data<T>(), count, bias.numel());
  });
  return out;
}
OPKILN_OP(NAME, cuda);
"""
LAUNCHES = """\
#include <opkiln/op.h>
using opk::Tensor;

static __global__ void ranks(float* out) {
  unsigned rank = 0;
#if __CUDA_ARCH__ >= 900
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
  if (threadIdx.x == 0) out[blockIdx.x] = float(rank);
}
static __global__ void last_of_many(float* out, int count) {
  extern __shared__ float memory[];
  __shared__ float last;  // counts, too
  for (int i = threadIdx.x; i < count; i += blockDim.x) memory[i] = float(i);
  __syncthreads();
  if (threadIdx.x == 0) last = memory[count - 1];
  __syncthreads();
  if (threadIdx.x == 0) out[0] = last;
}

Tensor NAME(const Tensor& x, int64_t threads, int64_t cluster, int64_t shared) {
  Tensor out = opk::empty_like(x);
#if !defined(OPKILN_NVRTC_HOST)
  if (shared < 0) {  // as much as the kernel may have now
    cudaFuncAttributes found;
    OPK_CHECK(cudaFuncGetAttributes(&found, last_of_many) == cudaSuccess, "no attributes");
    shared = found.maxDynamicSharedSizeBytes;
  }
#endif
  opk::Launch how;
  how.block = threads;
  how.shared = static_cast<size_t>(shared);
  how.cooperative = cluster > 1;
  if (shared) {
    opk::launch(last_of_many, how, out.data<float>(), static_cast<int>(shared / sizeof(float)));
  } else {
    how.grid = x.numel();
    how.cluster = cluster;
    opk::launch(ranks, how, out.data<float>());
  }
  return out;
}
OPKILN_OP(NAME, cuda);
"""
WAYS = ("nvrtc", "nvcc")
ALL = "float, opk::half, opk::bfloat16"


@contextlib.contextmanager
def way(name: str) -> Iterator[None]:
    """For NVRTC: no toolkit is found, and nothing asks for NVRTC by name."""
    if name == "nvcc":
        with override(cuda="nvcc"):
            yield
        return
    before, places = dict(os.environ), toolkits.DIRECTORIES
    path = [each for each in before["PATH"].split(":") if not os.path.exists(f"{each}/nvcc")]
    os.environ["PATH"] = ":".join(path)
    for variable in ("CUDA_HOME", "CUDA_PATH", "OPKILN_CUDA_HOME", "OPKILN_CUDA"):
        os.environ.pop(variable, None)
    toolkits.DIRECTORIES = ()
    try:
        if toolkits.find_nvcc():
            raise Skipped(f"there is an nvcc that cannot be hidden: {toolkits.find_nvcc()[0].nvcc}")
        if not nvrtc.available():
            raise Skipped("there is no NVRTC beside torch")
        yield
    finally:
        toolkits.DIRECTORIES = places
        os.environ.update(before)


_made: dict[str, Any] = {}


def gelu(by: str, name: str = "gelu", types: str = ALL) -> Any:
    full = f"{name}_{by}"
    if full not in _made:

        def declared(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
            raise AssertionError("the reference must not run")

        _made[full] = _loaded(by, full, declared, GELU.replace("TYPES", types))
    return _made[full]


def launches(by: str, name: str = "launches") -> Any:
    full = f"{name}_{by}"
    if full not in _made:

        def declared(x: torch.Tensor, threads: int, cluster: int, shared: int) -> torch.Tensor:
            raise AssertionError("the reference must not run")

        _made[full] = _loaded(by, full, declared, LAUNCHES)
    return _made[full]


def _loaded(by: str, name: str, declared: Callable[..., Any], text: str) -> Any:
    declared.__name__ = declared.__qualname__ = name
    with way(by), override(mode="native"):
        op = opkiln.op(source={"cuda": text.replace("NAME", name)})(declared)
        assert op.load("cuda")
    return op


def wanted(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(x.float() + bias.float()).to(x.dtype)


def check_nvrtc_serves_where_every_toolkit_is_hidden() -> str:
    name = gelu("nvrtc").__name__
    path = next(
        loaded.artifact.path
        for (_, op, backend), (loaded, _) in loader.loaded_here().items()
        if (op, backend) == (name, "cuda") and loaded.artifact is not None
    )
    manifest = entry.read_manifest(os.path.dirname(path))
    assert "nvrtc" in manifest["toolchain"], manifest["toolchain"]
    assert "nvcc" not in manifest["toolchain"], manifest["toolchain"]
    assert not [each for each in elf.read(path).needed if "cuda" in each]
    facts = entry.read_sidecar(os.path.dirname(path))["facts"]
    return f"{', '.join(fatbin.images(path))}; {len(facts)} facts"


def check_results_are_right_for_each_dtype() -> None:
    for by in WAYS:
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            x = torch.randn(257, 33, device="cuda").to(dtype)
            bias = torch.randn(33, device="cuda").to(dtype)
            torch.testing.assert_close(gelu(by)(x, bias), wanted(x, bias))


def check_both_ways_give_the_same_bits() -> None:
    x, bias = torch.randn(4096, 128, device="cuda"), torch.randn(128, device="cuda")
    assert torch.equal(gelu("nvrtc")(x, bias), gelu("nvcc")(x, bias))


def check_launches_go_to_the_current_stream() -> None:
    for by in WAYS:
        x, bias = torch.randn(1 << 16, 16, device="cuda"), torch.randn(16, device="cuda")
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)  # the default stream is done long before
            doubled = x * 2
            result = gelu(by)(doubled, bias)
        stream.synchronize()
        torch.testing.assert_close(result, wanted(x * 2, bias))


def check_launches_are_captured_in_cuda_graphs() -> None:
    for by in WAYS:
        x, bias = torch.randn(1 << 12, 16, device="cuda"), torch.randn(16, device="cuda")
        held, graph = x.clone(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = gelu(by)(held, bias)
        held.copy_(x + 1)
        graph.replay()
        torch.cuda.synchronize()
        torch.testing.assert_close(result, wanted(x + 1, bias))


def check_a_new_thread_launches() -> None:
    x, bias = torch.randn(64, 16, device="cuda"), torch.randn(16, device="cuda")
    for by in WAYS:
        results: list[torch.Tensor] = []
        thread = threading.Thread(target=lambda op, to: to.append(op(x, bias)),
                                  args=(gelu(by), results))  # fmt: skip
        thread.start()
        thread.join()
        torch.testing.assert_close(results[0], wanted(x, bias))


def check_a_launch_that_fails_says_why() -> str:
    said = {}
    for by in WAYS:
        four = torch.zeros(4, device="cuda")
        said[by] = refusal(lambda: launches(by)(four, 4096, 1, 0)).partition("\n")[0]  # noqa: B023
        assert "the kernel could not be launched: " in said[by], said[by]
        assert "block [4096, 1, 1]" in said[by], said[by]
        assert gelu(by)(torch.ones(4, 4, device="cuda"), four).isfinite().all()
    return f"{said['nvrtc']!r}; by nvcc {said['nvcc']!r}"


def check_clusters_and_much_shared_memory() -> None:
    if torch.cuda.get_device_capability()[0] < 9:
        raise Skipped("clusters need compute capability 9.0")
    for by in WAYS:
        four = torch.zeros(4, device="cuda")
        assert launches(by)(four, 32, 2, 0).tolist() == [0, 1, 0, 1]
        assert launches(by)(four, 128, 1, 96 << 10)[0].item() == (24 << 10) - 1


def check_static_shared_memory_counts() -> None:
    for by in WAYS:
        # The first launch of this copy of the kernel: no other has raised its limit.
        fresh = launches(by, "first")
        assert fresh(torch.zeros(4, device="cuda"), 128, 1, 48 << 10)[0].item() == (12 << 10) - 1


def check_a_launch_does_not_lower_the_limit_of_shared_memory() -> None:
    op, four = launches("nvcc"), torch.zeros(4, device="cuda")
    op(four, 128, 1, 96 << 10)
    op(four, 128, 1, 64 << 10)
    assert op(four, 128, 1, -1)[0].item() >= (24 << 10) - 1


def check_threads_with_other_needs_of_shared_memory_launch_at_the_same_time() -> None:
    most = torch.cuda.get_device_properties(0).shared_memory_per_block_optin >> 10

    def launch(op: Any, kib: int) -> None:
        four = torch.zeros(4, device="cuda")
        last = [op(four, 128, 1, kib << 10) for _ in range(1000)][-1]
        assert last[0].item() == (kib << 8) - 1

    for by in WAYS:
        with ThreadPoolExecutor() as pool:
            list(pool.map(launch, [launches(by)] * 4, (48, 56, 64, most - 1)))


def check_cold_builds_are_timed() -> str:
    """The whole of a first call, in a process that knows its compilers: build, load test, load."""
    x, bias = torch.ones(4, 4, device="cuda"), torch.ones(4, device="cuda")
    times: dict[str, list[float]] = {by: [] for by in WAYS}
    for turn in range(5):
        for by in WAYS:
            began = time.perf_counter()
            gelu(by, f"timed{turn}", "float")(x, bias)
            torch.cuda.synchronize()
            times[by].append(time.perf_counter() - began)
    shown = {by: " ".join(f"{each:.2f}" for each in sorted(taken)) for by, taken in times.items()}
    return f"nvrtc {shown['nvrtc']} s; nvcc {shown['nvcc']} s"


def check_a_call_costs_what_it_costs_by_nvcc() -> str:
    x, bias = torch.ones(4, 4, device="cuda"), torch.ones(4, device="cuda")
    shown = []
    for by in WAYS:
        op, best = gelu(by), float("inf")
        for _ in range(20):
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(200):
                op(x, bias)
            best = min(best, (time.perf_counter() - began) / 200)
        shown.append(f"{by} {best * 1e6:.1f} us")
    return ", ".join(shown)


CHECKS = [value for name, value in list(globals().items()) if name.startswith("check_")]

if __name__ == "__main__":
    store = tempfile.mkdtemp(prefix="opkiln-nvrtc-")
    os.environ["OPKILN_CACHE_DIR"] = store
    try:
        code = main(CHECKS, __doc__)
    finally:
        shutil.rmtree(store)
    sys.exit(code)
