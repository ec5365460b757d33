"""Which architectures an op is built for, and which entry serves which GPUs.

There is no GPU here: what the driver would answer is put in its place. What is compiled is real.
"""

from __future__ import annotations

import os
import shutil
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from sample import pool, wanted

import opkiln
from opkiln.builder import CUDAOpBuilder
from opkiln.decision.terms import Trace
from opkiln.errors import (
    ArchError,
    ArchWarning,
    CompilingOff,
    FallbackWarning,
    LoadError,
    MissingCUDAException,
    ToolchainError,
)
from opkiln.loading import loader
from opkiln.loading.explain import explain
from opkiln.machine.binary import fatbin
from opkiln.machine.devices import nvidia
from opkiln.machine.toolchain import toolkits
from opkiln.settings import override

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sample.package import Package, Steps

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc on PATH")


@pytest.fixture
def device(
    package: Callable[..., Package], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Package]:
    """Of its builders only links are counted, so objects come from the pool all the same."""
    monkeypatch.setenv("OPKILN_STORE_LAYERS", str(pool.LAYER))
    yield package("device")
    pool.add(cache)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts GPUs of these capabilities, in PCI order, into this machine."""

    def have(*capabilities: str, cuda: str = "13.0") -> None:
        gpus = tuple(
            nvidia.NvidiaGPU(index, f"GPU-{index}", "stand-in", capability, 1 << 30)
            for index, capability in enumerate(capabilities)
        )
        monkeypatch.setitem(nvidia._known, "/", nvidia.NvidiaDevices(gpus, "580", cuda, "nvml"))

    return have


def artifact(package: Package, **settings: object) -> tuple[str, Trace]:
    """What serves the op here, found or built."""
    with override(**settings):
        found, trace = wanted.traced(package.builder(_asked_backend="cuda").op())
    return found.path, trace


@needs_nvcc
def test_ranks_with_one_visible_gpu_each_share_one_build_for_all_gpus(
    device: Package, machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch, steps: Steps
) -> None:
    machine("9.0", "8.0", "9.0")
    paths = set()
    for visible in ("0", "1", "2", "0,1,2"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        paths.add(artifact(device)[0])
    assert len(paths) == 1
    assert fatbin.images(paths.pop()) == ("sm_80", "sm_90")
    assert steps.linked == 1


@needs_nvcc
@pytest.mark.parametrize(
    ("built", "gpu"), [("8.0;9.0", "9.0"), ("9.0a", "9.0"), ("8.0", "8.6"), ("10.0f", "10.3")]
)
def test_an_entry_whose_images_cover_the_gpu_is_a_hit(
    device: Package, machine: Callable[..., None], steps: Steps, built: str, gpu: str
) -> None:
    made, _ = artifact(device, cuda_arch_list=built)
    machine(gpu)
    found, trace = artifact(device)
    assert found == made
    assert steps.linked == 1
    assert f"its code for {built} runs here" in str(trace.candidates[-1])


@needs_nvcc
def test_code_for_another_gpu_is_not_taken(
    device: Package, machine: Callable[..., None], steps: Steps
) -> None:
    other, _ = artifact(device, cuda_arch_list="8.6;10.0a")
    machine("8.0")
    found, _ = artifact(device)
    assert found != other
    assert fatbin.images(found) == ("sm_80",)
    assert steps.linked == 2


@needs_nvcc
def test_a_list_that_was_named_is_built_although_another_entry_would_run(
    device: Package, machine: Callable[..., None], steps: Steps
) -> None:
    machine("9.0")
    artifact(device)
    found, _ = artifact(device, cuda_arch_list="9.0a")
    assert fatbin.images(found) == ("sm_90a",)
    assert steps.linked == 2


@needs_nvcc
def test_ptx_serves_only_where_nothing_better_can_be_compiled(
    device: Package, machine: Callable[..., None], steps: Steps
) -> None:
    ptx, _ = artifact(device, cuda_arch_list="8.0+PTX")
    machine("9.0")
    found, trace = artifact(device, mode="cached")
    assert found == ptx
    assert steps.linked == 1
    better, _ = artifact(device)
    assert fatbin.images(better) == ("sm_90",)
    assert "its code for 8.0+PTX runs here" in str(trace.candidates[-1])
    with pytest.raises(CompilingOff):
        artifact(device, mode="cached", cuda_arch_list="7.5")


@needs_nvcc
def test_a_gpu_newer_than_the_toolkit_gets_ptx_and_a_warning(
    device: Package, machine: Callable[..., None], steps: Steps
) -> None:
    machine("13.5", cuda="14.2")
    with pytest.warns(ArchWarning, match=r"capability 13\.5, which this CUDA toolkit"):
        path, _ = artifact(device)
    assert any(image.startswith("compute_") for image in fatbin.images(path))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # said once
        assert artifact(device)[0] == path
    assert steps.linked == 1


@needs_nvcc
def test_a_gpu_newer_than_toolkit_and_driver_is_refused_with_the_reason(
    device: Package, machine: Callable[..., None]
) -> None:
    machine("13.5", cuda="12.9")
    with pytest.raises(ToolchainError, match=r"13\.5") as refused:
        artifact(device)
    assert "driver is too old for PTX" in refused.value.why


@needs_nvcc
def test_an_arch_that_the_toolkit_lacks_is_refused_with_what_it_has(device: Package) -> None:
    with pytest.raises(ToolchainError, match=r"cannot be compiled for 5\.0") as no:
        artifact(device, cuda_arch_list="5.0;9.0")
    assert "its oldest is 7.5" in no.value.why
    assert no.value.hint == "export OPKILN_CUDA_ARCH_LIST='9.0'"


def test_without_gpu_or_list_the_cpu_version_is_built(device: Package) -> None:
    builder = device.builder()
    assert builder.backend == "cpu"
    assert isinstance(builder, CUDAOpBuilder)
    assert builder.build_for_cpu
    assert builder.load().answer() == 42


def test_a_bad_list_is_one_error_that_quotes_the_token(
    device: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0;9.0b")
    with pytest.raises(ArchError, match=r"TORCH_CUDA_ARCH_LIST: '9\.0b' is not a CUDA arch"):
        artifact(device)


def test_a_filter_that_leaves_nothing_says_what_was_asked_and_what_it_removed(
    device: Package,
) -> None:
    builder = device.builder(_asked_backend="cuda", LEAST=12)
    with override(cuda_arch_list="8.0;9.0a"), pytest.raises(LoadError) as nothing:
        wanted.artifact(builder.op())
    assert nothing.value.why.endswith("asks for 8.0;9.0a, and the op's filter removed 8.0;9.0a")


@pytest.fixture
def no_toolkit(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without CUDA: nothing on PATH, in /usr/local or from PyPI."""
    monkeypatch.setattr(toolkits, "DIRECTORIES", ())
    monkeypatch.setattr(toolkits, "site_directories", list)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")


