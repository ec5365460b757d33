"""Which accelerator is found: because a device answers, once, and without touching it."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from sample import child, nvidia
from sample.package import HERE

import opkiln
from opkiln.accelerator import detect
from opkiln.accelerator.cpu import CpuAccelerator
from opkiln.accelerator.gpus import CudaAccelerator
from opkiln.base.build_model import TorchSDK
from opkiln.builder import SYCLOpBuilder
from opkiln.errors import AcceleratorError
from opkiln.machine.devices import choice
from opkiln.machine.toolchain import torch_sdk
from opkiln.report import operators
from opkiln.settings import override

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from opkiln.accelerator.interface import Answer


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A process that has not looked yet, on a machine without devices."""
    monkeypatch.setattr(detect, "_found", {})
    monkeypatch.setattr(detect, "ROOT", str(tmp_path / "system"))
    yield tmp_path / "system"
    choice.set_given(None)


@pytest.fixture
def torch_with(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Path]:
    """Says what the torch that is installed is built for."""

    def have(cuda: str | None = None, hip: str | None = None) -> Path:
        sdk = TorchSDK(str(tmp_path), "2.13.0", "id", cuda, hip, True)
        monkeypatch.setattr(torch_sdk, "find", lambda: sdk)
        for module in ("base", "cuda"):  # which ask the torch of this process if it is imported
            name = f"opkiln.builder.{module}.torch_built_for"
            monkeypatch.setattr(name, lambda: (cuda is not None, hip is not None))
        return tmp_path

    return have


