"""CUDA ops on a machine that has torch's wheels and no CUDA toolkit."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest
import torch
from sample import child, pool
from sample.levels import ARCHITECTURES, HERE

from opkiln import settings
from opkiln.base.model import CUDA, LIBRARY, Op, OpSpec
from opkiln.building.asking import plan_here
from opkiln.building.build import build
from opkiln.decision.search import search
from opkiln.decision.terms import SHIP, Request, Serve, Trace
from opkiln.errors import BuildError, MissingCUDAException, SpecError, ToolchainError
from opkiln.machine import facts
from opkiln.machine.binary import elf, fatbin
from opkiln.machine.toolchain import choice, toolkits
from opkiln.ops.evoformer_attn.op import backward as evoformer_backward
from opkiln.ops.evoformer_attn.op import forward as evoformer_forward
from opkiln.ops.fused_lamb.op import FusedLambBuilder
from opkiln.ops.kv_attention.op import kit as kv_attention
from opkiln.ops.mixed_gemm.op import kit as mixed_gemm
from opkiln.ops.packbits.op import PackbitsBuilder
from opkiln.ops.sparse_attn.op import forward as sparse_forward
from opkiln.ops.transformer_inference.op import int8_linear, norms
from opkiln.ops.utils.op import UtilsBuilder
from opkiln.settings import override
from opkiln.store import entry, key
from opkiln.store.layers import Store

if TYPE_CHECKING:
    from opkiln.base.model import Artifact
    from opkiln.builder import CUDAOpBuilder

pytestmark = pytest.mark.slow

_WHEELS = ("nvidia-cuda-nvrtc==13.0.*", "nvidia-cuda-runtime==13.0.*")

_SOURCE = """\
#include <opkiln/op.h>
#include "shape.h"

using opk::Tensor;

namespace {
#define DEVICE __device__ __forceinline__
__constant__ float slope[2] = {0.5f, 2.0f};

DEVICE float bent(float x) { return x < 0 ? slope[0] * x : slope[1] * x; }

template <class T, int N>
__global__ void __launch_bounds__(256) bend(const T* __restrict__ x, T* y, Shape shape) {
  __shared__ float kept[N];
  kept[threadIdx.x % N] = 0;
  __syncthreads();
  const int64_t first = blockIdx.x * int64_t{256} + threadIdx.x;
  for (int64_t i = first; i < shape.count; i += 256) y[i] = bent(x[i]);
}
static __global__ void spread(const float4* x, float4* y) { y[threadIdx.x] = x[threadIdx.x]; }
}  // namespace

Tensor bend_it(const Tensor& x) {
  Tensor y = opk::empty_like(x);
  OPK_DISPATCH(x, T, (float, opk::half), {
    opk::launch(bend<T, 4>, (x.numel() + 255) / 256, 256, 0, x.data<const T>(), y.data<T>(),
                Shape{x.numel()});
  });
  return y;
}
OPKILN_OP(bend_it, cuda);

