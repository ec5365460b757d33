"""Linear layers with int8 weights: the CPU's version, the CUDA kernels in the emulator and the
reference, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from inference_ops import assert_rounded, each_dtype, version
from torch import Tensor

from opkiln.nn import inference as functions


@pytest.fixture(params=["native", "emulated", "reference"])
def op(request: pytest.FixtureRequest) -> Any:
    return version(request.param)


def made(outputs: int, inputs: int, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """Weights, scales, and the weights in float64."""
    torch.manual_seed(outputs + inputs)
    weight = torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8)
    scales = torch.rand(groups) * 0.01 + 0.001
    exact = weight.double().view(groups, -1) * scales.double()[:, None]
    return weight, scales, exact.view(outputs, inputs)


def close(got: Tensor, exact: Tensor, x: Tensor, w: Tensor) -> None:
    """Within the rounding of weights and results, relative to the sum of the products' sizes."""
    size = x.double().abs() @ w.abs().T
    bound = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[got.dtype]
    assert ((got.double() - exact).abs() <= bound * (size + 1)).all()


@each_dtype()
def test_weights_are_dequantized_by_groups(op: Any, dtype: torch.dtype) -> None:
    for outputs, inputs, groups in (
        (64, 48, 64),
        (64, 48, 192),
        (7, 5, 35),
        (6, 10, 4),
        (3, 32, 1),
    ):
        weight, scales, exact = made(outputs, inputs, groups)
        assert_rounded(op.dequantize_int8(weight, scales, dtype), exact)
    weight, scales, exact = made(8, 16, 8)
    flat = op.dequantize_int8(weight.view(2, 4, 16), scales, dtype)
    assert_rounded(flat, exact.view(2, 4, 16))
    assert op.dequantize_int8(weight[:0], scales, dtype).shape == (0, 16)


@each_dtype()
def test_every_number_of_rows_is_multiplied(op: Any, dtype: torch.dtype, whole_grid: bool) -> None:
    # One group; rows; parts of rows; groups of several rows; parts that are no power of two, or
    # too small for tensor cores; odd sizes.
    for outputs, inputs, groups in (
        (33, 64, 1), (20, 48, 20), (20, 256, 80), (20, 32, 5), (9, 96, 18), (6, 64, 12), (5, 7, 5),
        (4, 2064, 4),
    ):  # fmt: skip
        weight, scales, w = made(outputs, inputs, groups)
        bias = torch.randn(outputs).to(dtype)
        every = whole_grid or dtype == torch.bfloat16
        for rows in (1, 2, 3, 8, 9, 34) if every else (1, 8, 34):
            x = torch.randn(rows, inputs).to(dtype)
            if rows % 2:
                close(op.int8_linear(x, weight, scales), x.double() @ w.T, x, w)
            else:
                exact = x.double() @ w.T + bias.double()
                close(op.int8_linear(x, weight, scales, bias), exact, x, w)


@each_dtype("native", "emulated", dtypes=(torch.bfloat16, torch.float16))
def test_weights_are_not_rounded_for_few_rows(op: Any, dtype: torch.dtype) -> None:
    most = 8 if op is functions else 32
    unit = {torch.float16: 2**-11, torch.bfloat16: 2**-8}[dtype]
    for outputs, inputs, groups in ((20, 256, 80), (5, 80, 5), (33, 64, 1)):
        weight, scales, w = made(outputs, inputs, groups)
        for rows in (1, most // 2 + 1, most):
            x = torch.randn(rows, inputs).to(dtype)
            got, exact = op.int8_linear(x, weight, scales), x.double() @ w.T
            allowed = unit * exact.abs() + 1e-6 * (x.double().abs() @ w.abs().T)
            assert ((got.double() - exact).abs() <= allowed).all()


def test_shapes_and_strides_of_x_are_kept(op: Any) -> None:
    weight, scales, w = made(12, 32, 12)
    for x in (
        torch.randn(32), torch.randn(2, 3, 32), torch.randn(32, 4).T, torch.randn(3, 33)[:, 1:],
        torch.randn(0, 32), torch.randn(2, 5, 32).transpose(0, 1),
    ):  # fmt: skip
        out = op.int8_linear(x, weight, scales)
        assert out.shape == (*x.shape[:-1], 12)
        close(out, x.double() @ w.T, x, w)


def test_nan_and_infinity_pass(op: Any) -> None:
    weight, scales, _ = made(4, 32, 4)
    weight[:, 3] = torch.tensor([1, -1, 0, 5])
    for rows in (2, 10):
        x = torch.zeros(rows, 32)
        x[0, 3], x[1, 3] = torch.inf, torch.nan
        out = op.int8_linear(x, weight, scales)
        assert out[0, [0, 1, 3]].tolist() == [torch.inf, -torch.inf, torch.inf]
        assert out[0, 2].isnan()
        assert out[1].isnan().all()


def test_wrong_arguments_are_refused_by_name(op: Any) -> None:
    weight, scales, _ = made(4, 32, 4)
    x = torch.randn(2, 32)
    for message, call in (
        ("weight has dtype", lambda: op.int8_linear(x, weight.float(), scales)),
        ("weight is not contiguous", lambda: op.int8_linear(x[:, :4], weight.T, scales)),
        (
            "scales has 3 elements, which do not divide",
            lambda: op.int8_linear(x, weight, scales[:3]),
        ),
        (r"x has shape .2, 31.", lambda: op.int8_linear(x[:, 1:], weight, scales)),
        (r"bias has shape .3., expected .4.", lambda: op.int8_linear(x, weight, scales, x[0, :3])),
        ("2 dimensions", lambda: op.int8_linear(x, weight[0], scales)),
    ):
        with pytest.raises(RuntimeError, match=message):
            call()


def test_x_and_bias_have_gradients() -> None:
    weight, scales, w = made(4, 32, 8)
    x, bias = torch.randn(3, 32, requires_grad=True), torch.randn(4, requires_grad=True)
    grad = torch.randn(3, 4)
    found = torch.autograd.grad(functions.int8_linear(x, weight, scales, bias), (x, bias), grad)
    torch.testing.assert_close(found[0], (grad.double() @ w).float())
    torch.testing.assert_close(found[1], grad.sum(0))
    reference = version("reference").int8_linear
    x64, bias64 = (each.detach().double().requires_grad_() for each in (x, bias))
    scales64 = scales.double()
    assert torch.autograd.gradcheck(lambda x, b: reference(x, weight, scales64, b), (x64, bias64))


def test_it_passes_opcheck_and_compiles_in_one_graph() -> None:
    weight, scales, _ = made(4, 32, 8)
    x = torch.randn(3, 32, requires_grad=True)
    ops = torch.ops.opkiln
    torch.library.opcheck(ops.int8_linear.default, (x, weight, scales, torch.randn(4)))
    torch.library.opcheck(ops.dequantize_int8.default, (weight, scales, torch.bfloat16))

    def layer(x: Tensor) -> Tensor:
        return functions.int8_linear(x * 2, weight, scales)

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), layer(x))
