"""gds on a GPU: files and device memory, byte for byte. Needs torch and g++, and no pytest.

    PYTHONPATH=src python tests/gpu/gds.py

Each check runs with copies, and with cuFile in whichever mode it has here; if it has none, the
reason is printed. The exit code is 0 when every check passed or says why it could not be made,
otherwise 1.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from checks import Skipped, main
from sample.references import references

import opkiln
from opkiln import io
from opkiln.compat.deepspeed.modules import OpModule
from opkiln.io import AsyncIO, Transfer
from opkiln.ops.gds import device

reference = references("gds")

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE = 4096


def engines() -> list[str]:
    return [each.name for each in io.device_engines() if each.usable]


def noise(size: int, lead: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (lead + size,), dtype=torch.uint8, device="cuda")[lead:]


def contents(path: Path) -> torch.Tensor:
    data = bytearray(path.read_bytes())
    return torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def folders() -> Iterator[Path]:
    """A directory of the disk, and one in memory, which has no direct I/O."""
    for place in (None, "/dev/shm"):
        with tempfile.TemporaryDirectory(dir=place) as name:
            yield Path(name)


def check_it_builds_and_says_which_way_there_is() -> str:
    opkiln.get_builder("gds").jit_load()
    state, words = device.probe()
    with tempfile.TemporaryDirectory() as name, AsyncIO() as files:
        files.write(noise(PAGE), Path(name) / "file").wait()
        chosen = files.how()
    assert chosen is not None
    said = f"state {state}: {words}; auto: {chosen.engine}, {chosen.why}"
    return f"{said}; libraries: {device.libraries() or 'none'}"


def check_bytes_are_exact_at_any_offset_size_and_address() -> str:
    said = []
    draw = random.Random(0)
    edges = (0, 1, 511, 512, 513, 4095, 4096, 4097, 65536, 1_000_000)
    for engine in engines():
        for folder in folders():
            path = folder / "file"
            with AsyncIO(engine, block_size=65536, depth=8) as files:
                for _ in range(60):
                    offset, lead = draw.choice(edges), draw.choice((0, 1, 64, 513))
                    size = draw.choice(edges) + draw.choice((0, 0, 5))
                    before = os.urandom(draw.choice(edges))
                    path.write_bytes(before)
                    data = noise(size, lead)
                    assert files.write(data, path, offset).wait() == size
                    length = max(len(before), offset + size) if size else len(before)
                    want = torch.zeros(length, dtype=torch.uint8)
                    want[: len(before)] = torch.tensor(list(before), dtype=torch.uint8)
                    want[offset : offset + size] = data.cpu()
                    assert torch.equal(contents(path), want), (engine, offset, size, lead)
                    start = draw.randrange(length + 1)
                    room = torch.full((lead + length - start + 50,), 9, device="cuda").byte()[lead:]
                    assert files.read(room, path, start, partial=True).wait() == length - start
                    assert torch.equal(room[: length - start].cpu(), want[start:])
                    assert room[length - start :].eq(9).all()
                how = files.how()
            assert how is not None
            where = f"{engine} in {folder.parent}"
            said.append(f"{where}: {how.by_cufile} by cuFile, {how.copied} copied {how.refused}")
    return "; ".join(said)


def check_a_large_tensor_is_exact_and_its_memory_is_kept() -> None:
    for engine in engines():
        for folder in folders():
            data = noise((64 << 20) + 12345)
            held = data.clone()
            with AsyncIO(engine) as files:
                files.write(held, folder / "file")
                del held  # the op keeps it; else the next tensors would be in its place
                for _ in range(4):
                    torch.zeros_like(data)
                files.wait()
                room = torch.zeros_like(data)
                files.read(room, folder / "file").wait()
            assert torch.equal(room, data)


def check_streams_are_waited_for() -> None:
    for engine in engines():
        with tempfile.TemporaryDirectory() as name, AsyncIO(engine) as files:
            path = Path(name) / "file"
            x = torch.zeros(4 << 20, device="cuda")
            side = torch.cuda.Stream()
            torch.cuda.synchronize()
            with torch.cuda.stream(side):
                torch.cuda._sleep(400_000_000)
                x.fill_(3)
                files.write(x, path).wait()
                y = torch.ones_like(x)
                torch.cuda._sleep(400_000_000)
                y.fill_(1)  # before the read, which must not be overwritten by it
                files.read(y, path).wait()
            assert y.eq(3).all()  # on another stream, without waiting for the first
            assert contents(path).view(torch.float32).eq(3).all()


def check_host_and_device_share_a_request() -> None:
    for engine in engines():
        with tempfile.TemporaryDirectory() as name, AsyncIO(engine) as files:
            host, there = torch.randn(5000), torch.randn(7001, device="cuda").bfloat16()
            one, two = Path(name) / "one", Path(name) / "two"
            columns = there.view(7001, 1).expand(7001, 2)
            files.write_all(
                [Transfer(host, one), Transfer(there, one, host.nbytes), Transfer(columns, two)]
            ).wait()
            back = torch.empty_like(host), torch.empty_like(there)
            request = files.read_all([Transfer(back[0], one), Transfer(back[1], one, host.nbytes)])
            request.wait()
            assert request.sizes == [host.nbytes, there.nbytes]
            assert torch.equal(back[0], host)
            assert torch.equal(back[1], there)
            assert two.stat().st_size == 2 * there.nbytes


def check_a_dict_is_saved_from_the_gpu_and_loaded_to_it() -> None:
    tensors = {
        "a": torch.randn(1 << 22, device="cuda"),
        "b": torch.randn(5001, device="cuda").bfloat16(),
        "c": torch.tensor(3),
        "d": torch.rand(11, 13, device="cuda").t(),
        "e": torch.empty(0, device="cuda"),
    }
    for engine in engines():
        for folder in folders():
            with AsyncIO(engine) as files:
                io.save(tensors, folder / "file", files=files)
                back = io.load(folder / "file", device="cuda", files=files)
            on_host = io.load(folder / "file")
            for name, each in tensors.items():
                assert back[name].is_cuda
                assert torch.equal(back[name].cpu(), each.cpu())
                assert torch.equal(on_host[name], each.cpu())


def check_registered_memory_is_exact() -> str:
    if "cufile" not in engines():
        raise Skipped(io.device_engines()[0].why)
    with tempfile.TemporaryDirectory() as name, AsyncIO("cufile") as files:
        data, room = noise(16 << 20), noise(16 << 20)
        files.register(data)
        files.register(room)
        files.write(data[PAGE:], Path(name) / "file").wait()
        files.read(room[: -2 * PAGE], Path(name) / "file", PAGE).wait()
        assert torch.equal(room[: -2 * PAGE], data[2 * PAGE :])
        files.unregister(data)
        files.read(data[PAGE:], Path(name) / "file").wait()
        how = files.how()
    assert how is not None
    if how.by_cufile == 0:
        raise Skipped(f"exact, but cuFile moved nothing: {how.refused}")
    return f"{how.by_cufile} by cuFile, {how.copied} copied {how.refused}"


def check_a_file_that_ends_early_is_an_error() -> None:
    for engine in engines():
        with tempfile.TemporaryDirectory() as name, AsyncIO(engine) as files:
            path = Path(name) / "file"
            path.write_bytes(os.urandom(10_001))
            room = torch.zeros(20_000, dtype=torch.uint8, device="cuda")
            try:
                files.read(room, path, 1).wait()
            except EOFError:
                pass
            else:
                raise AssertionError("no EOFError")
            assert files.read(room, path, 1, partial=True).wait() == 10_000
            assert torch.equal(room[:10_000].cpu(), contents(path)[1:])


def check_deepspeeds_handle() -> None:
    handle = OpModule("gds").gds_handle(1 << 20, 32, False, True, 4)
    tensor = handle.new_pinned_device_tensor(1_000_000, torch.empty(0))
    tensor.normal_()
    with tempfile.TemporaryDirectory() as name:
        path = os.path.join(name, "file")
        assert handle.async_pwrite(tensor, path) == 0
        assert handle.wait() == 1
        got = torch.zeros_like(tensor)
        assert handle.read(got, path, True) == 0
        assert torch.equal(got, tensor)
    assert handle.free_pinned_device_tensor(tensor)


def check_the_reference_is_exact() -> None:
    queue = reference.gds_open(torch.empty(0), False, "", 4, 65536, 4, False)
    data, room = noise(1_000_003), torch.zeros(1_000_003, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as name:
        for function, memory in ((reference.gds_write, data), (reference.gds_read_, room)):
            fd = os.open(os.path.join(name, "file"), os.O_RDWR | os.O_CREAT)
            number = int(function(queue, [memory], [0], [0], [fd, -1]))
            assert reference.gds_wait(queue, number, -1).tolist() == [1, 0, -1, 1_000_003]
    reference.gds_close(queue)
    assert torch.equal(room, data)


CHECKS = [value for name, value in list(globals().items()) if name.startswith("check_")]


if __name__ == "__main__":
    sys.exit(main(CHECKS, __doc__))
