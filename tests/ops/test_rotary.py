"""Rotary position embedding: the CPU's version, the CUDA kernels in the emulator and the reference,
against complex numbers in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from inference_ops import DTYPES, each_dtype, version
from stand_in import poisoned
from torch import Tensor

from opkiln.nn import inference as functions

# A rounding of a result that is at most |a| + |b|.
ROUNDING = {torch.float32: 5e-7, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@pytest.fixture(params=["native", "emulated", "reference"])
def op(request: pytest.FixtureRequest) -> Any:
    return version(request.param)


def turned(
    x: Tensor, positions: Tensor, dim: int, theta: float, interleaved: bool, inverse: bool = False
) -> Tensor:
    """The definition, in complex numbers of float64."""
    head, rest = x.double()[..., :dim], x.double()[..., dim:]
    pairs = dim // 2
    if interleaved:
        z = torch.complex(head[..., 0::2], head[..., 1::2])
    else:
        z = torch.complex(head[..., :pairs], head[..., pairs:])
    angle = positions.double()[..., None, None] * theta ** (
        -torch.arange(pairs, dtype=torch.float64) / pairs
    )
    z = z * torch.exp(1j * (-angle if inverse else angle))
    out = torch.view_as_real(z).flatten(-2) if interleaved else torch.cat((z.real, z.imag), -1)
    return torch.cat((out, rest), -1)


def close(got: Tensor, expected: Tensor, of: Tensor) -> None:
    bound = ROUNDING[got.dtype] * (2 * of.double().abs().amax().item() + 1e-30)
    assert (got.double() - expected).abs().max().item() <= bound


@pytest.mark.parametrize("interleaved", [False, True])
@each_dtype()
def test_pairs_are_turned_by_position_and_frequency(
    op: Any, dtype: torch.dtype, interleaved: bool
) -> None:
    torch.manual_seed(0)
    # (batch, seq, heads, size of a head, rotated elements)
    for shape, dim in (
        ((2, 5, 3, 16), 16), ((1, 3, 9, 128), 128), ((3, 2, 1, 96), 32), ((2, 3, 2, 10), 6),
        ((1, 2, 5, 7), 4), ((1, 1, 1, 2), 2), ((1, 600, 1, 8), 8), ((1, 3, 2, 300), 290),
    ):  # fmt: skip
        x = torch.randn(shape).to(dtype)
        positions = torch.randint(0, 5000, shape[:2])
        expected = turned(x, positions, dim, 10000.0, interleaved)
        given = {"dim": dim, "interleaved": interleaved}
        with poisoned():
            out = op.rotary(x, positions, **given)
            close(out, expected, x)
            assert torch.equal(out[..., dim:], x[..., dim:])
            written = x.clone()
            op.rotary_(written, positions.int(), **given)
            assert torch.equal(written, out)
            back = op.rotary(out, positions, inverse=True, **given)
        assert (back.double() - x.double()).abs().max() <= 20 * ROUNDING[dtype]


def test_queries_and_keys_are_turned_at_once(op: Any) -> None:
    q, k = torch.randn(2, 5, 6, 64), torch.randn(2, 5, 2, 64)
    positions = torch.arange(5) + 3
    expected = [turned(each, positions, 64, 500000.0, False) for each in (q, k)]
    out = op.rotary_qk(q, k, positions, theta=500000.0)
    for got, value, of in zip(out, expected, (q, k), strict=True):
        close(got, value, of)
    op.rotary_qk_(q, k, positions, theta=500000.0)
    assert torch.equal(q, out[0])
    assert torch.equal(k, out[1])


@pytest.mark.parametrize("interleaved", [False, True])
def test_any_strides_are_taken(op: Any, interleaved: bool) -> None:
    torch.manual_seed(1)
    whole = torch.randn(2, 4, 3 * 5 * 32 + 1)
    views = {
        "a slice of q, k and v": whole[..., 160:320].view(2, 4, 5, 32),
        "heads before the sequence": torch.randn(2, 5, 4, 32).transpose(1, 2),
        "an odd address": whole[..., 1:161].view(2, 4, 5, 32),
        "every second element": torch.randn(2, 4, 5, 64)[..., ::2],
        "the same row for all": torch.randn(2, 1, 5, 32).expand(2, 4, 5, 32),
        "no batch": torch.randn(4, 5, 32),
    }
    for name, x in views.items():
        positions = torch.tensor([3, 0, 77, 5])
        expected = turned(x, positions, 32, 10000.0, interleaved)
        out = op.rotary(x, positions, interleaved=interleaved)
        close(out, expected, x)
        assert out.stride() == torch.empty_like(x).stride(), name
        if 0 not in x.stride():
            op.rotary_(x, positions, interleaved=interleaved)
            assert torch.equal(x, out), name


def test_far_positions_are_exact(op: Any) -> None:
    x = torch.randn(1, 5, 1, 128)
    positions = torch.tensor([0, 1_000_000, 999_983, 123_456_789, -17])
    close(op.rotary(x, positions), turned(x, positions, 128, 10000.0, False), x)
    assert torch.equal(op.rotary(x, positions)[:, 0], x[:, 0])


def test_angles_are_exact_to_2e_7(op: Any) -> None:
    """Of (1, 0): the cosine and the sine themselves."""
    x = torch.zeros(20_000 if op is not functions else 200_000, 1, 2)
    x[..., 0] = 1
    positions = torch.arange(x.shape[0]) * 911
    expected = turned(x, positions, 2, 1.0, False)
    assert (op.rotary(x, positions, theta=1.0).double() - expected).abs().max() <= 2e-7


@pytest.mark.parametrize("table_dtype", DTYPES, ids=str)
def test_tables_replace_the_frequencies(op: Any, table_dtype: torch.dtype) -> None:
    x = torch.randn(2, 3, 4, 32)
    angle = torch.randn(50, 16)
    cos, sin = angle.cos().to(table_dtype), angle.sin().to(table_dtype)
    positions = torch.tensor([[0, 49, 7], [7, 8, 9]], dtype=torch.int32)
    c, s = (table.double()[positions.long()][:, :, None] for table in (cos, sin))
    a, b = x.double().chunk(2, -1)
    expected = torch.cat((a * c - b * s, b * c + a * s), -1)
    close(op.rotary(x, positions, cos, sin), expected, x)
    first = op.rotary(x, None, cos, sin)
    assert torch.equal(first, op.rotary(x, torch.arange(3), cos, sin))


@pytest.mark.parametrize("interleaved", [False, True])
def test_tables_serve_many_tokens_and_heads(op: Any, interleaved: bool) -> None:
    torch.manual_seed(0)
    q, k = torch.randn(2, 37, 24, 20), torch.randn(2, 37, 8, 20)
    positions = torch.randint(0, 90, (2, 37))
    pairs = torch.arange(8, dtype=torch.float64)
    angle = torch.arange(90)[:, None] * 100.0 ** (-pairs / 8)
    tables = (angle.cos().float(), angle.sin().float())
    for inverse in (False, True):
        found = op.rotary_qk(
            q, k, positions, *tables, dim=16, interleaved=interleaved, inverse=inverse
        )
        for got, x in zip(found, (q, k), strict=True):
            close(got, turned(x, positions, 16, 100.0, interleaved, inverse), x)
    bad = positions.clone()
    bad[1, 36] = 90
    with pytest.raises((RuntimeError, IndexError)):
        op.rotary_qk(q, k, bad, *tables, dim=16, interleaved=interleaved)


def test_nan_and_infinity_reach_their_partner_alone(op: Any) -> None:
    x = torch.ones(1, 2, 1, 32)
    x[0, 1, 0, 3] = torch.nan
    x[0, 1, 0, 20] = torch.inf
    out = op.rotary(x)
    assert out.isnan().nonzero()[:, -1].tolist() == [3, 19]
    assert out[0, 1, 0, [4, 20]].tolist() == [-torch.inf, torch.inf]


def test_empty_tensors_give_empty_results(op: Any) -> None:
    for shape in ((0, 4, 2, 8), (2, 0, 2, 8), (2, 4, 0, 8)):
        assert op.rotary(torch.randn(shape)).shape == shape


def test_wrong_arguments_are_refused_by_name(op: Any) -> None:
    x = torch.randn(2, 3, 4, 8)
    table = torch.randn(9, 4)
    for message, call in (
        ("dim is 7", lambda: op.rotary(x, dim=7)),
        ("dim is 10", lambda: op.rotary(x, dim=10)),
        ("expected .batch, seq, heads, dim.", lambda: op.rotary(x[0, 0])),
        ("positions has dtype", lambda: op.rotary(x, torch.zeros(3))),
        ("positions has shape .4.", lambda: op.rotary(x, torch.arange(4))),
        ("cos and sin are given together", lambda: op.rotary(x, None, table)),
        (r"cos has shape .9, 3.", lambda: op.rotary(x, None, table[:, :3], table[:, :3])),
        ("only heads may differ", lambda: op.rotary_qk(x, x[:1])),
        ("k has dtype", lambda: op.rotary_qk(x, x.half())),
        ("theta is", lambda: op.rotary(x, theta=-1.0)),
        ("at most 512 without tables", lambda: op.rotary(torch.randn(1, 1, 1, 514))),
    ):
        with pytest.raises(RuntimeError, match=message):
            call()


def test_the_gradient_turns_back() -> None:
    from torch.autograd import gradcheck

    torch.manual_seed(2)
    x = torch.randn(1, 3, 2, 8, dtype=torch.float64, requires_grad=True)
    k = torch.randn(1, 3, 1, 8, dtype=torch.float64, requires_grad=True)
    positions = torch.tensor([4, 0, 9])
    reference = version("reference")
    assert gradcheck(lambda x: reference.rotary(x, positions, dim=6, interleaved=True), x)
    assert gradcheck(lambda q, k: reference.rotary_qk(q, k, positions), (x, k))
    for interleaved in (False, True):
        q, k32 = (each.detach().float().requires_grad_() for each in (x, k))
        grads = torch.randn(q.shape), torch.randn(k32.shape)
        out = functions.rotary_qk(q, k32, positions, interleaved=interleaved)
        got = torch.autograd.grad(out, (q, k32), grads)
        again = reference.rotary_qk(q, k32, positions, interleaved=interleaved)
        for one, other in zip(got, torch.autograd.grad(again, (q, k32), grads), strict=True):
            torch.testing.assert_close(one, other)


def test_it_passes_opcheck_and_compiles_in_one_graph() -> None:
    q, k = torch.randn(2, 5, 4, 16), torch.randn(2, 5, 2, 16)
    positions = torch.arange(5)
    ops = torch.ops.opkiln
    torch.library.opcheck(ops.rotary.default, (q, positions))
    torch.library.opcheck(ops.rotary_qk.default, (q.requires_grad_(), k, positions))
    torch.library.opcheck(ops.rotary_qk_.default, (q.detach().clone(), k.clone(), positions))

    def attended(q: Tensor, k: Tensor) -> Tensor:
        q, k = functions.rotary_qk(q * 2, k, positions)
        functions.rotary_(k, positions, interleaved=True)
        return q[..., :2, :] + k

    compiled = torch.compile(attended, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(q, k), attended(q, k))
