"""Residual adds of decoders. 16-bit tensors are added in fp32 and rounded once."""

from __future__ import annotations

from torch import Tensor

from opkiln.ops.checks import check, check_rows, check_same, widen
from opkiln.ops.transformer_inference.op import residuals as kit


@kit.op()
def residual_add(
    hidden: Tensor,
    residual: Tensor,
    attention: Tensor | None = None,
    bias: Tensor | None = None,
    attention_bias: Tensor | None = None,
    scale: float = 1.0,
    attention_scale: float = 1.0,
) -> Tensor:
    """``hidden + scale * (residual + bias + attention_bias) + attention_scale * attention``.

    If ``hidden`` and ``attention`` are one rank's parts of a sum over ranks, ``scale=1 / mp_size``
    has the residual and the biases count once. With parallel attention that is all. If the MLP
    comes after the attention, the attention's output is whole, and ``attention_scale`` is
    ``1 / mp_size``, too. ``hidden`` is fp32, bf16 or fp16; ``residual`` and ``attention`` have its
    shape, and the biases an element for each column. Raises RuntimeError, naming the argument.
    """
    check_rows(hidden, "hidden", bias=bias, attention_bias=attention_bias)
    check_same(hidden, "hidden", residual=residual, attention=attention)
    kept = widen(residual.contiguous())
    for each in (bias, attention_bias):
        if each is not None:
            kept = kept + widen(each)
    total = widen(hidden.contiguous()) + scale * kept
    if attention is not None:
        total = total + attention_scale * widen(attention)
    return total.to(hidden.dtype)


@kit.op()
def moe_res_matmul(residual: Tensor, coef: Tensor, mlp: Tensor) -> Tensor:
    """``residual * coef[0] + mlp * coef[1]``: what a residual mixture of experts mixes.

    ``coef`` has two numbers for each row (the shape of ``mlp``, but 2 columns) or two for each
    column (2 rows). ``residual`` has the shape of ``mlp``, fp32, bf16 or fp16. Raises RuntimeError,
    naming the argument.
    """
    check_rows(mlp, "mlp")
    check_same(mlp, "mlp", residual=residual)
    check("coef", coef, like=mlp, of="mlp")
    by_row = tuple(coef.shape) == (*mlp.shape[:-1], 2)
    if not by_row:
        check("coef", coef, shape=[2, mlp.shape[-1]])
    wide = widen(coef)
    first, second = (wide[..., :1], wide[..., 1:]) if by_row else (wide[0], wide[1])
    mixed = widen(residual.contiguous()) * first + widen(mlp.contiguous()) * second
    return mixed.to(mlp.dtype)
