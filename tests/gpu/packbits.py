"""packbits on a GPU: one line per check. Needs torch and nvcc, and no pytest.

    PYTHONPATH=src python tests/gpu/packbits.py

The exit code is 0 when every check passed or says why it could not be made, otherwise 1.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import torch
from checks import Skipped, main
from sample.references import references

import opkiln
from opkiln import quant

reference = references("packbits")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def native() -> Any:
    return opkiln.get_builder("packbits").jit_load()


def check_it_builds_for_this_gpu_and_serves() -> None:
    native()
    assert torch._C._dispatch_has_kernel_for_dispatch_key("opkiln::packbits", "CUDA")


def check_bits_are_the_references_at_every_size_and_address() -> None:
    odd = torch.tensor([0.0, -0.0, math.nan, -math.nan, math.inf, -math.inf, 1e-8, -1e-8])
    for dtype in DTYPES:
        whole = torch.cat([odd, torch.randn(100_003)]).to("cuda", dtype)
        for start in (0, 1, 2, 3, 4, 8):
            for count in (0, 1, 7, 8, 9, 4095, 8192, 100_000):
                x = whole[start : start + count]
                packed = native().packbits(x)
                assert torch.equal(packed, reference.packbits(x)), (dtype, start, count)
                back = native().unpackbits(packed, count, dtype)
                assert torch.equal(back, reference.unpackbits(packed, count, dtype))


def check_more_than_2_to_the_31_elements() -> None:
    count = 2**31 + 3
    if torch.cuda.get_device_properties(0).total_memory < 40 * 2**30:
        raise Skipped("the GPU has less than 40 GiB of memory")
    x = torch.ones(count, dtype=torch.float16, device="cuda")
    x[::3] = -1
    packed = quant.packbits(x)
    assert torch.equal(quant.unpackbits(packed, count, dtype=torch.float16), x)


def check_it_runs_on_the_current_stream_and_in_a_graph() -> None:
    x = torch.randn(100_003, device="cuda")
    quant.packbits(x)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        x.neg_()
        packed = quant.packbits(x)
    side.synchronize()
    assert torch.equal(packed, reference.packbits(x))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = quant.unpackbits(quant.packbits(x), x.shape)
    for _ in range(3):
        x.copy_(torch.randn(100_003))
        graph.replay()
        assert torch.equal(out, torch.where(torch.signbit(x), -1.0, 1.0))


def check_opcheck_finds_nothing() -> None:
    x = torch.randn(100, device="cuda")
    torch.library.opcheck(native().packbits, (x,))
    torch.library.opcheck(native().unpackbits, (native().packbits(x), 100, torch.bfloat16))


CHECKS = [value for name, value in list(globals().items()) if name.startswith("check_")]


if __name__ == "__main__":
    sys.exit(main(CHECKS, __doc__))
