"""One ``.cu`` with kernel, launch and binding: by nvcc and by hipcc, on a machine without a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from sample.levels import X86_64, X86_V1

from opkiln.base.build_model import Target
from opkiln.base.model import ROCM, STABLE_TAG
from opkiln.errors import LoadTestError
from opkiln.loading import loader
from opkiln.machine.binary import elf
from opkiln.machine.toolchain import find, hipcc, host, nvcc, staged_copy, torch_sdk
from opkiln.plan import hipcc as hip_steps
from opkiln.plan import plan
from opkiln.plan.host import PlanInputs
from opkiln.run import process
from opkiln.store.layers import Store

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from sample.package import Package

SOURCE = "csrc/bias_gelu.cu"


@pytest.fixture
def op(package: Callable[..., Package]) -> Package:
    return package("lightcuda")


@pytest.fixture
def for_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    if not nvcc.available():
        pytest.skip("no nvcc on this machine")
    monkeypatch.setenv("OPKILN_CUDA_ARCH_LIST", "9.0a")


@pytest.mark.usefixtures("for_hopper")
def test_one_cuda_file_builds_loads_and_registers(op: Package) -> None:
    op.builder().jit_load()
    for name in ("bias_gelu", "clustered"):
        qualified = f"{op.name}::{name}"
        assert torch._C._dispatch_has_kernel_for_dispatch_key(qualified, "CUDA")
        assert not torch._C._dispatch_has_kernel_for_dispatch_key(qualified, "CPU")
    artifact = loader.here.ops[op.builder().op().name].loaded.artifact
    assert artifact is not None
    needed = elf.read(artifact.path).needed
    assert "libtorch_cpu.so" in needed
    assert not any(name.startswith(("libcudart", "libtorch_cuda", "libcuda.so")) for name in needed)


@pytest.mark.full  # of a .cpp it is in every run: test_light_header.py
@pytest.mark.usefixtures("for_hopper")
def test_a_wrong_signature_in_a_cuda_file_is_an_error_of_the_build(op: Package) -> None:
    op.edit(SOURCE, "void clustered(Tensor& x) {", "void clustered(Tensor& x, int64_t) {")
    with pytest.raises(LoadTestError, match="clustered does not fit its schema"):
        op.builder().jit_load()


def test_the_same_file_compiles_for_an_amd_gpu(op: Package, tmp_path: Path) -> None:
    if not hipcc.available():
        pytest.skip("no hipcc is installed: apt-get install hipcc")
    memory = Store().memory
    chain = host.choose(memory)
    chain = chain._replace(device=find.choose(hipcc, memory, None, chain))
    torch_here = torch_sdk.find()
    assert torch_here is not None
    spec = op.builder().spec()._replace(backend=ROCM, device_args=())
    stage = tmp_path / "stage"
    (stage / "hip").mkdir(parents=True)
    staged = staged_copy.stage_hip(spec, torch_here, str(stage / "hip"))
    copy = spec._replace(root=staged.root)
    target = Target(
        backend=ROCM, system="linux", machine=X86_64, cpu=X86_V1, cpu_features=(),
        abi_tag=STABLE_TAG, archs=("gfx90a",),
    )  # fmt: skip
    step = hip_steps.compile_hip(PlanInputs(copy, target, chain), SOURCE)
    places = plan.anchors_of(copy, chain) | {"stage": str(stage)}
    done = process.run(
        plan.command(step, places).argv,
        cwd=str(stage),
        env=dict(hipcc.ENVIRONMENT),
        tmpdir=str(stage),
    )
    assert done.returncode == 0, done.output
    made = (stage / step.output).read_bytes()
    assert b"amdgcn-amd-amdhsa--gfx90a" in made
    assert b"bias_gelu_kernel" in made
