"""NVIDIA GPUs: none without a driver, what nvidia-smi says, what is remembered, what is visible."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from sample import child
from sample.nvidia import A100, B200, H200, Card, script, smi, tree

from opkiln.machine.devices import nvidia, nvidia_driver
from opkiln.machine.devices.nvidia import NvidiaDevices, NvidiaGPU, capabilities, devices, visible
from opkiln.settings import override

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

DIVIDED = A100._replace(parts=("MIG-44444444-dddd", "MIG-55555555-eeee"))


@pytest.fixture
def without_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the library cannot be opened: then nvidia-smi is asked."""
    monkeypatch.setattr(nvidia_driver, "_LIBRARIES", ("libnvidia-ml-that-is-absent.so",))


@pytest.fixture
def machine(without_nvml: None, tmp_path: Path) -> Iterator[Path]:
    """A machine with an H200 and an A100, and its nvidia-smi alone on PATH."""
    smi(tmp_path / "bin/nvidia-smi", H200, A100)
    with override(path=(str(tmp_path / "bin"), "/usr/bin", "/bin")):
        yield tree(tmp_path / "root", H200, A100)


def afresh(memory: Path | None, root: Path) -> NvidiaDevices:
    """The answer that another process would get."""
    nvidia._known.clear()
    return devices((str(memory),) if memory else (), str(root))


def questions(machine: Path) -> int:
    """How often nvidia-smi was started."""
    log = machine.parent / "bin/nvidia-smi.asked"
    return len(log.read_text().splitlines()) if log.exists() else 0


def found(*cards: Card, how: str = "nvml") -> NvidiaDevices:
    gpus = (
        NvidiaGPU(index, card.uuid, card.name, card.capability, card.memory, card.parts)
        for index, card in enumerate(cards)
    )
    return NvidiaDevices(tuple(gpus), "580.65.06", "13.0", how)


# Without a driver


def test_without_a_driver_nothing_is_opened_imported_or_started(tmp_path: Path) -> None:
    code = """
    import json, sys
    from opkiln.machine.devices import nvidia
    seen = []
    sys.addaudithook(lambda event, arguments: seen.append([event, str(arguments)]))
    found = nvidia.devices((sys.argv[1] + "/memory",), sys.argv[1])
    used = list(seen)
    open(sys.argv[1] + "/heard", "w").close()
    print(json.dumps([used, len(seen) > len(used), found._asdict()]))
    """
    used, listening, answer = json.loads(child.run(code, str(tmp_path)))
    assert listening
    assert used == []
    assert answer["gpus"] == []
    assert answer["why"] == "there is no NVIDIA driver here"


def test_a_driver_that_is_loaded_later_is_seen(machine: Path, tmp_path: Path) -> None:
    assert devices((), str(tmp_path / "elsewhere")).how == ""
    tree(tmp_path / "elsewhere", H200)
    assert devices((), str(tmp_path / "elsewhere")).how == "nvidia-smi"


# nvidia-smi


def test_nvidia_smi_tells_of_every_gpu(machine: Path) -> None:
    answer = devices((), str(machine))
    assert answer == found(H200, A100, how="nvidia-smi")
    assert capabilities(answer) == ("8.0", "9.0")


def test_nvidia_smi_tells_of_the_parts_of_a_divided_gpu(machine: Path) -> None:
    smi(machine.parent / "bin/nvidia-smi", H200, DIVIDED)
    assert [gpu.parts for gpu in devices((), str(machine)).gpus] == [(), DIVIDED.parts]


def test_a_gpu_without_memory_of_its_own_has_none(machine: Path) -> None:
    smi(machine.parent / "bin/nvidia-smi", H200, memory="[N/A]")
    assert [gpu.memory for gpu in devices((), str(machine)).gpus] == [0]


def test_a_gpu_that_nvidia_smi_cannot_read_is_left_out_and_named(machine: Path) -> None:
    smi(machine.parent / "bin/nvidia-smi", H200, A100._replace(capability="[GPU is lost]"))
    answer = devices((), str(machine))
    assert [gpu.name for gpu in answer.gpus] == [H200.name]
    assert answer.why == "GPU 1: [GPU is lost]"


