"""Block-sparse attention: kernels on the CPU and in the emulator against float64, layouts, and the
front end."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sparse_cases import CASES, MORE, Case, check, exact, make
from stand_in import emulated_functions, poisoned
from torch import Tensor

from opkiln import nn
from opkiln.builder.registry import get_builder
from opkiln.errors import FallbackWarning, UsageError
from opkiln.nn import sparse_attention as sparse
from opkiln.ops.sparse_attn import plans
from opkiln.ops.sparse_attn.functions import sparse_attn, sparse_attn_backward, visible
from opkiln.settings import override

NATIVE = SimpleNamespace(sparse_attn=sparse_attn, sparse_attn_backward=sparse_attn_backward)
DTYPES = (
    torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.full),
)  # fmt: skip


@pytest.fixture(scope="module")
def emulated() -> Any:
    """The ops, whose CUDA kernels the emulator runs on CPU tensors."""
    return emulated_functions(sparse_attn, sparse_attn_backward)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cpu_kernels_are_within_rounding_of_float64(dtype: torch.dtype, whole_grid: bool) -> None:
    assert sparse_attn.load("cpu", dtype=str(dtype).removeprefix("torch."))
    with poisoned():
        more = MORE if whole_grid else MORE[1:-1] if dtype == torch.float32 else ()
        for case in (*CASES, *more):
            check(case, dtype, NATIVE)


@pytest.mark.parametrize("number", range(len(CASES)))
def test_cuda_kernels_are_within_rounding_of_float64(emulated: Any, number: int) -> None:
    dtype = (torch.bfloat16, torch.float16)[number % 2]
    with poisoned():
        check(CASES[number], dtype, emulated)


def test_long_lines_are_cut_and_joined(emulated: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "LEAST", 1)
    monkeypatch.setattr(plans, "MEANS", 1)
    layout = sparse.Longformer(32, num_sliding_window_blocks=1)
    call = make(Case(layout, 320, head=16), torch.bfloat16)
    assert [len(each) for each in call.rest[1][2::3]] == [1, 1, 1]
    check(Case(layout, 320, head=16), torch.bfloat16, emulated)


@pytest.mark.parametrize("name", ["sparse_attn", "evoformer_attn"])
def test_hopper_gets_code_with_its_own_instructions(name: str) -> None:
    for part in get_builder(name).PARTS:
        flags = part(backend="cuda").compute_capability_args("7.5;8.0;9.0+PTX;10.0")
        images = [each.rpartition("code=")[2] for each in flags]
        assert images == ["sm_80", "sm_90", "compute_90", "sm_90a", "sm_100"]


def test_rows_at_odd_addresses_go_to_the_reference(emulated: Any) -> None:
    call = make(Case(sparse.Dense(16), 16), torch.bfloat16)
    q = call.tensors[0]
    odd = torch.empty(q.numel() + 1, dtype=q.dtype)[1:].view_as(q).copy_(q)
    with pytest.warns(FallbackWarning, match="do not begin at multiples of 16 bytes"):
        out, _ = emulated.sparse_attn(odd, *call.tensors[1:], *call.rest)
    assert torch.equal(out, sparse_attn.reference(*call.tensors, *call.rest)[0])


def test_lists_are_the_layout() -> None:
    """Each bit of each tile is a piece of 16 by 16 tokens that is seen."""
    for case in (*CASES, *MORE[1:3], MORE[-1]):
        plan = case.layout.plan(case.tokens)
        seen = visible(plan.seen, plan.block, case.tokens, causal=False, window=0)
        lists = plans.lists_of(plan.seen, plan.block, case.tokens)
        for number, rows in enumerate((128, 64, 64)):
            shares, tiles, joined = lists[3 * number : 3 * number + 3]
            wanted = seen.mT if number == 2 else seen
            assert torch.equal(_unlisted(shares, tiles, joined, rows, wanted.shape), wanted)


def _unlisted(shares: Tensor, tiles: Tensor, joined: Tensor, rows: int, shape: Any) -> Tensor:
    heads, tokens, _ = shape
    lines = -(-tokens // rows)
    out = torch.zeros(heads, lines * rows, -(-tokens // 64) * 64, dtype=torch.bool)
    slots = [list(range(first, first + count)) for _, first, count, _ in joined.tolist()]
    cut = {line: part for (line, *_), part in zip(joined.tolist(), slots, strict=True)}
    sizes = [end - first for _, first, end, _ in shares.tolist()]
    assert sizes == sorted(sizes, reverse=True)
    for line, first, end, slot in shares.tolist():
        assert (slot >= 0) == (line in cut)
        if slot >= 0:
            cut[line].remove(slot)
        for column, bits in tiles[first:end].tolist():
            for bit in range(rows // 4):
                if bits >> bit & 1:
                    down, across = line % lines * rows + bit // 4 * 16, column * 64 + bit % 4 * 16
                    out[line // lines, down : down + 16, across : across + 16] = True
    assert not any(cut.values())
    return out[:, :tokens, :tokens]


def test_layouts_have_the_blocks_of_their_parameters() -> None:
    def drawn(layout: Any, count: int) -> list[str]:
        return ["".join(".x"[int(b)] for b in row) for row in layout.blocks(count)[0]]

    assert drawn(sparse.Fixed(16, num_local_blocks=2, causal=True), 5) == [
        "x....", "xx...", ".xx..", ".xxx.", ".x.xx",
    ]  # fmt: skip
    assert drawn(sparse.Longformer(16, global_block_indices=(1,)), 5) == [
        "xx...", "xxxxx", ".xxx.", ".xxxx", ".x.xx",
    ]  # fmt: skip
    variable = sparse.Variable(
        16, local_window_blocks=(1, 2), global_block_indices=(0,), global_block_end_indices=(1,)
    )
    assert drawn(variable, 5) == ["x....", "xxx..", "xxx..", "x..xx", "x..xx"]
    assert drawn(sparse.SlidingWindow(num_sliding_window_blocks=3, block=16), 3) == [
        "x..", "xx.", ".xx",
    ]  # fmt: skip
    assert drawn(sparse.SlidingWindow(17, 16, causal=False), 3) == ["xx.", "xxx", ".xx"]
    assert drawn(sparse.SlidingWindow(18, 16), 4)[3] == ".xxx"
    other = sparse.Fixed(16, heads=2, num_different_global_patterns=2).blocks(8)
    assert not torch.equal(other[0], other[1])


def test_random_blocks_depend_on_the_seed_alone() -> None:
    one, again, other = (sparse.BigBird(16, num_random_blocks=3, seed=s) for s in (1, 1, 2))
    assert torch.equal(one.blocks(64), again.blocks(64))
    assert not torch.equal(one.blocks(64), other.blocks(64))
    plain = sparse.BigBird(16, num_random_blocks=0).blocks(64)
    more = (one.blocks(64) & ~plain).sum(-1)[0, 1:]
    assert 2.0 < more.float().mean() <= 3  # a few are in the window already
    columns = (one.blocks(64) & ~plain).sum(-2)[0, 1:]
    assert columns.max() < 12  # spread over all columns
    assert (one.blocks(64) & ~plain).triu(1).sum() > 50, "half of them are later blocks"
    causal, plain = (
        sparse.BigBird(16, num_random_blocks=n, causal=True).blocks(64) for n in (3, 0)
    )
    assert not causal.triu(1).any()
    chosen = (causal & ~plain).sum(-1)[0, 8:32]
    assert chosen.float().mean() > 2, "all are drawn from the blocks up to their own"
    assert (sparse.Variable(16, num_random_blocks=4).blocks(40).sum(-1) >= 4).all()


def test_the_plan_of_a_layout_is_kept() -> None:
    layout = sparse.BigBird(16)
    assert layout.plan(64).seen is layout.plan(64).seen
    assert pickle.loads(pickle.dumps(layout))._plans == {}


def test_attention_is_torchs_where_the_mask_is_the_layout() -> None:
    layout = sparse.SlidingWindow(30, 16)
    q, k, v = (torch.randn(2, 3, 90, 32, requires_grad=True) for _ in range(3))
    padding = torch.rand(2, 90) < 0.8
    padding[:, 0] = True
    place = torch.arange(90)
    near = (place[:, None] >= place) & (place[:, None] - place < 30)
    near = near & padding[:, None, None]
    out = sparse.attention(q, k, v, layout, key_padding_mask=padding)
    blind = ~near.any(-1, keepdim=True)
    theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=near | blind)
    torch.testing.assert_close(out, theirs.masked_fill(blind, 0), rtol=1e-5, atol=1e-5)
    module = nn.SparseSelfAttention(layout, key_padding_mask_mode="mul")
    again = module(q, k, v, key_padding_mask=padding.float()[:, None, None])
    assert torch.equal(out, again)


def test_relative_positions_are_added_with_a_mask() -> None:
    layout, q = sparse.Dense(16), torch.randn(1, 2, 20, 16)
    rpe, mask = torch.randn(1, 2, 20, 20), torch.rand(20, 20) < 0.7
    module = nn.SparseSelfAttention(layout)
    out = module(q, q, q, rpe=rpe, attn_mask=mask.float())
    wanted = sparse.attention(q, q, q, layout, attn_mask=rpe.masked_fill(~mask, -torch.inf))
    assert torch.equal(out, wanted)


def test_strides_are_kept_and_any_are_taken() -> None:
    q = torch.randn(2, 50, 3, 32).transpose(1, 2).requires_grad_()
    out = sparse.attention(q, q, q, sparse.BigBird(16))
    assert out.stride() == q.stride()
    out.sum().backward()
    plain = q.detach().contiguous().requires_grad_()
    sparse.attention(plain, plain, plain, sparse.BigBird(16)).sum().backward()
    assert q.grad is not None
    assert plain.grad is not None
    torch.testing.assert_close(q.grad, plain.grad)


def test_nan_reaches_the_queries_that_see_it() -> None:
    q, k, v = (torch.randn(1, 1, 64, 16) for _ in range(3))
    for x in (q, k, v):
        x[0, 0, 20] = torch.nan
    out = sparse.attention(q, k, v, sparse.SlidingWindow(4, 16))
    touched = set((~out.isfinite().all(-1))[0, 0].nonzero().view(-1).tolist())
    assert {20, 21, 22, 23} <= touched <= set(range(16, 48))


def test_the_gradient_of_the_reference_is_autograds() -> None:
    call = make(CASES[1], torch.float32).doubled()
    out, lse = sparse_attn.reference(*call.tensors, *call.rest)
    grads = sparse_attn_backward.reference(call.grad, *call.tensors, out, lse, *call.rest)
    for ours, theirs in zip(grads, exact(call)[2:], strict=True):
        torch.testing.assert_close(ours, theirs)


def test_opcheck_finds_nothing_and_it_compiles_in_one_graph() -> None:
    call = make(CASES[0]._replace(tokens=48), torch.float32)
    torch.library.opcheck(sparse_attn.overload, (*call.tensors, *call.rest))
    plan = sparse.BigBird(16).plan(50)

    def layer(x: Tensor) -> Tensor:
        return sparse.attention(x * 2, x, x + 1, plan) + 1

    x = torch.randn(1, 2, 50, 16, requires_grad=True)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), layer(x))


def test_an_empty_batch_gives_nothing() -> None:
    q = torch.randn(0, 2, 32, 16, requires_grad=True)
    sparse.attention(q, q, q, sparse.BigBird(16)).sum().backward()
    assert q.grad is not None
    assert q.grad.shape == q.shape


def test_wrong_arguments_are_refused_by_name() -> None:
    q, layout = torch.randn(1, 2, 32, 16), sparse.Dense(16)
    many = sparse.Blocks(torch.ones(3, 2, 2), 16)
    for message, wrong in (
        ("block is 24, expected 16, 32, 64, 128", lambda: sparse.Dense(24)),
        ("expected one of them", sparse.SlidingWindow),
        (
            "a multiple of num_global_blocks",
            lambda: sparse.Fixed(num_local_blocks=3, num_global_blocks=2),
        ),
        ("exclude each other", lambda: sparse.Fixed(horizontal_global_attention=True, causal=True)),
        ("window is -1", lambda: sparse.Blocks(torch.ones(2, 2), window=-1)),
        ("num_random_blocks is -1", lambda: sparse.Variable(num_random_blocks=-1)),
        ("num_random_blocks is -1", lambda: sparse.BigBird(num_random_blocks=-1)),
        ("num_global_blocks is 1.5", lambda: sparse.BigBird(num_global_blocks=1.5)),
        (
            "num_sliding_window_blocks is -3",
            lambda: sparse.Longformer(num_sliding_window_blocks=-3),
        ),
        ("as many ends as beginnings", lambda: sparse.Longformer(global_block_end_indices=(0,))),
        ("the layout has 2", lambda: many.blocks(3)),
        ("layout has shape .3, 2, 2., expected .2 or 1", lambda: sparse.attention(q, q, q, many)),
        ("k has shape", lambda: sparse.SparseSelfAttention(layout)(q, q.mT, q)),
        ("k has shape", lambda: sparse.attention(q, q[:, :1], q, layout)),
        ("v has dtype float64, q has float32", lambda: sparse.attention(q, q, q.double(), layout)),
        (
            "key_padding_mask has shape",
            lambda: sparse.attention(q, q, q, layout, key_padding_mask=q[0, 0]),
        ),
        ("attn_mask has shape", lambda: sparse.attention(q, q, q, layout, attn_mask=q)),
        ("scale is 0", lambda: sparse.attention(q, q, q, layout, scale=0)),
        ("the mode is 'or'", lambda: sparse.attention(q, q, q, layout, attn_mask_mode="or")),
        ("the plan is for 16 tokens", lambda: sparse.attention(q, q, q, layout.plan(16))),
    ):
        with pytest.raises(UsageError, match=message):
            wrong()


def test_with_the_setting_the_front_end_runs_the_cuda_kernels() -> None:
    """A call with lists, which only the CUDA kernels ask for."""
    with override(cuda="emulated"):
        plan = sparse.Dense().plan(64)
    assert len(plan.lists) == 9
