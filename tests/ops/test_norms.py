"""Layer norm and rms norm, also of the sum with a residual: the CPU's version, the CUDA kernels in
the emulator and the reference, against float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from inference_ops import assert_rounded, each_dtype, version
from stand_in import poisoned
from torch import Tensor

from opkiln.nn import inference

# Rows of a part of a warp, a warp and several; of whole 16 bytes and not.
# Of one dtype all: the way through a row is the same for the others.
SHAPES = [
    (3, 1),
    (5, 7),
    (33, 8),
    (2, 3, 64),
    (130, 40),
    (3, 1001),
    (2, 1024),
    (4, 4096),
    (2, 5000),
]


@pytest.fixture(params=["native", "emulated", "reference"])
def op(request: pytest.FixtureRequest) -> Any:
    return version(request.param)


def normalized(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, centred: bool
) -> Tensor:
    """The definition, in float64."""
    x = x.double()
    x = x - x.mean(-1, keepdim=True) if centred else x
    out = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    out = out if weight is None else out * weight.double()
    return out if bias is None else out + bias.double()


def made(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) + 0.5).to(dtype)


@each_dtype()
def test_rows_are_normalized(op: Any, dtype: torch.dtype, whole_grid: bool) -> None:
    for shape in SHAPES if whole_grid or dtype == torch.bfloat16 else SHAPES[:6]:
        x = made(*shape, dtype=dtype)
        weight, bias = (made(shape[-1], dtype=dtype, seed=seed) for seed in (1, 2))
        with poisoned():
            rms = [op.rms_norm(x, weight, 1e-6), op.rms_norm(x, None, 0.25)]
            layer = [op.layer_norm(x, weight, bias, 1e-5), op.layer_norm(x, None, bias, 0.25)]
        assert_rounded(rms[0], normalized(x, weight, None, 1e-6, False))
        assert_rounded(rms[1], normalized(x, None, None, 0.25, False))
        assert_rounded(layer[0], normalized(x, weight, bias, 1e-5, True), slack=4)
        assert_rounded(layer[1], normalized(x, None, bias, 0.25, True), slack=4)


@each_dtype()
def test_the_sum_with_a_residual_is_normalized_and_returned(
    op: Any, dtype: torch.dtype, whole_grid: bool
) -> None:
    for shape in SHAPES if whole_grid or dtype == torch.bfloat16 else SHAPES[:6:2]:
        x, residual = (made(*shape, dtype=dtype, seed=seed) for seed in (3, 4))
        weight, bias, shift = (made(shape[-1], dtype=dtype, seed=seed) for seed in (5, 6, 7))
        for some in (None, shift):
            with poisoned():
                rms, rms_sum = op.pre_rms_norm(x, residual, weight, some, 1e-6)
                layer, layer_sum = op.pre_layer_norm(x, residual, weight, bias, some, 1e-5)
                post = op.post_rms_norm(x, residual, weight, some, 1e-6)
                post_layer = op.post_layer_norm(x, residual, weight, bias, some, 1e-5)
            exact = x.double() + residual.double() + (0 if some is None else some.double())
            assert_rounded(rms_sum, exact, slack=3)
            assert torch.equal(rms_sum, layer_sum)
            assert_rounded(rms, normalized(rms_sum, weight, None, 1e-6, False))
            assert_rounded(layer, normalized(layer_sum, weight, bias, 1e-5, True), slack=4)
            assert torch.equal(post, rms)
            assert torch.equal(post_layer, layer)


@pytest.mark.parametrize(
    ("dtype", "columns"),
    [
        (torch.bfloat16, 16384),
        (torch.bfloat16, 65536),
        (torch.float32, 65536),
        (torch.bfloat16, 20001),
    ],
    ids=str,
)
def test_long_rows_are_normalized(op: Any, dtype: torch.dtype, columns: int) -> None:
    x, residual = (made(2, columns, dtype=dtype, seed=seed) for seed in (0, 1))
    weight, bias = (made(columns, dtype=dtype, seed=seed) for seed in (2, 3))
    assert_rounded(op.rms_norm(x, weight, 1e-6), normalized(x, weight, None, 1e-6, False))
    out, total = op.pre_layer_norm(x, residual, weight, bias, None, 1e-5)
    assert_rounded(out, normalized(total, weight, bias, 1e-5, True), slack=4)


def test_the_variance_of_rows_far_from_zero_is_exact(op: Any) -> None:
    # The mean of the squares less the square of the mean would be nothing but rounding.
    x = made(4, 512, dtype=torch.float32) + 4096.0
    assert_rounded(
        op.layer_norm(x, None, None, 0.0), normalized(x, None, None, 0.0, True), slack=400
    )


def test_numbers_that_are_not_finite_give_what_the_reference_gives(op: Any) -> None:
    x = made(4, 64, dtype=torch.float32)
    x[0, 3], x[1, 4], x[2, 5] = math.nan, math.inf, -math.inf
    reference = version("reference")
    for ours, theirs in (
        (op.rms_norm(x), reference.rms_norm(x)),
        (op.layer_norm(x), reference.layer_norm(x)),
        (op.post_rms_norm(x, x), reference.post_rms_norm(x, x)),
    ):
        torch.testing.assert_close(ours, theirs, equal_nan=True)


def test_any_strides_and_addresses_are_taken(op: Any) -> None:
    whole = made(8, 130, dtype=torch.bfloat16)
    weight = made(65, dtype=torch.bfloat16)
    for x, w in (
        (whole[:, ::2], weight),  # every second element
        (whole[:, 1:65], weight[1:]),  # an odd address
        (whole[:, :64].transpose(0, 1), whole[0, :8]),
        (whole[:1].expand(8, 130), None),
    ):
        assert_rounded(op.rms_norm(x, w, 1e-6), normalized(x, w, None, 1e-6, False))
        assert op.rms_norm(x, w, 1e-6).is_contiguous()


def test_no_rows_and_no_columns_give_no_elements(op: Any) -> None:
    assert op.rms_norm(torch.empty(0, 8), torch.ones(8)).shape == (0, 8)
    assert op.layer_norm(torch.empty(3, 0)).shape == (3, 0)
    out, total = op.pre_rms_norm(torch.empty(2, 0, 4), torch.empty(2, 0, 4))
    assert out.shape == total.shape == (2, 0, 4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda op, x: op.rms_norm(x, torch.ones(7)), r"weight has shape \[7\], expected \[8\]"),
        (lambda op, x: op.rms_norm(x, torch.ones(8).half()), r"weight has dtype .*float16, x has "),
        (lambda op, x: op.layer_norm(x, None, torch.ones(2, 8)), r"bias has shape \[2, 8\]"),
        (lambda op, x: op.post_rms_norm(x, x[:1]), r"residual has shape \[1, 8\], x has \[2, 8\]"),
        (lambda op, x: op.rms_norm(x.sum()), r"x has no dimensions"),
    ],
)
def test_arguments_that_do_not_fit_are_named(op: Any, call: Any, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        call(op, torch.ones(2, 8))


def test_gradients_of_the_references_are_right() -> None:
    reference = version("reference")
    x, residual = (torch.randn(3, 5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    weight, bias, shift = (
        torch.randn(5, dtype=torch.float64, requires_grad=True) for _ in range(3)
    )
    assert torch.autograd.gradcheck(reference.rms_norm, (x, weight))
    assert torch.autograd.gradcheck(reference.layer_norm, (x, weight, bias))
    assert torch.autograd.gradcheck(reference.pre_layer_norm, (x, residual, weight, bias, shift))


@pytest.mark.parametrize("name", ["rms_norm", "pre_layer_norm"])
def test_torch_compiles_and_checks_it(name: str) -> None:
    version("native")
    function = getattr(inference, name)
    x, weight = torch.randn(3, 16), torch.randn(16)
    arguments = (x, weight) if name == "rms_norm" else (x, x.clone(), weight, weight, weight)
    torch.library.opcheck(function.overload, arguments)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*arguments), function(*arguments))
    assert torch.equal(gradient(function, arguments), gradient(function.reference, arguments))


def gradient(function: Any, arguments: tuple[Tensor, ...]) -> Tensor:
    leaf = arguments[0].clone().requires_grad_()
    result = function(leaf, *arguments[1:])
    first = result if isinstance(result, Tensor) else result[0]
    (found,) = torch.autograd.grad([first.sum()], [leaf])
    return found
