"""``opkiln.nn.TransformerLayer`` against the same layer written with torch's modules."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import dropout, gelu, layer_norm, linear, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from opkiln import nn
from opkiln.errors import ArgumentError, FallbackWarning
from opkiln.loading import loader
from opkiln.ops.transformer import functions

HIDDEN, HEADS = 24, 3


def layer(dtype: torch.dtype = torch.float64, **words: Any) -> nn.TransformerLayer:
    torch.manual_seed(1)
    made = nn.TransformerLayer(HIDDEN, HEADS, 40, dtype=dtype, **words)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn(parameter.shape), alpha=0.3)
    return made


def plain(
    of: nn.TransformerLayer, x: Tensor, mask: Tensor | None = None, p: float = 0.0, **words: Any
) -> Tensor:
    """The layer as one would write it, with torch's dropout of what is added to the residuals."""

    def first(y: Tensor) -> Tensor:
        return layer_norm(y, (of.hidden,), of.attention_norm_weight, of.attention_norm_bias, of.eps)

    def second(y: Tensor) -> Tensor:
        return layer_norm(y, (of.hidden,), of.mlp_norm_weight, of.mlp_norm_bias, of.eps)

    def attention(y: Tensor) -> Tensor:
        parts = linear(y, of.qkv_weight, of.qkv_bias).chunk(3, -1)
        q, k, v = (each.unflatten(-1, (of.heads, -1)).transpose(1, 2) for each in parts)
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask, **words)
        return dropout(linear(out.transpose(1, 2).flatten(2), of.out_weight, of.out_bias), p)

    def mlp(y: Tensor) -> Tensor:
        wide = gelu(linear(y, of.up_weight, of.up_bias), approximate="tanh")
        return dropout(linear(wide, of.down_weight, of.down_bias), p)

    if of.pre_layer_norm:
        x = x + attention(first(x))
        return x + mlp(second(x))
    x = first(x + attention(x))
    return second(x + mlp(x))


def gradients(module: torch.nn.Module, out: Tensor, x: Tensor, grad: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(out, [x, *module.parameters()], grad))


@pytest.mark.parametrize(
    ("pre", "norm", "attention", "gelu"), list(product([True, False], repeat=4))
)
def test_layer_and_gradients_are_those_of_the_plain_one(
    pre: bool, norm: bool, attention: bool, gelu: bool
) -> None:
    made = layer(
        attention_dropout=0.0, hidden_dropout=0.0, pre_layer_norm=pre, normalize_invertible=norm,
        attn_dropout_checkpoint=attention, gelu_checkpoint=gelu,
    )  # fmt: skip
    x, grad = torch.randn(2, 2, 5, HIDDEN, dtype=torch.float64)
    x.requires_grad_()
    for words in ({}, {"is_causal": True}):
        out, expected = made(x, **words), plain(made, x, **words)
        torch.testing.assert_close(out, expected)
        for one, other in zip(
            gradients(made, out, x, grad), gradients(made, expected, x, grad), strict=True
        ):
            torch.testing.assert_close(one, other)


def test_a_mask_reaches_the_attention() -> None:
    made = layer().eval()
    x, mask = torch.randn(2, 5, HIDDEN).double(), torch.rand(2, 1, 1, 5) > 0.4
    mask[..., 0] = True
    torch.testing.assert_close(made(x, mask), plain(made, x, mask))


def test_a_batch_of_no_sequences_gives_nothing_and_gradients_of_zero() -> None:
    layer = nn.TransformerLayer(64, 4)
    out = layer(torch.randn(0, 5, 64))
    assert out.shape == (0, 5, 64)
    out.sum().backward()
    assert all(not each.grad.any() for each in layer.parameters())


@pytest.mark.parametrize("pre", [True, False])
def test_gradcheck_with_dropout(pre: bool) -> None:
    made = layer(pre_layer_norm=pre, activation_dropout=0.2, gelu_checkpoint=pre)
    x = torch.randn(1, 3, HIDDEN).double().requires_grad_()
    names = [name for name, _ in made.named_parameters() if name.endswith("bias")]

    def call(x: Tensor, *given: Tensor) -> Tensor:
        torch.manual_seed(3)
        return torch.func.functional_call(made, dict(zip(names, given, strict=True)), (x,))

    biases = [made.get_parameter(name) for name in names]
    assert torch.autograd.gradcheck(call, (x, *biases), fast_mode=True)


@pytest.mark.parametrize("pre", [True, False])
def test_dropout_repeats_with_torchs_seed_whatever_is_computed_again(pre: bool) -> None:
    x, grad = torch.randn(2, 2, 5, HIDDEN, dtype=torch.float64)
    x.requires_grad_()
    found = []
    for again in (False, True):
        made = layer(
            pre_layer_norm=pre, activation_dropout=0.3, normalize_invertible=again,
            attn_dropout_checkpoint=again, gelu_checkpoint=again,
        )  # fmt: skip
        for call in (made, lambda x, made=made: checkpoint(made, x, use_reentrant=False)):
            torch.manual_seed(5)
            out = call(x)
            found.append([out, *gradients(made, out, x, grad)])
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            torch.testing.assert_close(one, two)
    torch.manual_seed(6)
    assert not torch.allclose(found[0][0], made(x))
    made.eval()
    assert torch.equal(made(x), made(x))


