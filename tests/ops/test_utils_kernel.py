"""utils's CUDA kernel on the CPU: any sizes at any addresses, and nothing beside them."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest
import torch
from stand_in import compile_emulated

import opkiln

HERE = Path(__file__).parent
PACKAGE = Path(opkiln.__file__).parent


class _Part(ctypes.Structure):
    _fields_ = (("from_", ctypes.c_void_p), ("to", ctypes.c_void_p), ("bytes", ctypes.c_int64))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    library = tmp_path_factory.mktemp("kernel") / "copy_parts.so"
    compile_emulated(HERE / "copy_parts_on_cpu.cpp", library)
    return ctypes.CDLL(str(library)).run


def copy(run: Any, parts: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    listed = (_Part * len(parts))(
        *(_Part(a.data_ptr(), b.data_ptr(), a.numel()) for a, b in parts)
    )  # fmt: skip
    assert run(listed, ctypes.c_size_t(len(parts))) == 0


def test_bytes_arrive_at_any_address_and_their_neighbours_stay(
    run: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    source = torch.randint(0, 250, (40_000,)).to(torch.uint8)
    for size in (0, 1, 3, 16, 17, 4095, 16_384, 33_000):
        for start, to in ((0, 0), (16, 32), (4, 8), (2, 6), (1, 1), (3, 8), (0, 5)):
            target = torch.full((40_000,), 255, dtype=torch.uint8)
            copy(run, [(source[start : start + size], target[to : to + size])])
            assert torch.equal(target[to : to + size], source[start : start + size])
            assert bool((target[:to] == 255).all())
            assert bool((target[to + size :] == 255).all())
    assert "runtime error" not in capfd.readouterr().err  # what the sanitizers saw


def test_more_parts_than_a_launch_takes_all_arrive(run: Any) -> None:
    source = torch.arange(2000 * 7).to(torch.uint8)
    target = torch.zeros_like(source)
    copy(run, list(zip(source.split(7), target.split(7), strict=True)))
    assert torch.equal(source, target)
