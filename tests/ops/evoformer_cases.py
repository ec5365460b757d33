"""Calls of ``evoformer_attention`` and what they must give, for the CPU, the emulator and GPUs."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from opkiln.ops.evoformer_attn import functions


class Case(NamedTuple):
    """A call by its sizes. ``masked``: half of the keys are masked out, by -1e9 or, in fp16, minus
    infinity."""

    batch: int = 1
    rows: int = 2
    length: int = 40
    heads: int = 2
    head: int = 32
    mask: bool = True
    pair: bool = True
    masked: bool = False


# What changes a kernel's path: lengths around tiles of 64 and parts of 32, rows of the pair bias
# that do not begin at multiples of 16 bytes, heads that fill half of a tile, absent biases.
CASES = [
    Case(),
    Case(batch=2, rows=2, length=72, heads=1, head=24, masked=True),
    Case(length=131, heads=1, head=16),
    Case(rows=1, length=65, head=64),
    Case(rows=3, length=64, heads=3, head=8, mask=False),
    Case(rows=1, length=33, head=48, pair=False, masked=True),
    Case(rows=1, length=1, head=40),
]


class Call(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    mask_bias: Tensor | None
    pair_bias: Tensor | None
    scale: float

    def to(self, *where: Any) -> Call:
        return Call(*(each.to(*where) if isinstance(each, Tensor) else each for each in self))


def make(case: Case, dtype: torch.dtype, device: str = "cpu", *, seed: int = 0) -> Call:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    batch, rows, length, heads, head = case[:5]
    q, k, v = (random(batch, rows, length, heads, head) for _ in range(3))
    mask = random(batch, rows, 1, 1, length) if case.mask else None
    if mask is not None and case.masked:
        mask[..., : length // 2] = -1e9
    pair = random(batch, 1, heads, length, length) if case.pair else None
    return Call(q, k, v, mask, pair, head**-0.5).to(device)


def grad_of(call: Call, *, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(call.q.shape, generator=generator).to(call.q)


def check(call: Call, forward: Any = None, backward: Any = None) -> None:
    """Call both directions, and compare with float64: within the rounding of results and of what
    tensor cores are given (weights and their gradients) to the dtype."""
    forward = forward or functions.evoformer_attention
    backward = backward or functions.evoformer_attention_backward
    grad, wide = grad_of(call), call.to(torch.float64)
    exact = functions.evoformer_attention.reference(*wide)
    weights = _weights(wide)
    out, moments = forward(*call)
    assert moments.dtype == torch.float32
    _close(out, exact[0], torch.einsum("bnhqk,bnkhd->bnqhd", weights, wide.v.abs()), "output")
    wanted = (call.mask_bias is not None, call.pair_bias is not None)
    got = backward(grad, *call[:3], out, moments, *call[3:], *wanted)
    want = functions.evoformer_attention_backward.reference(
        grad.double(), *wide[:3], *exact, *wide[3:], *wanted
    )
    sizes = _sizes(wide, grad.double(), weights)
    for name, ours, theirs, size in zip(sizes, got, want, sizes.values(), strict=True):
        assert ours.shape == theirs.shape, name
        if theirs.numel():
            _close(ours, theirs, size, name)


def _weights(call: Call) -> Tensor:
    scores = torch.einsum("bnqhd,bnkhd->bnhqk", call.q, call.k) * call.scale
    for bias in call[3:5]:
        scores = scores if bias is None else scores + bias
    return scores.softmax(-1)


def _sizes(call: Call, grad: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """The gradients with no term negative: what their rounding errors grow with. (The output is
    rounded before it is subtracted from gradients of weights.)"""
    q, k, v, grad = (each.abs() for each in (*call[:3], grad))
    of_weights = torch.einsum("bnqhd,bnkhd->bnhqk", grad, v)
    through = weights * (of_weights + (weights * of_weights).sum(-1, keepdim=True))
    return {
        "q": torch.einsum("bnhqk,bnkhd->bnqhd", through, k) * call.scale,
        "k": torch.einsum("bnhqk,bnqhd->bnkhd", through, q) * call.scale,
        "v": torch.einsum("bnhqk,bnqhd->bnkhd", weights, grad),
        "mask": through.sum((2, 3), keepdim=True),
        "pair": through.sum(1, keepdim=True),
    }


def _close(ours: Tensor, exact: Tensor, size: Tensor, name: str) -> None:
    error = (ours.double() - exact).abs()
    allowed = torch.finfo(ours.dtype).eps * size + 2e-6 * (1 + size)
    assert bool((error <= allowed).all()), (name, (error - allowed).max().item())
