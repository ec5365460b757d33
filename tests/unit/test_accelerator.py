"""The accelerators' interface: every method on every class, for real where there is the device."""

from __future__ import annotations

import mmap
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from sample import child, conformance, recorder

from opkiln.accelerator import detect, gpus
from opkiln.accelerator.cpu import CpuAccelerator, HostEvent
from opkiln.accelerator.gpus import CudaAccelerator, MpsAccelerator, RocmAccelerator
from opkiln.accelerator.interface import Accelerator
from opkiln.errors import AcceleratorError

# The methods that code written against DeepSpeed's accelerators may call.
DEEPSPEED = [
    "is_synchronized_device",
    "use_host_timers",
    "resolves_data_dependency",
    "handles_memory_backpressure",
    "device_name",
    "device",
    "set_device",
    "current_device",
    "current_device_name",
    "device_count",
    "synchronize",
    "random",
    "set_rng_state",
    "get_rng_state",
    "manual_seed",
    "manual_seed_all",
    "initial_seed",
    "default_generator",
    "Stream",
    "stream",
    "current_stream",
    "default_stream",
    "Event",
    "empty_cache",
    "memory_allocated",
    "max_memory_allocated",
    "reset_max_memory_allocated",
    "memory_cached",
    "max_memory_cached",
    "reset_max_memory_cached",
    "memory_stats",
    "reset_peak_memory_stats",
    "memory_reserved",
    "max_memory_reserved",
    "total_memory",
    "available_memory",
    "is_bf16_supported",
    "is_fp16_supported",
    "supported_dtypes",
    "is_available",
    "range_push",
    "range_pop",
    "lazy_call",
    "communication_backend_name",
    "communication_backend_version",
    "is_triton_supported",
    "prefer_triton_grouped_mm",
    "create_graph",
    "capture_to_graph",
    "replay_graph",
    "BFloat16Tensor",
    "ByteTensor",
    "DoubleTensor",
    "FloatTensor",
    "HalfTensor",
    "IntTensor",
    "LongTensor",
    "pin_memory",
    "unpin_memory",
    "is_pinned",
    "on_accelerator",
    "op_builder_dir",
    "create_op_builder",
    "get_op_builder",
    "build_extension",
    "export_envs",
    "visible_devices_envs",
    "set_visible_devices_envs",
    "get_compile_backend",
    "set_compile_backend",
]


def test_it_has_the_names_that_users_of_deepspeed_know() -> None:
    assert [name for name in DEEPSPEED if not hasattr(Accelerator, name)] == []


def test_the_suite_checks_every_method_that_there_is() -> None:
    methods = {
        name
        for name in dir(Accelerator)
        if name.islower() or name in conformance.PROPERTIES
        if not name.startswith("_")
    }
    about = {"name", "device_type", "look", "supports_nvtx_domain"}
    assert methods - about == {check.method for check in conformance.CHECKS}


def test_the_cpu_does_all_of_it_for_real() -> None:
    # In a process of its own: in this one, torch's allocator may have memory to hand out.
    code = """
from sample import conformance
from opkiln.accelerator.cpu import CpuAccelerator
accelerator = CpuAccelerator()
print(conformance.failures(accelerator), conformance.behaviours(accelerator))
"""
    assert child.run(code, path=[Path(__file__).parents[1]], bare=False) == "[] []\n"


@pytest.mark.parametrize("name", ["cuda", "rocm", "xpu", "mps"])
def test_torchs_own_devices_are_asked_what_torchs_modules_have(name: str) -> None:
    module = recorder.module(name)
    accelerator = detect.KINDS[name](module)
    assert conformance.failures(accelerator, module) == []


def test_a_stand_in_refuses_what_the_real_module_does_not_have() -> None:
    module = recorder.module("xpu")
    with pytest.raises(AttributeError, match=r"torch\.xpu has no default_stream"):
        module.default_stream()
    with pytest.raises(TypeError):
        module.memory_allocated(0, "too much")


# What follows from the device


@pytest.mark.parametrize(
    ("capability", "fp16", "bf16", "fp8"),
    [
        ((6, 1), False, False, False),
        ((7, 5), True, False, False),
        ((8, 0), True, True, False),
        ((8, 9), True, True, True),
        ((10, 0), True, True, True),
    ],
)
def test_an_nvidia_gpus_dtypes_follow_from_its_capability(
    capability: tuple[int, int], fp16: bool, bf16: bool, fp8: bool
) -> None:
    module = recorder.module("cuda")
    module._answers["get_device_capability"] = lambda *_: capability
    cuda = CudaAccelerator(module)
    assert cuda.is_fp16_supported() is fp16
    assert cuda.is_bf16_supported() is bf16
    assert cuda.is_fp8_supported() is fp8
    assert (torch.bfloat16 in cuda.supported_dtypes()) is bf16


@pytest.mark.parametrize(("arch", "fp8"), [("gfx90a:xnack-", False), ("gfx942", True)])
def test_an_amd_gpus_dtypes_follow_from_its_architecture(arch: str, fp8: bool) -> None:
    module = recorder.module("rocm")
    module._answers["get_device_properties"]().gcnArchName = arch
    rocm = RocmAccelerator(module)
    assert rocm.is_fp8_supported() is fp8
    assert rocm.is_bf16_supported()


@pytest.mark.parametrize(("model", "has"), [("GAUDI", False), ("GAUDI2", True), ("GAUDI3", True)])
def test_a_gaudis_dtypes_follow_from_its_model(model: str, has: bool) -> None:
    module = recorder.module("hpu")
    module._answers["get_device_name"] = lambda *_: model
    hpu = gpus.VENDORS["hpu"](module)
    assert (hpu.is_fp16_supported(), hpu.is_fp8_supported()) == (has, has)


