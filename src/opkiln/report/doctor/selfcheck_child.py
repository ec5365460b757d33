"""What the self-check's child runs: ``main(BACKEND, "call" or "load", RESULT)``.

It compiles, loads and (unless told not to) calls a tiny op through the same engine as any program,
and writes what came of it to the file RESULT. Before each step that may crash it writes which.
"""

from __future__ import annotations

import json
import time
from importlib import import_module
from typing import Any

from opkiln.errors import CompileError, LoadError, LoadTestError, OpkilnError
from opkiln.loading import loader
from opkiln.model import (
    ABI_NONE,
    ABI_STABLE,
    CPU,
    CUDA,
    INLINE_ROOT,
    PLAIN,
    ROCM,
    XPU,
    Op,
    OpSpec,
    Registration,
)

_ADD = 'extern "C" int opkiln_doctor(int a, int b, int* sum) { *sum = a + b; return 0; }\n'

# Plain runtime calls, so that hipify translates the same text.
_KERNEL = """
#include <cuda_runtime.h>
__global__ void opkiln_doctor_add(int a, int b, int* sum) { *sum = a + b; }
extern "C" int opkiln_doctor(int a, int b, int* sum) {
  int* there = nullptr;
  if (int error = static_cast<int>(cudaMalloc(&there, sizeof(int)))) return error;
  opkiln_doctor_add<<<1, 1>>>(a, b, there);
  if (int error = static_cast<int>(cudaGetLastError())) return error;
  int error = static_cast<int>(cudaMemcpy(sum, there, sizeof(int), cudaMemcpyDeviceToHost));
  int freed = static_cast<int>(cudaFree(there));
  return error ? error : freed;
}
"""

# The kernel is text that SYCL's runtime compiler takes: both families of compilers build this.
_SYCL = """
#include <string>
#include <sycl/sycl.hpp>
namespace experimental = sycl::ext::oneapi::experimental;
static const char* kernel_text = R"sycl(
#include <sycl/sycl.hpp>
namespace oneapi = sycl::ext::oneapi;
extern "C" SYCL_EXT_ONEAPI_FUNCTION_PROPERTY((oneapi::experimental::nd_range_kernel<1>))
void opkiln_doctor_add(int a, int b, int* sum) { *sum = a + b; }
)sycl";
extern "C" int opkiln_doctor(int a, int b, int* sum) {
  sycl::queue queue;
  auto source = experimental::create_kernel_bundle_from_source(
      queue.get_context(), experimental::source_language::sycl, std::string(kernel_text));
  sycl::kernel kernel = experimental::build(source).ext_oneapi_get_kernel("opkiln_doctor_add");
  int* there = sycl::malloc_shared<int>(1, queue);
  queue.submit([&](sycl::handler& handler) {
    handler.set_args(a, b, there);
    handler.parallel_for(sycl::nd_range<1>(1, 1), kernel);
  }).wait_and_throw();
  *sum = *there;
  sycl::free(there, queue);
  return 0;
}
"""

_STABLE = """
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
using torch::stable::Tensor;
static Tensor add(const Tensor& x, int64_t y) {
  Tensor sum = torch::stable::empty_like(x);
  for (int64_t i = 0; i < x.numel(); ++i)
    sum.mutable_data_ptr<float>()[i] = x.const_data_ptr<float>()[i] + static_cast<float>(y);
  return sum;
}
STABLE_TORCH_LIBRARY_IMPL(opkiln_doctor, CPU, m) { m.impl("add", TORCH_BOX(&add)); }
"""


_SOURCES = {
    CPU: ("main.cpp", _ADD), CUDA: ("main.cu", _KERNEL), ROCM: ("main.cu", _KERNEL),
    XPU: ("main.cpp", _SYCL),
}  # fmt: skip


def _spec(source: str, text: str, **fields: Any) -> OpSpec:
    return OpSpec(
        name="opkiln_doctor",
        distribution="opkiln_doctor",
        root=INLINE_ROOT,
        sources=(source,),
        inline=((source, text),),
        **fields,
    )


def _loaded(backend: str) -> Any:
    spec = _spec(*_SOURCES[backend], kind=PLAIN, abi=ABI_NONE, backend=backend, vectorize=False)
    return loader.load(Op(spec)).value


def _called(library: Any) -> int:
    """20 + 22, as the op computes it. Raises LoadError with the runtime's error number."""
    import ctypes

    answer = ctypes.c_int(0)
    status = library.opkiln_doctor(20, 22, ctypes.byref(answer))
    if status != 0:
        raise LoadError("the op was called and failed", why=f"the runtime's error is {status}")
    return answer.value


def _called_with_a_tensor() -> int:
    schema = Registration("opkiln_doctor", ("add(Tensor x, int y) -> Tensor",), None)
    spec = _spec("main.cpp", _STABLE, abi=ABI_STABLE)
    functions = loader.load(Op(spec, schema), must_be_native=True).value
    # By name: what is in report/ must not bring torch into the process of who reads a report.
    torch = import_module("torch")
    return int(functions.add(torch.full((3,), 20.0), 22).sum().item() / 3)


def main(backend: str, how: str, result: str) -> int:
    """Do it; the exit code is 0 where the answer is right."""
    began = time.monotonic()

    def write(**facts: Any) -> None:
        with open(result, "w") as file:
            json.dump(facts, file)

    write(step="compile and load")
    answer = 42
    try:
        if backend == "torch":
            answer = _called_with_a_tensor()
        else:
            library = _loaded(backend)
            if how == "call":
                write(step="call")
                answer = _called(library)
    except OpkilnError as error:
        by_flags = isinstance(error, (CompileError, LoadTestError))  # or so it may be
        write(what=error.what, why=error.why, hint=error.hint, by_flags=by_flags)
        return 1
    if answer != 42:
        write(what=f"the op computed 20 + 22 = {answer}", why="", hint="", by_flags=True)
        return 1
    write(answer=answer, seconds=time.monotonic() - began)
    return 0