@pytest.fixture
def h200(fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with a driver that answers through nvidia-smi."""
    nvidia.smi(tmp_path / "bin" / "nvidia-smi", nvidia.H200)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    return nvidia.tree(fresh, nvidia.H200)


def amd_gpu(root: Path) -> None:
    node = root / "sys/class/kfd/kfd/topology/nodes/1"
    node.mkdir(parents=True)
    (node / "properties").write_text("simd_count 440\ngfx_target_version 90402\n")
    (node / "name").write_text("aqua_vanjaram\n")


def intel_gpu(root: Path) -> None:
    device = root / "sys/class/drm/renderD128/device"
    device.mkdir(parents=True)
    (device / "vendor").write_text("0x8086\n")
    node = root / "dev/dri/renderD128"
    node.parent.mkdir(parents=True)
    node.touch()


def answer(name: str) -> Answer:
    return next(each for each in detect.survey() if each.name == name)


# Finding


def test_without_a_device_it_is_the_cpu_and_the_trace_says_why_nothing_else() -> None:
    assert opkiln.get_accelerator().name == "cpu"
    names = [each.name for each in detect.trace()]
    assert names == ["cuda", "rocm", "xpu", "hpu", "npu", "mlu", "sdaa", "supa", "mps", "cpu"]
    assert [each.name for each in detect.trace() if each.present] == ["cpu"]
    assert all(each.why for each in detect.trace())
    assert detect.trace() == detect.survey()
    assert tuple(detect.KINDS) == choice.OWN


def test_an_nvidia_gpu_that_answers_is_taken(h200: Path, torch_with: Callable[..., Path]) -> None:
    torch_with(cuda="13.0")
    assert opkiln.get_accelerator().name == "cuda"
    assert detect.trace()[-1].why == "1 x NVIDIA H200, asked by nvidia-smi"


def test_a_gpu_that_is_hidden_from_the_process_is_not_taken(
    h200: Path, torch_with: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch_with(cuda="13.0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert opkiln.get_accelerator().name == "cpu"
    assert answer("cuda").why == "CUDA_VISIBLE_DEVICES='' leaves none of 1 GPUs"


def test_a_gpu_that_torch_cannot_drive_is_not_taken(
    h200: Path, torch_with: Callable[..., Path]
) -> None:
    torch_with()
    assert opkiln.get_accelerator().name == "cpu"
    expected = "torch 2.13.0 is built without CUDA; the GPU is there: NVIDIA H200"
    assert answer("cuda").why == expected


def test_an_amd_gpu_is_rocms(fresh: Path, torch_with: Callable[..., Path]) -> None:
    amd_gpu(fresh)
    torch_with(cuda="13.0")
    assert "built without ROCm; the GPU is there: gfx942" in answer("rocm").why
    torch_with(hip="6.2")
    assert opkiln.get_accelerator().name == "rocm"
    assert detect.trace()[-1].why == "1 x aqua_vanjaram (gfx942)"


def test_cuda_by_name_is_rocm_where_torch_is_built_for_rocm(
    fresh: Path, torch_with: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    amd_gpu(fresh)
    torch_with(hip="6.2")
    monkeypatch.setenv("DS_ACCELERATOR", "cuda")
    assert opkiln.get_accelerator().name == "rocm"
    assert opkiln.get_builder("fused_adam").backend == "rocm"


def test_an_intel_gpu_is_xpus_where_torch_has_xpu(
    fresh: Path, torch_with: Callable[..., Path]
) -> None:
    intel_gpu(fresh)
    where = torch_with()
    assert "built without XPU; the GPU is there: renderD128" in answer("xpu").why
    (where / "lib").mkdir()
    (where / "lib" / "libtorch_xpu.so").touch()
    assert opkiln.get_accelerator().name == "xpu"


def test_an_intel_gpu_that_the_process_cannot_open_is_not_taken(
    fresh: Path, torch_with: Callable[..., Path]
) -> None:
    intel_gpu(fresh)
    where = torch_with()
    (where / "lib").mkdir()
    (where / "lib" / "libtorch_xpu.so").touch()
    (fresh / "dev/dri/renderD128").unlink()  # as in a container that was given no GPU
    assert opkiln.get_accelerator().name == "cpu"
    assert answer("xpu").why == "not open to this user: /dev/dri/renderD128"


def test_without_torch_the_cpu_is_found_all_the_same(
    h200: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_sdk, "find", lambda: None)
    assert opkiln.get_accelerator().name == "cpu"
    assert answer("cuda").why == "torch is not installed; the GPU is there: NVIDIA H200"


# Asking for one


def test_asking_for_cuda_without_a_gpu_is_an_error_that_says_so_and_lists_what_can(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OPKILN_ACCELERATOR", "cuda")
    with pytest.raises(AcceleratorError) as caught:
        opkiln.get_accelerator()
    lines = str(caught.value).splitlines()
    expected = "OPKILN_ACCELERATOR=cuda cannot be used: there is no NVIDIA driver here"
    assert lines[0] == expected
    assert lines[1].startswith("  cpu can: ")
    assert "  rocm cannot: there is no AMD GPU driver here" in lines
    assert lines[-1] == "hint: unset OPKILN_ACCELERATOR"


def test_a_name_that_no_accelerator_has_is_an_error() -> None:
    with override(accelerator="tpu"), pytest.raises(AcceleratorError) as caught:
        opkiln.get_accelerator()
    expected = "accelerator 'tpu' cannot be used: there is no accelerator of this name"
    assert caught.value.what == expected


def test_the_cpu_can_be_asked_for_where_there_is_a_gpu(
    h200: Path, torch_with: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch_with(cuda="13.0")
    monkeypatch.setenv("OPKILN_ACCELERATOR", "CPU")
    assert opkiln.get_accelerator().name == "cpu"
    monkeypatch.delenv("OPKILN_ACCELERATOR")
    assert opkiln.get_accelerator().name == "cuda"


def test_an_accelerator_that_is_set_wins_over_all_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPKILN_ACCELERATOR", "cuda")
    mine = CpuAccelerator()
    opkiln.set_accelerator(mine)
    assert opkiln.get_accelerator() is mine
    assert "set_accelerator() was given" in detect.trace()[0].why
    opkiln.set_accelerator(None)
    with pytest.raises(AcceleratorError):
        opkiln.get_accelerator()


def test_setting_one_that_has_no_device_is_an_error_and_changes_nothing() -> None:
    with pytest.raises(AcceleratorError) as caught:
        opkiln.set_accelerator(CudaAccelerator())
    assert caught.value.what == "accelerator 'cuda' cannot be used: there is no NVIDIA driver here"
    assert "cpu can: " in caught.value.why
    assert opkiln.get_accelerator().name == "cpu"


@pytest.mark.parametrize("wrong", ["cpu", CpuAccelerator, 3])
def test_setting_what_is_no_accelerator_is_an_error(wrong: Any) -> None:
    with pytest.raises(AcceleratorError, match=r"set_accelerator\(\) takes an accelerator"):
        opkiln.set_accelerator(wrong)


# Other packages'


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Installs a package whose accelerators these are: ``name=Class``."""

    def install(**entries: str) -> None:
        info = tmp_path / "site" / "outside-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outside\nVersion: 1.0\n")
        lines = [f"{name} = outside_accelerator:{kind}" for name, kind in entries.items()]
        (info / "entry_points.txt").write_text("\n".join(["[opkiln.accelerators]", *lines, ""]))
        monkeypatch.syspath_prepend(str(HERE / "outside"))
        monkeypatch.syspath_prepend(str(tmp_path / "site"))

    return install


