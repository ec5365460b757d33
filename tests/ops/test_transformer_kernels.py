"""The kernels of a training layer, in the emulator, against references in float64; the gradients
against autograd."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from sample import catalogue
from stand_in import emulated, poisoned
from torch import Tensor

from opkiln import nn
from opkiln.errors import FallbackWarning
from opkiln.loading import loader
from opkiln.ops.transformer import functions
from opkiln.ops.transformer.op import kit

if TYPE_CHECKING:
    from collections.abc import Iterator

# fp16 differs from bf16 by how elements are converted, which the kernels of inference show.
DTYPES = (torch.float32, torch.bfloat16)
LATE = pytest.param(torch.float16, marks=pytest.mark.full)
# Less than an eight, a prime, no rows, several rows to a warp, several warps to a row; then rows of
# two eights to a thread. The widest are in one dtype: the way through a row is no dtype's own.
SHAPES = [(1, 1), (3, 7), (0, 8), (5, 8), (35, 64), (9, 101), (2, 3, 768)]
LONG = [(3, 8192), (2, 4104)]


@pytest.fixture(scope="module")
def native(whole_grid: bool) -> Iterator[Any]:
    """The functions, which the emulated kernels serve on the CPU until this module's tests end."""
    made: dict[str, Any] = {}
    builders = [
        each
        for each in kit.builder.variants()
        if whole_grid or not each.NAME.endswith(catalogue.NOT_NATIVE)
    ]
    for each in builders:
        functions_of = emulated(each)
        made |= {name: getattr(functions_of, name) for name in each().registration().names}
    yield SimpleNamespace(**made)
    for each in builders:
        loader.forget("emulated", each.NAME)


