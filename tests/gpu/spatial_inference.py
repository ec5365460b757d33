"""spatial_inference on a GPU: one line per check. Needs torch and nvcc, and no pytest.

    PYTHONPATH=src python tests/gpu/spatial_inference.py

The exit code is 0 when every check passed or says why it could not be made, otherwise 1.
"""

from __future__ import annotations

import math
import sys

import torch
from checks import Skipped, main

from opkiln.nn.spatial import spatial_bias_add

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SHAPES = ((2, 8, 3, 3), (2, 320, 33, 31), (3, 11, 2, 3), (2, 3, 90, 110), (1, 4099, 1, 3))


def check_it_builds_for_this_gpu_and_serves() -> None:
    assert spatial_bias_add.load("cuda")
    assert torch._C._dispatch_has_kernel_for_dispatch_key("opkiln::spatial_bias_add", "CUDA")


def check_sums_are_the_references_in_each_memory_format() -> None:
    for dtype in DTYPES:
        for shape in SHAPES:
            x, other = torch.randn(2, *shape, device="cuda").to(dtype)
            bias, more = torch.randn(2, shape[1], device="cuda").to(dtype)
            for form in (torch.contiguous_format, torch.channels_last):
                given = x.to(memory_format=form)
                for rest in ((), (other,), (other, more)):
                    got = spatial_bias_add(given, bias, *rest)
                    expected = spatial_bias_add.reference(given, bias, *rest)
                    assert torch.equal(got, expected), (dtype, shape, form, len(rest))
                    assert got.stride() == given.stride()


def check_nan_and_infinity_pass_through() -> None:
    odd = torch.tensor([math.nan, math.inf, -math.inf, -0.0, 3e38, 6e4, 1e-45, 1.0], device="cuda")
    for dtype in DTYPES:
        x = odd.to(dtype).repeat(9, 1)
        got = spatial_bias_add(x, odd.to(dtype), x.flip(1))
        expected = spatial_bias_add.reference(x, odd.to(dtype), x.flip(1))
        torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


def check_more_than_2_to_the_31_elements() -> None:
    if torch.cuda.get_device_properties(0).total_memory < 40 * 2**30:
        raise Skipped("the GPU has less than 40 GiB of memory")
    bias = torch.arange(8, device="cuda").half()
    for rows, channels in ((2**28 + 1, 8), (2**31 + 3, 1)):
        x = torch.ones(rows, channels, device="cuda", dtype=torch.float16)
        out = spatial_bias_add(x, bias[:channels])
        x += bias[:channels]
        assert torch.equal(out, x)


def check_it_runs_on_the_current_stream_and_in_a_graph() -> None:
    x, bias = torch.randn(64, 4096, device="cuda"), torch.randn(4096, device="cuda")
    spatial_bias_add(x, bias)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        x.neg_()
        out = spatial_bias_add(x, bias)
    side.synchronize()
    assert torch.equal(out, x + bias)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = spatial_bias_add(x, bias, x)
    for _ in range(3):
        x.normal_()
        graph.replay()
        assert torch.equal(out, x + bias + x)


def check_opcheck_finds_nothing() -> None:
    x = torch.randn(2, 8, 5, 5, device="cuda").to(memory_format=torch.channels_last)
    torch.library.opcheck(spatial_bias_add.overload, (x, x[0, :, 0, 0].contiguous(), x))


CHECKS = [value for name, value in list(globals().items()) if name.startswith("check_")]


if __name__ == "__main__":
    sys.exit(main(CHECKS, __doc__))
