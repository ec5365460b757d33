"""NVML, by a library that stands in for the driver's: what is read, and that nothing is left."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from sample import child
from sample.nvidia import A100, H200, described, nvml, script, tree

if TYPE_CHECKING:
    from pathlib import Path

DIVIDED = A100._replace(parts=("MIG-44444444-dddd", "MIG-55555555-eeee"))

ASK = """
import json, sys
from opkiln.machine.devices import nvidia
print(json.dumps(nvidia.devices((), sys.argv[1])._asdict()))
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return nvml(tmp_path_factory.mktemp("nvml"))


def asked(code: str, library: Path, root: Path, **environment: str) -> Any:
    """What a process says in which this library is the driver's."""
    env = {
        "LD_LIBRARY_PATH": str(library),
        "STANDIN_LOG": str(root / "log"),
        "STANDIN_GPUS": described(H200, DIVIDED),
        **environment,
    }
    return json.loads(child.run(code, str(tree(root, H200, DIVIDED)), env=env))


def calls(root: Path) -> list[list[str]]:
    return [line.split() for line in (root / "log").read_text().splitlines()]


def test_every_gpu_is_read(library: Path, tmp_path: Path) -> None:
    answer = asked(ASK, library, tmp_path)
    assert answer["gpus"] == [
        [0, H200.uuid, H200.name, "9.0", H200.memory, []],
        [1, A100.uuid, A100.name, "8.0", A100.memory, list(DIVIDED.parts)],
    ]
    assert (answer["driver"], answer["cuda"], answer["how"]) == ("580.65.06", "13.2", "nvml")
    assert answer["why"] == ""


def test_it_is_ended_as_often_as_it_is_started(library: Path, tmp_path: Path) -> None:
    for environment in ({}, {"STANDIN_LOST": "0"}, {"STANDIN_GPUS": ""}):
        asked(ASK, library, tmp_path, **environment)
        names = [name for name, _ in calls(tmp_path)]
        assert names == ["init", "shutdown"]
        (tmp_path / "log").unlink()


def test_a_forked_child_may_ask_whether_or_not_its_parent_did(
    library: Path, tmp_path: Path
) -> None:
    code = """
    import json, os, sys
    from opkiln.machine.devices import nvidia

    def in_child(ask_again):
        reader, writer = os.pipe()
        if os.fork() == 0:
            if ask_again:
                nvidia._known.clear()
            os.write(writer, nvidia.devices((), sys.argv[1]).how.encode() + b" " +
                     str(len(nvidia.devices((), sys.argv[1]).gpus)).encode())
            os._exit(0)
        os.wait()
        return os.read(reader, 100).decode()

    before = in_child(False)
    nvidia.devices((), sys.argv[1])
    print(json.dumps([before, in_child(True), in_child(False)]))
    """
    assert asked(code, library, tmp_path) == ["nvml 2"] * 3
    pids = [pid for _, pid in calls(tmp_path)]
    # The first child, the parent, the second child; the third had its parent's answer.
    assert len(set(pids)) == 3
    assert [name for name, _ in calls(tmp_path)] == ["init", "shutdown"] * 3


def test_many_threads_may_ask_at_once(library: Path, tmp_path: Path) -> None:
    code = """
    import json, sys, threading
    from opkiln.machine.devices import nvidia

    found, ready = [], threading.Barrier(8)

    def ask():
        ready.wait()
        found.append(len(nvidia.devices((), sys.argv[1]).gpus))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    print(json.dumps(found))
    """
    assert asked(code, library, tmp_path) == [2] * 8
    names = [name for name, _ in calls(tmp_path)]
    assert names.count("init") == names.count("shutdown") >= 1


def test_a_lost_gpu_is_left_out_and_named(library: Path, tmp_path: Path) -> None:
    answer = asked(ASK, library, tmp_path, STANDIN_LOST="0")
    assert [gpu[1] for gpu in answer["gpus"]] == [A100.uuid]
    assert answer["why"].startswith("GPU 0: GPU is lost")


def test_a_driver_that_refuses_is_quoted_and_nvidia_smi_is_not_tried(
    library: Path, tmp_path: Path
) -> None:
    script(tmp_path / "bin/nvidia-smi", f"touch {tmp_path}/started")
    answer = asked(ASK, library, tmp_path, STANDIN_INIT="18", PATH=f"{tmp_path}/bin:/usr/bin:/bin")
    assert answer["gpus"] == []
    assert "the NVIDIA driver answers: Driver/library version mismatch" in answer["why"]
    assert not (tmp_path / "started").exists()


def test_a_driver_that_shows_no_gpu_says_so(library: Path, tmp_path: Path) -> None:
    answer = asked(ASK, library, tmp_path, STANDIN_GPUS="")
    assert (answer["gpus"], answer["driver"]) == ([], "580.65.06")
    assert answer["why"] == "the NVIDIA driver shows no GPU to this process"


def test_a_gpu_without_memory_of_its_own_has_none(library: Path, tmp_path: Path) -> None:
    answer = asked(ASK, library, tmp_path, STANDIN_GPUS=described(H200._replace(mebibytes=0)))
    assert [gpu[4] for gpu in answer["gpus"]] == [0]


def test_an_old_library_tells_what_it_knows(tmp_path: Path) -> None:
    answer = asked(ASK, nvml(tmp_path / "old", "-DOLD"), tmp_path)
    assert [gpu[3] for gpu in answer["gpus"]] == ["9.0", "8.0"]
    assert [gpu[5] for gpu in answer["gpus"]] == [[], []]
    assert answer["cuda"] == ""


def test_the_answer_is_remembered_for_processes_without_the_library(
    library: Path, tmp_path: Path
) -> None:
    code = ASK.replace("devices((),", "devices((sys.argv[1] + '/memory',),")
    first = asked(code, library, tmp_path)
    second = asked(code, tmp_path / "nowhere", tmp_path)
    assert (first["how"], second["how"]) == ("nvml", "memo")
    assert second["gpus"] == first["gpus"]