def test_a_failing_nvidia_smi_is_told_in_its_own_words(machine: Path) -> None:
    words = "Failed to initialize NVML: Driver/library version mismatch"
    script(machine.parent / "bin/nvidia-smi", f"echo '{words}'", "exit 18")
    answer = devices((), str(machine))
    assert answer.gpus == ()
    assert f"exits with 18 {words}" in answer.why


def test_a_driver_without_library_and_program_says_what_was_looked_for(
    without_nvml: None, tmp_path: Path
) -> None:
    with override(path=(str(tmp_path),)):
        answer = devices((), str(tree(tmp_path, H200)))
    assert answer.gpus == ()
    assert "libnvidia-ml-that-is-absent.so" in answer.why
    assert "no nvidia-smi on PATH" in answer.why


# Remembering


def test_a_process_asks_once(machine: Path) -> None:
    first = devices((), str(machine))
    asked = questions(machine)
    assert devices((), str(machine)) is first
    assert questions(machine) == asked > 0


def test_another_process_remembers(machine: Path, tmp_path: Path) -> None:
    first = afresh(tmp_path / "memory", machine)
    asked = questions(machine)
    assert afresh(tmp_path / "memory", machine) == first._replace(how="memo")
    assert questions(machine) == asked


def test_parts_are_remembered(machine: Path, tmp_path: Path) -> None:
    smi(machine.parent / "bin/nvidia-smi", DIVIDED)
    first = afresh(tmp_path / "memory", machine)
    assert first.gpus[0].parts == DIVIDED.parts
    assert afresh(tmp_path / "memory", machine) == first._replace(how="memo")


@pytest.mark.parametrize("change", ["driver", "gpu", "removed", "withheld"])
def test_what_was_remembered_of_other_gpus_is_not_believed(
    machine: Path, tmp_path: Path, change: str
) -> None:
    afresh(tmp_path / "memory", machine)
    smi(machine.parent / "bin/nvidia-smi", B200)
    if change == "driver":
        tree(machine, H200, A100, driver="590.1")
    elif change == "gpu":
        tree(machine, H200, B200)
    elif change == "removed":
        gone = machine / "proc/driver/nvidia/gpus/0000:01:00.0"
        (gone / "information").unlink()
        gone.rmdir()
    else:  # by a container or a batch system: the kernel module still tells of it
        (machine / "dev/nvidia1").unlink()
    answer = afresh(tmp_path / "memory", machine)
    assert answer == found(B200, how="nvidia-smi")


def test_what_a_reboot_changes_does_not_matter(machine: Path, tmp_path: Path) -> None:
    afresh(tmp_path / "memory", machine)
    for path in machine.glob("proc/driver/nvidia/gpus/*/information"):
        path.write_text(path.read_text().replace("IRQ:   \t\t 10", "IRQ:   \t\t 20"))
    assert afresh(tmp_path / "memory", machine).how == "memo"


def test_nothing_is_remembered_where_the_kernel_module_does_not_show_itself(
    machine: Path, tmp_path: Path
) -> None:
    (tmp_path / "sandbox/dev").mkdir(parents=True)
    (tmp_path / "sandbox/dev/nvidiactl").touch()
    assert afresh(tmp_path / "memory", tmp_path / "sandbox").how == "nvidia-smi"
    assert afresh(tmp_path / "memory", tmp_path / "sandbox").how == "nvidia-smi"
    assert not (tmp_path / "memory").exists()


def test_a_failure_is_not_remembered(machine: Path, tmp_path: Path) -> None:
    script(machine.parent / "bin/nvidia-smi", "exit 9")
    assert afresh(tmp_path / "memory", machine).gpus == ()
    smi(machine.parent / "bin/nvidia-smi", H200, A100)
    assert afresh(tmp_path / "memory", machine) == found(H200, A100, how="nvidia-smi")


def test_an_answer_that_leaves_a_gpu_out_is_not_remembered(machine: Path, tmp_path: Path) -> None:
    smi(machine.parent / "bin/nvidia-smi", H200, A100._replace(capability="[GPU is lost]"))
    assert len(afresh(tmp_path / "memory", machine).gpus) == 1
    smi(machine.parent / "bin/nvidia-smi", H200, A100)
    assert len(afresh(tmp_path / "memory", machine).gpus) == 2


