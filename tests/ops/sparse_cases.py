"""Calls of ``sparse_attn`` and what they must give, for CPUs, the emulator and GPUs."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from opkiln.nn import sparse_attention as sparse
from opkiln.ops.sparse_attn.functions import sparse_attn
from opkiln.ops.sparse_attn.plans import lists_of

UNIT = {torch.float32: 2e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}


class Case(NamedTuple):
    layout: Any
    tokens: int = 128
    heads: int = 1
    head: int = 64
    batch: int = 1
    key_bias: bool = False
    mask: str = ""  # add, multiply


def random_blocks(heads: int, count: int, block: int, share: float = 0.4) -> Any:
    generator = torch.Generator().manual_seed(count)
    seen = torch.rand(heads, count, count, generator=generator) < share
    seen[:, 1] = False  # queries that see nothing
    return sparse.Blocks(seen, block)


# Every block size but 128; blocks that end within a tile; columns that are not there; layouts that
# differ by head; masks; one token.
CASES = [
    Case(random_blocks(1, 8, 16), 128),
    Case(random_blocks(2, 5, 32), 147, heads=2, head=40, mask="add"),
    Case(sparse.BigBird(64, num_sliding_window_blocks=1), 130, key_bias=True),
    Case(sparse.SlidingWindow(20, 16), 100, batch=2, head=8, key_bias=True, mask="multiply"),
    Case(sparse.Fixed(16, heads=2, num_different_global_patterns=2), 48, heads=2, head=128),
    Case(sparse.Dense(16), 1),
]
# For machines that compute faster than the emulator.
MORE = [
    Case(sparse.BigBird(64), 1000, heads=3, key_bias=True),
    Case(sparse.Longformer(128, causal=True), 700, heads=2),
    Case(sparse.SlidingWindow(50, 32), 530, heads=2, batch=2, mask="multiply"),
    Case(sparse.SlidingWindow(100, 64, causal=False), 515, head=128),
    Case(sparse.Variable(32, num_random_blocks=2, local_window_blocks=(1, 3)), 400, head=96),
    Case(sparse.Dense(128, causal=True), 300, heads=2, head=80, mask="add"),
    Case(sparse.BigBird(16, heads=2), 33 * 64, heads=2, head=32),  # lines that are cut
]


class Call(NamedTuple):
    """The arguments of the forward pass, and the gradient of its result."""

    tensors: tuple[Tensor, Tensor, Tensor]
    rest: tuple[Any, ...]
    grad: Tensor

    def doubled(self) -> Call:
        rest = [self.rest[0], []]
        rest += [each.double() if isinstance(each, Tensor) else each for each in self.rest[2:]]
        q, k, v = (each.double() for each in self.tensors)
        return Call((q, k, v), tuple(rest), self.grad.double())


def make(case: Case, dtype: torch.dtype, device: str = "cpu") -> Call:
    torch.manual_seed(case.tokens)
    shape = (case.batch, case.heads, case.tokens, case.head)
    q, k, v, grad = (torch.randn(shape).to(device, dtype) for _ in range(4))
    plan = case.layout.plan(case.tokens, device)
    lists = plan.lists or lists_of(plan.seen, plan.block, plan.tokens)
    bias, mask = None, None
    if case.key_bias:
        bias = torch.randn(case.batch, case.tokens)
        bias = bias.masked_fill(torch.rand(bias.shape) < 0.1, -torch.inf).to(device)
    if case.mask:
        mask = torch.randn(1, case.heads, case.tokens, case.tokens)
        if case.mask == "multiply":
            mask = mask > -1
        mask = mask.to(device, dtype).expand(case.batch, -1, -1, -1)
    rest = (
        plan.seen, lists, bias, mask, plan.block, case.head**-0.5, plan.causal, plan.window,
        case.mask == "multiply",
    )  # fmt: skip
    return Call((q, k, v), rest, grad)


def exact(call: Call) -> tuple[Tensor, ...]:
    """The result, its logarithms, and the gradients, by autograd in float64."""
    wide = call.doubled()
    inputs = [each.requires_grad_() for each in wide.tensors]
    out, lse = sparse_attn.reference(*inputs, *wide.rest)
    return out.detach(), lse.detach(), *torch.autograd.grad(out, inputs, wide.grad)


def check(case: Case, dtype: torch.dtype, functions: Any, device: str = "cpu") -> None:
    """Result and gradients are within rounding of float64: weights are rounded to 16 bits once."""
    call = make(case, dtype, device)
    out, lse = functions.sparse_attn(*call.tensors, *call.rest)
    grads = functions.sparse_attn_backward(call.grad, *call.tensors, out, lse, *call.rest)
    for name, found, wanted in zip(
        ("out", "lse", "q", "k", "v"), (out, lse, *grads), exact(call), strict=True
    ):
        assert found.shape == wanted.shape, name
        finite = wanted.isfinite()
        assert torch.equal(found.isfinite(), finite), (case, name)
        if not finite.any():
            continue
        error = (found.double() - wanted)[finite].abs()
        slack = UNIT[dtype] * (3 * wanted[finite].abs() + wanted[finite].abs().max())
        assert (error <= slack + 1e-6).all(), (case, name, error.max().item())