@pytest.mark.usefixtures("no_toolkit")
def test_without_a_toolkit_the_cpu_part_builds_and_cuda_says_what_to_install(
    device: Package, machine: Callable[..., None]
) -> None:
    machine("9.0")
    assert device.builder().load().answer() == 42  # this torch has no CUDA
    with pytest.raises(MissingCUDAException) as missing:
        artifact(device)
    assert missing.value.hint == "pip install 'opkiln[cuda]'"
    assert not device.builder(_asked_backend="cuda").is_compatible()


@pytest.mark.usefixtures("no_toolkit")
def test_a_missing_toolkit_falls_back_with_one_warning_that_names_cause_and_fix(
    device: Package, machine: Callable[..., None]
) -> None:
    machine("9.0")

    class Builder(type(device.builder())):  # type: ignore[misc]
        ABI, KIND, BACKENDS = "torch-stable", "library", ("cuda",)
        DISTRIBUTION = device.name

    @opkiln.library(Builder).op()
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x + x

    with pytest.warns(FallbackWarning) as told:
        functions = Builder().load()
    assert functions.twice(torch.ones(2)).tolist() == [2, 2]
    (warning,) = told
    assert "runs as its pure-PyTorch reference: no CUDA toolkit" in str(warning.message)
    assert "hint: pip install 'opkiln[cuda]'" in str(warning.message)
    with pytest.raises(MissingCUDAException):
        Builder().jit_load()


def test_nothing_is_written_or_compiled_to_learn_the_architectures(
    device: Package, machine: Callable[..., None], steps: Steps, cache: Path
) -> None:
    machine("8.0", "9.0")
    builder = device.builder(_asked_backend="cuda")
    assert isinstance(builder, CUDAOpBuilder)
    assert builder.enable_bf16
    assert builder.compute_capability_args() == [
        "-gencode=arch=compute_80,code=sm_80", "-gencode=arch=compute_90,code=sm_90",
    ]  # fmt: skip
    assert builder.compute_capability_args("7.5;7.5+PTX") == [
        "-gencode=arch=compute_75,code=sm_75", "-gencode=arch=compute_75,code=compute_75",
    ]  # fmt: skip
    assert steps.seen == []
    assert not (cache / "v1" / "ops").exists()
    assert not (cache / "v1" / "objects").exists()


