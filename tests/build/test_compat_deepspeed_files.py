"""DeepSpeed's modules ``async_io``, ``gds`` and ``pin_memory`` over opkiln's ops."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from deepspeed_given import warm  # noqa: F401 (a fixture)

from opkiln.compat.deepspeed.modules import OpModule
from opkiln.errors import FallbackWarning


@pytest.fixture(scope="module")
def module() -> OpModule:
    return OpModule("async_io")


def test_a_handle_has_the_defaults_and_answers_of_deepspeeds(module: OpModule) -> None:
    handle = module.aio_handle()
    assert (handle.get_block_size(), handle.get_queue_depth()) == (1 << 20, 128)
    assert (handle.get_single_submit(), handle.get_overlap_events()) == (False, False)
    handle = module.aio_handle(
        block_size=65536, queue_depth=4, single_submit=True, overlap_events=True,
        intra_op_parallelism=2,
    )  # fmt: skip
    assert (handle.get_intra_op_parallelism(), handle.get_alignment()) == (2, 1024)
    assert (handle.get_single_submit(), handle.get_overlap_events()) == (True, True)


def test_tensors_are_swapped_out_and_in(module: OpModule, tmp_path: Path) -> None:
    handle = module.aio_handle(65536, 8, False, True, 2)
    tensors = [torch.randn(100_000 + each) for each in range(3)]
    paths = [str(tmp_path / f"{each}") for each in range(3)]
    for tensor, path in zip(tensors, paths, strict=True):
        assert handle.async_pwrite(tensor, path, 0) == 0
    assert handle.wait() == 3
    back = [torch.empty_like(each) for each in tensors]
    for tensor, path in zip(back, paths, strict=True):
        assert handle.async_pread(tensor, path) == 0
    assert handle.wait() == 3
    assert all(torch.equal(a, b) for a, b in zip(tensors, back, strict=True))
    assert handle.wait() == 0


def test_every_way_to_read_and_write(module: OpModule, tmp_path: Path) -> None:
    handle, path = module.aio_handle(), str(tmp_path / "file")
    data = torch.arange(5000, dtype=torch.int32)
    assert handle.write(data, path, True) == 0
    got = torch.zeros_like(data)
    assert handle.read(got, path, validate=True) == 0
    assert torch.equal(got, data)
    part = torch.zeros(100, dtype=torch.int32)
    assert handle.sync_pread(part, path, file_offset=400) == 1
    assert part.tolist() == list(range(100, 200))
    assert handle.sync_pwrite(part, path, 0) == 1
    assert handle.pread(got, path, False, **{"async": True, "file_offset": 0}) == 0
    assert handle.wait() == 1
    assert torch.equal(got[:200], torch.cat([part, data[100:200]]))
    columns = torch.zeros(2500, 2, dtype=torch.int32).t()
    assert handle.pread(columns, path, False, False) == 1
    assert torch.equal(columns.reshape(-1), got)
    with open(path, "r+b") as file:
        assert handle.async_pwrite(data, file.fileno(), file_offset=0) == 0
        assert handle.wait() == 1
    assert module.aio_read(got, path, 1 << 20, 4, False, False, True) == 0
    assert torch.equal(got, data)
    assert module.aio_write(part, path, 1 << 20, 4, False, False, True) == 0


def test_failures_are_raised_and_the_others_are_waited_for(
    module: OpModule, tmp_path: Path
) -> None:
    handle, path = module.aio_handle(), tmp_path / "file"
    with pytest.raises(FileNotFoundError):
        handle.async_pread(torch.empty(4), str(path))
    path.write_bytes(bytes(8))
    good = torch.ones(2)
    handle.async_pread(torch.empty(4), str(path))
    handle.async_pread(good, str(path))
    with pytest.raises(EOFError, match="file"):
        handle.wait()
    assert good.tolist() == [0, 0]
    with pytest.raises(TypeError, match="async"):
        handle.pread(good, str(path), False)


def test_locked_tensors_are_known_by_any_part_until_they_are_freed(module: OpModule) -> None:
    handle, pins = module.aio_handle(), OpModule("pin_memory").pin_handle()
    tensor = handle.new_cpu_locked_tensor(1000, torch.empty(0, dtype=torch.bfloat16))
    assert (tensor.shape, tensor.dtype) == ((1000,), torch.bfloat16)
    assert tensor.data_ptr() % 4096 == 0
    assert pins.is_pinned(tensor.narrow(0, 5, 100))
    assert not handle.is_pinned(torch.empty(10))
    assert handle.free_cpu_locked_tensor(tensor)
    assert not handle.free_cpu_locked_tensor(tensor)
    assert not pins.is_pinned(tensor)
    other = pins.new_cpu_locked_tensor(10, torch.empty(0))
    assert pins.free_cpu_locked_tensor_by_ptr(other.data_ptr())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a driver here")
def test_gds_has_the_handle_of_async_io_and_says_why_it_copies(tmp_path: Path) -> None:
    with pytest.warns(FallbackWarning, match="through the host: "):
        handle = OpModule("gds").gds_handle(intra_op_parallelism=4)
    assert (handle.get_block_size(), handle.get_queue_depth()) == (1 << 20, 128)
    assert (handle.get_intra_op_parallelism(), handle.get_alignment()) == (4, 512)
    data, path = torch.randn(1000), str(tmp_path / "file")
    assert handle.pin_device_tensor(data)
    assert handle.write(data, path, True) == 0
    got = torch.zeros_like(data)
    assert handle.async_pread(got, path) == 0
    assert handle.wait() == 1
    assert torch.equal(got, data)
    assert handle.unpin_device_tensor(data)
    tensor = handle.new_cpu_locked_tensor(10, data)
    assert handle.free_cpu_locked_tensor(tensor)
