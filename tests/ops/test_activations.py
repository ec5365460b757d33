"""Activations with a bias, plain and gated, and residual adds: the CPU's version, the CUDA kernels
in the emulator and the reference, against float64."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from inference_ops import assert_rounded, each_dtype, version
from stand_in import poisoned
from torch import Tensor

from opkiln.nn import inference

# With and without rows of whole 16 bytes; more than a block's vectors; the last is one row.
SHAPES = [(3, 2), (5, 14), (33, 16), (2, 3, 64), (7, 1002), (3, 4096), (10008,)]
ODD = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-30, -1e-30, 100.0, -100.0, -12.0, 3e38, -3e38]


@pytest.fixture(params=["native", "emulated", "reference"])
def op(request: pytest.FixtureRequest) -> Any:
    return version(request.param)


def erf_gelu(x: Tensor) -> Tensor:
    return 0.5 * x * torch.special.erfc(-x * math.sqrt(0.5))


def tanh_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))


def silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


def made(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * 3).to(dtype)


@each_dtype()
def test_activations_of_the_sum_with_a_bias(op: Any, dtype: torch.dtype) -> None:
    for shape in SHAPES:
        x, row = made(*shape, dtype=dtype), made(shape[-1], dtype=dtype, seed=1)
        for bias in (None, row):
            exact = x.double() if bias is None else x.double() + bias.double()
            with poisoned():
                results = {
                    "nothing": (op.bias_add(x, bias), exact),
                    "relu": (op.bias_relu(x, bias), exact.relu()),
                    "silu": (op.bias_silu(x, bias), silu(exact)),
                    "tanh": (op.bias_gelu(x, bias), tanh_gelu(exact)),
                    "erf": (op.bias_gelu(x, bias, tanh=False), erf_gelu(exact)),
                }
            for got, wanted in results.values():
                assert_rounded(got, wanted, slack=6 if dtype == torch.float32 else 0.01)


@each_dtype()
def test_one_half_of_a_row_is_the_gate_of_the_other(op: Any, dtype: torch.dtype) -> None:
    for shape, interleaved, gate_first in itertools.product(SHAPES, (False, True), (False, True)):
        x, row = made(*shape, dtype=dtype), made(shape[-1], dtype=dtype, seed=1)
        form = {"interleaved": interleaved, "gate_first": gate_first}
        for bias in (None, row):
            sums = x.double() if bias is None else x.double() + bias.double()
            halves = (sums[..., 0::2], sums[..., 1::2]) if interleaved else sums.chunk(2, -1)
            gate, value = halves if gate_first else halves[::-1]
            with poisoned():
                results = [
                    (op.gated_silu(x, bias, **form), silu(gate) * value),
                    (op.gated_gelu(x, bias, **form), tanh_gelu(gate) * value),
                    (op.gated_gelu(x, bias, tanh=False, **form), erf_gelu(gate) * value),
                ]
            for got, wanted in results:
                assert_rounded(got, wanted, slack=50 if dtype == torch.float32 else 0.1)


@each_dtype()
def test_numbers_that_are_not_finite_give_what_the_reference_gives(
    op: Any, dtype: torch.dtype
) -> None:
    reference = version("reference")
    for x in (torch.tensor(ODD).to(dtype), torch.tensor(ODD + ODD[:4]).to(dtype)):
        for name, more in (
            ("bias_add", ()), ("bias_relu", ()), ("bias_silu", ()), ("bias_gelu", (None, True)),
            ("bias_gelu", (None, False)),
        ):  # fmt: skip
            ours, theirs = getattr(op, name)(x, *more), getattr(reference, name)(x, *more)
            torch.testing.assert_close(
                ours, theirs, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
            )


# The reference's tanh, torch's, loses digits near -1.
@each_dtype("native", "emulated", dtypes=(torch.bfloat16, torch.float16))
def test_every_16_bit_number_is_within_a_rounding(op: Any, dtype: torch.dtype) -> None:
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    x = x[x.isfinite() & (x.abs() > 1e-4) & (x.abs() < 8)]
    assert_rounded(op.bias_silu(x), silu(x.double()))
    assert_rounded(op.bias_gelu(x), tanh_gelu(x.double()))
    small = x[x > -4]  # below, fp16 has no digits left
    assert_rounded(op.bias_gelu(small, None, False), erf_gelu(small.double()))


def test_any_strides_and_addresses_are_taken(op: Any) -> None:
    whole = made(8, 132, dtype=torch.bfloat16)
    for x in (whole[:, ::2], whole[:, 1:65], whole[:, :64].t(), whole[:1].expand(8, 132)):
        assert_rounded(op.bias_silu(x), silu(x.double()))
        gate, value = x.double().chunk(2, -1)
        assert_rounded(op.gated_silu(x), silu(gate) * value)
        assert op.bias_silu(x).is_contiguous()


def test_no_elements_give_none(op: Any) -> None:
    assert op.bias_gelu(torch.empty(0, 8), torch.ones(8)).shape == (0, 8)
    assert op.gated_silu(torch.empty(3, 0)).shape == (3, 0)
    assert op.residual_add(torch.empty(0, 4), torch.empty(0, 4)).shape == (0, 4)


@each_dtype()
def test_residuals_are_added_with_their_scales(op: Any, dtype: torch.dtype) -> None:
    for shape in SHAPES:
        hidden, residual, attention = (made(*shape, dtype=dtype, seed=s) for s in range(3))
        bias, more = (made(shape[-1], dtype=dtype, seed=s) for s in (3, 4))
        h, r, a, b, m = (each.double() for each in (hidden, residual, attention, bias, more))
        with poisoned():
            plain = op.residual_add(hidden, residual)
            biased = op.residual_add(hidden, residual, None, bias)
            whole = op.residual_add(hidden, residual, attention, bias, more, 0.5, 0.25)
        assert_rounded(plain, h + r, slack=20)
        assert_rounded(biased, h + r + b, slack=20)
        assert_rounded(whole, h + 0.5 * (r + b + m) + 0.25 * a, slack=20)


@each_dtype()
def test_experts_are_mixed_by_rows_and_by_columns(op: Any, dtype: torch.dtype) -> None:
    for shape in SHAPES:
        residual, mlp = (made(*shape, dtype=dtype, seed=s) for s in (0, 1))
        rows, columns = made(*shape[:-1], 2, dtype=dtype), made(2, shape[-1], dtype=dtype)
        r, m, by_row, by_column = (each.double() for each in (residual, mlp, rows, columns))
        exact = r * by_row[..., :1] + m * by_row[..., 1:]
        with poisoned():
            assert_rounded(op.moe_res_matmul(residual, rows, mlp), exact, slack=20)
            if columns.shape != rows.shape:
                exact = r * by_column[0] + m * by_column[1]
                assert_rounded(op.moe_res_matmul(residual, columns, mlp), exact, slack=20)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda op, x: op.bias_gelu(x, torch.ones(7)), r"bias has shape \[7\], expected \[9\]"),
        (lambda op, x: op.gated_silu(x), r"x has 9 columns, expected an even number"),
        (
            lambda op, x: op.residual_add(x, x[:1]),
            r"residual has shape \[1, 9\], hidden has \[2, 9\]",
        ),
        (lambda op, x: op.moe_res_matmul(x, torch.ones(3, 9), x), r"coef has shape \[3, 9\]"),
        (lambda op, x: op.bias_silu(x.sum()), r"x has no dimensions"),
    ],
)
def test_arguments_that_do_not_fit_are_named(op: Any, call: Any, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        call(op, torch.ones(2, 9))


def test_gradients_of_the_references_are_right() -> None:
    reference = version("reference")
    x, other = (torch.randn(3, 6, dtype=torch.float64, requires_grad=True) for _ in range(2))
    bias = torch.randn(6, dtype=torch.float64, requires_grad=True)
    for name in ("bias_gelu", "bias_silu", "gated_gelu", "gated_silu"):
        assert torch.autograd.gradcheck(getattr(reference, name), (x, bias))
    assert torch.autograd.gradcheck(lambda *a: reference.bias_gelu(*a, tanh=False), (x, bias))
    assert torch.autograd.gradcheck(reference.residual_add, (x, other, x, bias, bias))
    coef = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(reference.moe_res_matmul, (x, coef, other))


@pytest.mark.parametrize("name", ["bias_gelu", "gated_silu", "residual_add"])
def test_torch_compiles_and_checks_it(name: str) -> None:
    version("native")
    function = getattr(inference, name)
    x = torch.randn(3, 16)
    arguments = (x, x.clone()) if name == "residual_add" else (x, x[0].clone())
    torch.library.opcheck(function.overload, arguments)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*arguments), function(*arguments))
