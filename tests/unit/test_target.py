"""What a build here is for, and whether it could run here."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from sample.decisions import World
from sample.levels import AARCH64, HERE, IS_X86, LEVELS, OTHER, OTHER_LEVELS, X86_V1, kernel_flags

from opkiln.base.build_model import Target, TorchSDK
from opkiln.base.model import ABI_STABLE, ABI_TORCH, CPU, CUDA
from opkiln.decision import archs
from opkiln.errors import ArchError, LoadError
from opkiln.machine import uname
from opkiln.machine.arch import cpu
from opkiln.machine.toolchain import torch_sdk

if TYPE_CHECKING:
    from pathlib import Path

OTHER_LEVEL = OTHER_LEVELS[0]
LOW, HIGH = LEVELS[1], LEVELS[2]
SDK = TorchSDK("/torch", "2.13.0", "abc", "13.0", None, True)


@pytest.fixture
def world(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(uname, "cpu_flags", lambda: kernel_flags(HIGH))
    return World(tmp_path, cache, monkeypatch)


def test_op_is_built_for_this_machine(world: World) -> None:
    assert archs.target_of(world.spec, None, ("9.0",)) == Target(
        CPU, uname.system(), HERE, LOW, (), "none", False, (), ("9.0",)
    )
    vector = world.spec._replace(vectorize=True)
    assert archs.target_of(vector, None, ()).cpu == HIGH
    assert archs.features() == cpu.features_of(kernel_flags(HIGH))


def test_settings_name_the_cpu_the_flags_and_debugging(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPKILN_CPU", LOW)
    monkeypatch.setenv("OPKILN_DEBUG", "1")
    monkeypatch.setenv("CXXFLAGS", "-g -O1")
    monkeypatch.setenv("CUDAFLAGS", "-lineinfo")
    monkeypatch.setenv("DS_DEBUG_CUDA", "1")
    found = archs.target_of(world.spec._replace(vectorize=True), None, ())
    assert (found.cpu, found.debug) == (LOW, True)
    assert found.flags == (("cxxflags", ("-g", "-O1")),)
    gpu = archs.target_of(world.spec._replace(backend=CUDA), SDK, ("9.0",))
    assert dict(gpu.flags) == {
        "cxxflags": ("-g", "-O1"), "cudaflags": ("-lineinfo",), "debug_cuda": ("-Xptxas=-v",),
    }  # fmt: skip


def test_cpu_ops_follow_a_cpu_of_another_machine_and_plain_gpu_ops_do_not(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPKILN_CPU", OTHER_LEVEL)
    assert archs.target_machine() == OTHER
    assert archs.target_of(world.spec, None, ()).machine == OTHER
    assert archs.target_of(world.spec, None, ()).cpu == OTHER_LEVEL
    gpu = world.spec._replace(backend=CUDA)
    assert archs.target_of(gpu, None, ()).machine == HERE
    assert archs.target_of(gpu._replace(vectorize=True), None, ()).machine == OTHER


def test_abi_is_that_of_the_torch_it_is_built_with(world: World) -> None:
    full = archs.target_of(world.spec._replace(abi=ABI_TORCH), SDK, ())
    assert full.abi_tag == torch_sdk.full_abi_tag(SDK)


def test_cpu_that_means_nothing_is_told_with_its_variable(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPKILN_CPU", "abacus")
    with pytest.raises(ArchError) as raised:
        archs.target_cpu()
    assert raised.value.what == f"OPKILN_CPU='abacus': 'abacus' is not a CPU for {HERE}"
    assert raised.value.why.startswith("known: native, ")
    assert raised.value.hint == "unset OPKILN_CPU"
    from opkiln.settings import override

    with override(cpu="abacus"), pytest.raises(ArchError) as raised:
        archs.target_cpu()
    assert raised.value.what == f"'abacus' is not a CPU for {HERE}"
    assert raised.value.hint == "OPKILN_CPU=native"


def test_native_op_runs_on_linux_with_the_torch_it_needs(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_sdk, "find", lambda: SDK)
    assert archs.require_torch(world.spec) is None
    assert archs.require_torch(world.spec._replace(abi=ABI_STABLE)) == SDK
    old = SDK._replace(version="2.9.1")
    monkeypatch.setattr(torch_sdk, "find", lambda: old)
    assert archs.require_torch(world.spec._replace(abi=ABI_TORCH)) == old
    with pytest.raises(LoadError) as raised:
        archs.require_torch(world.spec._replace(abi=ABI_STABLE))
    assert raised.value.what == "op op needs torch 2.10 or later"
    assert raised.value.why == "torch 2.9.1 lacks the stable ABI"
    assert raised.value.hint == "pip install 'torch>=2.10'"
    monkeypatch.setattr(torch_sdk, "find", lambda: None)
    with pytest.raises(LoadError) as raised:
        archs.require_torch(world.spec._replace(abi=ABI_STABLE))
    assert str(raised.value).splitlines() == [
        "op op needs torch", "  torch is not installed", "hint: pip install torch",
    ]  # fmt: skip
    monkeypatch.setattr(uname, "system", lambda: "darwin")
    with pytest.raises(LoadError) as raised:
        archs.require_torch(world.spec)
    assert raised.value.what == "op op has no native version for darwin"
    assert raised.value.why == f"native ops are built and loaded on Linux, {X86_V1} and {AARCH64}"


def test_what_was_asked_for_by_name_and_cannot_run_here_is_refused(world: World) -> None:
    here = archs.target_of(world.spec, None, ())
    archs.require_cpu(world.spec, here._replace(cpu=HIGH))
    one, other = ("avx512bw", "avx512f") if IS_X86 else ("sve", "sve2")
    with pytest.raises(LoadError) as raised:
        archs.require_cpu(world.spec, here._replace(cpu=LOW, cpu_features=(one, other)))
    assert raised.value.what == f"op op for {LOW}+{one}+{other} cannot run here"
    assert raised.value.why == f"it needs {one}, {other}, which this CPU lacks"
    assert raised.value.hint == "OPKILN_CPU=native"
    with pytest.raises(LoadError) as raised:
        archs.require_cpu(world.spec, here._replace(machine=OTHER, cpu=OTHER_LEVEL))
    assert raised.value.why == f"it needs {OTHER}, which this CPU lacks"