// Without a tensor: what a test calls.
extern "C" const char* launch_all(long grid, long shared, long cluster) {
  static char said[500];
  try {
    opk::Launch how;
    how.grid = dim3(static_cast<unsigned>(grid), 2, 3);
    how.block = 64;
    how.shared = static_cast<size_t>(shared);
    how.cluster = cluster;
    how.cooperative = cluster > 1;
    if (cluster > 1 && !opk::has_clusters(bend<float, 4>)) return "no clusters";
    opk::launch(bend<float, 4>, how, nullptr, reinterpret_cast<float*>(16), Shape{7});
    opk::launch(spread, 1, 32, 0, nullptr, nullptr);
    return "";
  } catch (const std::exception& error) {
    return __builtin_strncpy(said, error.what(), sizeof said - 1);
  }
}
"""
_SCHEMAS = ("bend_it(Tensor x) -> Tensor",)
_HEADER = """\
#pragma once
#ifdef __CUDACC_RTC__
#include "seen_by_nvrtc.h"
#endif
struct Shape {
  int64_t count;
};
"""


class Machine(NamedTuple):
    """A directory of sources, where there is no toolkit."""

    root: Path

    def spec(self, *sources: str, **changes: object) -> OpSpec:
        given = {"std": "c++17", "vectorize": False, "kind": LIBRARY, "schemas": _SCHEMAS} | changes
        names = (str(each).partition("(")[0] for each in given["schemas"])
        given["kernels"] = tuple(f"demo::{name}" for name in names)
        return OpSpec("bend", "demo", str(self.root), sources, backend=CUDA, **given)

    def write(self, **texts: str) -> None:
        for name, text in texts.items():
            stem, _, suffix = name.rpartition("_")
            (self.root / f"{stem}.{suffix}").write_text(text)

    def build(self, *sources: str, archs: str = "9.0a", **changes: object) -> Artifact:
        with override(cuda_arch_list=archs):
            request = Request(Op(spec=self.spec(*sources, **changes)), SHIP)
            return build(plan_here(request), request.store, since=time.monotonic())

    def search(self, *sources: str, archs: str = "9.0a") -> str:
        """The library that serves; empty if one would be built."""
        with override(cuda_arch_list=archs):
            outcome = search(Request(Op(spec=self.spec(*sources)), SHIP), Trace())
        return outcome.artifact.path if isinstance(outcome, Serve) else ""


@pytest.fixture(scope="module")
def wheels() -> Path:
    """A directory of packages that has the wheels which a CUDA build of torch depends on. It is
    kept in the pool, and nobody changes it."""
    if HERE not in ARCHITECTURES:
        pytest.skip(f"no wheels for {HERE}")
    site = pool.ROOT / "nvrtc" / "-".join(name.replace("*", "x") for name in _WHEELS)
    if not site.exists():
        site.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=site.parent) as new:
            command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target",
                       f"{new}/site", *_WHEELS]  # fmt: skip
            done = subprocess.run(command, check=False, capture_output=True, text=True)
            if done.returncode != 0:
                pytest.skip(f"pip install {' '.join(_WHEELS)}: {done.stderr.strip()[-500:]}")
            with contextlib.suppress(OSError):  # another worker was first
                os.rename(f"{new}/site", site)
    return site


@pytest.fixture
def new_machine(wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    path = [each for each in os.environ["PATH"].split(":") if not Path(each, "nvcc").exists()]
    if shutil.which("g++", path=":".join(path)) is None:
        pytest.skip("g++ is only where nvcc is, too")
    monkeypatch.setenv("PATH", ":".join(path))
    for name in ("CUDA_HOME", "CUDA_PATH", "OPKILN_CUDA_HOME", "OPKILN_CUDA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(toolkits, "DIRECTORIES", ())
    monkeypatch.setattr(toolkits, "site_directories", lambda: [str(wheels)])
    made = Machine(tmp_path / "sources")
    made.root.mkdir()
    made.write(bend_cu=_SOURCE, shape_h=_HEADER, seen_by_nvrtc_h="")
    return made


@pytest.fixture(scope="module")
def memory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("memory")


@pytest.fixture
def machine(new_machine: Machine, cache: Path, memory: Path) -> Machine:
    """One that knows NVRTC: it is asked once, which takes most of a second."""
    known = cache / settings.LAYOUT / "toolchains"
    if any(memory.iterdir()):
        shutil.copytree(memory, known, dirs_exist_ok=True)
    else:
        choice.choose(Store().memory, CUDA, spec=new_machine.spec("bend.cu"))
        shutil.copytree(known, memory, dirs_exist_ok=True)
    return new_machine


def test_source_on_op_header_is_built_by_nvrtc_where_there_is_no_toolkit(machine: Machine) -> None:
    assert choice.cuda_compiler(machine.spec("bend.cu")) == ("nvrtc", "there is no CUDA toolkit")
    artifact = machine.build("bend.cu", archs="8.0;9.0a+PTX")
    assert fatbin.images(artifact.path) == ("sm_80", "sm_90a", "compute_90a")
    assert not [name for name in elf.read(artifact.path).needed if "cud" in name]
    manifest = entry.read_manifest(os.path.dirname(artifact.path))
    assert manifest["toolchain"]["nvrtc"] == "13.0"
    assert "nvcc" not in manifest["toolchain"]
    assert manifest["needs"]["images"] == ["sm_80", "sm_90a", "compute_90a"]


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    "builder",
    [PackbitsBuilder, norms.builder.variant(("bfloat16",)),
     *(pytest.param(each, marks=pytest.mark.full) for each in (
         FusedLambBuilder, UtilsBuilder,
         kv_attention.builder.variant((128, "bfloat16", True)),
         mixed_gemm.builder.variant(("E3M2", "half")),
         int8_linear.builder.variant(("float16",)),
         evoformer_backward.builder.variant(("bfloat16",)),
         evoformer_forward.builder.variant(("float16",)),
         sparse_forward.builder.variant(("bfloat16",)),
     ))],
)  # fmt: skip
def test_the_catalogues_kernels_are_built_by_nvrtc(builder: type[CUDAOpBuilder]) -> None:
    with override(cuda_arch_list="9.0a"):
        request = Request(builder(backend=CUDA).op(), SHIP)
        artifact = build(plan_here(request), request.store, since=time.monotonic())
    assert fatbin.images(artifact.path) == ("sm_90a",)


def test_what_nvrtc_reads_is_a_dependency_and_what_its_driver_reads_is_not(
    machine: Machine,
) -> None:
    first = machine.build("bend.cu")
    leaf = os.path.dirname(first.path)
    manifest, sidecar = entry.read_manifest(leaf), entry.read_sidecar(leaf)
    own = {(anchor, path) for anchor, path, *_ in manifest["deps"]["own"]}
    assert {("src", "bend.cu"), ("src", "shape.h"), ("src", "seen_by_nvrtc.h")} <= own
    known = key.read(sidecar["facts"])
    paths = [each.path for each in known]
    paths += [f"{each.path}/{name}" for each in known if each.kind == "absent"
              for name in facts.split_names(each.value)]  # fmt: skip
    assert [path for path in paths if "python3" in os.path.basename(path)] == []
    assert [path for path in paths if path.startswith(os.path.dirname(os.__file__))] == []
    assert machine.build("bend.cu").path == first.path
    machine.write(seen_by_nvrtc_h="#define BENT 1\n")
    assert machine.build("bend.cu").path != first.path


@pytest.mark.counts_compiles
def test_two_builds_in_two_places_have_the_same_bytes(
    machine: Machine, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(cache, tmp_path / "other cache")  # it knows the compilers
    first = machine.build("bend.cu")
    other = Machine(tmp_path / "elsewhere")
    shutil.copytree(machine.root, other.root)
    monkeypatch.setenv("OPKILN_CACHE_DIR", str(tmp_path / "other cache"))
    second = other.build("bend.cu")
    assert first.path != second.path
    assert first.sha256 == second.sha256


def test_sources_may_have_kernels_of_one_name(machine: Machine) -> None:
    more = _SOURCE.replace("bend_it", "bend_more").replace("launch_all", "launch_more")
    machine.write(more_cu=more)
    schemas = (*_SCHEMAS, "bend_more(Tensor x) -> Tensor")
    made = machine.build("bend.cu", "more.cu", schemas=schemas)
    assert fatbin.images(made.path) == ("sm_90a",)


def test_source_without_op_header_needs_a_toolkit(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.write(plain_cu="__global__ void k() {}\n")
    with pytest.raises(MissingCUDAException, match="no CUDA toolkit is installed"):
        machine.build("plain.cu")
    monkeypatch.setenv("OPKILN_CUDA", "nvrtc")
    with pytest.raises(ToolchainError) as caught:
        machine.build("plain.cu")
    assert caught.value.what == ("op bend cannot be compiled by NVRTC, which OPKILN_CUDA asks for")
    assert caught.value.why.startswith("plain.cu does not include opkiln/op.h")
    monkeypatch.setenv("OPKILN_CUDA", "nvcc")
    with pytest.raises(MissingCUDAException):
        machine.build("bend.cu")


@pytest.mark.counts_compiles
def test_flags_of_nvcc_reach_who_has_them_or_are_refused(machine: Machine) -> None:
    flags = ("-use_fast_math", "--expt-relaxed-constexpr", "-Xcompiler=-Wall", "-DBENDS=1", "-O3")
    assert machine.build("bend.cu", device_args=flags).compiled == 1
    with pytest.raises(SpecError, match="NVRTC has no flag '--extended-lambda'"):
        machine.build("bend.cu", device_args=("--extended-lambda",))
    with pytest.raises(SpecError, match="op bend needs nvcc"):
        machine.build("bend.cu", device_args=("-rdc=true",))


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("bent(x[i]);", "straight(x[i]);", 'bend.cu(18): error: identifier "straight"'),
        ("return y;", "return z;", "bend.cu:29:"),
        ("opk::launch(spread, 1, 32, 0, nullptr, nullptr)", "spread<<<1, 32>>>(nullptr, nullptr)",
         "bend.cu:45: kernel<<<...>>>(...) is nvcc's own syntax"),
        ("#include <opkiln/op.h>", "#include <opkiln/op.h>\n#include <map>",
         'open source file "map"'),
    ],
    ids=["device", "host", "launch", "header"],
)  # fmt: skip
def test_mistake_is_told_with_the_authors_file_and_line(
    machine: Machine, old: str, new: str, expected: str
) -> None:
    machine.write(bend_cu=_SOURCE.replace(old, new))
    with pytest.raises(BuildError) as caught:
        machine.build("bend.cu")
    assert expected in f"{caught.value.what}\n{caught.value.why}"


def test_what_nvcc_has_built_serves_where_the_toolkit_is_gone(
    new_machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = new_machine
    with pytest.MonkeyPatch.context() as before:
        before.setattr(toolkits, "DIRECTORIES", ("/usr/local/cuda", "/usr/local/cuda-*"))
        if not toolkits.find_nvcc():
            pytest.skip("no nvcc on this machine")
        assert choice.cuda_compiler(machine.spec("bend.cu"))[0] == "nvcc"
        by_nvcc = machine.build("bend.cu")
    assert choice.cuda_compiler(machine.spec("bend.cu"))[0] == "nvrtc"
    assert machine.search("bend.cu") == by_nvcc.path
    choice.choose(Store().memory, CUDA, spec=machine.spec("bend.cu"))
    assert machine.search("bend.cu") == by_nvcc.path  # also when NVRTC is known
    monkeypatch.setenv("OPKILN_CUDA", "nvrtc")
    assert machine.search("bend.cu") == ""
    by_nvrtc = machine.build("bend.cu")
    assert machine.search("bend.cu") == by_nvrtc.path


# The launch. There is no GPU here, so a stand-in for CUDA's driver says what it was told.

_DRIVER = r"""
#include <stdio.h>
#include <string.h>
struct Attribute { int id, unused; unsigned words[16]; };
struct Config { unsigned sizes[7]; void* stream; Attribute* attributes; unsigned count; };
extern "C" {
int aoti_torch_get_current_device_index(int* out) { *out = 3; return 0; }
int aoti_torch_get_current_cuda_stream(int device, void** out) {
  *out = reinterpret_cast<void*>(0x1000L + device);
  return 0;
}
int cuGetErrorString(int error, const char** out) {
  *out = error == 9 ? "as CUDA says it" : 0;
  return 0;
}
int cuCtxGetCurrent(void** out) { *out = nullptr; return 0; }
int cuCtxSetCurrent(void* context) { printf("context %p\n", context); return 0; }
int cuDevicePrimaryCtxRetain(void** out, int device) {
  *out = reinterpret_cast<void*>(0x20L + device);
  return 0;
}
int cuLibraryLoadData(void** out, const void* image, int*, void**, unsigned, int*, void**,
                      unsigned) {
  printf("load %#x\n", *static_cast<const unsigned*>(image));
  *out = const_cast<void*>(image);
  return 0;
}
int cuLibraryUnload(void*) { return 0; }
int cuLibraryGetKernel(void** out, void* library, const char* name) {
  // The images' own tables of symbols have the name.
  const size_t size = 16 + *reinterpret_cast<const size_t*>(static_cast<char*>(library) + 8);
  if (!memmem(library, size, name, strlen(name) + 1)) return 500;
  *out = const_cast<char*>(name);
  return 0;
}
int cuKernelGetAttribute(int* out, int attribute, void*, int device) {
  printf("attribute %d of %d?\n", attribute, device);
  *out = attribute == 1 ? 16 : 90;  // bytes of static shared memory
  return 0;
}
int cuDeviceGetAttribute(int* out, int attribute, int device) {
  printf("device attribute %d of %d?\n", attribute, device);
  *out = 227 << 10;
  return 0;
}
int cuKernelSetAttribute(int attribute, int value, void*, int device) {
  printf("attribute %d = %d of %d\n", attribute, value, device);
  return 0;
}
int cuLaunchKernelEx(const Config* how, void* kernel, void** arguments, void**) {
  const bool bends = strstr(static_cast<char*>(kernel), "4bendI");
  printf("%s", bends ? "bend" : "spread");
  for (unsigned each : how->sizes) printf(" %u", each);
  printf(" on %p", how->stream);
  for (unsigned i = 0; i < how->count; ++i) {
    const Attribute& each = how->attributes[i];
    printf(", %d: %u %u %u", each.id, each.words[0], each.words[1], each.words[2]);
  }
  if (bends) {
    printf("; %p %p %ld", *static_cast<void**>(arguments[0]), *static_cast<void**>(arguments[1]),
           *static_cast<long*>(arguments[2]));
  }
  printf("\n");
  fflush(stdout);
  return how->sizes[0] == 13 ? 9 : 0;
}
}
"""
_CALLS = """\
import ctypes, sys
driver, torch, library, *calls = sys.argv[1:]
if driver:
    ctypes.CDLL(driver, ctypes.RTLD_GLOBAL)
