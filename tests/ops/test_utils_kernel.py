"""utils's CUDA kernel on the CPU: any sizes at any addresses, and nothing beside them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from stand_in import emulated

from opkiln.ops.utils.op import UtilsBuilder


@pytest.fixture(scope="module")
def kernel() -> Any:
    return emulated(UtilsBuilder)


def test_bytes_arrive_at_any_address_and_their_neighbours_stay(kernel: Any) -> None:
    source = torch.randint(0, 250, (40_000,)).to(torch.uint8)
    for size in (0, 1, 3, 16, 17, 4095, 16_384, 33_000):
        for start, to in ((0, 0), (16, 32), (4, 8), (2, 6), (1, 1), (3, 8), (0, 5)):
            target = torch.full((40_000,), 255, dtype=torch.uint8)
            kernel.unflatten_list_([target[to : to + size]], source[start : start + size])
            assert torch.equal(target[to : to + size], source[start : start + size])
            assert bool((target[:to] == 255).all())
            assert bool((target[to + size :] == 255).all())


def test_more_parts_than_a_launch_takes_all_arrive(kernel: Any) -> None:
    source = torch.arange(400 * 7).to(torch.uint8)
    assert torch.equal(kernel.flatten_list(list(source.split(7))), source)
    target = torch.zeros_like(source)
    kernel.unflatten_list_(list(target.split(7)), source)
    assert torch.equal(source, target)
