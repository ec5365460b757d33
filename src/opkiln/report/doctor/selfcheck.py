"""The self-check: compiles, loads and calls a tiny op for each backend, in a child process.

A crash there is a finding, and the doctor goes on. The child uses a temporary store; everything
else is as in the user's own programs. It writes its result to a file and, before each step that may
crash, the name of the step.
"""

from __future__ import annotations

import json
import os
import time
from importlib import import_module
from typing import Any

from opkiln.base import model
from opkiln.base.build_model import DeviceCompiler
from opkiln.base.model import CPU, CUDA, ROCM, XPU, Op, OpSpec
from opkiln.errors import CompileError, LoadError, LoadTestError, OpkilnError, StoreError
from opkiln.loading import loader
from opkiln.machine.devices import amd, nvidia
from opkiln.machine.toolchain import hipcc, libsycl, nvcc, torch_sdk
from opkiln.machine.toolchain import sycl as sycl_compilers
from opkiln.machine.uname import read_text
from opkiln.report.commands import use_this_python
from opkiln.report.doctor.terms import (
    Diagnosis,
    Facts,
    copyable_command,
    describe_exit,
    failed,
    join,
    passed,
    skipped,
)
from opkiln.report.layout import duration
from opkiln.run import process
from opkiln.settings import environment_with_store, settings, table, whole_environment
from opkiln.store import publish

_CHILD = """
from opkiln.report.doctor.selfcheck import child_main
child_main(*sys.argv[1:])
"""
_LONGEST = 600.0  # seconds
# Settings that add the user's flags to command lines. The op itself compiles without them.
_FLAGS = ("cppflags", "cxxflags", "cudaflags", "ldflags")
_TEMPORARY = ("command: ", "log: ")  # how lines of an error begin that name temporary files


def cpu(here: Facts) -> Diagnosis:
    """C++ without torch."""
    here.need_compiler("there is no compiler")
    return _try_backend("cpu", calls=True)


def torch(here: Facts) -> Diagnosis:
    """C++ on torch's stable ABI, called with a tensor."""
    found = here.installed_torch
    here.need_compiler("there is no compiler")
    if not torch_sdk.has_stable_abi(found):
        return skipped(f"torch {found.version} lacks the stable ABI: see torch")
    return _try_backend("torch", calls=True)


def cuda(here: Facts) -> Diagnosis:
    """A kernel by nvcc; called if there is a GPU."""
    if not nvcc.available() or not isinstance(here.cuda, DeviceCompiler):
        return skipped("there is no usable CUDA toolkit")
    visible, _ = nvidia.visible(here.nvidia)
    # For one architecture: the user's own list may name all of them.
    archs = "native" if here.nvidia.gpus else here.cuda.archs[-1]
    return _try_backend(CUDA, calls=bool(visible), OPKILN_CUDA_ARCH_LIST=archs)


def rocm(here: Facts) -> Diagnosis:
    """The same kernel by hipcc; called if there is an AMD GPU."""
    if not hipcc.available() or here.torch is None:
        return skipped("there is no hipcc" if here.torch else "torch, which has hipify, is missing")
    device = here.device_compiler(ROCM)
    if not isinstance(device, DeviceCompiler):
        return skipped("there is no usable hipcc: see rocm")
    devices = amd.devices()
    archs = "native" if devices.gpus or not device.archs else device.archs[-1]
    return _try_backend(ROCM, calls=bool(amd.visible(devices)), PYTORCH_ROCM_ARCH=archs)


def xpu(here: Facts) -> Diagnosis:
    """A SYCL kernel; called if there is a device."""
    if not sycl_compilers.available():
        return skipped("there is no SYCL compiler")
    if isinstance(here.device_compiler(XPU), Exception):
        return skipped("there is no usable SYCL compiler: see sycl")
    if libsycl.why_no_device(settings.ocl_icd_filenames):
        return skipped("there is no device to load it for: see sycl device")
    return _try_backend(XPU, calls=True)


