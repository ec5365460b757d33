"""AMD GPUs: what the kernel's files say of them, and which of them the runtime would take."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from opkiln.errors import SettingError
from opkiln.machine.devices.amd import (
    AmdDevices,
    devices,
    get_rocm_gpu_arch,
    get_rocm_wavefront_size,
    visible,
)
from opkiln.settings import override

if TYPE_CHECKING:
    from pathlib import Path


def node(root: Path, number: int, **properties: int) -> Path:
    """One node of the driver's topology; without a ``gfx_target_version`` it is a CPU."""
    here = root / f"sys/class/kfd/kfd/topology/nodes/{number}"
    here.mkdir(parents=True)
    known = {"cpu_cores_count": 0, "simd_count": 440, "wave_front_size": 64, **properties}
    if "gfx_target_version" not in properties:
        known |= {"cpu_cores_count": 64, "simd_count": 0, "gfx_target_version": 0}
    (here / "properties").write_text("".join(f"{key} {value}\n" for key, value in known.items()))
    (here / "name").write_text("" if "gfx_target_version" not in properties else "aldebaran\n")
    return here


def card(root: Path, minor: int, memory: int, product: str = "") -> None:
    here = root / f"sys/class/drm/renderD{minor}/device"
    here.mkdir(parents=True)
    (here / "mem_info_vram_total").write_text(f"{memory}\n")
    if product:
        (here / "product_name").write_text(f"{product}\n")


@pytest.fixture
def mixed(tmp_path: Path) -> AmdDevices:
    """Two CPUs, two MI210, one MI300X, one RX 7900."""
    for number in (0, 1):
        node(tmp_path, number)
    node(tmp_path, 2, gfx_target_version=90010, unique_id=0xDEAD)
    node(tmp_path, 3, gfx_target_version=90010, unique_id=0xDEAF)
    node(tmp_path, 4, gfx_target_version=90402, unique_id=0xBEEF)
    node(tmp_path, 10, gfx_target_version=110000, wave_front_size=32)
    return devices(str(tmp_path))


@pytest.mark.parametrize(
    ("version", "arch"),
    [
        (90000, "gfx900"),
        (90008, "gfx908"),
        (90010, "gfx90a"),
        (90012, "gfx90c"),
        (90402, "gfx942"),
        (90500, "gfx950"),
        (100300, "gfx1030"),
        (110001, "gfx1101"),
        (110501, "gfx1151"),
        (120001, "gfx1201"),
    ],
)
def test_the_drivers_number_is_the_compilers_name(tmp_path: Path, version: int, arch: str) -> None:
    node(tmp_path, 0, gfx_target_version=version)
    assert [gpu.arch for gpu in devices(str(tmp_path)).gpus] == [arch]


def test_every_gpu_is_read_and_no_cpu(mixed: AmdDevices) -> None:
    assert [gpu.arch for gpu in mixed.gpus] == ["gfx90a", "gfx90a", "gfx942", "gfx1100"]
    assert [gpu.index for gpu in mixed.gpus] == [0, 1, 2, 3]
    assert [gpu.wavefront for gpu in mixed.gpus] == [64, 64, 64, 32]
    assert [gpu.uuid for gpu in mixed.gpus][2:] == ["GPU-000000000000beef", ""]


def test_name_and_memory_come_from_the_graphics_driver_where_it_tells(tmp_path: Path) -> None:
    node(tmp_path, 0, gfx_target_version=90010, drm_render_minor=128)
    node(tmp_path, 1, gfx_target_version=90010, drm_render_minor=129)
    node(tmp_path, 2, gfx_target_version=90010, drm_render_minor=130)
    card(tmp_path, 128, 64 << 30, "AMD Instinct MI210")
    card(tmp_path, 129, 32 << 30)
    told = [(gpu.name, gpu.memory) for gpu in devices(str(tmp_path)).gpus]
    assert told == [("AMD Instinct MI210", 64 << 30), ("aldebaran", 32 << 30), ("aldebaran", 0)]


def test_all_gpus_count_for_the_architectures_and_the_least_for_the_wavefront(
    mixed: AmdDevices, tmp_path: Path
) -> None:
    assert get_rocm_gpu_arch(str(tmp_path)) == "gfx90a;gfx942;gfx1100"
    assert get_rocm_wavefront_size(str(tmp_path)) == "32"


