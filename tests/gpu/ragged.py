"""ragged_device_ops on a GPU: one line per check. Needs torch and nvcc, and no pytest.

    PYTHONPATH=src python tests/gpu/ragged.py

The exit code is 0 when every check passed or says why it could not be made, otherwise 1.
"""

from __future__ import annotations

import math
import sys
from typing import Any, NamedTuple

import torch
from checks import main, refusal
from torch import Tensor

import opkiln
from opkiln.nn import ragged
from opkiln.ops.ragged_device_ops.functions import gating, paged, rows

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
INT = torch.int32


class Batch(NamedTuple):
    k_cache: Tensor
    v_cache: Tensor
    block_table: Tensor
    sequences: Tensor
    positions: Tensor

    def copy(self) -> Batch:
        return Batch(self.k_cache.clone(), self.v_cache.clone(), *self[2:])


def batch_of(
    tokens: int, sequences: int, heads: int, head: int, size: int, dtype: torch.dtype
) -> Batch:
    """Tokens dealt to the sequences, each with some seen tokens and shuffled blocks."""
    share = -(-tokens // sequences)
    most = -(-(share + 50) // size)
    table = torch.randperm(sequences * most, device="cuda").view(sequences, most).to(INT)
    at = torch.arange(tokens, device="cuda")
    rows = at // share
    shape = (sequences * most, size, heads, head)
    caches = (torch.full(shape, 77.0, dtype=dtype, device="cuda") for _ in range(2))
    return Batch(*caches, table, rows.to(INT), (at % share + rows % 50).to(INT))


def inputs(tokens: int, q: int, kv: int, head: int, dtype: torch.dtype) -> list[Tensor]:
    return [torch.randn(tokens, n, head, device="cuda").to(dtype) for n in (q, kv, kv)]


def same(ours: Tensor, theirs: Tensor) -> None:
    """Within a rounding of each other."""
    eps = torch.finfo(ours.dtype).eps
    torch.testing.assert_close(ours, theirs, rtol=eps, atol=8 * max(eps, 1e-6), equal_nan=True)


def check_it_builds_for_this_gpu_and_serves() -> None:
    for part in ("paged", "gating", "rows"):
        opkiln.get_builder(f"ragged_device_ops__{part}").jit_load()
    for name in ("paged_kv_rotary", "top_k_gating", "moe_gather", "logits_gather"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"opkiln::{name}", "CUDA"), name


def check_keys_are_rotated_and_written_as_by_the_reference() -> None:
    for dtype in DTYPES:
        for tokens, q, kv, head, dim in (
            (1, 32, 8, 128, 128), (333, 32, 8, 128, 128), (100, 8, 8, 64, 32), (57, 6, 1, 80, 80),
            (1000, 1, 1, 16, 16), (77, 3, 1, 10, 6), (40, 4, 2, 256, 256),
        ):  # fmt: skip
            ours = batch_of(tokens, min(tokens, 9), kv, head, 16, dtype)
            theirs = ours.copy()
            given = inputs(tokens, q, kv, head, dtype)
            out = ragged.paged_kv_rotary(*given, *ours, dim=dim)
            same(out, paged.paged_kv_rotary.reference(*given, *theirs, dim=dim))
            same(ours.k_cache, theirs.k_cache)
            assert torch.equal(ours.v_cache, theirs.v_cache)
            ragged.paged_kv_copy(*given[1:], *ours)
            paged.paged_kv_copy.reference(*given[1:], *theirs)
            assert torch.equal(ours.k_cache, theirs.k_cache)


def check_tables_and_padding() -> None:
    batch = batch_of(60, 4, 2, 64, 16, torch.bfloat16)
    batch.sequences[::7] = -1
    theirs = batch.copy()
    given = inputs(60, 4, 2, 64, torch.bfloat16)
    angle = torch.randn(200, 32, device="cuda")
    tables = {"cos": angle.cos(), "sin": angle.sin()}
    out = ragged.paged_kv_rotary(*given, *batch, **tables)
    same(out, paged.paged_kv_rotary.reference(*given, *theirs, **tables))
    same(batch.k_cache, theirs.k_cache)


def check_gating_is_the_references_and_the_same_every_time() -> None:
    for dtype in DTYPES:
        for tokens, count in ((0, 8), (1, 8), (64, 64), (65, 64), (5000, 60), (70, 1024), (3, 200)):
            logits = torch.randn(tokens, count, device="cuda").to(dtype)
            for k in (1, 2, 4, 8):
                ours = ragged.top_k_gating(logits, k)
                theirs = gating.top_k_gating.reference(logits, k)
                torch.testing.assert_close(ours[0], theirs[0], rtol=1e-5, atol=1e-12)
                again = ragged.top_k_gating(logits, k)
                for mine, other, once_more in zip(ours[1:], theirs[1:], again[1:], strict=True):
                    assert torch.equal(mine, other), (tokens, count, k)
                    assert torch.equal(mine, once_more)
    odd = torch.tensor([[0.0, -0.0, 5, 5], [1, math.nan, math.inf, math.nan]], device="cuda")
    assert ragged.top_k_gating(odd, 3)[1].tolist() == [[2, 3, 0], [1, 3, 2]]


def check_rows_are_the_references() -> None:
    for dtype in DTYPES:
        for tokens, columns, k in ((1, 4096, 2), (777, 4096, 8), (50, 7, 2), (33, 65536, 1)):
            x = torch.randn(tokens, columns, device="cuda").to(dtype)
            weights, _, slots, *_ = ragged.top_k_gating(torch.randn(tokens, 16, device="cuda"), k)
            sorted_rows = ragged.moe_scatter(x, slots)
            assert torch.equal(sorted_rows, rows.moe_scatter.reference(x, slots))
            for given in (weights, None):
                ours = ragged.moe_gather(sorted_rows, slots, given)
                same(ours, rows.moe_gather.reference(sorted_rows, slots, given))
            ids = torch.randint(tokens, (500,), device="cuda")
            assert torch.equal(ragged.ragged_embedding(ids, x), x[ids])
            args = (ids, x, ids.flip(0).to(INT), x.flip(0).contiguous(), 0)
            same(ragged.ragged_embedding(*args), rows.ragged_embedding.reference(*args))
            ends = torch.arange(tokens, device="cuda", dtype=INT)
            last = ragged.logits_gather(x, ends * 0, ends)
            assert torch.equal(last, rows.logits_gather.reference(x, ends * 0, ends))


def check_gradients_reach_every_input() -> None:
    gate = torch.randn(64, 8, device="cuda", requires_grad=True)
    table = torch.randn(30, 64, device="cuda", requires_grad=True)
    ids = torch.randint(30, (100,), device="cuda")

    def loss(f: Any) -> Tensor:
        x = f.ragged_embedding(ids, table)
        weights, _, slots, *_ = f.top_k_gating(x @ gate, 2)
        return f.moe_gather(f.moe_scatter(x, slots).square(), slots, weights).sum()

    class Reference:
        ragged_embedding = staticmethod(rows.ragged_embedding.reference)
        top_k_gating = staticmethod(gating.top_k_gating.reference)
        moe_gather = staticmethod(rows.moe_gather.reference)
        moe_scatter = staticmethod(rows.moe_scatter.reference)

    ours = torch.autograd.grad(loss(ragged), (gate, table))
    theirs = torch.autograd.grad(loss(Reference), (gate, table))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)


def check_a_packed_batch_runs_in_a_graph_and_on_a_side_stream() -> None:
    batch = ragged.RaggedBatch(8, 32, 4, 16, device="cuda")
    views = batch.to_device()
    table = torch.randn(50, 64, device="cuda", dtype=torch.float16)
    caches = [torch.zeros(40, 16, 2, 32, device="cuda", dtype=torch.float16) for _ in range(2)]

    def step() -> Tensor:
        x = ragged.ragged_embedding(views.tokens, table)
        k = x.view(-1, 2, 32)
        at = (views.block_table, views.sequences, views.positions)
        q = ragged.paged_kv_rotary(k, k, k, *caches, *at)
        return ragged.logits_gather(q.flatten(1), views.starts, views.lengths)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    side = torch.cuda.Stream()
    for turn in range(5):
        batch.pack([ragged.Sequenced([turn, 7, 9 + turn], 13 * turn, list(range(4)))])
        with torch.cuda.stream(side):
            batch.to_device()
            graph.replay()
        side.synchronize()
        found = out[0].clone()
        assert torch.equal(caches[1].flatten(0, 1)[13 * turn + 2].flatten(), table[9 + turn])
        assert torch.equal(found, step()[0])
        assert (out[1:] == 0).all()


def check_wrong_arguments_are_named() -> None:
    x = torch.randn(4, 16, device="cuda")
    slots = torch.zeros(4, 2, dtype=INT, device="cuda")
    assert "k is 17" in refusal(lambda: ragged.top_k_gating(x, 17))
    assert "slots has shape" in refusal(lambda: ragged.moe_scatter(x, slots[1:]))
    assert "slots" in refusal(lambda: ragged.moe_scatter(x, slots.cpu()))


CHECKS = [value for name, value in list(globals().items()) if name.startswith("check_")]


if __name__ == "__main__":
    sys.exit(main(CHECKS, __doc__))
