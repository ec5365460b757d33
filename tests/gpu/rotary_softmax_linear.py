"""Rotary embedding, softmax and int8 linear layers on a GPU: one line per check. Needs torch and
nvcc, and no pytest.

    PYTHONPATH=src python tests/gpu/rotary_softmax_linear.py

The exit code is 0 when every check passed or says why it could not be made, otherwise 1.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import torch
from checks import Skipped, main
from torch import Tensor

from opkiln.nn import inference as functions

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}


def close(got: Tensor, expected: Tensor, slack: float = 1.0) -> None:
    """Within rounding of a result in float64; of a number that is too small to be normal, too."""
    tolerance = ROUNDING[got.dtype]
    smallest = torch.finfo(got.dtype).smallest_normal * torch.finfo(got.dtype).eps
    least = max(tolerance * slack, smallest)
    torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=least, equal_nan=True)


def exact(name: str, *given: Any, **options: Any) -> Any:
    """The reference in float64, on the CPU."""
    wide = [
        each.cpu().double() if isinstance(each, Tensor) and each.is_floating_point()
        else each.cpu() if isinstance(each, Tensor) else each
        for each in given
    ]  # fmt: skip
    return getattr(functions, name).reference(*wide, **options)


def check_it_builds_for_this_gpu() -> None:
    for function in (functions.rotary, functions.softmax, functions.int8_linear):
        assert function.load("cuda")
    for name in ("rotary", "rotary_qk_", "softmax", "int8_linear"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"opkiln::{name}", "CUDA")


def check_rotary_is_within_rounding_of_float64() -> None:
    for dtype in DTYPES:
        for shape, dim in (
            ((2, 300, 32, 128), 128), ((3, 700, 1, 96), 32), ((1, 5, 9, 80), 80), ((2, 3, 2, 7), 4),
            ((1, 1, 64, 256), 256),
        ):  # fmt: skip
            x = torch.randn(shape, device="cuda").to(dtype)
            positions = torch.randint(0, 1_000_000, shape[:2], device="cuda")
            for interleaved in (False, True):
                options = {"dim": dim, "interleaved": interleaved}
                out = functions.rotary(x, positions, **options)
                close(out.cpu(), exact("rotary", x, positions, **options), slack=4)
                functions.rotary_(x, positions, **options)
                assert torch.equal(x, out)


def check_softmax_is_within_rounding_of_float64() -> None:
    for dtype in DTYPES:
        for columns in (1, 7, 64, 1000, 1023, 1024, 4096, 16_384, 32_768, 65_536):
            x = (torch.randn(2, 3, 5, columns, device="cuda") * 3).to(dtype)
            close(functions.softmax(x).cpu(), exact("softmax", x), slack=1e-6)
            mask = torch.randn(2, 1, 1, columns, device="cuda").to(dtype)
            slopes = torch.tensor([0.5, 0.25, 0.125], device="cuda")
            options = {"scale": 0.3, "causal": True, "offset": columns // 2, "window": 900}
            out = functions.softmax(x, mask, slopes, **options)
            close(out.cpu(), exact("softmax", x, mask, slopes, **options), slack=1e-4)


def check_hidden_rows_nan_and_infinity() -> None:
    for columns in (64, 63, 40_000):
        x = torch.zeros(4, columns, device="cuda")
        x[0] = -math.inf
        x[1, 3], x[2, 3] = math.nan, math.inf
        out = functions.softmax(x)
        assert torch.equal(out[0], torch.zeros_like(out[0]))
        assert out[1:3].isnan().all()
        assert not out[3].isnan().any()


def check_int8_linear_is_within_rounding_of_float64() -> None:
    for dtype in DTYPES:
        for outputs, inputs, groups in ((4096, 4096, 4096 * 32), (1000, 11_008, 1000), (33, 80, 1)):
            weight = torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8, device="cuda")
            scales = torch.rand(groups, device="cuda") * 0.01
            bias = torch.randn(outputs, device="cuda").to(dtype)
            for rows in (1, 2, 3, 8, 16, 32, 33):
                x = torch.randn(rows, inputs, device="cuda").to(dtype)
                w = exact("dequantize_int8", weight, scales, dtype=torch.float64)
                expected = x.double().cpu() @ w.T + bias.double().cpu()
                parts = x.double().cpu().abs() @ w.abs().T + bias.double().cpu().abs()
                size = parts.max().item()
                out = functions.int8_linear(x, weight, scales, bias)
                wrong = (out.double().cpu() - expected).abs().max().item()
                assert wrong <= ROUNDING[dtype] * size, (dtype, outputs, rows, wrong, size)


def check_more_than_2_to_the_31_elements() -> None:
    if torch.cuda.get_device_properties(0).total_memory < 40 * 2**30:
        raise Skipped("the GPU has less than 40 GiB of memory")
    rows = 2**31 // 1024 + 3
    x = torch.zeros(rows, 1024, dtype=torch.bfloat16, device="cuda")
    x[-1, 5] = 20
    functions.softmax_(x)
    assert torch.equal(x[0], torch.full_like(x[0], 1 / 1024))
    assert x[-1, 5] == 1
    functions.rotary_(x.view(1, rows, 8, 128))
    assert x[-1].isfinite().all()


def check_it_runs_on_the_current_stream_and_in_a_graph() -> None:
    x = torch.randn(2, 64, 8, 128, device="cuda")
    positions = torch.arange(64, device="cuda")
    functions.softmax(functions.rotary(x, positions))
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        x.neg_()
        out = functions.rotary(x, positions)
    side.synchronize()
    close(out.cpu(), exact("rotary", x, positions), slack=4)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = functions.softmax(functions.rotary(x, positions))
    for _ in range(3):
        x.copy_(torch.randn(x.shape))
        graph.replay()
        close(out.cpu(), exact("softmax", exact("rotary", x, positions)))


def check_opcheck_finds_nothing() -> None:
    x = torch.randn(2, 5, 4, 16, device="cuda")
    positions = torch.arange(5, device="cuda")
    torch.library.opcheck(functions.rotary.overload, (x, positions))
    torch.library.opcheck(functions.rotary_qk_.overload, (x.clone(), x.clone(), positions))
    torch.library.opcheck(functions.softmax.overload, (x,))
    weight = torch.ones(8, 16, dtype=torch.int8, device="cuda")
    torch.library.opcheck(functions.int8_linear.overload, (x, weight, torch.ones(8, device="cuda")))


CHECKS = [value for name, value in list(globals().items()) if name.startswith("check_")]


if __name__ == "__main__":
    sys.exit(main(CHECKS, __doc__))
