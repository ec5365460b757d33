"""The two halves of a training layer around its attention, each with a gradient of its own.

Matrix products are torch's. What is between them is one kernel each. A half keeps what its matrix
products need, and of the rest only what cannot be computed from that. Norms and the gelu may be
computed again in the backward pass, by the kernels that read their inputs there anyway.

A residual goes through the half that adds to it: so its gradients are added in a kernel, or in a
matrix product, that writes the sum anyway.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import linear

from opkiln.ops.stochastic_transformer import functions as stochastic
from opkiln.ops.transformer import functions as ops

_NATIVE = (torch.float32, torch.bfloat16, torch.float16)
_ATTENTION, _ACTIVATION, _OUTPUT = range(3)  # the sites of dropout


def _for(op: Any, x: Tensor) -> Any:
    """The op, or its reference for rows that no kernel takes."""
    return op if x.shape[-1] <= ops.LONGEST_ROW and x.dtype in _NATIVE else op.reference


def _flat(x: Tensor) -> Tensor:
    return x.flatten(0, -2)


def _gelu(x: Tensor, relaxed: bool) -> Any:
    return _for_any_row(stochastic.stochastic_gelu_dropout if relaxed else ops.gelu_dropout, x)


def _gelu_backward(x: Tensor, relaxed: bool) -> Any:
    relaxed_op = stochastic.stochastic_gelu_dropout_backward
    return _for_any_row(relaxed_op if relaxed else ops.gelu_dropout_backward, x)


def _for_any_row(op: Any, x: Tensor) -> Any:
    return op if x.dtype in _NATIVE else op.reference


class Projection(Function):
    """``x`` itself, and query, key and value of it. With ``norm_weight``, of its layer norm."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        norm_weight: Tensor | None,
        norm_bias: Tensor | None,
        weight: Tensor,
        bias: Tensor,
        eps: float,
        recompute: bool,
    ) -> tuple[Tensor, ...]:
        normal, mean, scale = x, None, None
        if norm_weight is not None:
            normal, mean, scale = _for(ops.norm_with_moments, x)(x, norm_weight, norm_bias, eps)
        ctx.again = recompute and norm_weight is not None
        kept = None if ctx.again or norm_weight is None else normal
        ctx.save_for_backward(x, mean, scale, norm_weight, norm_bias, weight, kept)
        query, key, value = linear(normal, weight, bias).chunk(3, -1)
        return x.view_as(x), query, key, value

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, scale, norm_weight, norm_bias, weight, normal = ctx.saved_tensors
        x_grad, query, key, value = grads
        joined, bias_grad = _for_any_row(ops.join_columns, x)(query, key, value)
        joined = _flat(joined)
        if norm_weight is None:
            total = torch.addmm(_flat(x_grad), joined, weight).view_as(x)
            return total, None, None, joined.t() @ _flat(x), bias_grad, None, None
        total, _, _, norm_weight_grad, norm_bias_grad, again = _for(
            ops.dropout_add_norm_backward, x
        )(
            (joined @ weight).view_as(x), x, mean, scale, norm_weight,
            norm_bias if ctx.again else None, x_grad,
        )  # fmt: skip
        weight_grad = joined.t() @ _flat(again if ctx.again else normal)
        return total, norm_weight_grad, norm_bias_grad, weight_grad, bias_grad, None, None