def test_a_damaged_record_is_not_believed(machine: Path, tmp_path: Path) -> None:
    afresh(tmp_path / "memory", machine)
    (record,) = (tmp_path / "memory").iterdir()
    whole = json.loads(record.read_text())
    for damage in ({}, {"gpus": [{"index": 0}], "driver": "", "cuda": ""}, []):
        record.write_text(json.dumps({**whole, "answer": damage}))
        assert afresh(tmp_path / "memory", machine).how == "nvidia-smi"
        assert afresh(tmp_path / "memory", machine).how == "memo"


# Visibility


def seen(
    answer: NvidiaDevices, text: str | None, order: str = "FASTEST_FIRST"
) -> tuple[list[int], bool]:
    with override(cuda_visible_devices=text, cuda_device_order=order):
        gpus, certain = visible(answer)
    return [gpu.index for gpu in gpus], certain


ALIKE = found(H200, H200._replace(uuid="GPU-11119999-ffff"), H200._replace(uuid="GPU-77777777"))
MIXED = found(H200, DIVIDED, B200)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, [0, 1, 2]),
        ("0,1,2", [0, 1, 2]),
        ("2,0", [2, 0]),
        (" 1 , 2 ", [1, 2]),
        ("1gpu,+2", [1, 2]),
        ("", []),
        ("-1", []),
        ("none", []),
        ("3", []),
        ("0,2,-1,1", [0, 2]),
        ("0,99,1", [0]),
        ("0,,1", [0]),
        ("0,1,0", []),
        ("1,GPU-1111", [1]),
    ],
)
def test_indices_mean_what_they_mean_to_cuda(text: str | None, expected: list[int]) -> None:
    assert seen(ALIKE, text) == (expected, True)
    assert seen(MIXED, text, order="PCI_BUS_ID") == (expected, True)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("GPU-77777777", [2]),
        ("GPU-7", [2]),
        ("gpu-7", [2]),
        ("GPU-11111111-aaaa,GPU-7", [0, 2]),
        ("GPU-7,GPU-11111", [2, 0]),
        ("GPU-1111", []),  # two begin like this
        ("GPU-7,GPU-1111,GPU-11111", [2]),
        ("GPU-7,GPU-77", []),
        ("GPU-absent,GPU-7", []),
        ("GPU-7,0", [2]),
    ],
)
def test_uuids_mean_what_they_mean_to_cuda(text: str, expected: list[int]) -> None:
    assert seen(ALIKE, text) == (expected, True)


@pytest.mark.parametrize(
    ("text", "expected", "certain"),
    [
        ("MIG-44444444-dddd", [1], True),
        ("MIG-55555555-eeee,MIG-44444444-dddd", [1], True),
        ("MIG-55555555-eeee,MIG-55555555-eeee", [], True),
        ("MIG-GPU-22222222-bbbb/3/0", [1], True),
        ("GPU-33333333,MIG-4", [2, 1], True),
        ("MIG-99999999", [0, 1, 2], False),
    ],
)
def test_a_mig_instance_stands_for_its_gpu(text: str, expected: list[int], certain: bool) -> None:
    assert seen(MIXED, text) == (expected, certain)


def test_an_index_among_different_gpus_is_not_certain_unless_they_are_counted_by_address() -> None:
    assert seen(MIXED, "0") == ([0, 1, 2], False)
    assert seen(MIXED, "0", order="PCI_BUS_ID") == ([0], True)


def test_what_does_not_hang_on_the_order_is_certain() -> None:
    assert seen(MIXED, "") == ([], True)
    assert seen(MIXED, "3") == ([], True)
    assert sorted(seen(MIXED, "2,0,1")[0]) == [0, 1, 2]
    assert seen(MIXED, "2,0,1")[1]


def test_a_uuid_that_was_not_remembered_is_not_taken_for_wrong() -> None:
    assert seen(MIXED, "GPU-99999999") == ([], True)
    assert seen(MIXED._replace(how="memo"), "GPU-99999999") == ([0, 1, 2], False)


def test_an_empty_list_hides_every_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible(ALIKE) == ((), True)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert visible(ALIKE) == (ALIKE.gpus, True)


def test_capabilities_are_in_numeric_order_and_each_is_there_once() -> None:
    assert capabilities(found(B200, H200, A100, H200)) == ("8.0", "9.0", "10.0")
    assert capabilities(NvidiaDevices()) == ()