@needs_nvcc
def test_code_that_cannot_run_on_the_visible_gpu_is_refused_with_the_reason(
    device: Package, machine: Callable[..., None]
) -> None:
    machine("9.0")
    with override(cuda_arch_list="8.0"), pytest.raises(LoadError, match=r"for 8\.0 cannot run"):
        device.builder(_asked_backend="cuda").jit_load()
    machine("7.5", "9.0")
    builder = device.builder(_asked_backend="cuda", LEAST=8)
    with (
        override(cuda_visible_devices="0", cuda_device_order="PCI_BUS_ID"),
        pytest.raises(LoadError, match=r"cannot run on this machine's 7\.5") as refused,
    ):
        builder.jit_load()
    assert "the op's filter left 9.0" in refused.value.why


@needs_nvcc
def test_an_old_card_that_nobody_may_use_costs_no_op(
    device: Package, machine: Callable[..., None]
) -> None:
    machine("6.1", "9.0")
    with (
        override(cuda_visible_devices="1", cuda_device_order="PCI_BUS_ID"),
        pytest.warns(ArchWarning, match="it is left out"),
    ):
        path, _ = artifact(device)
    assert fatbin.images(path) == ("sm_90",)


@needs_nvcc
def test_what_a_filter_removes_does_not_come_back_through_another_entry(
    device: Package, machine: Callable[..., None], steps: Steps
) -> None:
    wide, _ = artifact(device, cuda_arch_list="7.5;9.0")
    machine("9.0")
    builder = device.builder(_asked_backend="cuda", LEAST=8)
    found = wanted.artifact(builder.op())
    assert found.path != wide
    assert fatbin.images(found.path) == ("sm_90",)


@needs_nvcc
def test_another_list_in_the_same_process_is_another_library(device: Package) -> None:
    paths = set()
    for archs in ("8.0", "9.0", "8.0"):
        builder = device.builder(_asked_backend="cuda", _asked_archs=archs)
        paths.add(builder.load()._name)
    assert len(paths) == 2


@needs_nvcc
def test_a_toolkit_that_cannot_be_used_is_no_worse_than_none(
    device: Package, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made, _ = artifact(device, cuda_arch_list="9.0")
    broken = tmp_path / "toolkit" / "bin" / "nvcc"
    broken.parent.mkdir(parents=True)
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("OPKILN_CUDA_HOME", str(tmp_path / "toolkit"))
    with override(cuda_arch_list="9.0"):
        builder = device.builder(_asked_backend="cuda")
        builder.jit_load()
    loaded = loader.loaded_here()[builder.op().name][0]
    assert loaded.artifact is not None
    assert loaded.artifact.path == made


@needs_nvcc
def test_an_authors_header_below_the_toolkit_is_the_authors(
    device: Package, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    home = tmp_path / "toolkit"
    real = Path(os.path.realpath(shutil.which("nvcc") or "")).parents[1]
    real = Path("/usr/local/cuda") if not (real / "nvvm").exists() else real
    home.mkdir()
    for part in os.listdir(real):
        (home / part).symlink_to(real / part)
    (home / "bin").unlink()
    (home / "bin").mkdir()
    for program in os.listdir(real / "bin"):
        if program != "nvcc":
            (home / "bin" / program).symlink_to(real / "bin" / program)
    shutil.copy(real / "bin" / "nvcc", home / "bin" / "nvcc")
    monkeypatch.setenv("OPKILN_CUDA_HOME", str(home))
    mine = home / "share" / "mine"
    mine.mkdir(parents=True)
    shutil.move(device / "kernel.h", mine / "kernel.h")
    with override(cuda_arch_list="9.0"):
        op = device.builder(_asked_backend="cuda").op()
        op = op._replace(spec=op.spec._replace(include_dirs=(str(mine),)))
        wanted.artifact(op)
        assert explain(op).changes == ()
        (mine / "kernel.h").write_text("#define FACTOR 3\n")
        assert "kernel.h changed" in str(explain(op).changes)


@pytest.mark.parametrize(("visible", "backend"), [("0", "cuda"), ("", "cpu"), ("-1", "cpu")])
def test_a_process_that_may_use_no_gpu_gets_the_cpu_version(
    device: Package, machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch,
    visible: str, backend: str,
) -> None:  # fmt: skip
    machine("9.0")
    monkeypatch.setattr("opkiln.builder.cuda.torch_built_for", lambda: (True, False))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert device.builder().backend == backend
