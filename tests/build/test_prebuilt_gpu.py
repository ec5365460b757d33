"""Libraries with GPU code that were built elsewhere: which GPUs, lists and drivers they serve.

There is no GPU here: what the driver would answer is put in its place. What is compiled is real.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from sample.package import Package
from sample.shipped import Shipped, rewrite

from opkiln.errors import CompilingOff
from opkiln.machine.binary import fatbin
from opkiln.machine.devices import nvidia
from opkiln.settings import override

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc on PATH")


@pytest.fixture
def shipped(
    package: Callable[..., Package], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Shipped:
    return Shipped(package("device"), "answer.cpp", tmp_path, monkeypatch)


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


CUDA = {"_asked_backend": "cuda"}


def taken(shipped: Shipped, leaf: Path) -> None:
    """It serves, and nothing is compiled."""
    with override(mode="cached"):
        library = shipped.load(**CUDA)
    assert library.answer() == 42
    assert shipped.opened[-1] == str(leaf / "device.so")


def refused(shipped: Shipped, reason: str, **settings: Any) -> None:
    """`explain` and the load both say why; what was shipped is not opened."""
    before = list(shipped.opened)
    with override(**settings):
        assert f"prebuilt  refused  {reason}" in shipped.explained(**CUDA)
        with override(mode="cached"), pytest.raises(CompilingOff):
            shipped.load(**CUDA)
    assert shipped.opened == before


def built(shipped: Shipped, **settings: Any) -> str:
    """What is compiled instead, and opened."""
    with override(**settings):
        shipped.load(**CUDA)
    assert "/prebuilt/" not in shipped.opened[-1]
    return shipped.opened[-1]


def test_code_for_another_gpu_is_refused_with_both_named_and_the_right_code_is_compiled(
    shipped: Shipped, machine: Callable[..., None]
) -> None:
    shipped.build(backend="cuda", cuda_arch_list="8.0")
    machine("9.0")
    refused(shipped, "its code is for 8.0, which does not run on 9.0")
    machine("8.0", "9.0")  # one of two is not enough
    refused(shipped, "its code is for 8.0, which does not run on 9.0")
    machine("9.0")
    assert fatbin.images(built(shipped)) == ("sm_90",)


def test_code_for_another_gpu_is_refused_where_a_list_asks_for_more(shipped: Shipped) -> None:
    leaf = shipped.build(backend="cuda", cuda_arch_list="8.0;9.0")
    refused(shipped, "its code is for 8.0;9.0, which does not run on 9.0a", cuda_arch_list="9.0a")
    refused(shipped, "its code is for 8.0;9.0, which does not run on 7.5", cuda_arch_list="7.5")
    with override(cuda_arch_list="8.0;9.0"):
        taken(shipped, leaf)
    assert fatbin.images(built(shipped, cuda_arch_list="9.0a")) == ("sm_90a",)


@pytest.mark.parametrize(
    ("made", "gpu"), [("8.0;9.0", "9.0"), ("9.0a", "9.0"), ("8.0", "8.6"), ("10.0f", "10.3")]
)
def test_code_that_runs_on_the_gpu_serves(
    shipped: Shipped, machine: Callable[..., None], made: str, gpu: str
) -> None:
    leaf = shipped.build(backend="cuda", cuda_arch_list=made)
    machine(gpu)
    taken(shipped, leaf)
    assert f"its code for {made} runs here" in shipped.trace


def test_the_images_in_the_file_count_not_the_list_it_was_built_for(
    shipped: Shipped, machine: Callable[..., None]
) -> None:
    leaf = shipped.build(backend="cuda", cuda_arch_list="8.0")
    rewrite(leaf, lambda manifest: manifest["target"].update(archs=["9.0"]))
    machine("9.0")
    refused(shipped, "its code is for 9.0, which does not run on 9.0")


def test_the_best_of_what_runs_is_taken(shipped: Shipped, machine: Callable[..., None]) -> None:
    for worse in ("8.0+PTX", "8.0"):
        shipped.build(backend="cuda", cuda_arch_list=worse)
    exact = shipped.build(backend="cuda", cuda_arch_list="8.6")
    machine("8.6")
    taken(shipped, exact)


def test_what_the_ops_filter_removes_is_refused(
    shipped: Shipped, machine: Callable[..., None]
) -> None:
    shipped.build(backend="cuda", cuda_arch_list="7.5;9.0")
    machine("9.0")
    said = shipped.explained(**CUDA, LEAST=8)
    assert "prebuilt  refused  it is for 7.5;9.0, of which the op's filter keeps less" in said


def test_ptx_that_is_newer_than_the_driver_is_refused(
    shipped: Shipped, machine: Callable[..., None]
) -> None:
    leaf = shipped.build(backend="cuda", cuda_arch_list="8.0+PTX")
    machine("9.0", cuda="13.0")
    taken(shipped, leaf)
    # As a newer nvcc of the same major writes it: its binaries would run, its PTX is not taken.
    rewrite(leaf, lambda manifest: manifest["toolchain"].update(nvcc="13.1.80"))
    refused(
        shipped,
        "only its PTX fits the GPU, which is of CUDA 13.1.80, and the driver here takes PTX up to "
        "CUDA 13.0",
    )
    machine("8.0", cuda="13.0")
    taken(shipped, leaf)
    machine("9.0", cuda="13.0")
    assert fatbin.images(built(shipped)) == ("sm_90",)


def test_a_library_of_a_newer_cuda_than_the_drivers_is_refused(
    shipped: Shipped, machine: Callable[..., None]
) -> None:
    shipped.build(backend="cuda", cuda_arch_list="9.0")
    machine("9.0", cuda="12.9")
    refused(shipped, "it is built with CUDA 13.")


def test_a_process_that_may_use_one_of_two_gpus_is_served_by_code_for_that_one(
    shipped: Shipped, machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    leaf = shipped.build(backend="cuda", cuda_arch_list="8.0")
    machine("9.0", "8.0")
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    taken(shipped, leaf)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    refused(shipped, "its code is for 8.0, which does not run on 9.0")
