"""The functions of the library; their bodies are the reference. Importing this module declares
them.

Rows are what the last dimension counts. All arithmetic of 16-bit tensors is fp32, and each result
is rounded once. Native kernels take fp32, bf16 and fp16, those of norms and residuals rows of up to
``LONGEST_ROW`` elements. The reference takes any floats. All raise RuntimeError for arguments that
do not fit, naming the argument.

**Dropout.** An element is dropped with probability ``p``, rounded to a multiple of 2**-16, and what
is kept is multiplied by ``1 / (1 - p)``. Which elements are dropped is a function of ``seed`` (one
int64 on the device of the other tensors), of ``site`` (a number for each place in a layer) and of
the element's place, see ``kept_elements``. So nothing is stored, and the gradient finds the same
elements. Without dropout, ``seed`` may be None.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import gelu

from opkiln.ops.checks import check, check_numel, check_rows, check_same, widen
from opkiln.ops.philox import philox
from opkiln.ops.transformer.op import columns, norms

LONGEST_ROW = 8192

_Two = tuple[Tensor, Tensor]
_Three = tuple[Tensor, Tensor, Tensor]
_Four = tuple[Tensor, Tensor, Tensor, Tensor]
_Six = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


@norms.op()
def norm_with_moments(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> _Three:
    """The layer norm of ``x``, and what its gradient needs: the mean of each row and one over its
    standard deviation, in fp32."""
    check_rows(x, weight=weight, bias=bias)
    return _normalize(x.contiguous(), weight, bias, eps)


@norms.op()
def dropout_add(
    x: Tensor,
    bias: Tensor,
    residual: Tensor,
    seed: Tensor | None = None,
    site: int = 0,
    p: float = 0.0,
) -> Tensor:
    """``dropout(x + bias) + residual``."""
    check_rows(x, bias=bias)
    check_same(x, residual=residual)
    return _add(x, bias, residual, seed, site, p)


@norms.op()
def dropout_add_backward(
    grad: Tensor, seed: Tensor | None = None, site: int = 0, p: float = 0.0
) -> _Two:
    """The gradients of ``x`` and ``bias`` in ``dropout_add``; that of ``residual`` is ``grad``.

    With a ``p`` of 0 the first is ``grad`` as well, and an empty tensor is returned for it.
    """
    check_rows(grad, "grad")
    through = _drop(widen(grad), seed, site, p)
    return _unless(p == 0, through, grad), _sum_of_rows(through).to(grad.dtype)


@norms.op()
def dropout_add_norm(
    x: Tensor,
    bias: Tensor,
    residual: Tensor,
    weight: Tensor,
    norm_bias: Tensor,
    seed: Tensor | None = None,
    site: int = 0,
    p: float = 0.0,
    eps: float = 1e-5,
) -> _Four:
    """``dropout(x + bias) + residual``, its layer norm, and the moments of ``norm_with_moments``.

    What is normalized is the sum as it is returned, rounded.
    """
    check_rows(x, bias=bias, weight=weight, norm_bias=norm_bias)
    check_same(x, residual=residual)
    total = _add(x, bias, residual, seed, site, p)
    return total, *_normalize(total, weight, norm_bias, eps)


@norms.op()
def dropout_add_norm_backward(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    scale: Tensor,
    weight: Tensor,
    norm_bias: Tensor | None = None,
    residual_grad: Tensor | None = None,
    seed: Tensor | None = None,
    site: int = 0,
    p: float = 0.0,
) -> _Six:
    """Gradients in ``dropout_add_norm``. ``x`` is the sum, ``mean`` and ``scale`` are its moments.

    ``grad`` is that of the norm, ``residual_grad`` what the sum's gradient has from elsewhere. The
    results are the gradient of the sum, which is the residual's; that of what was dropped (an empty
    tensor with a ``p`` of 0: it is the same); of ``bias``, ``weight`` and ``norm_bias``; and, where
    ``norm_bias`` is given, the norm again, so that nobody has to keep it.

    With a ``p`` of 0 it is the gradient of ``norm_with_moments``, too.
    """
    check_rows(grad, "grad", weight=weight, norm_bias=norm_bias)
    check_same(grad, "grad", x=x, residual_grad=residual_grad)
    wide, by = widen(grad), widen(weight)
    normal = (widen(x) - mean[..., None]) * scale[..., None]
    part = wide * by
    total = part - part.mean(-1, keepdim=True) - normal * (part * normal).mean(-1, keepdim=True)
    total = total * scale[..., None]
    if residual_grad is not None:
        total = total + widen(residual_grad)
    through = _drop(total, seed, site, p)
    again = normal if norm_bias is None else normal * by + widen(norm_bias)
    return (
        total.to(grad.dtype),
        _unless(p == 0, through, grad),
        _sum_of_rows(through).to(grad.dtype),
        _sum_of_rows(wide * normal).to(grad.dtype),
        _sum_of_rows(wide).to(grad.dtype),
        _unless(norm_bias is None, again, grad),
    )


@columns.op()
def gelu_dropout(
    x: Tensor, bias: Tensor, seed: Tensor | None = None, site: int = 0, p: float = 0.0
) -> Tensor:
    """``dropout(gelu(x + bias))``, with the gelu that is approximated by tanh."""
    check_rows(x, bias=bias)
    out = gelu(widen(x.contiguous()) + widen(bias), approximate="tanh")
    return _drop(out, seed, site, p).to(x.dtype)


@columns.op()
def gelu_dropout_backward(
    grad: Tensor,
    x: Tensor,
    bias: Tensor,
    seed: Tensor | None = None,
    site: int = 0,
    p: float = 0.0,
    recompute: bool = False,
) -> _Three:
    """The gradients of ``x`` and ``bias`` in ``gelu_dropout``, and with ``recompute`` its result
    again, so that nobody has to keep it; otherwise an empty tensor."""
    check_rows(grad, "grad", bias=bias)
    check_same(grad, "grad", x=x)
    wide = widen(x.contiguous()) + widen(bias)
    x_grad = torch.ops.aten.gelu_backward(
        _drop(widen(grad.contiguous()), seed, site, p), wide, approximate="tanh"
    )
    again = _drop(gelu(wide, approximate="tanh"), seed, site, p) if recompute else wide
    return (
        x_grad.to(x.dtype),
        _sum_of_rows(x_grad).to(x.dtype),
        _unless(not recompute, again, x),
    )


@columns.op()
def join_columns(first: Tensor, second: Tensor, third: Tensor) -> _Two:
    """The three beside each other in each row, and the sum of all rows."""
    check_rows(first, "first")
    check_same(first, "first", second=second, third=third)
    out = torch.cat([first, second, third], -1)
    return out, _sum_of_rows(widen(out)).to(first.dtype)


def kept_elements(shape: torch.Size, seed: Tensor, site: int, p: float) -> Tensor:
    """Which elements of a tensor of this shape are kept.

    The counter of Philox4x32-7 is the index of eight neighbours in a row (the last of a row may be
    fewer), its upper half the site, its key the seed. Each of its words has 16 bits for two
    elements, the lower ones for the first. An element is kept if they are at least
    ``round(p * 65536)``.
    """
    columns = shape[-1]
    rows = shape[:-1].numel()
    eights = (columns + 7) // 8
    low = torch.arange(rows * eights, device=seed.device)
    words = torch.stack(philox(low, site, seed.reshape(())), -1)
    bits = torch.stack([words & 0xFFFF, words >> 16], -1).view(rows, eights * 8)
    return (bits[:, :columns] >= int(p * 65536 + 0.5)).view(shape)


def _drop(x: Tensor, seed: Tensor | None, site: int, p: float) -> Tensor:
    if not 0 <= p <= 1:
        raise RuntimeError(f"p is {p}, expected 0 to 1")
    if p == 0:
        return x
    if seed is None:
        raise RuntimeError(f"seed is None, and p is {p}")
    check_numel("seed", seed, 1)
    check("seed", seed, torch.int64)
    factor = 0.0 if int(p * 65536 + 0.5) >= 65536 else 1 / (1 - p)
    return torch.where(kept_elements(x.shape, seed, site, p), x * factor, 0.0)


def _add(
    x: Tensor, bias: Tensor, residual: Tensor, seed: Tensor | None, site: int, p: float
) -> Tensor:
    total = _drop(widen(x.contiguous()) + widen(bias), seed, site, p)
    return (total + widen(residual)).to(x.dtype)


def _normalize(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> _Three:
    wide = widen(x)
    mean = wide.mean(-1)
    off = wide - mean[..., None]
    scale = torch.rsqrt(off.square().mean(-1) + eps)
    out = off * scale[..., None] * widen(weight) + widen(bias)
    return out.to(x.dtype), mean, scale


def _sum_of_rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]).sum(0)


def _unless(absent: bool, value: Tensor, like: Tensor) -> Tensor:
    """``value`` in the dtype of ``like``, or an empty tensor."""
    return like.new_empty(0) if absent else value.to(like.dtype, copy=True)
