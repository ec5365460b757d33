"""Softmax of scores: the CPU's version, the CUDA kernels in the emulator and the reference, against
float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from inference_ops import each_dtype, version
from stand_in import poisoned
from torch import Tensor

from opkiln.nn import inference as functions

RELATIVE = {torch.float32: 4e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
SMALLEST = {torch.float32: 1e-37, torch.float16: 6e-8, torch.bfloat16: 1e-37}


@pytest.fixture(params=["native", "emulated", "reference"])
def op(request: pytest.FixtureRequest) -> Any:
    return version(request.param)


def exact(
    x: Tensor,
    mask: Tensor | None = None,
    slopes: Tensor | None = None,
    scale: float = 1.0,
    causal: bool = False,
    offset: int = 0,
    window: int = 0,
) -> Tensor:
    """The definition for four dimensions, one row after the other, in float64."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    scores = x.double() * scale
    if mask is not None:
        scores = scores + mask.double()
    for b, h, i in torch.cartesian_prod(*map(torch.arange, x.shape[:3])).view(-1, 3).tolist():
        keys = [
            j
            for j in range(x.shape[3])
            if not (causal and j > i + offset) and not (window and abs(j - i - offset) >= window)
        ]
        row = scores[b, h, i, keys]
        if slopes is not None:
            row = row + slopes[h].double() * (torch.tensor(keys) - i - offset)
        if keys and row.max() > -math.inf:
            out[b, h, i, keys] = torch.softmax(row, -1)
    return out


def close(got: Tensor, expected: Tensor) -> None:
    dtype = got.dtype
    torch.testing.assert_close(
        got.double(), expected, rtol=RELATIVE[dtype], atol=SMALLEST[dtype], equal_nan=True
    )


@each_dtype()
def test_rows_of_every_size_sum_to_one(op: Any, dtype: torch.dtype, whole_grid: bool) -> None:
    torch.manual_seed(0)
    # 1024 and 3000 rows of one block; 33,000 and 65,536 columns do not fit into its registers;
    # of 20,000 and 32,768 they are kept in the narrow dtype
    # (bf16; fp16 goes the same way).
    every = [(3, 1023), (2, 1024), (1, 4096), (2, 20_000), (1, 32_768), (1, 33_000), (1, 65_536)]
    some = {torch.float32: (0, 2, 5, 6), torch.bfloat16: (0, 1, 3, 4, 5), torch.float16: (0,)}
    long = every if whole_grid else [every[place] for place in some[dtype]]
    for rows, columns in ((5, 1), (3, 7), (70, 8), (4, 100), *long):
        x = (torch.randn(rows, columns) * 4).to(dtype)
        expected = torch.softmax(x.double(), -1)
        with poisoned():
            out = op.softmax(x)
        close(out, expected)
        written = x.clone()
        op.softmax_(written)
        assert torch.equal(written, out)


@each_dtype()
@pytest.mark.parametrize("keys", [24, 21])  # with and without accesses of sixteen bytes
def test_masks_alibi_and_windows_are_added(op: Any, dtype: torch.dtype, keys: int) -> None:
    torch.manual_seed(1)
    x = torch.randn(2, 3, 5, keys).to(dtype)
    slopes = torch.tensor([0.5, 0.25, 0.125])
    hidden = torch.zeros(2, 1, 1, keys).masked_fill(torch.rand(2, 1, 1, keys) < 0.3, -math.inf)
    for options in (
        {"scale": 0.3}, {"scale": -2.0}, {"causal": True}, {"causal": True, "offset": keys - 5},
        {"causal": True, "offset": -2}, {"window": 3, "offset": 4},
        {"causal": True, "window": 4, "offset": 6}, {"slopes": slopes},
        {"mask": torch.randn(2, 3, 5, keys).to(dtype)}, {"mask": hidden},
        {"mask": torch.randn(5, keys).to(dtype), "causal": True},
        {"mask": torch.randn(3, 1, 1).to(dtype)}, {"mask": torch.randn(2, 3, 5, keys + 1)[..., 1:]},
        {"mask": hidden, "slopes": slopes, "scale": 0.7, "causal": True, "offset": 9, "window": 12},
    ):  # fmt: skip
        with poisoned():
            close(op.softmax(x, **options), exact(x, **options))


def test_a_row_that_sees_nothing_is_zero(op: Any) -> None:
    for columns in (16, 15):
        x = torch.randn(1, 2, 4, columns)
        x[0, 0, 3] = -math.inf
        out = op.softmax(x, causal=True, offset=-2)
        assert torch.equal(out[:, :, :2], torch.zeros(1, 2, 2, columns))
        assert torch.equal(out[0, 0, 3], torch.zeros(columns))
        torch.testing.assert_close(out[0, 1].sum(-1), torch.tensor([0.0, 0, 1, 1]))
        assert torch.equal(op.softmax(torch.full((2, columns), -math.inf)), torch.zeros(2, columns))