class Output(Function):
    """What follows the attention: its output matrix, and the multilayer perceptron.

    ``x`` is the residual. With ``last_weight`` and ``last_bias``, each of the two is normalized
    after its residual was added, the second one with these. Without them, the first norm is the
    perceptron's input, and there is no second one.
    """

    @staticmethod
    def forward(
        ctx: Any,
        attention: Tensor,
        x: Tensor,
        out_weight: Tensor,
        out_bias: Tensor,
        norm_weight: Tensor,
        norm_bias: Tensor,
        up_weight: Tensor,
        up_bias: Tensor,
        down_weight: Tensor,
        down_bias: Tensor,
        last_weight: Tensor | None,
        last_bias: Tensor | None,
        seed: Tensor | None,
        p: float,
        activation_p: float,
        eps: float,
        recompute_norm: bool,
        recompute_gelu: bool,
        relaxed: bool,
    ) -> Tensor:
        add_norm = _for(ops.dropout_add_norm, x)
        total, normal, mean, scale = add_norm(
            linear(attention, out_weight), out_bias, x, norm_weight, norm_bias,
            seed, _ATTENTION, p, eps,
        )  # fmt: skip
        up = linear(normal, up_weight)
        active = _gelu(x, relaxed)(up, up_bias, seed, _ACTIVATION, activation_p)
        down = linear(active, down_weight)
        last: tuple[Tensor | None, ...] = (None, None, None)
        if last_weight is None:
            add = _for(ops.dropout_add, x)
            out = add(down, down_bias, total, seed, _OUTPUT, p)
        else:
            last_total, out, last_mean, last_scale = add_norm(
                down, down_bias, normal, last_weight, last_bias, seed, _OUTPUT, p, eps
            )
            last = (last_total, last_mean, last_scale)
        ctx.options = (p, activation_p, recompute_norm, recompute_gelu, relaxed)
        ctx.save_for_backward(
            attention, total, mean, scale, None if recompute_norm else normal, up,
            None if recompute_gelu else active, *last, out_weight, norm_weight, norm_bias,
            up_weight, up_bias, down_weight, last_weight, seed,
        )  # fmt: skip
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        p, activation_p, recompute_norm, recompute_gelu, relaxed = ctx.options
        (
            attention, total, mean, scale, normal, up, active, last_total, last_mean, last_scale,
            out_weight, norm_weight, norm_bias, up_weight, up_bias, down_weight, last_weight, seed,
        ) = ctx.saved_tensors  # fmt: skip
        norm_backward = _for(ops.dropout_add_norm_backward, total)
        last_grads: tuple[Tensor | None, Tensor | None] = (None, None)
        if last_weight is None:
            residual = grad
            add_backward = _for(ops.dropout_add_backward, total)
            down, down_bias_grad = add_backward(grad, seed, _OUTPUT, p)
        else:
            residual, down, down_bias_grad, *found, _ = norm_backward(
                grad, last_total, last_mean, last_scale, last_weight, None, None, seed, _OUTPUT, p
            )
            last_grads = (found[0], found[1])
        down = _flat(residual if p == 0 else down)

        up_grad, up_bias_grad, again = _gelu_backward(total, relaxed)(
            (down @ down_weight).view_as(up), up, up_bias, seed, _ACTIVATION, activation_p,
            recompute_gelu,
        )  # fmt: skip
        down_weight_grad = down.t() @ _flat(again if recompute_gelu else active)
        del down, again, active, up
        up_grad = _flat(up_grad)
        if last_weight is None:
            normal_grad = (up_grad @ up_weight).view_as(total)
        else:  # the norm is the residual of what follows
            normal_grad = torch.addmm(_flat(residual), up_grad, up_weight).view_as(total)
        total_grad, out, out_bias_grad, norm_weight_grad, norm_bias_grad, again = norm_backward(
            normal_grad, total, mean, scale, norm_weight, norm_bias if recompute_norm else None,
            residual if last_weight is None else None, seed, _ATTENTION, p,
        )  # fmt: skip
        up_weight_grad = up_grad.t() @ _flat(again if recompute_norm else normal)
        del normal_grad, up_grad, again, normal
        out = _flat(total_grad if p == 0 else out)
        return (
            (out @ out_weight).view_as(attention), total_grad, out.t() @ _flat(attention),
            out_bias_grad, norm_weight_grad, norm_bias_grad, up_weight_grad, up_bias_grad,
            down_weight_grad, down_bias_grad, *last_grads, *(None,) * 7,
        )  # fmt: skip
