"""``opkiln.nn.core``: the pieces of a layer as DeepSpeed-FastGen calls them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from opkiln.compat.deepspeed.modules import OpModule
from opkiln.errors import UsageError
from opkiln.nn import core

ROWS, COLUMNS = 7, 48
UNIT = {torch.float32: 4e-6, torch.float16: 2**-9, torch.bfloat16: 2**-6}


@pytest.fixture(params=UNIT, ids=str, autouse=True)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    torch.manual_seed(0)
    found: torch.dtype = request.param
    return found


def _drawn(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape or (ROWS, COLUMNS)).to(dtype)


def _agrees(found: Tensor, expected: Tensor) -> None:
    unit = UNIT[found.dtype]
    torch.testing.assert_close(found.double(), expected, rtol=unit, atol=unit)


@pytest.mark.parametrize(
    ("name", "number", "function"),
    [
        ("gelu", 0, lambda x: functional.gelu(x, approximate="tanh")),
        ("relu", 1, torch.relu),
        ("silu", 2, functional.silu),
        ("identity", 6, lambda x: x),
    ],
)
def test_activations_are_in_place(
    dtype: torch.dtype, name: str, number: int, function: Any
) -> None:
    x, bias = _drawn(dtype), _drawn(dtype, COLUMNS)
    for given, each in ((name, bias), (number, bias), (name, None)):
        found = x.clone()
        core.bias_activation(found, each, given)
        _agrees(found, function(x.double() + (0 if each is None else each.double())))


@pytest.mark.parametrize(
    ("name", "number", "function"),
    [
        ("geglu", 3, lambda x: functional.gelu(x, approximate="tanh")),
        ("reglu", 4, torch.relu),
        ("siglu", 5, functional.silu),
    ],
)
def test_even_columns_are_gates(dtype: torch.dtype, name: str, number: int, function: Any) -> None:
    x, bias = _drawn(dtype), _drawn(dtype, COLUMNS)
    for given, each in ((name, bias), (number, None)):
        out = x.new_empty(ROWS, COLUMNS // 2)
        core.gated_activation(out, x, each, given)
        wide = x.double() + (0 if each is None else each.double())
        _agrees(out, function(wide[:, 0::2]) * wide[:, 1::2])


def test_an_activation_of_the_other_kind_is_refused(dtype: torch.dtype) -> None:
    x = _drawn(dtype)
    with pytest.raises(UsageError, match="act_type is geglu, expected one of gelu, relu"):
        core.bias_activation(x, None, 3)
    with pytest.raises(UsageError, match="act_type is 9, expected one of geglu"):
        core.gated_activation(x, x, None, 9)


def test_norms_may_write_over_what_they_read(dtype: torch.dtype) -> None:
    x, residual, gamma, beta = (
        _drawn(dtype),
        _drawn(dtype),
        _drawn(dtype, COLUMNS),
        _drawn(dtype, COLUMNS),
    )
    total = x.double() + residual.double()

    def norm(wide: Tensor) -> Tensor:
        return functional.layer_norm(wide, (COLUMNS,), gamma.double(), beta.double(), 1e-5)

    def rms(wide: Tensor) -> Tensor:
        return functional.rms_norm(wide, (COLUMNS,), gamma.double(), 1e-5)

    one, two = x.clone(), residual.clone()
    core.layer_norm(one, one, gamma, beta, 1e-5)
    _agrees(one, norm(x.double()))
    core.rms_norm(two, two, gamma, 1e-5)
    _agrees(two, rms(residual.double()))
    one = x.clone()
    core.post_layer_norm(one, one, residual, gamma, beta, 1e-5)
    _agrees(one, norm(total))
    one, two = x.clone(), residual.clone()
    core.pre_layer_norm(one, two, one, two, gamma, beta, 1e-5)
    _agrees(one, total)
    _agrees(two, norm(total))
    one, two = x.clone(), residual.clone()
    core.rms_pre_norm(one, two, one, two, gamma, 1e-5)
    _agrees(one, rms(total))
    _agrees(two, total)


def test_a_linear_layer_goes_to_the_output(dtype: torch.dtype) -> None:
    x = _drawn(dtype, 2, ROWS, COLUMNS).requires_grad_()
    weight = (torch.randn(32, COLUMNS) / 8).to(dtype)
    out = torch.empty(2, ROWS, 32, dtype=dtype)
    core.blas_linear(out, x, weight)
    assert not out.requires_grad
    _agrees(out, x.detach().double() @ weight.double().t())


def test_deepspeed_gets_the_same_functions() -> None:
    module: Any = OpModule("inference_core_ops")
    for name in core.__all__:
        assert getattr(module, name) is getattr(core, name)
    assert module.create_handle() is None
    assert {*core.__all__} <= set(dir(module))


WRITING = {
    "bias_activation": lambda out, x, row: core.bias_activation(out, row, "relu"),
    "gated_activation": lambda out, x, row: core.gated_activation(
        out, x.repeat(1, 2), row.repeat(2), "reglu"
    ),
    "layer_norm": lambda out, x, row: core.layer_norm(out, x, row, row, 1e-5),
    "pre_layer_norm": lambda out, x, row: core.pre_layer_norm(out, x, x, x, row, row, 1e-5),
    "post_layer_norm": lambda out, x, row: core.post_layer_norm(out, x, x, row, row, 1e-5),
    "rms_norm": lambda out, x, row: core.rms_norm(out, x, row, 1e-5),
    "rms_pre_norm": lambda out, x, row: core.rms_pre_norm(out, x, x, x, row, 1e-5),
    "blas_linear": lambda out, x, row: core.blas_linear(out, x, x.new_ones(COLUMNS, COLUMNS)),
}


@pytest.mark.parametrize("name", WRITING)
def test_what_requires_gradients_is_written_to_by_torchs_rule(
    name: str, dtype: torch.dtype
) -> None:
    call, x, row = WRITING[name], _drawn(dtype), _drawn(dtype, COLUMNS)
    leaf = _drawn(dtype).requires_grad_()
    for refused in (leaf, leaf[:]):
        with pytest.raises(RuntimeError, match=r"requires grad|automatic differentiation"):
            call(refused, x, row)
    with torch.no_grad():
        call(leaf, x, row)  # as an optimizer writes
    if name != "blas_linear":  # torch's own refuses any output of a graph
        inside = leaf * 1
        call(inside, x, row)
        inside.sum().backward()
        assert not leaf.grad.any()  # what was there before counts no more