def test_dropout_is_that_of_the_seed_which_is_drawn() -> None:
    made = layer(attention_dropout=0.0, hidden_dropout=0.5)
    x = torch.randn(2, 5, HIDDEN).double()
    torch.manual_seed(2)
    out = made(x)
    torch.manual_seed(2)
    seed = torch.randint(2**63 - 1, (1,))
    drops = iter([functions.kept_elements(x.shape, seed, site, 0.5) * 2.0 for site in (0, 2)])
    rest = x + plain_attention(made, x) * next(drops)
    normal = layer_norm(rest, (HIDDEN,), made.mlp_norm_weight, made.mlp_norm_bias, made.eps)
    wide = gelu(linear(normal, made.up_weight, made.up_bias), approximate="tanh")
    expected = rest + linear(wide, made.down_weight, made.down_bias) * next(drops)
    torch.testing.assert_close(out, expected)


def plain_attention(of: nn.TransformerLayer, x: Tensor) -> Tensor:
    normal = layer_norm(x, (HIDDEN,), of.attention_norm_weight, of.attention_norm_bias, of.eps)
    parts = linear(normal, of.qkv_weight, of.qkv_bias).chunk(3, -1)
    q, k, v = (each.unflatten(-1, (of.heads, -1)).transpose(1, 2) for each in parts)
    out = scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    return linear(out, of.out_weight, of.out_bias)


def kept_bytes(made: nn.TransformerLayer, call: Any, x: Tensor) -> int:
    """The memory that a forward pass keeps for the backward pass, parameters and input apart."""
    seen: dict[int, int] = {}
    known = {each.untyped_storage().data_ptr() for each in (x, *made.parameters())}

    def pack(each: Tensor) -> Tensor:
        storage = each.untyped_storage()
        if storage.data_ptr() not in known:
            seen[storage.data_ptr()] = storage.nbytes()
        return each

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda each: each):
        out = call(x)
    del out
    return sum(seen.values())


@pytest.mark.parametrize("pre", [True, False])
def test_less_is_kept_than_by_the_plain_layer(pre: bool) -> None:
    words = {"attention_dropout": 0.0, "pre_layer_norm": pre, "dtype": torch.float32}
    x = torch.randn(4, 32, HIDDEN, requires_grad=True)
    element = x.nbytes
    made = layer(**words)
    keeping = layer(**words, normalize_invertible=False, gelu_checkpoint=False)
    eager = kept_bytes(made, lambda x: plain(made, x, p=0.1), x)
    ours, more = kept_bytes(made, made, x), kept_bytes(keeping, keeping, x)
    assert ours < more < eager
    # The gelu's result, and one norm or two.
    assert more - ours >= element * 40 // HIDDEN + (2 if pre else 1) * element


@pytest.mark.parametrize("pre", [True, pytest.param(False, marks=pytest.mark.full)])
def test_compile_has_no_graph_breaks(pre: bool) -> None:
    made = layer(torch.float32, pre_layer_norm=pre, hidden_dropout=0.2, gelu_checkpoint=True)
    x = torch.randn(2, 5, HIDDEN, requires_grad=True)
    compiled = torch.compile(made, fullgraph=True, backend="aot_eager")
    grad = torch.randn_like(x)
    found = []
    for call in (made, compiled):
        torch.manual_seed(4)
        out = call(x)
        found.append([out, *gradients(made, out, x, grad)])
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)


def test_autocast_computes_in_its_dtype() -> None:
    made = layer(torch.float32).eval()
    x = torch.randn(2, 5, HIDDEN, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = made(x)
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == made.qkv_weight.grad.dtype == torch.float32
    torch.testing.assert_close(out.float(), plain(made, x), rtol=0.05, atol=0.15)


def test_the_stochastic_mode_is_within_its_tolerance() -> None:
    made, relaxed = layer().eval(), layer(stochastic=True).eval()
    x = torch.randn(2, 5, HIDDEN).double()
    torch.testing.assert_close(made(x), relaxed(x), rtol=2**-9, atol=2**-9)


def test_what_does_not_fit_is_refused() -> None:
    for words in ({"hidden": 10, "heads": 3}, {"hidden": 8, "heads": 2, "hidden_dropout": 1.0}):
        with pytest.raises(ArgumentError):
            nn.TransformerLayer(**words)
    made = layer(torch.float32)
    with pytest.raises(ArgumentError, match="24"):
        made(torch.randn(2, 5, 8))
    with pytest.raises(ArgumentError, match="dtype"):
        made(torch.randn(2, 5, HIDDEN).double())


def test_without_kernels_for_a_device_the_warning_names_the_op_alone() -> None:
    loader.forget_references()
    with pytest.warns(FallbackWarning) as told:
        layer(torch.float32)(torch.randn(1, 5, HIDDEN))
    assert {str(each.message).partition(":")[0] for each in told} == {
        "op transformer runs as its pure-PyTorch reference on cpu"
    }