@pytest.mark.parametrize("columns", [64, 63, 20_000, 33_000])
def test_nan_and_infinity_are_as_in_torch(op: Any, columns: int) -> None:
    dtype = torch.bfloat16 if columns == 20_000 else torch.float32
    for odd in (math.nan, math.inf):
        for others in (0.0, -math.inf):
            x = torch.full((3, columns), others, dtype=dtype)
            x[1, columns // 2] = odd
            out = op.softmax(x)
            assert out[1].isnan().all()
            assert not out[[0, 2]].isnan().any()
    x = torch.zeros(2, columns, dtype=dtype)
    x[:, 5:9] = -math.inf
    close(op.softmax(x), torch.softmax(x.double(), -1))
    # What is hidden does not matter.
    x[:, -1] = math.nan
    assert not op.softmax(x, causal=True, offset=10).isnan().any()


@pytest.mark.parametrize("columns", [64, 63])
def test_far_scores_neither_overflow_nor_vanish(op: Any, columns: int) -> None:
    for base in (-60_000.0, 60_000.0):
        x = (torch.arange(columns) % 7).float().add(base).repeat(2, 1)
        close(op.softmax(x), torch.softmax(x.double(), -1))
        close(op.softmax(x, scale=0.5), torch.softmax(x.double() * 0.5, -1))
    x = torch.full((1, columns), -1000.0)
    x[0, 2] = 0
    assert op.softmax(x)[0].tolist() == [float(i == 2) for i in range(columns)]


def test_any_strides_are_taken(op: Any) -> None:
    whole = torch.randn(2, 4, 3, 40)
    for x in (
        whole[..., :24], whole[..., 1:25], whole.transpose(1, 2), whole.transpose(2, 3),
        whole[..., ::2], whole[:, 1], whole[0, 0, 0],
    ):  # fmt: skip
        out = op.softmax(x, scale=0.5)
        close(out, torch.softmax(x.double() * 0.5, -1))
        assert out.is_contiguous()
        if x.stride(-1) == 1:
            written = torch.empty_strided(x.size(), x.stride()).copy_(x)
            op.softmax_(written, scale=0.5)
            close(written, torch.softmax(x.double() * 0.5, -1))
    for shape in ((0, 4), (4, 0), (2, 0, 3, 4)):
        assert op.softmax(torch.randn(shape)).shape == shape


def test_wrong_arguments_are_refused_by_name(op: Any) -> None:
    x = torch.randn(2, 3, 4, 8)
    for message, call in (
        ("expected at most .batch, heads", lambda: op.softmax(x[None])),
        ("window is -1", lambda: op.softmax(x, window=-1)),
        ("mask has shape .3, 8.*broadcast", lambda: op.softmax(x, torch.randn(3, 8))),
        ("mask has dtype", lambda: op.softmax(x, torch.zeros(4, 8, dtype=torch.bool))),
        ("slopes has shape .2., expected .3.", lambda: op.softmax(x, slopes=torch.randn(2))),
        ("expected 1 as the last", lambda: op.softmax_(x.transpose(2, 3))),
    ):
        with pytest.raises(RuntimeError, match=message):
            call()


def test_gradients_are_those_of_the_definition() -> None:
    from torch.autograd import gradcheck

    torch.manual_seed(2)
    reference = version("reference")
    x = torch.randn(1, 2, 3, 5, dtype=torch.float64, requires_grad=True)
    mask = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    slopes = torch.rand(2, dtype=torch.float64, requires_grad=True)
    options = {"scale": 0.7, "causal": True, "offset": 1, "window": 3}
    assert gradcheck(lambda x, m, s: reference.softmax(x, m, s, **options), (x, mask, slopes))
    given = [each.detach().float().requires_grad_() for each in (x, mask, slopes)]
    grad = torch.randn(x.shape)
    got = torch.autograd.grad(functions.softmax(*given, **options), given, grad)
    again = torch.autograd.grad(reference.softmax(*given, **options), given, grad)
    for one, other in zip(got, again, strict=True):
        torch.testing.assert_close(one, other)


def test_it_passes_opcheck_and_compiles_in_one_graph() -> None:
    x, mask = torch.randn(2, 3, 4, 8, requires_grad=True), torch.randn(4, 8)
    ops = torch.ops.opkiln
    torch.library.opcheck(ops.softmax.default, (x, mask, torch.rand(3), 0.5, True, 1, 2))
    torch.library.opcheck(ops.softmax_.default, (x.detach().clone(), mask))

    def weights(x: Tensor) -> Tensor:
        return functions.softmax(x * 2, mask, causal=True, offset=4)

    compiled = torch.compile(weights, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), weights(x))
