"""gds: tensors of a device and files, by cuFile or by copies.

There is no GPU here. Two small libraries in C stand in for CUDA's driver and for cuFile, on memory
of the host. The dynamic linker finds them as it would find the real ones, so processes of their own
run with them: the cases of gds_cases.py, and the tests of test_async_io.py once more.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from sample import child, sanitizers

import opkiln
from opkiln import io
from opkiln.errors import ToolchainError, UsageError
from opkiln.machine.toolchain import toolkits
from opkiln.ops.gds import device

HERE = Path(__file__).parent
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a driver here")


class StandIns(NamedTuple):
    """The directories of the two libraries."""

    driver: Path
    cufile: Path


@pytest.fixture(scope="module")
def native() -> Any:
    try:
        opkiln.get_builder("async_io").jit_load(verbose=False)
        return opkiln.get_builder("gds").jit_load(verbose=False)
    except ToolchainError as error:
        pytest.skip(f"no native gds here: {error.what}")


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory: pytest.TempPathFactory) -> StandIns:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("stand-ins")
    for name, soname in (("cuda", "libcuda.so.1"), ("cufile", "libcufile.so.0")):
        (folder / name).mkdir()
        command = [compiler, "-shared", "-fPIC", "-O1", "-Wall", "-Werror", f"-Wl,-soname,{soname}"]
        command += ["-o", str(folder / name / soname), str(HERE / f"{name}_stand_in.c")]
        subprocess.run(command, check=True)
    return StandIns(folder / "cuda", folder / "cufile")


@pytest.mark.skipif(bool(sanitizers.flags()), reason="a process of its own lacks the sanitizer")
@pytest.mark.usefixtures("native")
@pytest.mark.parametrize(
    ("tests", "least"),
    [("gds_cases.py", 15), pytest.param("test_async_io.py", 40, marks=pytest.mark.full)],
    ids=["cases of its own", "those of async_io"],
)
def test_on_stand_ins(
    tests: str, least: int, stand_ins: StandIns, catalogue: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "-n", "0"]
    command += [f"--basetemp={tmp_path / 'run'}", str(HERE / tests)]
    if tests == "test_async_io.py":
        command += ["-k", "cufile or copies"]
    done = subprocess.run(
        command,
        check=False,
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
        timeout=600,
        env={
            **child.environment(),
            # Not LD_LIBRARY_PATH: that reaches compilers, and so is in the keys of ops.
            "LD_PRELOAD": f"{stand_ins.driver}/libcuda.so.1:{stand_ins.cufile}/libcufile.so.0",
            "GDS_STAND_INS": str(catalogue),
            "CUFILE_STAND_IN_NVFS": "2",
        },
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    passed = re.search(r"(\d+) passed", said)
    assert passed, said
    assert int(passed[1]) >= least, said


# Each is a process: what the environment says, whether libcufile is among the paths, the answer.
_ANSWERS = [
    (
        {"CUDA_STAND_IN_INIT": "100"},
        True,
        3,
        "CUDA's error 100, no CUDA-capable device is detected",
    ),
    ({}, False, 2, "libcufile.so.0: cannot open shared object file"),
    ({"CUFILE_STAND_IN_OPEN": "5001"}, True, 2, "cuFile's error 5001, its driver cannot be opened"),
    ({"CUFILE_STAND_IN_OPEN": "5099"}, True, 2, "cuFileDriverOpen: cuFile's error 5099"),
    ({"CUFILE_STAND_IN_NVFS": "2"}, True, 0, "libcufile.so.0, nvidia-fs 2.24"),
    ({"CUFILE_STAND_IN_P2P": "1"}, True, 0, "libcufile.so.0, PCI peer-to-peer"),
    ({"CUFILE_STAND_IN_OPEN": "5026"}, True, 1, "compatibility mode: nvidia-fs is not loaded"),
]


@pytest.mark.skipif(bool(sanitizers.flags()), reason="a process of its own lacks the sanitizer")
@NO_GPU
@pytest.mark.usefixtures("native")
def test_the_probe_says_what_there_is(stand_ins: StandIns) -> None:
    code = """
        import json, os, sys, torch
        from opkiln.ops.gds.op import GDSBuilder
        functions = GDSBuilder().load()
        torch.empty(0)
        for variables, path in json.loads(sys.argv[1]):
            if os.fork() == 0:
                os.environ.update(variables)
                print(*functions.gds_probe(torch.empty(0), True, path), flush=True)
                os._exit(0)
            os.wait()
    """
    path = f"/nowhere:{stand_ins.cufile / 'libcufile.so.0'}"
    asked = [(variables, path if there else "") for variables, there, _, _ in _ANSWERS]
    found = child.start(
        code, json.dumps(asked), env={"LD_PRELOAD": f"{stand_ins.driver}/libcuda.so.1"}, bare=False
    )
    out, err = found.communicate(timeout=120)
    assert found.returncode == 0, err
    for line, (_, _, state, words) in zip(out.splitlines(), _ANSWERS, strict=True):
        assert line.startswith(f"{state} ")
        assert words in line


@NO_GPU
@pytest.mark.usefixtures("native")
def test_a_machine_without_a_driver_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for each in (device.device_engines, device.probe):
        each.cache_clear()
    cufile, copies = io.device_engines()
    assert (cufile.usable, copies.usable) == (False, True)
    assert "CUDA's driver cannot be opened: libcuda.so.1: cannot open" in cufile.why
    files = io.AsyncIO("cufile")  # tensors of the host have their own engine
    files.write(torch.ones(3), tmp_path / "file").wait()
    monkeypatch.setattr("opkiln.io.handle._is_on_host", lambda _: False)
    with pytest.raises(UsageError, match="cuFile cannot be used here\n  CUDA's driver cannot be"):
        files.write(torch.ones(3), tmp_path / "file")
    files.close()
    with io.AsyncIO() as files:  # torch copies to a device without CUDA's driver
        room = torch.zeros(3)
        files.read(room, tmp_path / "file").wait()
        how = files.how()
    assert room.tolist() == [1, 1, 1]
    assert how is not None
    assert (how.engine, how.copied) == ("copies", 12)


def test_libcufile_is_looked_for_in_the_wheels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [tmp_path / "nvidia" / each / "lib" / "libcufile.so.0" for each in ("cu13", "cufile")]
    for each in made:
        each.parent.mkdir(parents=True)
        each.touch()
    (tmp_path / "nvidia" / "cublas" / "lib").mkdir(parents=True)
    monkeypatch.setattr(toolkits, "site_directories", lambda: [str(tmp_path)])
    device.libraries.cache_clear()
    try:
        assert device.libraries().split(":")[:2] == [str(each) for each in made]
    finally:
        device.libraries.cache_clear()
