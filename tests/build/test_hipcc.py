"""Real HIP compiles, of translated CUDA sources, for GPUs that need not be there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from sample import known, pool, wanted
from sample.levels import X86_64, X86_V1

from opkiln import get_builder, ops, settings
from opkiln.base.build_model import DeviceCompiler, Target, Toolchain
from opkiln.base.model import ABI_NONE, PLAIN, ROCM, OpSpec
from opkiln.machine.binary import fatbin
from opkiln.machine.toolchain import find, hipcc, host, staged_copy, torch_sdk
from opkiln.plan import hipcc as hip_steps
from opkiln.plan import plan
from opkiln.plan.host import PlanInputs
from opkiln.run import process
from opkiln.run.child import Completed

if TYPE_CHECKING:
    from sample.package import Steps

_KERNEL = """\
#include "scale.h"

template <class T>
concept Number = requires(T x) { x * x; };

template <Number T>
__global__ void scale(T* x, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) {
    x[i] *= std::exp(x[i]) * kScale;
  }
}

extern "C" int launch(float* x, int n, void* stream) {
  scale<<<(n + 255) / 256, 256, 0, static_cast<cudaStream_t>(stream)>>>(x, n);
  return cudaGetLastError();
}
"""
_HEADER = "#pragma once\n#include <cmath>\nconstexpr float kScale = 2;\n"


@pytest.fixture(scope="module")
def memory(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    store = known.make_store(tmp_path_factory.mktemp("memory") / "store")
    return (str(store / settings.LAYOUT / "toolchains"),)


@pytest.fixture(scope="module")
def toolchain(memory: tuple[str, ...]) -> Toolchain:
    """The host compiler and hipcc, whatever the HIP of the torch that is here."""
    if not hipcc.available():
        pytest.skip("no hipcc is installed: apt-get install hipcc")
    if torch_sdk.find() is None:
        pytest.skip("torch is not installed, and hipify is a part of it")
    compiler = host.choose(memory)
    return compiler._replace(device=find.choose(hipcc, memory, None, compiler))


@pytest.fixture
def device(toolchain: Toolchain) -> DeviceCompiler:
    assert toolchain.device is not None
    return toolchain.device


def an_op(root: Path) -> OpSpec:
    root.mkdir(parents=True)
    (root / "kernel.cu").write_text(_KERNEL)
    (root / "scale.h").write_text(_HEADER)
    return OpSpec(
        name="scaled", distribution="package", root=str(root), sources=("kernel.cu",),
        backend=ROCM, kind=PLAIN, abi=ABI_NONE,
    )  # fmt: skip


def a_target(*archs: str) -> Target:
    return Target(
        backend=ROCM, system="linux", machine=X86_64, cpu=X86_V1, cpu_features=(),
        abi_tag="none", archs=archs,
    )  # fmt: skip


class Built:
    """One source, translated and compiled in a stage of its own."""

    def __init__(self, spec: OpSpec, toolchain: Toolchain, stage: Path, *archs: str) -> None:
        assert toolchain.torch is not None
        (stage / "hip").mkdir(parents=True)
        self.stage = stage
        self.staged = staged_copy.stage_hip(spec, toolchain.torch, str(stage / "hip"))
        copy = spec._replace(root=self.staged.root)
        places = plan.anchors_of(copy, toolchain) | {"stage": str(stage)}
        (source,) = spec.sources
        inputs = PlanInputs(copy, a_target(*archs), toolchain)
        self.step = hip_steps.compile_hip(inputs, source)
        self.command = plan.command(self.step, places)
        self.done = self.run(self.command.argv)
        self.linking = [plan.render(each, places) for each in hip_steps.runtime(inputs)]

    def run(self, argv: tuple[str, ...]) -> Completed:
        place = str(self.stage)
        return process.run(argv, cwd=place, env=dict(hipcc.ENVIRONMENT), tmpdir=place)

    @property
    def object(self) -> bytes:
        assert self.done.returncode == 0, self.done.output
        return (self.stage / self.step.output).read_bytes()

    def read(self) -> set[str]:
        """The author's files that the compiler says it reads."""
        listed = self.run((*self.command.words, "-M", self.command.file)).output.split()
        return {self.staged.origin[path] for path in listed if path in self.staged.origin}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, toolchain: Toolchain) -> Built:
    place = tmp_path_factory.mktemp("built")
    return Built(an_op(place / "op"), toolchain, place / "stage", "gfx90a")


def test_a_cuda_source_compiles_for_an_amd_gpu_and_links(
    tmp_path: Path, toolchain: Toolchain, built: Built
) -> None:
    assert b"amdgcn-amd-amdhsa--gfx90a" in built.object
    assert b"amdgcn-amd-amdhsa--gfx1030" not in built.object
    op = built.stage.parent / "op"
    assert built.read() == {str(op / name) for name in ("kernel.cu", "scale.h")}
    library = str(tmp_path / "op.so")
    argv = (toolchain.cxx, "-shared", str(built.stage / built.step.output), "-o", library)
    linked = process.run((*argv, *built.linking))
    assert linked.returncode == 0, linked.output
    assert b"libamdhip64.so" in Path(library).read_bytes()


def test_the_same_source_in_another_place_gives_the_same_object(
    tmp_path: Path, toolchain: Toolchain, built: Built
) -> None:
    other = Built(an_op(tmp_path / "longer" / "op"), toolchain, tmp_path / "a-stage", "gfx90a")
    assert other.object == built.object


def test_what_the_compiler_says_of_a_line_is_true_of_the_authors(
    tmp_path: Path, toolchain: Toolchain
) -> None:
    spec = an_op(tmp_path / "op")
    (tmp_path / "op" / "kernel.cu").write_text(_KERNEL.replace("kScale", "kScala"))
    built = Built(spec, toolchain, tmp_path / "stage", "gfx90a")
    line = _KERNEL.splitlines().index("    x[i] *= std::exp(x[i]) * kScale;") + 1
    assert built.done.returncode != 0
    assert f"kernel.cu:{line}:" in built.done.output
    assert "kScala" in built.done.output


def test_beside_an_nvcc_it_still_compiles_for_amd(
    tmp_path: Path, device: DeviceCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text(f"#!/bin/sh\necho nvcc: NVIDIA >> '{tmp_path}/asked'; echo nvcc: NVIDIA\n")
    nvcc.chmod(0o755)
    monkeypatch.setenv("PATH", f"{nvcc.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("HIP_PLATFORM", "nvidia")
    monkeypatch.setenv("ROCM_HOME", device.home)
    chosen = find.choose(hipcc, (), None, host.choose(()))
    assert chosen == device
    assert not (tmp_path / "asked").exists()


@pytest.mark.usefixtures("device")
def test_fused_adam_is_translated_built_and_found_again_and_its_source_tree_is_untouched(
    steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPKILN_STORE_LAYERS", str(pool.LAYER))  # only links are counted
    package = Path(ops.__file__).parents[1]

    def tree() -> dict[str, tuple[int, bytes]]:
        sources = (path for folder in ("ops", "csrc") for path in (package / folder).rglob("*"))
        return {
            str(path): (path.stat().st_mtime_ns, path.read_bytes())
            for path in sources
            if path.is_file() and "__pycache__" not in path.parts
        }

    before = tree()
    op = get_builder("fused_adam", backend="rocm", archs="gfx90a").op()
    built = wanted.artifact(op)
    assert fatbin.hip_images(built.path) == ("gfx90a",)
    assert tree() == before
    assert wanted.artifact(op) == built._replace(origin="store", compiled=0, seconds=0.0)
    assert steps.linked == 1