def made(shape: tuple[int, ...], dtype: torch.dtype, count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(sum(shape))
    return [torch.randn(shape, generator=generator).to(dtype) for _ in range(count)]


def rows(columns: int, dtype: torch.dtype, count: int) -> list[Tensor]:
    return made((columns,), dtype, count)


def seed(value: int = 2**40 + 7) -> Tensor:
    return torch.tensor([value])


def doubled(values: Any) -> list[Any]:
    return [v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for v in values]


def assert_close(found: Any, exact: Any, dtype: torch.dtype, terms: int = 1) -> None:
    """Within a rounding of ``dtype``, and what fp32 loses in a sum of ``terms``."""
    found = found if isinstance(found, (tuple, list)) else (found,)
    exact = exact if isinstance(exact, (tuple, list)) else (exact,)
    assert len(found) == len(exact)
    for one, other in zip(found, exact, strict=True):
        assert one.shape == other.shape
        if one.numel() == 0:
            continue
        size = other.abs().max().item()
        slack = 4e-7 * max(1.0, size) * max(8, terms) ** 0.5 * 4
        rtol = 2e-5 if one.dtype == torch.float32 else torch.finfo(dtype).eps
        torch.testing.assert_close(one.double(), other, rtol=rtol, atol=slack)


@pytest.mark.parametrize("dtype", [*DTYPES, LATE], ids=str)
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_forward_kernels_are_the_references_within_rounding(
    native: Any, dtype: torch.dtype, p: float, whole_grid: bool
) -> None:
    every = whole_grid or (p, dtype) == (0.3, torch.bfloat16)
    for shape in SHAPES + LONG if every else SHAPES[:4]:
        x, residual = made(shape, dtype, 2)
        bias, weight, norm_bias = rows(shape[-1], dtype, 3)
        drop = (seed(), 3, p)
        with poisoned():
            added = native.dropout_add(x, bias, residual, *drop)
            assert_close(
                added, functions.dropout_add.reference(*doubled([x, bias, residual]), *drop), dtype
            )
            total, *normal = native.dropout_add_norm(
                x, bias, residual, weight, norm_bias, *drop, 1e-5
            )
            assert torch.equal(total, added)
            again = native.norm_with_moments(total, weight, norm_bias, 1e-5)
            assert all(torch.equal(a, b) for a, b in zip(normal, again, strict=True))
            if shape[-1] > 1:  # of one column nothing is left but the rounding
                exact = functions.norm_with_moments.reference(
                    *doubled([total, weight, norm_bias]), 1e-5
                )
                assert_close(again, exact, dtype, shape[-1])
            if shape not in LONG:
                out = native.gelu_dropout(x, bias, *drop)
                exact = functions.gelu_dropout.reference(*doubled([x, bias]), *drop)
                assert_close(out, exact, dtype)


@pytest.mark.parametrize(
    ("p", "dtype"),
    [
        (0.0, torch.float32),
        *((0.3, dtype) for dtype in DTYPES),
        pytest.param(0.3, torch.float16, marks=pytest.mark.full),
        pytest.param(0.0, torch.float16, marks=pytest.mark.full),
        pytest.param(0.0, torch.bfloat16, marks=pytest.mark.full),
    ],
)
def test_backward_kernels_are_the_references_within_rounding(
    native: Any, dtype: torch.dtype, p: float, whole_grid: bool
) -> None:
    every = whole_grid or (p, dtype) == (0.3, torch.bfloat16)
    for shape in SHAPES + LONG[1:] if every else SHAPES[1:4]:
        grad, x, more = made(shape, dtype, 3)
        bias, weight = rows(shape[-1], dtype, 2)
        terms = max(shape[-1], torch.Size(shape)[:-1].numel())
        drop = (seed(), 3, p)
        with poisoned():
            assert_close(
                native.dropout_add_backward(grad, *drop),
                functions.dropout_add_backward.reference(grad.double(), *drop),
                dtype, terms,
            )  # fmt: skip
            moments = [
                m.float()
                for m in functions.norm_with_moments.reference(*doubled([x, weight, bias]))[1:]
            ]
            for norm_bias, rest in ((None, None), (bias, more)):
                given = [grad, x, *moments, weight, norm_bias, rest]
                exact = functions.dropout_add_norm_backward.reference(*doubled(given), *drop)
                if shape[-1] > 1:
                    assert_close(
                        native.dropout_add_norm_backward(*given, *drop), exact, dtype, terms
                    )
            if shape not in LONG:
                found = native.gelu_dropout_backward(grad, x, bias, *drop, True)
                exact = functions.gelu_dropout_backward.reference(
                    *doubled([grad, x, bias]), *drop, True
                )
                assert_close(found, exact, dtype, terms)
                assert torch.equal(found[2], native.gelu_dropout(x, bias, *drop))
                assert native.gelu_dropout_backward(grad, x, bias, *drop, False)[2].numel() == 0
                joined, sums = native.join_columns(grad, x, more)
                assert torch.equal(joined, torch.cat([grad, x, more], -1))
                assert_close(sums, joined.double().reshape(-1, 3 * shape[-1]).sum(0), dtype, terms)


def test_tensors_at_odd_addresses_and_strides_are_served(native: Any) -> None:
    whole = torch.randn(5 * 16 + 1).bfloat16()
    odd = whole[1:].view(5, 16)
    turned = torch.randn(16, 5).bfloat16().t()
    bias = torch.randn(32).bfloat16()[::2]
    found = native.dropout_add(odd, bias, turned, seed(), 0, 0.5)
    even = native.dropout_add(odd.clone(), bias.contiguous(), turned.contiguous(), seed(), 0, 0.5)
    assert torch.equal(found, even)
    assert torch.equal(native.gelu_dropout(odd, bias), native.gelu_dropout(odd.clone(), bias))
    assert torch.equal(
        native.join_columns(odd, turned, odd)[1],
        native.join_columns(odd.clone(), turned.contiguous(), odd.clone())[1],
    )


def test_nan_and_inf_pass_as_in_the_reference(native: Any) -> None:
    x = torch.randn(4, 64)
    x[0, 3], x[1, 5], x[2, 7] = float("nan"), float("inf"), -float("inf")
    x[3, 0] = 1e30
    one, zero = torch.ones(64), torch.zeros(64)
    torch.testing.assert_close(
        native.gelu_dropout(x, zero), functions.gelu_dropout.reference(x, zero), equal_nan=True
    )
    torch.testing.assert_close(
        native.gelu_dropout_backward(one.expand(4, 64), x, zero)[0],
        functions.gelu_dropout_backward.reference(one.expand(4, 64), x, zero)[0],
        equal_nan=True,
    )
    found, exact = (
        each(x, zero, x, one, zero)
        for each in (native.dropout_add_norm, functions.dropout_add_norm.reference)
    )
    for a, b in zip(found, exact, strict=True):
        assert torch.equal(a.isnan(), b.isnan())


def test_what_is_dropped_depends_on_seed_site_and_place_alone(native: Any) -> None:
    x, zero = torch.ones(64, 200), torch.zeros(200)
    out = native.dropout_add(x, zero, torch.zeros_like(x), seed(), 1, 0.25)
    share = (out == 0).float().mean().item()
    assert abs(share - 0.25) < 0.02
    assert torch.equal(out[out != 0], torch.full_like(out[out != 0], 1 / 0.75))
    assert torch.equal(out != 0, functions.kept_elements(x.shape, seed(), 1, 0.25))
    for other in ((seed(5), 1), (seed(), 2)):
        assert not torch.equal(out, native.dropout_add(x, zero, torch.zeros_like(x), *other, 0.25))
    grad = native.dropout_add_backward(x, seed(), 1, 0.25)[0]
    assert torch.equal(grad, out)
    assert native.dropout_add(x, zero, torch.zeros_like(x), seed(), 1, 1.0).count_nonzero() == 0


def test_sums_over_rows_have_the_same_bits_each_time(native: Any) -> None:
    grad, x, more = made((333, 40), torch.float32, 3)
    weight, bias = rows(40, torch.float32, 2)
    moments = native.norm_with_moments(x, weight, bias)[1:]
    first, second = (
        native.dropout_add_norm_backward(grad, x, *moments, weight, bias, more, seed(), 0, 0.1)
        for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("pre", [True, False])
def test_a_layer_of_these_kernels_is_that_of_the_references(pre: bool) -> None:
    """In fp64 the layer takes the references. The generator gives both the same seed."""
    words = {"attention_dropout": 0.0, "hidden_dropout": 0.25, "activation_dropout": 0.1}
    torch.manual_seed(0)
    exact = nn.TransformerLayer(16, 2, 24, **words, pre_layer_norm=pre, dtype=torch.float64)
    ours = nn.TransformerLayer(
        16, 2, 24, **words, pre_layer_norm=pre, normalize_invertible=pre, gelu_checkpoint=True
    )
    ours.load_state_dict(exact.state_dict())
    x, grad = torch.randn(2, 3, 4, 16)
    found = []
    for layer, dtype in ((exact, torch.float64), (ours, torch.float32)):
        torch.manual_seed(1)
        given = x.to(dtype).requires_grad_()
        out = layer(given)
        found.append([out, *torch.autograd.grad(out, [given, *layer.parameters()], grad.to(dtype))])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(other.double(), one, rtol=1e-4, atol=1e-5)


def test_arguments_that_do_not_fit_are_refused(native: Any) -> None:
    x, row = torch.randn(3, 16), torch.randn(16)
    for bad in (
        lambda f: f.dropout_add(x, row[:8], x),
        lambda f: f.dropout_add(x, row, x[:2]),
        lambda f: f.dropout_add(x, row, x, None, 0, 0.1),
        lambda f: f.dropout_add(x, row, x, seed(), 0, 1.5),
        lambda f: f.gelu_dropout(x, row.bfloat16()),
        lambda f: f.gelu_dropout_backward(x, x[:2], row),
        lambda f: f.join_columns(x, x, x[:2]),
    ):
        for each in (native, functions):
            with pytest.raises(RuntimeError, match=r"bias|residual|seed|p is|x has|third"):
                bad(each)


def test_rows_that_are_too_long_for_the_kernels_take_the_reference(native: Any) -> None:
    wide = torch.randn(1, 8200)
    with pytest.warns(FallbackWarning, match="rows have 8200 elements, expected at most 8192"):
        out = native.dropout_add(wide, wide[0], wide)
    assert torch.equal(out, functions.dropout_add.reference(wide, wide[0], wide))


def test_fp64_takes_the_reference(native: Any) -> None:
    x = torch.randn(3, 8, dtype=torch.float64)
    with pytest.warns(FallbackWarning, match="not float64"):
        out = native.dropout_add(x, x[0], x)
    assert torch.equal(out, functions.dropout_add.reference(x, x[0], x))


@pytest.mark.parametrize("p", [0.0, 0.3])
def test_backward_references_are_the_gradients_of_the_forward_ones(p: float) -> None:
    drop = (seed(), 1, p)
    x, residual, grad, more = (t.requires_grad_() for t in made((4, 9), torch.float64, 4))
    bias, weight, norm_bias = (t.requires_grad_() for t in rows(9, torch.float64, 3))

    total, out, mean, scale = functions.dropout_add_norm.reference(
        x, bias, residual, weight, norm_bias, *drop
    )
    expected = torch.autograd.grad(
        (out, total), (residual, x, bias, weight, norm_bias), (grad, more), retain_graph=True
    )
    found = functions.dropout_add_norm_backward.reference(
        grad, total, mean, scale, weight, norm_bias, more, *drop
    )
    through = found[0] if p == 0 else found[1]
    for one, other in zip((found[0], through, *found[2:5]), expected, strict=True):
        torch.testing.assert_close(one, other)
    torch.testing.assert_close(found[5], out)

    gelu = functions.gelu_dropout.reference(x, bias, *drop)
    expected = torch.autograd.grad(gelu, (x, bias), grad)
    found = functions.gelu_dropout_backward.reference(grad, x, bias, *drop, True)
    for one, other in zip(found, (*expected, gelu), strict=True):
        torch.testing.assert_close(one, other)


def test_references_pass_gradcheck() -> None:
    x, residual = (t.requires_grad_() for t in made((3, 9), torch.float64, 2))
    bias, weight, norm_bias = (t.requires_grad_() for t in rows(9, torch.float64, 3))
    drop = (seed(), 1, 0.3)
    assert torch.autograd.gradcheck(
        lambda *given: functions.dropout_add_norm.reference(*given, *drop)[:2],
        (x, bias, residual, weight, norm_bias),
    )
    assert torch.autograd.gradcheck(
        lambda *given: functions.gelu_dropout.reference(*given, *drop), (x, bias)
    )


# Tracing takes the longest: of one op in every run.
@pytest.mark.parametrize("checks", [
    ("test_schema", "test_autograd_registration", "test_faketensor"),
    pytest.param(("test_aot_dispatch_dynamic",), marks=pytest.mark.full),
])  # fmt: skip
def test_opcheck_finds_nothing(checks: tuple[str, ...]) -> None:
    x, other, row = torch.randn(3, 16), torch.randn(3, 16), torch.randn(16)
    moments = torch.randn(3), torch.rand(3)
    for op, given in (
        (functions.norm_with_moments, (x, row, row)),
        (functions.dropout_add, (x, row, other, seed(), 1, 0.5)),
        (functions.dropout_add_backward, (x, seed(), 1, 0.5)),
        (functions.dropout_add_norm, (x, row, other, row, row, seed(), 1, 0.5)),
        (functions.dropout_add_norm_backward, (x, other, *moments, row, row, x, seed(), 1, 0.5)),
        (functions.gelu_dropout, (x, row, seed(), 1, 0.5)),
        (functions.gelu_dropout_backward, (x, other, row, seed(), 1, 0.5, True)),
        (functions.join_columns, (x, other, x)),
    ):
        torch.library.opcheck(op.overload, given, test_utils=checks)
    torch.library.opcheck(functions.join_columns.overload, (x, other, x))
