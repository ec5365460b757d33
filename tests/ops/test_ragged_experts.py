"""``opkiln.nn.ragged`` for mixture of experts, embedding and last tokens: the CUDA kernels in the
emulator and the reference."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from ragged_fixtures import REFERENCES, kernels
from stand_in import poisoned
from torch import Tensor

from opkiln.nn import ragged
from opkiln.ops.ragged_device_ops.functions.gating import top_k_gating
from opkiln.ops.ragged_device_ops.functions.rows import (
    logits_gather,
    moe_gather,
    moe_scatter,
    ragged_embedding,
)

DTYPES = F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


@pytest.fixture(params=["emulated", "reference"])
def op(request: pytest.FixtureRequest) -> Any:
    return kernels() if request.param == "emulated" else REFERENCES


def close(got: Tensor, expected: Tensor, sizes: Tensor) -> None:
    """Rounded once from sums in fp32 whose terms have these sizes."""
    last = torch.finfo(got.dtype).eps / 2 * expected.abs() + torch.finfo(got.dtype).tiny
    assert ((got.double() - expected).abs() <= last + 1e-6 * sizes).all()


# One block of tokens, several, a last one that is not full; each size of a lane's share of experts.
@pytest.mark.parametrize(
    ("tokens", "experts", "k", "dtype"),
    [
        (0, 4, 2, F32), (1, 1, 1, F32), (5, 8, 2, F16), (64, 64, 8, BF16), (65, 7, 4, F32),
        (70, 70, 2, BF16), (3, 1024, 8, F16), (2, 33, 32, F32),
    ],
)  # fmt: skip
def test_gating_chooses_the_greatest_and_gives_each_its_row(
    op: Any, tokens: int, experts: int, k: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    logits = torch.randn(tokens, experts).mul(3).to(dtype)
    with poisoned():
        weights, chosen, slots, counts, offsets = op.top_k_gating(logits, k)
    share = logits.double().softmax(1)
    best = share.gather(1, chosen.long())
    assert weights.dtype == torch.float32
    assert torch.allclose(weights.double(), best, rtol=1e-5, atol=1e-30)
    assert torch.equal(best, share.topk(k, 1).values)
    rows = [(int(e), t) for t, each in enumerate(chosen) for e in each]
    place = {row: at for at, row in enumerate(sorted(rows))}
    assert slots.flatten().tolist() == [place[row] for row in rows]
    assert counts.tolist() == torch.bincount(chosen.flatten(), minlength=experts).tolist()
    assert torch.equal(offsets, counts.cumsum(0).int())
    normal = op.top_k_gating(logits, k, True)
    assert torch.allclose(normal[0].double(), best / best.sum(1, keepdim=True), rtol=1e-5)
    assert torch.equal(normal[2], slots)


def test_of_equal_logits_the_lower_expert_is_first(op: Any) -> None:
    logits = torch.tensor([[0.0, -0.0, 5, 5], [-math.inf] * 4, [1, math.nan, math.inf, math.nan]])
    weights, chosen, *_ = op.top_k_gating(logits, 3)
    assert chosen.tolist() == [[2, 3, 0], [0, 1, 2], [1, 3, 2]]
    assert weights[1:].isnan().all()
    assert torch.allclose(weights[0], logits[0].softmax(0)[chosen[0].long()])


# Rows of whole vectors, of words, and of single elements; more and fewer than a block has.
COLUMNS = (1, 7, 10, 64, 4104)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tokens_go_to_their_experts_and_back(op: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for columns, k in zip(COLUMNS, (1, 2, 4, 8, 3), strict=True):
        x = torch.randn(6, columns).to(dtype)
        weights, _, slots, *_ = top_k_gating.reference(torch.randn(6, 9), k)
        with poisoned():
            rows = op.moe_scatter(x, slots)
            assert torch.equal(rows[slots.long()], x[:, None].expand(6, k, columns))
            rows = (rows * torch.arange(1, len(rows) + 1)[:, None]).to(dtype)
            for given in (weights, None):
                out = op.moe_gather(rows, slots, given)
                factor = torch.ones(6, k) if given is None else given
                terms = rows[slots.long()].double() * factor.double()[:, :, None]
                close(out, terms.sum(1), terms.abs().sum(1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_token_gives_its_row(op: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for columns in COLUMNS:
        weight, places = torch.randn(11, columns).to(dtype), torch.randn(9, columns).to(dtype)
        weight[3, 0] = math.inf
        tokens = torch.tensor([3, 0, 10, 10, 7])
        at = torch.tensor([0, 1, 6, 0, 1], dtype=torch.int32)
        with poisoned():
            assert torch.equal(op.ragged_embedding(tokens, weight), weight[tokens])
            assert torch.equal(op.ragged_embedding(tokens.int(), weight), weight[tokens])
            out = op.ragged_embedding(tokens, weight, at, places, 2)
        exact = weight[tokens].double() + places[at + 2].double()
        assert torch.equal(out, exact.to(dtype))
        starts = torch.tensor([0, 4, 4], dtype=torch.int32)
        lengths = torch.tensor([4, 0, 7], dtype=torch.int32)
        last = op.logits_gather(weight, starts, lengths)
        assert torch.equal(last[[0, 2]], weight[[3, 10]])
        assert (last[1] == 0).all()


def test_sizes_may_be_zero_and_strides_any(op: Any) -> None:
    slots = torch.tensor([[0, 3], [2, 1]], dtype=torch.int32)
    x, odd = torch.randn(2, 16), torch.randn(16, 2).t()
    moved = torch.randn(2, 33)[:, 1:17]  # no row begins at a multiple of 16 bytes
    for given in (x, odd, moved):
        rows = op.moe_scatter(given, slots.t().contiguous().t())
        assert torch.equal(rows, given[[0, 1, 1, 0]])
        assert torch.equal(op.moe_gather(rows, slots), given * 2)
        assert torch.equal(op.ragged_embedding(slots[:, 0] // 2, given), given)
    assert op.moe_scatter(x[:0], slots[:0]).shape == (0, 16)
    assert op.moe_scatter(x[:, :0], slots).shape == (4, 0)
    assert op.moe_gather(x, slots[:0]).shape == (0, 16)
    assert op.ragged_embedding(slots[0, :0], x).shape == (0, 16)
    assert op.logits_gather(x, slots[0, :0], slots[0, :0]).shape == (0, 16)


def test_wrong_arguments_are_named(op: Any) -> None:
    x, slots = torch.randn(4, 16), torch.zeros(4, 2, dtype=torch.int32)
    for message, call in (
        ("k is 17, expected 1 to 16", lambda: op.top_k_gating(x, 17)),
        ("k is 0", lambda: op.top_k_gating(x, 0)),
        ("logits has shape", lambda: op.top_k_gating(torch.randn(1, 1025), 1)),
        ("logits has", lambda: op.top_k_gating(x[0], 1)),
        ("slots has shape", lambda: op.moe_scatter(x, slots[1:])),
        ("slots has dtype int64", lambda: op.moe_scatter(x, slots.long())),
        ("weights has dtype float16", lambda: op.moe_gather(x, slots, x[:, :2].half())),
        ("weights has shape", lambda: op.moe_gather(x, slots, x[:, :1])),
        ("tokens has dtype float32", lambda: op.ragged_embedding(x[0], x)),
        ("positions and position_weight", lambda: op.ragged_embedding(slots[0], x, slots[0])),
        ("position_weight has shape", lambda: op.ragged_embedding(
            slots[0], x, slots[0], x[:, :2])),
        ("lengths has shape", lambda: op.logits_gather(x, slots[:, 0], slots[0])),
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match=message):
            call()


def test_gradients_are_those_of_the_definition() -> None:
    torch.manual_seed(0)
    logits = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    for normalize in (False, True):
        assert torch.autograd.gradcheck(lambda x: top_k_gating(x, 2, normalize)[0], logits)  # noqa: B023
    slots = top_k_gating(logits.detach(), 2)[2]
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    rows = torch.randn(10, 3, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(moe_scatter, (x, slots))
    assert torch.autograd.gradcheck(moe_gather, (rows, slots, weights))
    tokens = torch.tensor([0, 3, 3])
    places = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(ragged_embedding, (tokens, rows, tokens.int(), places))
    assert torch.autograd.gradcheck(logits_gather, (rows, tokens.int(), tokens.int()))


def test_they_pass_opcheck_and_compile_without_a_graph_break() -> None:
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    x, weights = torch.randn(4, 16), torch.rand(4, 2)
    slots = torch.arange(8, dtype=torch.int32).view(4, 2)
    for name, args in (
        ("top_k_gating", (x, 2)),
        ("moe_scatter", (x, slots)),
        ("moe_gather", (torch.randn(8, 16), slots, weights)),
        ("ragged_embedding", (slots[0], x)),
        ("logits_gather", (x, slots[0], slots[0] + 1)),
    ):
        torch.library.opcheck(getattr(kernels(), name).overload, args, test_utils=tests)

    def layer(tokens: Tensor, table: Tensor, gate: Tensor) -> Tensor:
        x = ragged.ragged_embedding(tokens, table)
        weights, _, slots, *_ = ragged.top_k_gating(x @ gate, 2)
        return ragged.moe_gather(ragged.moe_scatter(x, slots) * 2, slots, weights)

    tokens, table = torch.tensor([1, 2, 2, 0]), torch.randn(3, 16, requires_grad=True)
    gate = torch.randn(16, 4)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    expected = layer(tokens, table, gate)
    out = compiled(tokens, table, gate)
    assert torch.allclose(out, expected)
    ours, theirs = (torch.autograd.grad(each.sum(), table)[0] for each in (out, expected))
    assert torch.allclose(ours, theirs)
