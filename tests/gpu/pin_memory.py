"""pin_memory and utils on a GPU: one line per check. Needs torch and nvcc, and no pytest.

    PYTHONPATH=src python tests/gpu/pin_memory.py [--only WORD]

The exit code is 0 when every check passed, otherwise 1.
"""

from __future__ import annotations

import sys
import time

import torch
from checks import main

import opkiln
from opkiln import utils
from opkiln.io import PinnedPool


def check_both_build_for_this_gpu_and_serve() -> str:
    began = time.perf_counter()
    for name, functions in (
        ("pin_memory", ("lock_pages_", "unlock_pages_")),
        ("utils", ("flatten_list", "unflatten_list_")),
    ):
        builder = opkiln.get_builder(name)
        builder.jit_load()
        assert builder.backend == "cuda", builder.backend
        for function in functions:
            assert torch._C._dispatch_has_kernel_for_dispatch_key(f"opkiln::{function}", "CUDA")
    return f"loaded in {time.perf_counter() - began:.2f} s"


def check_buffers_are_pinned_as_torch_sees_it_and_no_longer_when_closed() -> None:
    pool = PinnedPool("cuda", alignment=1 << 16)
    tensor = pool.take((1000, 1000), torch.float32)
    assert tensor.is_pinned()
    assert tensor.data_ptr() % (1 << 16) == 0
    assert pool.counts().locked_bytes == pool.counts().bytes >= 4_000_000
    tensor.copy_(torch.randn(1000, 1000))
    assert torch.equal(tensor.to("cuda", non_blocking=True).cpu(), tensor)
    pool.give(tensor)
    pool.close()
    assert not tensor.is_pinned()


def check_a_buffer_is_not_handed_out_while_a_copy_from_it_is_under_way() -> None:
    with PinnedPool("cuda") as pool:
        stream = torch.cuda.Stream()
        one = pool.take(1 << 20)
        one.fill_(5)
        target = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(200_000_000)
            target.copy_(one, non_blocking=True)
            pool.give(one)
        two = pool.take(1 << 20)
        assert two.data_ptr() != one.data_ptr()
        two.fill_(9)
        stream.synchronize()
        assert int(target.min()) == int(target.max()) == 5
        pool.give(two)
        three = pool.take(1 << 20)
        assert three.data_ptr() in (one.data_ptr(), two.data_ptr())
        pool.give(three)
        assert pool.counts().made == 2


def check_copies_from_it_are_faster_than_from_pageable_memory() -> str:
    target = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    with PinnedPool("cuda") as pool, pool.borrow(1 << 28) as pinned:
        pageable = torch.ones(1 << 28, dtype=torch.uint8)
        rates = []
        for source in (pinned.fill_(1), pageable):
            times = []
            for _ in range(4):
                torch.cuda.synchronize()
                began = time.perf_counter()
                target.copy_(source, non_blocking=True)
                torch.cuda.synchronize()
                times.append(time.perf_counter() - began)
            rates.append(0.268435456 / min(times))
    return f"{rates[0]:.1f} GB/s against {rates[1]:.1f}"


def check_lists_are_flattened_and_come_back_in_few_launches() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.uint8, torch.float64):
        for sizes in ((0, 1), (7, 0, 4095, 1), (300_001, 5, 300_003), (33,) * 5000):
            listed = [torch.randint(0, 100, (n,), device="cuda").to(dtype) for n in sizes]
            flat = utils.flatten(listed)
            assert torch.equal(flat, torch.cat(listed)), (dtype, sizes[:4])
            targets = [torch.zeros_like(tensor) for tensor in listed]
            utils.unflatten_into(flat, targets)
            assert all(torch.equal(a, b) for a, b in zip(targets, listed, strict=True))
    memory = torch.full((1000,), 9, dtype=torch.uint8, device="cuda")
    given = torch.arange(484, device="cuda").to(torch.uint8)
    utils.unflatten_into(given, [memory[1:18], memory[33:500]])
    assert set(memory[18:33].tolist()) | set(memory[500:].tolist()) == {9}


def check_more_than_2_to_the_31_bytes_and_elements_are_flattened() -> None:
    large = torch.randint(0, 256, ((1 << 31) + 3,), dtype=torch.uint8, device="cuda")
    small = torch.arange(5, dtype=torch.uint8, device="cuda")
    flat = utils.flatten([small, large, small])
    assert flat.numel() == (1 << 31) + 13
    assert torch.equal(flat[5:-5], large)
    assert torch.equal(flat[-5:], small)


def check_flattening_is_captured_in_a_graph_and_follows_its_stream() -> None:
    listed = [torch.randn(1000, device="cuda"), torch.randn(77, device="cuda")]
    utils.flatten(listed)
    with torch.cuda.stream(torch.cuda.Stream()):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            flat = utils.flatten(listed)
    for tensor in listed:
        tensor.normal_()
    graph.replay()
    assert torch.equal(flat, torch.cat(listed))


CHECKS = [
    value for name, value in list(globals().items()) if name.startswith("check_")
]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(CHECKS, __doc__))
