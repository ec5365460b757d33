"""Attention with a KV cache on a GPU: one line per check. Needs torch and nvcc, and no pytest.

    PYTHONPATH=src python tests/gpu/kv_attention.py

The exit code is 0 when every check passed or says why it could not be made, otherwise 1.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from checks import Skipped, main

sys.path.insert(0, str(Path(__file__).parents[1] / "ops"))

from kv_cases import CASES, Case, check, make

from opkiln.nn.inference import KVCache, attention
from opkiln.ops.kv_attention.functions import kv_attention

NAMES = {torch.float16: "half", torch.bfloat16: "bfloat16"}
KERNELS = [
    (64, torch.bfloat16, 0),
    (80, torch.float16, 7),
    (128, torch.bfloat16, 0),
    (128, torch.bfloat16, 16),
    (192, torch.float16, 0),
    (256, torch.bfloat16, 32),
]
LONG = [
    Case(heads=32, kv_heads=32, lengths=(1023,), splits=8),
    Case(heads=32, kv_heads=8, lengths=(8191,), splits=33),
    Case(heads=32, kv_heads=8, lengths=(4095, 17, 0, 3000), splits=9),
    Case(heads=64, kv_heads=1, lengths=(20_000,), splits=66),
    Case(heads=16, kv_heads=1, lengths=(5000,), tokens=3, splits=40, alibi=True),
    Case(heads=32, kv_heads=4, lengths=(2000, 100), tokens=8, splits=1),
]


def check_kernels_build_for_this_gpu() -> None:
    def load(head: int, dtype: torch.dtype, blocks: int) -> bool:
        return kv_attention.load("cuda", HEAD=head, T=NAMES[dtype], PAGED=blocks > 0)

    with ThreadPoolExecutor() as pool:
        assert all(pool.map(lambda kernel: load(*kernel), KERNELS))


def check_every_head_size_is_within_rounding_of_float64() -> None:
    for head, dtype, blocks in KERNELS:
        for case in CASES:
            check(make(case._replace(blocks=blocks), head, dtype, "cuda"))


def check_long_contexts_are_within_rounding_of_float64() -> None:
    for blocks in (0, 16):
        for case in LONG:
            check(make(case._replace(blocks=blocks), 128, torch.bfloat16, "cuda"))


def check_a_result_is_the_same_to_the_bit_each_time() -> None:
    call = make(LONG[1], 128, torch.bfloat16, "cuda")
    first = kv_attention(*call.copied())
    assert all(torch.equal(first, kv_attention(*call.copied())) for _ in range(50))


def _cache(lengths: list[int], capacity: int) -> KVCache:
    shape = (len(lengths), 8, capacity, 128)
    k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return KVCache(k, v, torch.tensor(lengths, dtype=torch.int32, device="cuda"))


def check_prompt_and_steps_agree_with_attention_over_all_tokens() -> None:
    torch.manual_seed(0)
    cache = KVCache.empty(2, 8, 600, 128, device="cuda")
    q = torch.randn(2, 32, 600, 128, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, 2, 8, 600, 128, device="cuda", dtype=torch.bfloat16).unbind()
    want = torch.nn.functional.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), is_causal=True, enable_gqa=True
    )
    for begin, end in ((0, 500), (500, 501), (501, 509), (509, 600)):
        part = (each[:, :, begin:end] for each in (q, k, v))
        out = attention(*part, cache, context=end)
        torch.testing.assert_close(out.double(), want[:, :, begin:end], rtol=2e-2, atol=2e-2)
        cache.lengths += end - begin


def check_a_graph_follows_the_lengths() -> None:
    cache = _cache([100, 3000], 4608)
    q = torch.randn(2, 32, 1, 128, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(2, 8, 1, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    attention(q, k, v, cache)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(q, k, v, cache)
    for step in range(3):
        cache.lengths += 500 * step + 1
        q.normal_(), k.normal_(), v.normal_()
        graph.replay()
        got = out.clone()
        torch.testing.assert_close(got, attention(q, k, v, cache), rtol=0, atol=0)
        dense = cache.lengths.tolist()
        for row, length in enumerate(dense):
            keys, values = (each[row, :, : length + 1].double() for each in (cache.k, cache.v))
            want = torch.nn.functional.scaled_dot_product_attention(
                q[row].double(), keys, values, enable_gqa=True
            )
            torch.testing.assert_close(got[row].double(), want, rtol=2e-2, atol=1e-2)


def check_it_runs_on_the_current_stream() -> None:
    cache = _cache([2000], 2048)
    q = torch.randn(1, 32, 1, 128, device="cuda", dtype=torch.bfloat16)
    attention(q, None, None, cache)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        cache.v.fill_(3)
        out = attention(q, None, None, cache)
    side.synchronize()
    assert torch.allclose(out.float(), torch.tensor(3.0, device="cuda"), atol=2e-2)


def check_a_compiled_step_is_one_graph() -> None:
    cache = _cache([100, 3000], 4096)
    q = torch.randn(2, 32, 1, 128, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(2, 8, 1, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    want = attention(q, k, v, cache)
    assert torch.equal(torch.compile(attention, fullgraph=True)(q, k, v, cache), want)


def check_a_cache_of_more_than_2_to_the_31_elements() -> None:
    if torch.cuda.get_device_properties(0).total_memory < 40 * 2**30:
        raise Skipped("the GPU has less than 40 GiB of memory")
    cache = _cache([100] * 64, 33_000)  # 64 * 8 * 33000 * 128 = 2^31 + 14,876,672 elements
    q = torch.randn(64, 8, 1, 128, device="cuda", dtype=torch.bfloat16)
    cache.lengths[-1] = 32_999
    out = attention(q, None, None, cache)[-1:]
    want = torch.nn.functional.scaled_dot_product_attention(
        q[-1:].float(), cache.k[-1:, :, :32_999].float(), cache.v[-1:, :, :32_999].float()
    )
    torch.testing.assert_close(out.float(), want, rtol=2e-2, atol=2e-3)


def check_opcheck_finds_nothing() -> None:
    call = make(Case(splits=2), 128, torch.bfloat16, "cuda")
    torch.library.opcheck(kv_attention.overload, tuple(call))


CHECKS = [value for name, value in list(globals().items()) if name.startswith("check_")]


if __name__ == "__main__":
    sys.exit(main(CHECKS, __doc__))
