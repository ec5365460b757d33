"""DeepSpeed's modules ``transformer`` and ``stochastic_transformer`` over opkiln's ops."""

from __future__ import annotations

from collections import namedtuple
from itertools import product
from typing import Any

import pytest
import torch
from deepspeed_given import warm  # noqa: F401 (a fixture)
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, linear

from opkiln.compat.deepspeed.modules import OpModule
from opkiln.compat.deepspeed.training import KEPT, WEIGHTS
from opkiln.errors import UsageError
from opkiln.ops.transformer.functions import kept_elements

Weights = namedtuple("Weights", WEIGHTS.split())
Kept = namedtuple("Kept", KEPT.split())
BATCH, SEQ, HIDDEN, HEADS, WIDE, EPS = 2, 7, 24, 3, 40, 1e-5


@pytest.fixture(scope="module", params=["transformer", "stochastic_transformer"])
def module(request: pytest.FixtureRequest) -> OpModule:
    return OpModule(request.param)


def weights(dtype: torch.dtype = torch.float64) -> Weights:
    torch.manual_seed(2)
    shapes = (
        (3 * HIDDEN, HIDDEN), (3 * HIDDEN,), (HIDDEN, HIDDEN), (HIDDEN,), (HIDDEN,), (HIDDEN,),
        (WIDE, HIDDEN), (WIDE,), (HIDDEN, WIDE), (HIDDEN,), (HIDDEN,), (HIDDEN,),
    )  # fmt: skip
    return Weights(*((torch.randn(shape) * 0.3).to(dtype).requires_grad_() for shape in shapes))


def create(
    module: OpModule, pre: bool, *again: bool, attention_p: float = -1.0, hidden_p: float = -1.0
) -> tuple[bool, ...]:
    """Layer 4, with what is computed again of attention, norms and gelu. Returns the flags for its
    forward pass."""
    done = module.create_transformer_layer_fp32(
        4, BATCH, HIDDEN, HEADS, WIDE, attention_p, hidden_p, EPS, 11, pre, False, *again, False
    )
    assert done == 0
    return (pre, *again)


def passed_back(found: list[Tensor], x: Tensor, pre: bool, *again: bool) -> tuple[Tensor, ...]:
    """What DeepSpeed's front end keeps of the tensors of a forward pass, and its input."""
    state = Kept(*found)
    attention, norms, activation = again
    inverted = pre and norms
    return (
        state.inp_norm if inverted else state.output,
        state.inp_norm if pre or not norms else x,
        state.qkv_tf, state.soft_out, state.soft_out if attention else state.ctx_bufB,
        state.attn_o_inp, state.ff1_inp if norms else state.add_res, state.ff1_inp,
        state.ff2_inp if activation else state.gelu_inp, *found[9:],
        state.inp_norm if inverted else x,
    )  # fmt: skip