def _try_backend(what: str, *, calls: bool, **variables: str) -> Diagnosis:
    try:
        with publish.scratch("doctor") as work:
            result = os.path.join(work, "result.json")
            argv = process.python_code(_CHILD, what, "call" if calls else "load", result)
            environment = environment_with_store(work, "off") | variables
            done = process.run(argv, env=environment, timeout=_LONGEST)
            found: dict[str, Any] = json.loads(read_text(result) or "{}")
    except StoreError as error:
        return skipped(f"{error.what}: see tmpdir")
    if "answer" in found:
        rest = "loaded and called" if calls else "loaded; there is no GPU to call it on"
        return passed(f"compiled, {rest}, in {duration(found['seconds'])}")
    flags = _unset_command()
    if "what" in found:
        # The log and the files of the command are gone with the temporary store.
        why = [line for line in found["why"].splitlines() if not line.startswith(_TEMPORARY)]
        command = use_this_python(copyable_command(found["hint"]))
        if found["by_flags"] and flags:
            command = flags
        elif "opkiln_doctor" in command:
            command = ""
        return failed(join(found["what"], *why[:4]), command)
    step = f" at the step: {found.get('step', 'start')}" if done.returncode < 0 else ""
    last = done.output.strip().splitlines()[-1:]
    return failed(join(f"the child {describe_exit(done.returncode)}{step}", *last), flags)


def _unset_command() -> str:
    """The command that unsets the user's flags; empty if there are none."""
    environment = whole_environment()
    names = (name for each in table() if each.field in _FLAGS for name in each.names)
    given = " ".join(name for name in names if environment.get(name))
    return f"unset {given}" if given else ""


# In the child

_ADD = 'extern "C" int opkiln_doctor(int a, int b, int* sum) { *sum = a + b; return 0; }\n'

# Only runtime calls that hipify translates: the same text serves for ROCm.
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

# The kernel is a string for SYCL's runtime compiler: both families of compilers build this.
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
STABLE_TORCH_LIBRARY(opkiln_doctor, m) { m.def("add(Tensor x, int y) -> Tensor"); }
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
        root=model.INLINE_ROOT,
        sources=(source,),
        inline=((source, text),),
        **fields,
    )


def _call(library: Any) -> int:
    """20 + 22, computed by the op. Raises LoadError with the runtime's error number."""
    import ctypes

    answer = ctypes.c_int(0)
    status = library.opkiln_doctor(20, 22, ctypes.byref(answer))
    if status != 0:
        raise LoadError("the op was called and failed", why=f"the runtime's error is {status}")
    return answer.value


def _call_with_tensor() -> int:
    loader.load(Op(_spec("main.cpp", _STABLE, abi=model.ABI_STABLE)), must_be_native=True)
    # By name: no module of report/ imports torch, and a linter checks that.
    torch = import_module("torch")
    return int(torch.ops.opkiln_doctor.add(torch.full((3,), 20.0), 22).sum().item() / 3)


def child_main(backend: str, how: str, result: str) -> None:
    """Compile and load the op, and call it if ``how`` is "call". Writes the result to a file."""
    began = time.monotonic()

    def write(**facts: Any) -> None:
        with open(result, "w") as file:
            json.dump(facts, file)

    write(step="compile and load")
    answer = 42
    try:
        if backend == "torch":
            answer = _call_with_tensor()
        else:
            source, text = _SOURCES[backend]
            spec = _spec(
                source, text, kind=model.PLAIN, abi=model.ABI_NONE, backend=backend, vectorize=False
            )
            library = loader.load(Op(spec)).value
            if how == "call":
                write(step="call")
                answer = _call(library)
    except OpkilnError as error:
        by_flags = isinstance(error, (CompileError, LoadTestError))  # flags may be the cause
        write(what=error.what, why=error.why, hint=error.hint, by_flags=by_flags)
        return
    if answer == 42:
        write(answer=answer, seconds=time.monotonic() - began)
    else:
        write(what=f"the op computed 20 + 22 = {answer}", why="", hint="", by_flags=True)
