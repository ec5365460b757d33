"""Evoformer attention on a GPU: one line per check. Needs torch and nvcc, and no pytest.

    PYTHONPATH=src python tests/gpu/evoformer_attn.py

The exit code is 0 when every check passed or says why it could not be made, otherwise 1.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from checks import main
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "ops"))

from evoformer_cases import CASES, Call, Case, check, grad_of, make

from opkiln.nn import evoformer_attention
from opkiln.ops.evoformer_attn import functions

DTYPES = (torch.bfloat16, torch.float16)
# The shapes of the figures (fewer rows), and long, odd and many small ones.
LARGE = [
    Case(rows=24, length=256, heads=4),
    Case(rows=12, length=384, heads=8, masked=True),
    Case(rows=3, length=1021, heads=2, head=64),
    Case(batch=3, rows=7, length=200, heads=3, head=24, masked=True),
    Case(batch=2, rows=500, length=17, heads=4, head=16),
    Case(rows=2, length=2048, heads=1),
]


def check_kernels_build_for_this_gpu() -> None:
    both = (functions.evoformer_attention, functions.evoformer_attention_backward)
    with ThreadPoolExecutor() as pool:
        loads = [
            pool.submit(each.load, "cuda", dtype=dtype)
            for each in both
            for dtype in ("bfloat16", "float16")
        ]
        assert all(each.result() for each in loads)


def check_small_cases_are_within_rounding_of_float64() -> None:
    for dtype in DTYPES:
        for case in CASES:
            check(make(case, dtype, "cuda"))


def check_large_cases_are_within_rounding_of_float64() -> None:
    for dtype in DTYPES:
        for case in LARGE:
            check(make(case, dtype, "cuda"))


def check_rows_that_are_masked_out_have_equal_weights_and_their_gradients() -> None:
    call = make(Case(pair=False), torch.bfloat16, "cuda")
    call.q.zero_()
    call.mask_bias.fill_(-1e9)
    check(call)


def _step(call: Call, function: Any = evoformer_attention) -> list[Tensor]:
    given = [each.clone().requires_grad_() for each in call[:5]]
    out = function(*given)
    out.backward(grad_of(call))
    return [out.detach(), *(each.grad for each in given)]


def check_a_step_is_the_same_to_the_bit_each_time() -> None:
    call = make(Case(rows=64, length=256, heads=4), torch.bfloat16, "cuda")
    first = _step(call)
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(first, _step(call), strict=True))


def check_fp32_runs_as_the_reference() -> None:
    check(make(Case(), torch.float32, "cuda"))


def check_a_graph_is_captured_and_replayed() -> None:
    call = make(Case(rows=8, length=128), torch.bfloat16, "cuda")
    want = functions.evoformer_attention(*call)[0]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = functions.evoformer_attention(*call)[0]
    out.zero_()
    graph.replay()
    assert torch.equal(out, want)


def check_it_runs_on_the_current_stream() -> None:
    call = make(Case(rows=8, length=128), torch.bfloat16, "cuda")
    functions.evoformer_attention(*call)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        call.v.fill_(3)
        out = functions.evoformer_attention(*call)[0]
    side.synchronize()
    assert torch.allclose(out.float(), torch.tensor(3.0, device="cuda"), atol=2e-2)


def check_a_compiled_step_is_one_graph_and_equal() -> None:
    call = make(Case(rows=8, length=128), torch.bfloat16, "cuda")
    want, got = _step(call), _step(call, torch.compile(evoformer_attention, fullgraph=True))
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


def check_memory_grows_with_the_length_and_not_with_its_square() -> str:
    """Beyond what a step is given and gives."""
    found = []
    for length in (256, 512, 1024, 2048):
        call = make(Case(rows=64, length=length, heads=4), torch.bfloat16, "cuda")
        given = [each.requires_grad_() for each in call[:5]]
        grad = grad_of(call)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = evoformer_attention(*given)
        out.backward(grad)
        results = sum(each.nbytes for each in (out, *given))
        found.append((torch.cuda.max_memory_allocated() - before - results) / 2**20)
        del call, given, grad, out
    allowed = 48.0  # parts of the gradient of the pair bias, and the allocator's rounding
    assert found[3] <= 8 * found[0] + allowed, found
    return ", ".join(f"{each:.1f} MiB" for each in found)


def check_opcheck_finds_nothing() -> None:
    call = make(Case(rows=1, length=24, heads=1, head=16), torch.bfloat16, "cuda")
    results = functions.evoformer_attention(*call)
    torch.library.opcheck(
        functions.evoformer_attention.overload, tuple(call),
        test_utils=("test_schema", "test_faketensor"),
    )  # fmt: skip
    arguments = (grad_of(call), *call[:3], *results, *call[3:], True, True)
    torch.library.opcheck(
        functions.evoformer_attention_backward.overload, arguments,
        test_utils=("test_schema", "test_faketensor"),
    )  # fmt: skip


CHECKS = [value for name, value in list(globals().items()) if name.startswith("check_")]


if __name__ == "__main__":
    sys.exit(main(CHECKS, __doc__))
