"""What AsyncIO does with tensors of a device: run by test_gds.py, in a process whose CUDA driver
and cuFile are the stand-ins, and where tensors on the CPU count as a device's."""

from __future__ import annotations

import ctypes
import errno
import gc
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import opkiln
from opkiln import io
from opkiln.compat.deepspeed.modules import OpModule
from opkiln.errors import UsageError
from opkiln.io import AsyncIO, Transfer, handle
from opkiln.ops.gds import device
from opkiln.ops.gds.functions import REFERENCES as reference

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE = 4096


@pytest.fixture(autouse=True)
def everything_is_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handle, "_is_on_host", lambda _: False)


@pytest.fixture
def cufile(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The library. What it is told to do, it does from its next call on."""
    library = ctypes.CDLL("libcufile.so.0")
    library.stand_in_begin_anew()
    yield library
    monkeypatch.undo()
    library.stand_in_begin_anew()


def count(library: Any, name: str) -> int:
    return ctypes.c_int.in_dll(library, name).value


def noise(size: int) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8)


def contents(path: Path) -> torch.Tensor:
    return torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)


def test_cufile_moves_whole_pages_and_the_host_the_ends_of_a_write(
    cufile: Any, tmp_path: Path
) -> None:
    path, data = tmp_path / "file", noise(3 * PAGE + 100)
    with AsyncIO("cufile") as files:
        assert files.how() is None
        files.write(data, path, PAGE - 7).wait()
        how = files.how()
        assert how is not None
        assert (how.engine, how.by_cufile, how.copied) == ("cufile", 3 * PAGE, 100)
        assert "libcufile.so.0, nvidia-fs 2.24" in how.why
        room = torch.zeros_like(data)
        files.read(room, path, PAGE - 7).wait()
        how = files.how()
        assert how is not None
        assert (how.by_cufile, how.copied) == (3 * PAGE + data.numel(), 100)
        assert how.refused == ""
    assert torch.equal(room, data)
    assert torch.equal(contents(path)[PAGE - 7 :], data)
    assert count(cufile, "stand_in_opened") == 0


def test_copies_go_through_locked_memory_and_leave_nothing(tmp_path: Path) -> None:
    driver = ctypes.CDLL("libcuda.so.1")
    path, data = tmp_path / "file", noise(1_000_003)
    before = count(driver, "stand_in_copies")
    with AsyncIO("copies", block_size=65536, threads=3) as files:
        files.write(data, path).wait()
        room = torch.zeros_like(data)
        files.read(room, path).wait()
        assert files.how() == io.How("copies", "asked for", 0, 2 * data.numel(), "")
        assert 1 <= count(driver, "stand_in_memory") <= 3
    assert torch.equal(room, data)
    assert torch.equal(contents(path), data)
    assert count(driver, "stand_in_copies") - before >= 2 * data.numel() / 65536
    assert [count(driver, f"stand_in_{each}") for each in ("memory", "streams")] == [0, 0]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("none", "cuFile's error 5030, internal error"),
        ("mess", "Input/output error"),
        ("all,none,part,mess,part,part,none,all,mess,all", "cuFile"),
    ],
)
def test_what_cufile_cannot_do_the_host_does(
    words: str, said: str, cufile: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUFILE_STAND_IN", ",".join([words] * 3))
    path, data = tmp_path / "file", noise(300_001)
    with AsyncIO("cufile", block_size=16384, depth=4) as files:
        assert files.write(data, path).wait() == data.numel()
        room = torch.zeros_like(data)
        assert files.read(room, path).wait() == data.numel()
        how = files.how()
        assert how is not None
        assert said in how.refused
    assert torch.equal(contents(path), data)
    assert torch.equal(room, data)


@pytest.mark.usefixtures("cufile")
def test_a_file_that_cufile_refuses_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUFILE_STAND_IN_FILE", "5008")
    path, data = tmp_path / "file", noise(100_000)
    with AsyncIO("cufile") as files:
        files.write(data, path).wait()
        how = files.how()
        assert how is not None
        assert (how.by_cufile, how.copied) == (0, data.numel())
        assert "5008, this file system is not supported" in how.refused
    assert torch.equal(contents(path), data)


@pytest.mark.parametrize("engine", ["cufile", "copies"])
def test_a_copy_that_fails_is_an_error_with_the_drivers_words(
    engine: str, cufile: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_STAND_IN_COPIES", "0")
    monkeypatch.setenv("CUFILE_STAND_IN", "none")
    path = tmp_path / "file"
    path.write_bytes(bytes(PAGE))
    with AsyncIO(engine) as files:
        for begin in (files.read, files.write):
            with pytest.raises(OSError, match="CUDA's error 700, an illegal memory acc") as raised:
                begin(noise(PAGE), path).wait()
            assert (raised.value.errno, raised.value.filename) == (errno.EIO, str(path))
    assert contents(path).eq(0).all()
    assert count(cufile, "stand_in_opened") == 0


def test_registered_memory_is_named_by_its_begin(cufile: Any, tmp_path: Path) -> None:
    path, data = tmp_path / "file", noise(64 * PAGE)
    with AsyncIO("cufile", block_size=4 * PAGE) as files:
        files.register(data)
        with pytest.raises(UsageError, match="registered already"):
            files.register(data)
        files.write(data[PAGE:], path).wait()
        how = files.how()
        assert how is not None
        assert (how.refused, how.copied) == ("", 0)
        assert count(cufile, "stand_in_based") == count(cufile, "stand_in_calls") == 16
        files.unregister(data)
        files.unregister(data)
        files.write(data[PAGE:], path).wait()
        assert count(cufile, "stand_in_based") == 16
        files.register(data)
    with AsyncIO("cufile") as files:  # close() has unregistered it
        files.register(data)
    assert torch.equal(contents(path), data[PAGE:])


def test_a_dict_is_saved_from_a_device_and_loaded_to_it(tmp_path: Path) -> None:
    tensors = {
        "a": torch.randn(300, 70),
        "b": torch.randn(5001).bfloat16(),
        "c": torch.tensor(3),
        "d": torch.rand(11, 13).t(),
        "e": torch.empty(0),
    }
    with AsyncIO("cufile") as files:
        io.save(tensors, tmp_path / "file", files=files)
        back = io.load(tmp_path / "file", files=files)
        how = files.how()
        assert how is not None
        assert how.by_cufile > 0
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[name], each) for name, each in tensors.items())
    assert all(torch.equal(each, io.load(tmp_path / "file")[name]) for name, each in back.items())


def test_the_page_cache_is_used_if_asked_for(tmp_path: Path) -> None:
    path, data = tmp_path / "file", noise(100_000)
    with AsyncIO("cufile", direct=False) as files:
        files.write(data, path).wait()
        how = files.how()
        assert how is not None
        assert (how.by_cufile, how.refused) == (0, "a file is not open for direct I/O")
    assert torch.equal(contents(path), data)


def test_without_nvidia_fs_bytes_are_copied_and_the_reason_is_told(tmp_path: Path) -> None:
    path, data = tmp_path / "file", noise(100)
    with AsyncIO() as files:
        files.write(data, path).wait()
        how = files.how()
        assert how is not None
        assert how.engine == "copies"
        assert "nvidia-fs is not loaded" in how.why


def test_with_nvidia_fs_cufile_is_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_NVIDIA_FS", str(tmp_path))
    with AsyncIO() as files:
        files.write(noise(100), tmp_path / "file").wait()
        how = files.how()
        assert how is not None
        assert how.engine == "cufile"


def test_parts_of_host_and_device_share_a_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ``host_too`` all is the device's. Without, memory of the CPU is not given to cuFile."""
    open_queue = device.open_queue
    monkeypatch.setattr(
        device,
        "open_queue",
        lambda *given, **named: open_queue(*given, **{**named, "host_too": False}),
    )
    path, data = tmp_path / "file", noise(10 * PAGE + 5)
    # As where like is on a GPU: the native version, not the one in Python.
    with AsyncIO("cufile") as files:
        files.write_all([Transfer(data, path, 3), Transfer(data, tmp_path / "other", 0)]).wait()
        room = torch.zeros_like(data)
        files.read(room, path, 3).wait()
        how = files.how()
        assert how is not None
        assert (how.by_cufile, how.copied) == (0, 0)  # these are of the host
    assert torch.equal(room, data)
    assert torch.equal(contents(tmp_path / "other"), data)


def test_deepspeeds_handle_reads_and_writes_by_cufile(cufile: Any, tmp_path: Path) -> None:
    module = OpModule("gds")
    handle, other = module.gds_handle(65536, 8, False, True, 4), module.gds_handle()
    assert (handle.get_intra_op_parallelism(), handle.get_alignment()) == (4, 512)
    data, path = torch.randn(100_000), str(tmp_path / "file")
    assert handle.pin_device_tensor(data)
    assert handle.pin_device_tensor(data)
    assert handle.async_pwrite(data, path) == 0
    assert handle.wait() == 1
    assert count(cufile, "stand_in_based") == count(cufile, "stand_in_calls") > 0
    assert other.unpin_device_tensor(data)
    assert other.free_pinned_device_tensor(data)
    room = torch.zeros(100, 1000).t()
    assert other.read(room, path, validate=True) == 0
    assert torch.equal(room.reshape(-1), data)
    assert other.sync_pread(room, path, 0) == 1
    assert count(cufile, "stand_in_opened") == 0


def test_the_reference_has_the_same_functions(tmp_path: Path) -> None:
    queue = reference.gds_open(torch.empty(0), False, "", 4, PAGE, 2, True)
    data, room = noise(10_000), torch.zeros(10_000, dtype=torch.uint8)
    try:
        for function, memory in ((reference.gds_write, data), (reference.gds_read_, room)):
            fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
            number = int(function(queue, [memory], [0], [0], [fd, -1]))
            assert reference.gds_wait(queue, number, -1).tolist() == [1, 0, -1, 10_000]
        assert reference.gds_ways(queue)[:2] == (0, 20_000)
    finally:
        reference.gds_close(queue)
    assert torch.equal(room, data)
    with pytest.raises(RuntimeError, match="pure-Python"):
        reference.gds_open(torch.empty(0), True, "", 4, PAGE, 2, True)


def test_functions_pass_opcheck_and_check_their_arguments() -> None:
    functions = opkiln.get_builder("gds").jit_load(verbose=False)
    # torch's graphs have no strings as results: those functions are not traced.
    untraced = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(functions.gds_probe, (torch.empty(0), False, ""), test_utils=untraced)
    with pytest.raises(RuntimeError, match="depth is 0"):
        functions.gds_open(torch.empty(0), False, "", 0, PAGE, 1, True)
    queue = functions.gds_open(torch.empty(0), False, "", 4, PAGE, 1, True)
    torch.library.opcheck(functions.gds_cancel, (queue, 5))
    with pytest.raises(RuntimeError, match="has dtype float32"):
        functions.gds_read_(queue, [torch.empty(4)], [0], [0], [-1, -1])
    functions.gds_close(queue)
    with pytest.raises(RuntimeError, match="it was closed"):
        functions.gds_ways(queue)
    gc.collect()