def test_an_accelerator_of_another_package_is_found_before_opkilns_own(
    outside: Callable[..., None],
) -> None:
    outside(outside="OutsideAccelerator")
    found = opkiln.get_accelerator()
    assert (found.name, found.communication_backend_name()) == ("outside", "outccl")
    assert detect.trace() == (("outside", True, "the card in slot 3"),)
    builder = found.create_op_builder("fused_adam")
    assert builder is not None
    assert builder.backend == "cpu"


def test_another_packages_accelerator_without_its_device_does_not_win(
    outside: Callable[..., None],
) -> None:
    outside(
        absent="AbsentAccelerator",
        failing="FailingAccelerator",
        gone="NoSuchClass",
        unmade="UnmadeAccelerator",
        leaving="LeavingAccelerator",
    )
    assert opkiln.get_accelerator().name == "cpu"
    why = {each.name: each.why for each in detect.trace()}
    assert why["absent"] == "slot 3 is empty"
    assert why["failing"].endswith("OSError: libfailing.so: cannot open shared object file")
    assert "AttributeError" in why["gone"]
    assert why["unmade"].endswith("RuntimeError: the card is held by another process")
    assert why["leaving"].endswith("SystemExit: no licence")


def test_another_packages_accelerator_can_be_asked_for_by_name(
    outside: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    outside(first="OutsideAccelerator", Second="OutsideAccelerator", absent="AbsentAccelerator")
    monkeypatch.setenv("OPKILN_ACCELERATOR", "second")
    assert opkiln.get_accelerator().name == "outside"
    monkeypatch.setenv("OPKILN_ACCELERATOR", "absent")
    with pytest.raises(AcceleratorError, match="absent cannot be used: slot 3 is empty"):
        opkiln.get_accelerator()


def test_another_packages_accelerator_that_cannot_be_made_is_refused_by_name_too(
    outside: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    outside(unmade="UnmadeAccelerator")
    monkeypatch.setenv("OPKILN_ACCELERATOR", "unmade")
    with pytest.raises(AcceleratorError, match=r"unmade cannot be used: .*held by another process"):
        opkiln.get_accelerator()


def test_one_that_was_written_for_deepspeed_serves_too(outside: Callable[..., None]) -> None:
    outside(theirs="ForDeepSpeed")
    assert opkiln.get_accelerator().device_name() == "theirs"


def test_another_package_cannot_take_the_name_of_one_of_opkilns(
    outside: Callable[..., None],
) -> None:
    outside(cpu="OutsideAccelerator")
    assert type(opkiln.get_accelerator()) is CpuAccelerator
    assert detect.trace()[0].why.endswith("the name is opkiln's own")


# Once, lazily, in threads and after a fork


def in_a_child(code: str, *, forked: bool = True) -> list[str]:
    return child.run(code, bare=False, forked=forked).splitlines()


def test_it_is_found_without_torch_and_without_reading_entry_points() -> None:
    told = in_a_child("""
        import sys, opkiln
        print("opkiln.accelerator" in sys.modules)
        opkiln.get_accelerator()
        print("torch" in sys.modules, "importlib.metadata" in sys.modules)
        opkiln.get_accelerator().create_op_builder("fused_adam")
        print("torch" in sys.modules)
    """, forked=False)  # fmt: skip
    assert told == ["False", "False False", "False"]


@pytest.mark.timed
def test_many_threads_get_one_object_that_was_looked_for_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks = []
    first = detect._find_first

    def slow() -> Any:
        looks.append(threading.get_ident())
        time.sleep(0.05)
        return first()

    monkeypatch.setattr(detect, "_find_first", slow)
    found: list[Any] = []
    threads = [
        threading.Thread(target=lambda: found.append(opkiln.get_accelerator())) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(looks) == 1
    assert len(found) == 8
    assert all(each is found[0] for each in found)


@pytest.mark.timed
def test_a_child_that_is_forked_while_another_thread_looks_finds_it_itself() -> None:
    told = in_a_child("""
        import os, signal, threading, opkiln
        from opkiln.accelerator import detect
        inside, leave = threading.Event(), threading.Event()
        first = detect._find_first
        def slow():
            inside.set()
            leave.wait()
            return first()
        detect._find_first = slow
        looking = threading.Thread(target=opkiln.get_accelerator)
        looking.start()
        inside.wait()
        child = os.fork()
        if child == 0:
            signal.alarm(20)  # a child that waits for a thread it does not have is killed
            detect._find_first = first
            os._exit(0 if opkiln.get_accelerator().name == "cpu" else 1)
        print(os.waitpid(child, 0)[1])
        leave.set()
        looking.join()
        print(opkiln.get_accelerator().name)
    """)
    assert told == ["0", "cpu"]


def test_a_forked_child_has_its_parents_accelerator() -> None:
    told = in_a_child("""
        import os, opkiln
        mine = opkiln.get_accelerator()
        child = os.fork()
        if child == 0:
            os._exit(0 if opkiln.get_accelerator() is mine else 1)
        print(os.waitpid(child, 0)[1])
    """)
    assert told == ["0"]


# Builders follow what is asked for


class Both(SYCLOpBuilder):
    """An op with a SYCL and a plain version."""

    NAME = "both"
    BACKENDS = ("xpu", "cpu")


@pytest.mark.parametrize(
    ("asked", "fused_adam", "cpu_adam", "both"),
    [
        ("cuda", "cuda", "cpu", "cpu"),
        ("cpu", "cpu", "cpu", "cpu"),
        ("xpu", "cpu", "cpu", "xpu"),
        ("npu", "cpu", "cpu", "cpu"),
    ],
)
def test_a_builder_serves_the_accelerator_that_is_asked_for(
    asked: str, fused_adam: str, cpu_adam: str, both: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert opkiln.get_builder("fused_adam").backend == "cpu"
    assert Both().backend == "xpu"
    monkeypatch.setenv("OPKILN_ACCELERATOR", asked)
    assert opkiln.get_builder("fused_adam").backend == fused_adam
    assert opkiln.get_builder("cpu_adam").backend == cpu_adam
    assert Both().backend == both


@pytest.mark.parametrize("make", [lambda: opkiln.get_builder("fused_adam"), Both])
def test_a_builder_refuses_a_name_that_no_accelerator_has(
    make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPKILN_ACCELERATOR", "nonsense")
    expected = "OPKILN_ACCELERATOR=nonsense cannot be used: there is no accelerator of this name"
    with pytest.raises(AcceleratorError) as caught:
        _ = make().backend
    assert caught.value.what == expected
    assert caught.value.why == "known: " + ", ".join(choice.OWN)
    assert caught.value.hint == "unset OPKILN_ACCELERATOR"


def test_an_op_is_not_compatible_with_an_accelerator_that_does_not_exist(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OPKILN_ACCELERATOR", "nonsense")
    builder = opkiln.get_builder("fused_adam")
    assert not builder.is_compatible()
    assert "there is no accelerator of this name" in str(builder.error_log)


def test_a_builder_takes_the_name_of_another_packages_accelerator(
    outside: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    outside(Mine="AbsentAccelerator")
    monkeypatch.setenv("OPKILN_ACCELERATOR", "mine")
    assert opkiln.get_builder("fused_adam").backend == "cpu"


def test_a_builder_refuses_rocm_where_torch_is_built_without_it(
    torch_with: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPKILN_ACCELERATOR", "rocm")
    torch_with(cuda="13.0")
    with pytest.raises(AcceleratorError, match=r"torch 2\.13\.0 is built without ROCm"):
        _ = opkiln.get_builder("fused_adam").backend
    torch_with(hip="6.2")
    assert opkiln.get_builder("fused_adam").backend == "rocm"


def test_the_report_has_a_row_for_an_op_whose_accelerator_does_not_exist(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OPKILN_ACCELERATOR", "nonsense")
    rows = {row.op: row for row in operators.statuses()}
    assert "there is no accelerator of this name" in rows["fused_adam"].error
    assert rows["cpu_adam"].error == ""


def test_a_builder_follows_the_accelerator_that_is_set(
    h200: Path, torch_with: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch_with(cuda="13.0")
    opkiln.set_accelerator(CpuAccelerator())
    assert opkiln.get_builder("fused_adam").backend == "cpu"
    assert opkiln.get_builder("fused_adam", backend="cuda").backend == "cuda"
