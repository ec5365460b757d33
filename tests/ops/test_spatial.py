"""``opkiln.nn.spatial``: adds of biases and residuals."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from stand_in import emulated_functions, poisoned
from torch import Tensor

from opkiln.nn import spatial
from opkiln.ops.spatial_inference.functions import spatial_bias_add
from opkiln.testing import Make, op_tests

if TYPE_CHECKING:
    from collections.abc import Callable

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
LAST = torch.channels_last


def samples(make: Make, size: int) -> tuple[Any, ...]:
    return make(3, 5, size), make(size), make(3, 5, size), make(size)


def images(make: Make, size: int) -> tuple[Any, ...]:
    x = make(2, size, 3, 5)
    return x.to(memory_format=LAST), make(size), x.flip(0).to(memory_format=LAST)


TestRows = op_tests(spatial_bias_add, samples, dtypes=DTYPES)
TestImages = op_tests(spatial_bias_add, images, sizes=(0, 1, 17, 64, 320))


@pytest.fixture(scope="module")
def kernel() -> Any:
    """The CUDA kernels."""
    return emulated_functions(spatial_bias_add).spatial_bias_add


@pytest.fixture(params=["cpu", "cuda"])
def add(request: pytest.FixtureRequest) -> Any:
    """The native versions: for the CPU, and for CUDA by the emulator."""
    if request.param == "cuda":
        return request.getfixturevalue("kernel")
    if not spatial_bias_add.load("cpu"):
        pytest.skip(str(spatial_bias_add.explain("cpu")))
    return spatial_bias_add


def exactly(x: Tensor, bias: Tensor, other: Tensor | None, other_bias: Tensor | None) -> Tensor:
    """In float64, for channels in dimension 1."""
    shape = [1, -1] + [1] * (x.dim() - 2)
    out = x.double() + bias.double().view(shape)
    if other is not None:
        out = out + other.double()
    return out if other_bias is None else out + other_bias.double().view(shape)


# Channels of one vector, of several, of a vector and a bit, fewer than a vector; and long rows.
@pytest.mark.parametrize(
    "shape", [(2, 8, 3, 3), (2, 64, 5, 7), (3, 11, 2, 3), (2, 3, 9, 11), (1, 4099, 1, 3)]
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_adds_within_rounding_in_each_memory_format(
    add: Any, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    x, other = torch.randn(2, *shape).to(dtype)
    bias, other_bias = torch.randn(2, shape[1]).to(dtype)
    for how in (lambda t: t, lambda t: t.to(memory_format=LAST)):
        for rest in ((None, None), (other, None), (other, other_bias)):
            with poisoned():
                out = add(how(x), bias, *rest)
            assert out.stride() == how(x).stride()
            assert out.dtype == dtype
            exact = exactly(x, bias, *rest)
            # The last rounding, and before it three sums in fp32, or in fp64.
            sizes = exactly(
                x.abs(), bias.abs(), *(None if each is None else each.abs() for each in rest)
            )
            wide = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
            least = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
            last = torch.finfo(dtype).eps / 2 * exact.abs() + least
            assert ((out.double() - exact).abs() <= last + 3 * wide * sizes).all()
            assert torch.equal(out, spatial_bias_add.reference(how(x), bias, *rest))


def test_any_strides_and_addresses_are_read(add: Any) -> None:
    whole = torch.randn(4, 6, 8, 17)
    bias = torch.randn(9)[1:]
    x = whole.permute(0, 2, 1, 3)[:, :, ::2]
    other = torch.randn(4, 8, 3, 17).to(memory_format=LAST)
    for given in (x, torch.randn(1 + 4 * 8 * 3 * 17)[1:].view(4, 3, 17, 8).permute(0, 3, 1, 2)):
        out = add(given, bias, other, bias)
        expected = spatial_bias_add.reference(given, bias, other, bias)
        assert torch.equal(out, expected)
        assert out.stride() == expected.stride()


def test_channels_are_where_it_is_said(add: Any) -> None:
    x, bias = torch.randn(2, 3, 4, 5), torch.randn(5)
    assert torch.equal(add(x, bias, channel_dim=-1), x + bias)
    assert torch.equal(add(x, bias[:3]), x + bias[:3].view(3, 1, 1))
    assert torch.equal(add(x, bias[:2], channel_dim=0), x + bias[:2].view(2, 1, 1, 1))
    assert torch.equal(add(x[0], bias), x[0] + bias)
    assert torch.equal(add(bias, bias), bias + bias)


def test_nan_and_infinity_pass_through(add: Any) -> None:
    odd = torch.tensor([math.nan, math.inf, -math.inf, -0.0, 3e38, 6e4, 1e-45, 1.0])
    for dtype in DTYPES:
        x = odd.to(dtype).repeat(9, 1)
        for rest in ((), (x.flip(1),), (x.flip(1), odd.to(dtype))):
            out = add(x, odd.to(dtype), *rest)
            expected = spatial_bias_add.reference(x, odd.to(dtype), *rest)
            assert torch.equal(out.nan_to_num(7), expected.nan_to_num(7))
            assert torch.equal(out.isnan(), expected.isnan())


@pytest.mark.parametrize("version", ["native", "reference"])
def test_wrong_arguments_are_named(version: str, add: Any) -> None:
    call: Callable[..., Tensor] = add if version == "native" else spatial_bias_add.reference
    x, bias = torch.randn(2, 4), torch.randn(4)
    for message, args in (
        ("x has dtype int64, expected float32", (x.long(), bias)),
        (r"bias has shape \[3\], expected \[4\]", (x, bias[:3])),
        ("bias has dtype float16, x has float32", (x, bias.half())),
        (r"other has shape \[4\], expected \[2, 4\]", (x, bias, bias)),
        (r"other_bias has shape \[1\], expected \[4\]", (x, bias, x, bias[:1])),
        ("other_bias is given without other", (x, bias, None, bias)),
        ("so it has no dimension 2", (x, bias, None, None, 2)),
    ):
        with pytest.raises(RuntimeError, match=message):
            call(*args)


def test_gradients_are_those_of_the_sum() -> None:
    torch.manual_seed(0)
    shapes = ((2, 3, 2, 2), (3,), (2, 3, 2, 2), (3,))
    given = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    for count in (2, 3, 4):
        assert torch.autograd.gradcheck(spatial_bias_add, given[:count])
        assert torch.autograd.gradcheck(spatial_bias_add.reference, given[:count])
        assert torch.autograd.gradgradcheck(spatial_bias_add, given[:count])


def test_it_compiles_with_dynamic_shapes_and_without_a_graph_break() -> None:
    compiled = torch.compile(
        lambda *a: spatial.spatial_bias_add(*a) * 2,
        fullgraph=True, dynamic=True, backend="aot_eager",
    )  # fmt: skip
    for size in (5, 7):
        x = torch.randn(2, 8, size, size).to(memory_format=LAST)
        bias = torch.randn(8, requires_grad=True)
        out = compiled(x, bias, x)
        assert torch.equal(out, spatial_bias_add(x, bias, x) * 2)
        out.sum().backward()
        assert torch.equal(bias.grad, torch.full((8,), 4.0 * size * size))
