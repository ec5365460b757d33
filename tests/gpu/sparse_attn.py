"""Block-sparse attention on a GPU: one line per check. Needs torch and nvcc, and no pytest.

    PYTHONPATH=src python tests/gpu/sparse_attn.py

The exit code is 0 when every check passed or says why it could not be made, otherwise 1.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import torch
from checks import main
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "ops"))

from sparse_cases import CASES, MORE, Case, check, make

from opkiln.nn import sparse_attention as sparse
from opkiln.ops.sparse_attn.functions import sparse_attn, sparse_attn_backward

DTYPES = (torch.float16, torch.bfloat16)
NATIVE = SimpleNamespace(sparse_attn=sparse_attn, sparse_attn_backward=sparse_attn_backward)


def check_kernels_build_for_this_gpu() -> None:
    wanted = [(f, d) for f in (sparse_attn, sparse_attn_backward) for d in ("float16", "bfloat16")]
    with ThreadPoolExecutor() as pool:
        assert all(pool.map(lambda each: each[0].load("cuda", dtype=each[1]), wanted))


def check_results_and_gradients_are_within_rounding_of_float64() -> None:
    for dtype in DTYPES:
        for case in (*CASES, *MORE):
            check(case, dtype, NATIVE, "cuda")


def check_lists_are_the_same_on_the_device() -> None:
    for case in (*CASES, *MORE):
        here, there = make(case, torch.float16), make(case, torch.float16, "cuda")
        assert torch.equal(here.rest[0], there.rest[0].cpu())
        for ours, theirs in zip(here.rest[1], there.rest[1], strict=True):
            assert torch.equal(ours, theirs.cpu()), case


def check_long_sequences_are_right_where_dense_attention_cannot_be() -> None:
    """Some queries of 32,768 tokens, each against float64 over the keys that it sees."""
    tokens, layout = 32_768, sparse.BigBird(64, num_random_blocks=3)
    q, k, v = (torch.randn(1, 2, tokens, 64, device="cuda").bfloat16() for _ in range(3))
    out = sparse.attention(q, k, v, layout)
    seen = layout.plan(tokens, "cuda").seen[0].repeat_interleave(64, 1)
    for query in (0, 63, 64, 5000, tokens - 1):
        keys = seen[query // 64].nonzero()[:, 0]
        scores = (k[:, :, keys].double() @ q[:, :, query, :, None].double())[..., 0] / 8
        exact = (torch.softmax(scores, -1)[..., None] * v[:, :, keys].double()).sum(2)
        torch.testing.assert_close(out[:, :, query].double(), exact, rtol=2**-6, atol=2**-8)


def check_results_are_the_same_to_the_bit_each_time() -> None:
    call = make(
        Case(sparse.BigBird(64, num_random_blocks=2), 8192, heads=4), torch.bfloat16, "cuda"
    )

    def all_of_it() -> list[Tensor]:
        out, lse = sparse_attn(*call.tensors, *call.rest)
        return [out, *sparse_attn_backward(call.grad, *call.tensors, out, lse, *call.rest)]

    first = all_of_it()
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(first, all_of_it(), strict=True))


def check_memory_grows_with_the_tokens() -> str:
    layout, used = sparse.SlidingWindow(512, 64), {}
    for tokens in (8192, 16_384, 32_768):
        q = torch.randn(1, 4, tokens, 64, device="cuda").bfloat16().requires_grad_()
        layout.plan(tokens, "cuda")
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        sparse.attention(q, q, q, layout).sum().backward()
        torch.cuda.synchronize()
        used[tokens] = torch.cuda.max_memory_allocated() - before
        q.grad = None
    assert used[32_768] < 4.4 * used[8192], used
    return ", ".join(f"{tokens}: {size >> 20} MiB" for tokens, size in used.items())


def check_it_runs_on_the_current_stream_and_in_a_graph() -> None:
    layout = sparse.BigBird(64)
    q = torch.randn(1, 2, 512, 64, device="cuda").half()
    sparse.attention(q, q, q, layout)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        q.mul_(0.5)
        out = sparse.attention(q, q, q, layout)
    side.synchronize()
    assert torch.equal(out, sparse.attention(q, q, q, layout))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = sparse.attention(q, q, q, layout)
    q.copy_(torch.randn_like(q))
    graph.replay()
    assert torch.equal(out, sparse.attention(q, q, q, layout))


def check_opcheck_finds_nothing_and_it_compiles() -> None:
    call = make(CASES[0], torch.bfloat16, "cuda")
    torch.library.opcheck(sparse_attn.overload, (*call.tensors, *call.rest))
    plan = sparse.BigBird(64).plan(256, "cuda")

    def layer(x: Tensor) -> Tensor:
        return sparse.attention(x * 2, x, x + 1, plan) + 1

    x = torch.randn(1, 2, 256, 64, device="cuda").bfloat16()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), layer(x))


CHECKS = [value for name, value in list(globals().items()) if name.startswith("check_")]


if __name__ == "__main__":
    sys.exit(main(CHECKS, __doc__))
