"""The two halves of a training layer around its attention, each with a gradient of its own: as
functions that say what they keep, and as autograd functions over these.

Matrix products are torch's; one kernel computes everything between two of them. A half keeps the
inputs of its matrix products, and only those other values that cannot be computed from them. Norms
and the gelu may be computed again in the backward pass, by kernels that read their inputs anyway.

A residual passes through the half that adds to it. Then its gradients are added by a kernel, or by
a matrix product, that writes the sum anyway.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import linear

from opkiln.ops.stochastic_transformer import functions as stochastic
from opkiln.ops.transformer import functions as ops

_NATIVE = (torch.float32, torch.bfloat16, torch.float16)
_ATTENTION, _ACTIVATION, _OUTPUT = range(3)  # the sites of dropout


def _pick_op(op: Any, x: Tensor) -> Any:
    """The op, or its reference for a dtype that no kernel takes."""
    return op if x.dtype in _NATIVE else op.reference


def _pick_row_op(op: Any, x: Tensor) -> Any:
    """The op, or its reference for a dtype, or rows, that no kernel takes."""
    return _pick_op(op, x) if x.shape[-1] <= ops.LONGEST_ROW else op.reference


def _flat(x: Tensor) -> Tensor:
    return x.flatten(0, -2)


class ProjectionKept(NamedTuple):
    """The values that the gradient of ``project`` needs."""

    x: Tensor
    mean: Tensor | None
    scale: Tensor | None
    norm_weight: Tensor | None
    norm_bias: Tensor | None
    weight: Tensor
    normal: Tensor | None  # None: there is no norm, or it is to be computed again


def project(
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    recompute: bool,
) -> tuple[Tensor, ProjectionKept]:
    """Query, key and value of ``x`` in one tensor; with ``norm_weight``, of its layer norm."""
    normal, mean, scale = x, None, None
    if norm_weight is not None:
        normal, mean, scale = _pick_row_op(ops.norm_with_moments, x)(x, norm_weight, norm_bias, eps)
    kept = None if recompute or norm_weight is None else normal
    return linear(normal, weight, bias), ProjectionKept(
        x, mean, scale, norm_weight, norm_bias, weight, kept
    )


def project_backward(
    kept: ProjectionKept, x_grad: Tensor, joined: Tensor
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    """The gradients of ``x`` and of the first three parameters of ``project``. ``joined`` is that
    of its result, ``x_grad`` what the gradient of ``x`` has from elsewhere."""
    x, joined = kept.x, _flat(joined)
    if kept.norm_weight is None:
        total = torch.addmm(_flat(x_grad), joined, kept.weight).view_as(x)
        return total, None, None, joined.t() @ _flat(x)
    backward = _pick_row_op(ops.dropout_add_norm_backward, x)
    total, _, _, norm_weight_grad, norm_bias_grad, again = backward(
        (joined @ kept.weight).view_as(x), x, kept.mean, kept.scale, kept.norm_weight,
        kept.norm_bias if kept.normal is None else None, x_grad,
    )  # fmt: skip
    normal = again if kept.normal is None else kept.normal
    return total, norm_weight_grad, norm_bias_grad, joined.t() @ _flat(normal)


class ProjectionFunction(Function):
    """``project`` as an autograd function. Returns ``x`` itself, query, key and value."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        joined, kept = project(*arguments)
        ctx.save_for_backward(*kept)
        return kept.x.view_as(kept.x), *joined.chunk(3, -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_grad, query, key, value = grads
        joined, bias_grad = _pick_op(ops.join_columns, x_grad)(query, key, value)
        found = project_backward(ProjectionKept(*ctx.saved_tensors), x_grad, joined)
        return *found, bias_grad, None, None


class OutputKept(NamedTuple):
    """The values that the gradient of ``output`` needs."""

    attention: Tensor
    total: Tensor
    mean: Tensor
    scale: Tensor
    normal: Tensor | None  # None: to be computed again
    up: Tensor
    active: Tensor | None  # None: to be computed again
    last_total: Tensor | None
    last_mean: Tensor | None
    last_scale: Tensor | None
    out_weight: Tensor
    norm_weight: Tensor
    norm_bias: Tensor
    up_weight: Tensor
    up_bias: Tensor
    down_weight: Tensor
    last_weight: Tensor | None
    seed: Tensor | None


def output(
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
) -> tuple[Tensor, OutputKept]:
    """The half after the attention: its output matrix, and the multilayer perceptron.

    ``x`` is the residual. With ``last_weight`` and ``last_bias``, each of the two is normalized
    after its residual was added, the second one with these. Without them, the first norm is the
    perceptron's input, and there is no second one.
    """
    add_norm = _pick_row_op(ops.dropout_add_norm, x)
    total, normal, mean, scale = add_norm(
        linear(attention, out_weight), out_bias, x, norm_weight, norm_bias,
        seed, _ATTENTION, p, eps,
    )  # fmt: skip
    up = linear(normal, up_weight)
    gelu = stochastic.stochastic_gelu_dropout if relaxed else ops.gelu_dropout
    active = _pick_op(gelu, x)(up, up_bias, seed, _ACTIVATION, activation_p)
    down = linear(active, down_weight)
    last_total, last_mean, last_scale = None, None, None
    if last_weight is None:
        out = _pick_row_op(ops.dropout_add, x)(down, down_bias, total, seed, _OUTPUT, p)
    else:
        last_total, out, last_mean, last_scale = add_norm(
            down, down_bias, normal, last_weight, last_bias, seed, _OUTPUT, p, eps
        )
    return out, OutputKept(
        attention, total, mean, scale, None if recompute_norm else normal, up,
        None if recompute_gelu else active, last_total, last_mean, last_scale, out_weight,
        norm_weight, norm_bias, up_weight, up_bias, down_weight, last_weight, seed,
    )  # fmt: skip


def output_backward(
    kept: OutputKept, grad: Tensor, p: float, activation_p: float, relaxed: bool
) -> tuple[Tensor | None, ...]:
    """The gradients of the first twelve arguments of ``output``."""
    (
        attention, total, mean, scale, normal, up, active, last_total, last_mean, last_scale,
        out_weight, norm_weight, norm_bias, up_weight, up_bias, down_weight, last_weight, seed,
    ) = kept  # fmt: skip
    norm_again, gelu_again = normal is None, active is None
    norm_backward = _pick_row_op(ops.dropout_add_norm_backward, total)
    last_grads: tuple[Tensor | None, Tensor | None] = (None, None)
    if last_weight is None:
        residual = grad
        down, down_bias_grad = _pick_row_op(ops.dropout_add_backward, total)(grad, seed, _OUTPUT, p)
    else:
        residual, down, down_bias_grad, *found, _ = norm_backward(
            grad, last_total, last_mean, last_scale, last_weight, None, None, seed, _OUTPUT, p
        )
        last_grads = (found[0], found[1])
    down = _flat(residual if p == 0 else down)

    gelu_backward = (
        stochastic.stochastic_gelu_dropout_backward if relaxed else ops.gelu_dropout_backward
    )
    up_grad, up_bias_grad, again = _pick_op(gelu_backward, total)(
        (down @ down_weight).view_as(up), up, up_bias, seed, _ACTIVATION, activation_p, gelu_again
    )
    down_weight_grad = down.t() @ _flat(again if active is None else active)
    del down, again, active, up
    up_grad = _flat(up_grad)
    if last_weight is None:
        normal_grad = (up_grad @ up_weight).view_as(total)
    else:  # the norm is the residual of what follows
        normal_grad = torch.addmm(_flat(residual), up_grad, up_weight).view_as(total)
    total_grad, out, out_bias_grad, norm_weight_grad, norm_bias_grad, again = norm_backward(
        normal_grad, total, mean, scale, norm_weight, norm_bias if norm_again else None,
        residual if last_weight is None else None, seed, _ATTENTION, p,
    )  # fmt: skip
    up_weight_grad = up_grad.t() @ _flat(again if normal is None else normal)
    del normal_grad, up_grad, again, normal
    out = _flat(total_grad if p == 0 else out)
    return (
        (out @ out_weight).view_as(attention), total_grad, out.t() @ _flat(attention),
        out_bias_grad, norm_weight_grad, norm_bias_grad, up_weight_grad, up_bias_grad,
        down_weight_grad, down_bias_grad, *last_grads,
    )  # fmt: skip


class OutputFunction(Function):
    """``output`` as an autograd function."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        out, kept = output(*arguments)
        _, p, activation_p, _, _, _, relaxed = arguments[12:]
        ctx.options = (p, activation_p, relaxed)
        ctx.save_for_backward(*kept)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        found = output_backward(OutputKept(*ctx.saved_tensors), grad, *ctx.options)
        return *found, *(None,) * 7
