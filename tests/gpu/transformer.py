"""A training layer and its kernels on a GPU: one line per check. Needs torch and nvcc.

    PYTHONPATH=src python tests/gpu/transformer.py

The exit code is 0 when every check passed or says why it could not be made, otherwise 1.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from checks import main
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from opkiln import nn
from opkiln.ops.stochastic_transformer import functions as stochastic
from opkiln.ops.transformer import functions

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Parts of a warp, a warp, warps, a block, two eights to a thread; whole eights and not.
SHAPES = (
    (7001, 1), (1001, 7), (5003, 8), (3001, 64), (777, 520), (4099, 1024), (3000, 4096), (33, 5000),
    (17, 8192), (5, 8191), (513, 1001),
)  # fmt: skip
_ROUNDING = {torch.float32: 4e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}


def made(*shape: int, dtype: torch.dtype, count: int = 1) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(count)
    return [torch.randn(shape, device="cuda", generator=generator).to(dtype) for _ in range(count)]


def seed() -> Tensor:
    return torch.tensor([2**50 + 3], device="cuda")


def close(op: Any, *given: Any, what: object) -> None:
    """The op gives what its reference gives in float64. Sums over rows may have lost some bits."""
    wide = [
        each.double() if isinstance(each, Tensor) and each.is_floating_point() else each
        for each in given
    ]
    got, exact = op(*given), op.reference(*wide)
    pairs = [(got, exact)] if isinstance(got, Tensor) else list(zip(got, exact, strict=True))
    for index, (one, other) in enumerate(pairs):
        assert one.shape == other.shape, (what, index)
        if one.numel():
            size = other.abs().max().item()
            allowed = _ROUNDING[one.dtype] * (other.abs() + 2) + 2e-6 * (1 + size)
            worst = ((one.double() - other).abs() - allowed).max().item()
            assert worst <= 0, (op.__name__, what, index, worst)


def check_they_build_for_this_gpu_and_serve() -> None:
    assert functions.dropout_add.load("cuda")
    assert functions.gelu_dropout.load("cuda")
    assert stochastic.stochastic_gelu_dropout.load("cuda")
    for name in ("dropout_add_norm", "gelu_dropout_backward", "stochastic_gelu_dropout"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"opkiln::{name}", "CUDA")


def check_forward_kernels_are_the_references_within_rounding() -> None:
    for dtype in DTYPES:
        for shape in SHAPES:
            x, residual = made(*shape, dtype=dtype, count=2)
            bias, weight, shift = made(shape[-1], dtype=dtype, count=3)
            for p in (0.0, 0.1):
                drop, what = (seed(), 1, p), (dtype, shape, p)
                close(functions.dropout_add, x, bias, residual, *drop, what=what)
                close(functions.gelu_dropout, x, bias, *drop, what=what)
            if shape[-1] > 1:
                close(functions.norm_with_moments, x, weight, shift, what=what)
                total, *norm = functions.dropout_add_norm(x, bias, residual, weight, shift, *drop)
                assert torch.equal(total, functions.dropout_add(x, bias, residual, *drop))
                again = functions.norm_with_moments(total, weight, shift)
                assert all(torch.equal(a, b) for a, b in zip(norm, again, strict=True))


def check_backward_kernels_are_the_references_within_rounding() -> None:
    for dtype in DTYPES:
        for shape in SHAPES:
            grad, x, more = made(*shape, dtype=dtype, count=3)
            weight, shift = made(shape[-1], dtype=dtype, count=2)
            for p in (0.0, 0.1):
                drop, what = (seed(), 1, p), (dtype, shape, p)
                close(functions.dropout_add_backward, grad, *drop, what=what)
                close(functions.gelu_dropout_backward, grad, x, shift, *drop, True, what=what)
                if shape[-1] > 1:
                    _, mean, scale = functions.norm_with_moments(x, weight, shift)
                    for rest in ((None, None), (shift, more)):
                        given = (grad, x, mean, scale, weight, *rest, *drop)
                        close(functions.dropout_add_norm_backward, *given, what=what)
            close(functions.join_columns, grad, x, more, what=what)


def check_the_stochastic_gelu_is_within_its_tolerance() -> None:
    x, grad = made(1000, 4096, dtype=torch.float32, count=2)
    (bias,) = made(4096, dtype=torch.float32)
    one, other = stochastic.stochastic_gelu_dropout(x, bias), functions.gelu_dropout(x, bias)
    torch.testing.assert_close(one, other, rtol=0, atol=2**-11 * 8)
    for a, b in zip(
        stochastic.stochastic_gelu_dropout_backward(grad, x, bias)[:1],
        functions.gelu_dropout_backward(grad, x, bias)[:1],
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=0, atol=2**-11 * 32)


def layer(dtype: torch.dtype, **words: Any) -> nn.TransformerLayer:
    torch.manual_seed(0)
    return nn.TransformerLayer(256, 4, device="cuda", dtype=dtype, **words)


def gradients(module: Any, call: Any, x: Tensor, grad: Tensor) -> list[Tensor]:
    torch.manual_seed(3)
    out = call(x)
    return [out, *torch.autograd.grad(out, [x, *module.parameters()], grad)]


def check_layer_is_that_of_the_references_in_float64() -> None:
    for pre in (True, False):
        for dtype in DTYPES:
            words = {"attention_dropout": 0.0, "hidden_dropout": 0.1, "pre_layer_norm": pre}
            words |= {"normalize_invertible": pre, "gelu_checkpoint": True}
            ours, exact = layer(dtype, **words), layer(torch.float64, **words)
            exact.load_state_dict(ours.state_dict())
            x, grad = made(4, 64, 256, dtype=dtype, count=2)
            x.requires_grad_()
            wide = x.detach().double().requires_grad_()
            found = gradients(ours, ours, x, grad)
            for one, other in zip(found, gradients(exact, exact, wide, grad.double()), strict=True):
                size = other.abs().max().item()
                tolerance = {torch.float32: 1e-4, torch.bfloat16: 0.04, torch.float16: 0.008}
                worst = (one.double() - other).abs().max().item()
                assert worst <= tolerance[dtype] * max(size, 1e-3), (pre, dtype, worst, size)


def check_dropout_repeats_when_it_is_computed_again_and_compiled() -> None:
    for pre in (True, False):
        plain = layer(torch.bfloat16, pre_layer_norm=pre)
        thrifty = layer(
            torch.bfloat16, pre_layer_norm=pre, normalize_invertible=True, gelu_checkpoint=True,
            attn_dropout_checkpoint=True,
        )  # fmt: skip
        x, grad = made(4, 64, 256, dtype=torch.bfloat16, count=2)
        x.requires_grad_()
        expected = gradients(plain, plain, x, grad)
        calls = {
            "thrifty": (thrifty, thrifty),
            "checkpoint": (plain, lambda x, m=plain: checkpoint(m, x, use_reentrant=False)),
        }
        for name, (module, call) in calls.items():
            for one, other in zip(gradients(module, call, x, grad), expected, strict=True):
                torch.testing.assert_close(
                    one.float(), other.float(), rtol=0.02, atol=0.02, msg=f"{name}, {pre}"
                )
        compiled = torch.compile(plain, fullgraph=True)
        repeated = [gradients(plain, compiled, x, grad)[0] for _ in range(2)]
        assert torch.equal(*repeated)


def check_a_captured_step_draws_anew_at_each_replay() -> None:
    module = layer(torch.bfloat16, hidden_dropout=0.5)
    (x,) = made(2, 32, 256, dtype=torch.bfloat16)
    for _ in range(2):
        module(x).sum().backward()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = module(x)
    graph.replay()
    first = out.clone()
    graph.replay()
    assert not torch.equal(first, out)
    torch.manual_seed(9)
    graph.replay()
    first.copy_(out)
    torch.manual_seed(9)
    graph.replay()
    assert torch.equal(first, out)


def check_less_memory_than_with_torchs_modules() -> str:
    """Of one layer of 1024 x 512 x 8, from before the forward to after the backward pass."""
    torch.manual_seed(0)
    theirs = torch.nn.TransformerEncoderLayer(
        1024, 16, 4096, 0.1, batch_first=True, norm_first=True, device="cuda",
        dtype=torch.bfloat16, activation=lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    )  # fmt: skip
    ours = nn.TransformerLayer(1024, 16, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(8, 512, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    peaks = []
    for module in (theirs, ours):
        for _ in range(2):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            torch.autograd.grad(module(x), [x, *module.parameters()], torch.ones_like(x))
        peaks.append((torch.cuda.max_memory_allocated() - before) / 2**20)
    assert peaks[1] < peaks[0], peaks
    return f"{peaks[1]:.0f} MiB, torch's {peaks[0]:.0f}"


CHECKS = [value for name, value in list(globals().items()) if name.startswith("check_")]


if __name__ == "__main__":
    sys.exit(main(CHECKS, __doc__))
