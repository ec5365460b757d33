"""Norms, activations and residual adds on a GPU: one line per check. Needs torch and nvcc.

    PYTHONPATH=src python tests/gpu/norms.py

The exit code is 0 when every check passed or says why it could not be made, otherwise 1.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from checks import Skipped, main
from torch import Tensor

from opkiln.nn import inference

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Rows of a part of a warp, a warp, a block, shared memory, and beyond it; whole 16 bytes and not.
SHAPES = (
    (70_001, 1), (1001, 7), (5003, 8), (3001, 64), (777, 520), (513, 1024), (300, 4096), (33, 5000),
    (17, 8192), (5, 16384), (3, 65536), (2, 131_072), (3, 65_537),
)  # fmt: skip
_ROUNDING = {torch.float32: 4e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}


def made(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, device="cuda", generator=generator).to(dtype)


def close(got: Any, exact: Any, what: object) -> None:
    if not isinstance(got, Tensor):
        for one, other in zip(got, exact, strict=True):
            close(one, other, what)
        return
    allowed = _ROUNDING[got.dtype] * (exact.abs() + 8)
    assert bool(((got.double() - exact).abs() <= allowed).all()), what


def exact(function: Any, *arguments: Any) -> Any:
    """The reference's result in float64."""
    wide = [each.double() if isinstance(each, Tensor) else each for each in arguments]
    return function.reference(*wide)


def check_it_builds_for_this_gpu_and_serves() -> None:
    assert inference.rms_norm.load("cuda")
    assert torch._C._dispatch_has_kernel_for_dispatch_key("opkiln::rms_norm", "CUDA")


def check_norms_are_those_of_float64() -> None:
    for dtype in DTYPES:
        for shape in SHAPES:
            x, residual = (made(*shape, dtype=dtype, seed=s) for s in (0, 1))
            weight, bias, shift = (made(shape[-1], dtype=dtype, seed=s) for s in (2, 3, 4))
            close(inference.rms_norm(x, weight), exact(inference.rms_norm, x, weight), shape)
            ours = inference.layer_norm(x, weight, bias)
            close(ours, exact(inference.layer_norm, x, weight, bias), shape)
            out, total = inference.pre_layer_norm(x, residual, weight, bias, shift)
            close(out, exact(inference.layer_norm, total, weight, bias), shape)
            post = inference.post_layer_norm(x, residual, weight, bias, shift)
            assert torch.equal(post, out), shape
            out, total = inference.pre_rms_norm(x, residual, weight, shift)
            close(out, exact(inference.rms_norm, total, weight), shape)
            close(total, x.double() + residual.double() + shift.double(), shape)


def check_activations_are_those_of_float64() -> None:
    for dtype in DTYPES:
        for shape in ((5, 14), (3001, 64), (777, 1002), (513, 4096), (1, 10_000_008)):
            x, bias = made(*shape, dtype=dtype) * 3, made(shape[-1], dtype=dtype, seed=1)
            for name in ("bias_add", "bias_relu", "bias_silu"):
                function = getattr(inference, name)
                close(function(x, bias), exact(function, x, bias), (name, shape))
            for tanh in (True, False):
                ours = inference.bias_gelu(x, bias, tanh)
                close(ours, exact(inference.bias_gelu, x, bias, tanh), shape)
            for interleaved in (True, False):
                ours = inference.gated_silu(x, bias, interleaved)
                close(ours, exact(inference.gated_silu, x, bias, interleaved), shape)
                ours = inference.gated_gelu(x, bias, False, interleaved, False)
                close(ours, exact(inference.gated_gelu, x, bias, False, interleaved, False), shape)


def check_residuals_are_those_of_float64() -> None:
    for dtype in DTYPES:
        for shape in ((5, 14), (3001, 64), (777, 1002), (513, 4096)):
            hidden, residual, attention = (made(*shape, dtype=dtype, seed=s) for s in range(3))
            bias = made(shape[-1], dtype=dtype, seed=3)
            arguments = (hidden, residual, attention, bias, bias, 0.5, 0.25)
            ours = inference.residual_add(*arguments)
            close(ours, exact(inference.residual_add, *arguments), shape)
            for coef in (made(shape[0], 2, dtype=dtype), made(2, shape[1], dtype=dtype)):
                ours = inference.moe_res_matmul(residual, coef, hidden)
                close(ours, exact(inference.moe_res_matmul, residual, coef, hidden), shape)


def check_numbers_that_are_not_finite() -> None:
    odd = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, 3e38, -3e38, 1.0, -50.0])
    for dtype in DTYPES:
        x = odd.to("cuda", dtype)
        for name, more in (("bias_relu", ()), ("bias_silu", ()), ("bias_gelu", (None, False))):
            function = getattr(inference, name)
            ours, theirs = function(x, *more), function.reference(x, *more)
            torch.testing.assert_close(ours, theirs, equal_nan=True)
        ours, theirs = inference.layer_norm(x), inference.layer_norm.reference(x)
        torch.testing.assert_close(ours, theirs, equal_nan=True)


def check_more_than_2_to_the_31_elements() -> None:
    if torch.cuda.get_device_properties(0).total_memory < 40 * 2**30:
        raise Skipped("the GPU has less than 40 GiB of memory")
    x = torch.randn(2**31 + 3, device="cuda", dtype=torch.bfloat16)
    out = inference.bias_relu(x)
    assert torch.equal(out[-1000:], x[-1000:].relu())
    del out
    rows = x[: 2**31].view(-1, 1024)
    last = inference.rms_norm(rows)[-3:]
    close(last, exact(inference.rms_norm, rows[-3:]), "the last rows")


def check_it_runs_on_the_current_stream_and_in_a_graph() -> None:
    x, weight = made(512, 1024, dtype=torch.bfloat16), made(1024, dtype=torch.bfloat16)
    inference.rms_norm(x, weight)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        x.mul_(3).add_(1)
        out = inference.rms_norm(x, weight)
    side.synchronize()
    close(out, exact(inference.rms_norm, x, weight), "a side stream")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = inference.gated_silu(inference.rms_norm(x, weight))
    for seed in range(3):
        x.copy_(made(512, 1024, seed=seed))
        graph.replay()
        assert torch.equal(out, inference.gated_silu(inference.rms_norm(x, weight)))


def check_opcheck_finds_nothing() -> None:
    x, weight = made(3, 64), made(64)
    torch.library.opcheck(inference.rms_norm.overload, (x, weight))
    torch.library.opcheck(inference.pre_layer_norm.overload, (x, x.clone(), weight, weight))
    torch.library.opcheck(inference.gated_gelu.overload, (x, weight))


CHECKS = [value for name, value in list(globals().items()) if name.startswith("check_")]


if __name__ == "__main__":
    sys.exit(main(CHECKS, __doc__))
