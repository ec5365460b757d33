"""random_ltd on a GPU: one line per check. Needs torch and nvcc, and no pytest.

    PYTHONPATH=src python tests/gpu/random_ltd.py

The exit code is 0 when every check passed or says why it could not be made, otherwise 1.
"""

from __future__ import annotations

import sys

import torch
from checks import Skipped, main
from torch import Tensor

from opkiln.nn import random_ltd
from opkiln.ops.random_ltd import functions


def drawn(*shape: int, tokens: int, kept: int, dtype: torch.dtype = torch.int32) -> Tensor:
    """Different indices in each row, in no order."""
    return torch.rand(*shape, tokens, device="cuda").argsort(-1)[..., :kept].to(dtype)


def numbers(batch: int, count: int, channels: int, batch_first: bool) -> Tensor:
    shape = (batch, count) if batch_first else (count, batch)
    return torch.randint(1, 100, (*shape, channels), device="cuda")


def check_it_builds_for_this_gpu_and_serves() -> None:
    assert functions.token_gather.load("cuda")
    assert torch._C._dispatch_has_kernel_for_dispatch_key("opkiln::token_gather", "CUDA")


def check_tokens_are_moved_whole() -> None:
    for dtype, channels in (
        (torch.bfloat16, 4096), (torch.float16, 1024), (torch.float32, 33), (torch.bfloat16, 33),
        (torch.int8, 7), (torch.float64, 3), (torch.float32, 1), (torch.complex128, 5),
    ):  # fmt: skip
        for batch, tokens, kept in ((1, 1, 1), (3, 23, 11), (5, 1000, 501), (2, 4096, 4096)):
            indices = drawn(batch, tokens=tokens, kept=kept)
            for batch_first in (True, False):
                x, part = (
                    numbers(batch, count, channels, batch_first).to(dtype)
                    for count in (tokens, kept)
                )
                for function, args in (
                    (functions.token_gather, (x, indices, batch_first)),
                    (functions.token_scatter, (x, part, indices, batch_first)),
                    (functions.token_spread, (part, indices, tokens, batch_first)),
                    (functions.token_clear, (x, indices.long(), batch_first)),
                ):
                    got = function(*args)
                    what = (function.__name__, dtype, channels, batch, tokens, batch_first)
                    assert torch.equal(got, function.reference(*args)), what
                written = x.clone()
                random_ltd.token_scatter_(written, part, indices, batch_first)
                assert torch.equal(written, functions.token_scatter(x, part, indices, batch_first))


def check_indices_are_sorted() -> None:
    for tokens, kept in ((1, 1), (33, 32), (2048, 1000), (65_536, 40_000), (65_536, 65_536)):
        for dtype in (torch.int32, torch.int64):
            indices = drawn(3, 2, tokens=tokens, kept=kept, dtype=dtype)
            assert torch.equal(random_ltd.token_sort(indices, tokens), indices.sort(-1).values)
            odd = torch.randint(tokens, (4, kept), device="cuda", dtype=dtype)
            assert torch.equal(random_ltd.token_sort(odd, tokens), odd.sort(-1).values)
            random_ltd.token_sort_(odd, tokens)
            assert bool((odd.diff(dim=-1) >= 0).all())


def check_masks_are_those_of_the_kept_tokens() -> None:
    for dtype in (torch.bool, torch.float16, torch.float32, torch.int64):
        mask = torch.randint(0, 2, (2, 3, 300, 300), device="cuda").to(dtype)
        indices = drawn(3, 2, tokens=300, kept=151)
        for given in (mask, mask.transpose(2, 3), mask[:1, :1].expand_as(mask)):
            expected = functions.mask_gather_bert.reference(given, indices)
            assert torch.equal(random_ltd.mask_gather_bert(given, indices), expected)
            assert torch.equal(random_ltd.mask_gather_gpt(given, 97), given[:, :, :97, :97])


def check_more_than_2_to_the_31_elements() -> None:
    if torch.cuda.get_device_properties(0).total_memory < 40 * 2**30:
        raise Skipped("the GPU has less than 40 GiB of memory")
    x = torch.arange(3 * 2**15, device="cuda").view(3, -1, 1).expand(-1, -1, 24_000).short()
    indices = drawn(3, tokens=2**15, kept=2**15)
    part = random_ltd.token_gather(x, indices)
    assert torch.equal(part[:, :, 0], x[:, :, 0].gather(1, indices.long()))
    assert torch.equal(part[:, :, 23_999], part[:, :, 0])
    assert torch.equal(random_ltd.token_spread(part, indices, 2**15), x)


def check_gradients_are_those_of_the_reference() -> None:
    indices = drawn(2, tokens=50, kept=20)
    x = torch.randn(2, 50, 64, device="cuda", requires_grad=True)
    part = torch.randn(2, 20, 64, device="cuda", requires_grad=True)
    found = []
    for scatter, gather in (
        (functions.token_scatter, functions.token_gather),
        (functions.token_scatter.reference, functions.token_gather.reference),
    ):
        out = scatter(x, part * gather(x, indices), indices)
        found.append(torch.autograd.grad(out.sin().sum(), (x, part)))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def check_it_runs_on_the_current_stream_and_in_a_graph() -> None:
    indices = drawn(2, tokens=50, kept=20)
    x = torch.randn(2, 50, 64, device="cuda")
    random_ltd.token_gather(x, indices)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        x.neg_()
        part = random_ltd.token_gather(x, indices)
    side.synchronize()
    assert torch.equal(part, functions.token_gather.reference(x, indices))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = random_ltd.token_scatter(x, part * 2, indices)
    for _ in range(3):
        x.normal_()
        graph.replay()
        assert torch.equal(out, functions.token_scatter.reference(x, part * 2, indices))


def check_samples_are_sorted_and_different() -> None:
    mask = torch.ones(4, 1, 128, 128, device="cuda", dtype=torch.bool)
    indices, masks = random_ltd.bert_sample_tokens(64, 128, 4, 3, "cuda", mask)
    assert bool((indices.diff(dim=-1) > 0).all())
    assert masks.shape == (3, 4, 1, 64, 64)


CHECKS = [value for name, value in list(globals().items()) if name.startswith("check_")]


if __name__ == "__main__":
    sys.exit(main(CHECKS, __doc__))