ctypes.CDLL(torch, ctypes.RTLD_GLOBAL)
launch = ctypes.CDLL(library).launch_all
launch.restype, launch.argtypes = ctypes.c_char_p, [ctypes.c_long] * 3
for each in calls:
    print(launch(*map(int, each.split(","))).decode())
"""


def _called(artifact: Artifact, driver: Path | None, *calls: str) -> list[str]:
    core = os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cpu.so")
    places = "" if driver is None else f"{driver.parent}:"
    path = f"{places}{os.path.dirname(core)}:{os.environ.get('LD_LIBRARY_PATH', '')}"
    first = "" if driver is None else str(driver)
    started = child.start(
        textwrap.dedent(_CALLS), first, core, artifact.path, *calls, env={"LD_LIBRARY_PATH": path}
    )
    done = child.finish(started)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture
def driver(tmp_path: Path) -> Path:
    """A library that stands for CUDA's driver and for torch's part that knows the stream."""
    source, made = tmp_path / "driver.cpp", tmp_path / "fakes" / "libtorch_cuda.so"
    source.write_text(_DRIVER)
    made.parent.mkdir()
    subprocess.run(
        ["g++", "-shared", "-fPIC", "-Wl,-soname,libtorch_cuda.so", source, "-o", made], check=True
    )
    shutil.copy(made, made.parent / "libcuda.so.1")
    return made


_REFUSED = "the kernel could not be launched: as CUDA says it"


def test_launch_tells_the_driver_what_the_author_says_and_the_caller_that_there_is_none(
    machine: Machine, driver: Path
) -> None:
    artifact = machine.build("bend.cu")
    said = _called(artifact, driver, "5,100,1", "5,65536,2", "13,0,1", "0,0,1")
    assert said == [
        "context 0x23", "load 0xba55ed50",
        # Once, all that the device has: no launch of another thread finds less than it asks for.
        "attribute 1 of 3?", "device attribute 97 of 3?", "attribute 8 = 232432 of 3",
        "bend 5 2 3 64 1 1 100 on 0x1003; (nil) 0x10 7",
        "context 0x23", "spread 1 1 1 32 1 1 0 on 0x1003", "",
        "context 0x23", "attribute 0 of 3?", "attribute 5 of 3?", "attribute 6 of 3?",
        "context 0x23", "bend 5 2 3 64 1 1 65536 on 0x1003, 4: 2 1 1, 2: 1 0 0; (nil) 0x10 7",
        "context 0x23", "spread 1 1 1 32 1 1 0 on 0x1003", "",
        "context 0x23", "bend 13 2 3 64 1 1 0 on 0x1003; (nil) 0x10 7",
        f"{_REFUSED} (grid [13, 2, 3], block [64, 1, 1], 0 bytes of shared memory)",
        "context 0x23", "spread 1 1 1 32 1 1 0 on 0x1003", "",
    ]  # fmt: skip
    if child.finish(child.start("import ctypes; ctypes.CDLL('libcuda.so.1')")).returncode == 0:
        return  # without the stand-in it is CUDA's own driver that is called
    (said,) = _called(artifact, None, "1,0,1")
    assert said.startswith("launch: CUDA's driver cannot be opened: libcuda.so.1: ")