def plain(
    x: Tensor, w: Weights, mask: Tensor | None, pre: bool, drops: tuple[Any, Any] = (1.0, 1.0)
) -> Tensor:
    """The layer as BERT has it, and with its norms first."""

    def attention(y: Tensor) -> Tensor:
        parts = linear(y, w.attn_qkvw, w.attn_qkvb).chunk(3, -1)
        q, k, v = (each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in parts)
        scores = q @ k.transpose(2, 3) / (HIDDEN // HEADS) ** 0.5
        shares = (scores if mask is None else scores + mask).softmax(-1)
        return linear((shares @ v).transpose(1, 2).flatten(2), w.attn_ow, w.attn_ob) * drops[0]

    def mlp(y: Tensor) -> Tensor:
        wide = gelu(linear(y, w.inter_w, w.inter_b), approximate="tanh")
        return linear(wide, w.output_w, w.output_b) * drops[1]

    def first(y: Tensor) -> Tensor:
        return layer_norm(y, (HIDDEN,), w.attn_nw, w.attn_nb, EPS)

    def outer(y: Tensor) -> Tensor:
        return layer_norm(y, (HIDDEN,), w.norm_w, w.norm_b, EPS)

    if pre:
        x = x + attention(outer(x))
        return x + mlp(first(x))
    x = first(x + attention(x))
    return outer(x + mlp(x))


@pytest.mark.parametrize("pre", [True, False])
@pytest.mark.parametrize("again", list(product([True, False], repeat=3)))
def test_layer_and_gradients_are_those_of_the_plain_one(
    module: OpModule, pre: bool, again: tuple[bool, bool, bool]
) -> None:
    w = weights()
    flags = create(module, pre, *again)
    x, grad = torch.randn(2, BATCH, SEQ, HIDDEN, dtype=torch.float64)
    mask = torch.zeros(BATCH, 1, 1, SEQ, dtype=torch.float64)
    mask[1, ..., -3:] = -10000.0
    leaf = x.clone().requires_grad_()
    expected = plain(leaf, w, mask, pre)
    gradients = torch.autograd.grad(expected, [leaf, *w], grad)
    found = module.forward_fp32(4, x, mask, *w, True, *flags)
    assert len(found) == 17
    assert not found[0].requires_grad
    torch.testing.assert_close(found[0], expected)
    state = passed_back(found, x, *flags)
    for _ in range(2):  # what a forward pass returned may be used again
        results = module.backward_fp32(4, grad, *state, mask, *w)
        assert len(results) == 13
        for one, other in zip(results, gradients, strict=True):
            torch.testing.assert_close(one, other)
    without = module.forward_fp32(4, x, None, *w, False, *flags)
    torch.testing.assert_close(without[0], plain(x, w, None, pre))
    assert not any(each.requires_grad for each in without)


@pytest.mark.parametrize("pre", [True, False])
def test_dropout_is_torchs_seeds_and_the_same_in_the_backward_pass(
    module: OpModule, pre: bool
) -> None:
    w = weights()
    x, grad = torch.randn(2, BATCH, SEQ, HIDDEN, dtype=torch.float64)
    leaf = x.clone().requires_grad_()
    for again in ((False, False, False), (True, True, True)):
        flags = create(module, pre, *again, hidden_p=0.4)
        torch.manual_seed(5)
        found = module.forward_fp32(4, x, None, *w, True, *flags)
        torch.manual_seed(5)
        seed = torch.randint(2**63 - 1, (1,))
        first, last = (kept_elements(x.shape, seed, site, 0.4) / 0.6 for site in (0, 2))
        expected = plain(leaf, w, None, pre, (first, last))
        torch.testing.assert_close(found[0], expected)
        results = module.backward_fp32(4, grad, *passed_back(found, x, *flags), None, *w)
        for one, other in zip(
            results, torch.autograd.grad(expected, [leaf, *w], grad), strict=True
        ):
            torch.testing.assert_close(one, other)
        assert not torch.equal(found[0], module.forward_fp32(4, x, None, *w, True, *flags)[0])
        still = module.forward_fp32(4, x, None, *w, False, *flags)[0]
        torch.testing.assert_close(still, plain(x, w, None, pre))


def test_attention_computed_again_drops_the_same(module: OpModule) -> None:
    w = weights()
    x, grad = torch.randn(2, BATCH, SEQ, HIDDEN, dtype=torch.float64)
    results = []
    for attention_again in (False, True):
        flags = create(module, True, attention_again, False, False, attention_p=0.5)
        torch.manual_seed(5)
        found = module.forward_fp32(4, x, None, *w, True, *flags)
        torch.manual_seed(6)  # the backward pass has its own draws
        state = passed_back(found, x, *flags)
        results.append([found[0], *module.backward_fp32(4, grad, *state, None, *w)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)
    assert not torch.allclose(results[0][0], plain(x, w, None, True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_layers_are_near_to_float64(module: OpModule, dtype: torch.dtype) -> None:
    w = weights(dtype)
    flags = create(module, True, False, False, False)
    x, grad = torch.randn(2, BATCH, SEQ, HIDDEN).to(dtype)
    wide = [each.detach().double().requires_grad_() for each in (x, *w)]
    expected = plain(wide[0], Weights(*wide[1:]), None, True)
    gradients = torch.autograd.grad(expected, wide, grad.double())
    found = module.forward_fp16(4, x, None, *w, True, *flags)
    results = module.backward_fp16(4, grad, *passed_back(found, x, *flags), None, *w)
    unit = 2.0 ** (-9 if dtype == torch.float16 else -6)
    for one, other in zip((found[0], *results), (expected, *gradients), strict=True):
        assert one.dtype == dtype
        assert (one - other).norm() <= unit * other.norm()


def test_autocast_does_not_change_what_is_computed(module: OpModule) -> None:
    w = weights(torch.float32)
    flags = create(module, True, False, False, False)
    x, grad = torch.randn(2, BATCH, SEQ, HIDDEN)
    results = []
    for enabled in (True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            found = module.forward_fp32(4, x, None, *w, True, *flags)
            state = passed_back(found, x, *flags)
            results.append([found[0], *module.backward_fp32(4, grad, *state, None, *w)])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_layers_are_known_by_number_and_unknown_ones_are_refused(module: OpModule) -> None:
    with pytest.raises(UsageError, match="number 99"):
        module.forward_fp32(99, torch.zeros(1, 1, 1), None, *weights(), True, *[False] * 4)
    with pytest.raises(UsageError, match="multiple of 5 heads"):
        module.create_transformer_layer_fp16(
            5, 1, 24, 5, 40, 0.1, 0.1, EPS, 1, True, False, False, False, False, False
        )