def test_rocm_is_an_accelerator_of_its_own_whose_devices_torch_calls_cuda() -> None:
    rocm = RocmAccelerator(recorder.module("rocm"))
    assert (rocm.name, rocm.device_name(1), rocm._name) == ("rocm", "cuda:1", "cuda")
    builder = rocm.create_op_builder("fused_adam")
    assert builder is not None
    assert builder.backend == "rocm"
    environment: dict[str, str] = {}
    rocm.set_visible_devices_envs(environment, [1])
    assert environment == {"HIP_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "1"}


# Where something is not there


def test_what_has_no_graphs_says_so_before_anything_is_lost() -> None:
    cpu = CpuAccelerator()
    assert cpu.create_graph() is None
    with pytest.raises(AcceleratorError, match="there are no graphs on cpu"):
        cpu.capture_to_graph(None)
    with pytest.raises(AcceleratorError, match="there are no graphs on cpu"):
        cpu.replay_graph(None)


def test_a_compile_backend_that_torch_lacks_is_an_error_that_lists_those_it_has() -> None:
    cpu = CpuAccelerator()
    with pytest.raises(ValueError, match="no backend 'no_such'") as caught:
        cpu.set_compile_backend("no_such")
    assert "inductor" in str(caught.value)
    assert cpu.get_compile_backend() == "inductor"


def test_one_accelerators_compile_backend_is_not_anothers() -> None:
    one, other = CpuAccelerator(), CpuAccelerator()
    one.set_compile_backend("eager")
    assert (one.get_compile_backend(), other.get_compile_backend()) == ("eager", "inductor")


def test_a_sensor_that_needs_a_package_names_it() -> None:
    def absent(*device: int) -> int:
        raise ModuleNotFoundError("pynvml does not seem to be installed")

    module = recorder.module("cuda")
    module._answers["temperature"] = absent
    with pytest.raises(AcceleratorError, match="pynvml does not seem to be installed"):
        CudaAccelerator(module).temperature()


def test_events_that_were_not_recorded_have_no_distance() -> None:
    begin, end = HostEvent(enable_timing=True), HostEvent(enable_timing=True)
    begin.record()
    with pytest.raises(RuntimeError, match="both events must be recorded"):
        begin.elapsed_time(end)


@pytest.mark.parametrize("arguments", [{}, {"device": "cpu", "priority": -1}])
def test_a_cpu_stream_does_all_that_a_cuda_stream_does(arguments: dict[str, Any]) -> None:
    cpu = CpuAccelerator()
    stream = cpu.Stream(**arguments)
    stream.wait_stream(cpu.current_stream())
    with stream as entered:
        assert entered is stream is cpu.current_stream()
        begin = stream.record_event()
    assert cpu.current_stream() is cpu.default_stream()
    end = HostEvent(enable_timing=True)
    assert stream.record_event(end) is end
    stream.wait_event(end)
    stream.synchronize()
    assert stream.query() is True
    assert begin.elapsed_time(end) > 0


@pytest.mark.parametrize("theirs", [torch.cpu.Stream(), torch.Stream(device="cpu")])
def test_torchs_own_cpu_streams_can_be_chosen(theirs: Any) -> None:
    cpu = CpuAccelerator()
    with cpu.stream(theirs):
        assert cpu.current_stream() is theirs
        with cpu.stream(None):
            assert cpu.current_stream() is theirs
        cpu.Stream().wait_stream(theirs)
    assert cpu.current_stream() is cpu.default_stream()


def test_a_stream_is_the_current_one_of_its_thread_alone_and_until_an_error() -> None:
    cpu, seen = CpuAccelerator(), []
    with pytest.raises(KeyError), cpu.stream(cpu.Stream()):  # noqa: PT012 (what goes on inside)
        other = threading.Thread(target=lambda: seen.append(cpu.current_stream()))
        other.start()
        other.join()
        raise KeyError
    assert seen == [cpu.default_stream()]
    assert cpu.current_stream() is cpu.default_stream()


def test_a_stream_of_a_device_that_runs_ahead_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[str] = []
    monkeypatch.setattr(torch.mps, "synchronize", lambda: waits.append("mps"))
    mps = MpsAccelerator(recorder.module("mps"))
    mps.current_stream().synchronize()
    assert mps.Stream().query() is True
    assert waits == ["mps", "mps"]
    with mps.stream(mps.Stream()):
        assert CpuAccelerator().current_stream() is CpuAccelerator().default_stream()


def test_nvidias_communication_library_tells_its_version() -> None:
    module = recorder.module("cuda")
    assert CudaAccelerator(module).communication_backend_version() == (2, 27, 5)
    assert module.calls == ["nccl.version"]


def test_a_triton_without_a_spec_is_a_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", ModuleType("triton"))
    assert CudaAccelerator(recorder.module("cuda")).is_triton_supported()


def test_the_cpus_peak_is_counted_anew_after_a_reset() -> None:
    cpu = CpuAccelerator()
    cpu.reset_peak_memory_stats()
    with mmap.mmap(-1, 256 << 20) as block:  # not by torch, which may keep what is given back
        block.write(bytes(len(block)))
        high = cpu.max_memory_allocated()
    cpu.reset_peak_memory_stats()
    assert cpu.max_memory_allocated() < high - (200 << 20)


def test_seeding_the_cpu_seeds_no_other_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "manual_seed_all", pytest.fail)
    CpuAccelerator().manual_seed(3)
    assert torch.initial_seed() == 3