def test_gpus_of_one_kind_have_their_own_wavefront(tmp_path: Path) -> None:
    node(tmp_path, 0, gfx_target_version=90010)
    assert get_rocm_gpu_arch(str(tmp_path)) == "gfx90a"
    assert get_rocm_wavefront_size(str(tmp_path)) == "64"


def test_without_a_driver_there_is_no_gpu_and_the_reason_is_told(tmp_path: Path) -> None:
    assert devices(str(tmp_path)) == AmdDevices(why="there is no AMD GPU driver here")
    assert get_rocm_gpu_arch(str(tmp_path)) == ""
    assert get_rocm_wavefront_size(str(tmp_path)) == "32"


def test_a_gpu_that_is_withheld_is_left_out(tmp_path: Path) -> None:
    node(tmp_path, 0)
    os.unlink(node(tmp_path, 1, gfx_target_version=90010) / "properties")
    (node(tmp_path, 2, gfx_target_version=90402) / "properties").write_text("")
    assert devices(str(tmp_path)).gpus == ()
    assert devices(str(tmp_path)).why == "the AMD driver shows no GPU to this process"
    node(tmp_path, 3, gfx_target_version=90402)
    assert [(gpu.index, gpu.arch) for gpu in devices(str(tmp_path)).gpus] == [(0, "gfx942")]


def test_an_architecture_that_the_runtime_is_told_to_assume_is_assumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node(tmp_path, 0, gfx_target_version=100301, wave_front_size=32)
    monkeypatch.setenv("HSA_OVERRIDE_GFX_VERSION", "10.3.0")
    assert get_rocm_gpu_arch(str(tmp_path)) == "gfx1030"
    monkeypatch.setenv("HSA_OVERRIDE_GFX_VERSION", "9.0.10")
    assert get_rocm_gpu_arch(str(tmp_path)) == "gfx90a"
    monkeypatch.setenv("HSA_OVERRIDE_GFX_VERSION", "gfx1030")
    with pytest.raises(SettingError, match=r"HSA_OVERRIDE_GFX_VERSION='gfx1030'"):
        devices(str(tmp_path))


@pytest.mark.parametrize(
    ("rocr", "hip", "cuda", "expected"),
    [
        (None, None, None, [0, 1, 2, 3]),
        ("1,2", None, None, [1, 2]),
        ("", None, None, []),
        ("-1", None, None, []),
        ("2,9,1", None, None, [2]),
        ("2,2,1", None, None, [2]),  # a repetition ends the list
        ("GPU-000000000000BEEF,0", None, None, [2, 0]),
        ("gpu-000000000000bee", None, None, [2]),
        ("GPU-000000000000de", None, None, []),  # two begin like this
        ("GPU-", None, None, []),
        (None, "3,0", None, [3, 0]),
        (None, "2,2,1", None, [2, 1]),  # here it does not
        (None, "", None, [0, 1, 2, 3]),
        (None, "", "1", [1]),
        (None, None, "1", [1]),
        (None, None, "", [0, 1, 2, 3]),  # unlike to CUDA, an empty list hides nothing from HIP
        (None, "0", "1", [0]),
        (None, "first", None, []),
        ("1,2", "1", None, [2]),
        ("1,2", None, "0", [1]),
        ("1", "1", None, []),
    ],
)
def test_the_runtimes_filters_act_one_upon_the_other(
    mixed: AmdDevices,
    monkeypatch: pytest.MonkeyPatch,
    rocr: str | None,
    hip: str | None,
    cuda: str | None,
    expected: list[int],
) -> None:
    for name, value in (("ROCR", rocr), ("HIP", hip), ("CUDA", cuda)):
        if value is not None:
            monkeypatch.setenv(f"{name}_VISIBLE_DEVICES", value)
    assert [gpu.index for gpu in visible(mixed)] == expected


def test_a_choice_may_also_be_a_callers(mixed: AmdDevices) -> None:
    with override(hip_visible_devices="1"):
        assert [gpu.index for gpu in visible(mixed)] == [1]
