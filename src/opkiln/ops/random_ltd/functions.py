"""The functions of ``random_ltd``: their bodies are the references.

B is the batch, S the tokens of a sequence, K those that are kept, C the channels and L the layers.
``x`` is [B, S, C], or [S, B, C] with ``batch_first=False``, of any dtype. ``indices`` is [B, K],
int32 or int64, in any order, from 0 to S - 1. An index outside of that is an error: on a GPU an
assertion, as with torch's own functions. The same index twice in a row is only allowed in
``token_sort``, in masks, and in a ``token_gather`` that nobody differentiates.

All functions on tokens are linear. Their gradients are each other: that of a gather spreads the
gradient over zeros, that of a scatter gathers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from opkiln.ops.checks import WHOLE, check, check_least, check_within
from opkiln.ops.random_ltd.op import kit


@kit.op()
def token_sort(indices: Tensor, tokens: int) -> Tensor:
    """Each row of ``indices`` ([..., K], int32 or int64), sorted upward.

    They are from 0 to ``tokens - 1``. It is fastest if those of a row differ. Raises RuntimeError.
    """
    _check_within(indices, tokens)
    return indices.contiguous().sort(dim=-1).values if indices.dim() else indices.clone()


@kit.op(mutates="indices")
def token_sort_(indices: Tensor, tokens: int) -> None:
    """``token_sort`` in place."""
    _check_within(indices, tokens)
    if indices.dim():
        indices.copy_(indices.sort(dim=-1).values)


@kit.op()
def token_gather(x: Tensor, indices: Tensor, batch_first: bool = True) -> Tensor:
    """The tokens of ``x`` at ``indices``: [B, K, C], or [K, B, C]. Raises RuntimeError."""
    return x.gather(_tokens_dim(batch_first), _places(x, indices, batch_first))


@kit.op()
def token_scatter(x: Tensor, part: Tensor, indices: Tensor, batch_first: bool = True) -> Tensor:
    """``x`` with the tokens of ``part`` at ``indices``, in new memory. Raises RuntimeError."""
    places = _places(x, indices, batch_first, part)
    return x.contiguous().scatter(_tokens_dim(batch_first), places, part)


@kit.op(mutates="x")
def token_scatter_(x: Tensor, part: Tensor, indices: Tensor, batch_first: bool = True) -> None:
    """``token_scatter`` in place."""
    x.scatter_(_tokens_dim(batch_first), _places(x, indices, batch_first, part), part)


@kit.op()
def token_spread(part: Tensor, indices: Tensor, tokens: int, batch_first: bool = True) -> Tensor:
    """Zeros for ``tokens`` tokens, with those of ``part`` at ``indices``. Raises RuntimeError."""
    check("part", part, dims=3)
    check_least(0, tokens=tokens)
    shape = list(part.shape)
    shape[_tokens_dim(batch_first)] = tokens
    zeros = part.new_zeros(shape)
    places = _places(zeros, indices, batch_first, part)
    return zeros.scatter(_tokens_dim(batch_first), places, part)


@kit.op()
def token_clear(x: Tensor, indices: Tensor, batch_first: bool = True) -> Tensor:
    """``x`` with zeros at ``indices``, in new memory. Raises RuntimeError."""
    places = _places(x, indices, batch_first)
    return x.contiguous().scatter(_tokens_dim(batch_first), places, 0)


@kit.op()
def mask_gather_bert(mask: Tensor, indices: Tensor) -> Tensor:
    """The rows and columns of ``mask`` ([B, H, S, S], any dtype; H is 1 if the heads share it) at
    ``indices`` ([L, B, K]): [L, B, H, K, K]. Raises RuntimeError."""
    _check_mask(mask)
    check("indices", indices, *WHOLE, at=mask, of="mask")
    if indices.dim() != 3 or indices.shape[1] != mask.shape[0]:
        raise RuntimeError(
            f"indices has shape {list(indices.shape)}, expected [layers, {mask.shape[0]}, kept]"
        )
    check_within("indices", indices, 0, mask.shape[2] - 1)
    layers, batch, kept = indices.shape
    heads, tokens = mask.shape[1], mask.shape[2]
    places = indices.long()
    rows = places[:, :, None, :, None].expand(layers, batch, heads, kept, tokens)
    columns = places[:, :, None, None, :].expand(layers, batch, heads, kept, kept)
    return mask.expand(layers, *mask.shape).gather(3, rows).gather(4, columns)


@kit.op()
def mask_gather_gpt(mask: Tensor, kept: int) -> Tensor:
    """The first ``kept`` rows and columns of a causal ``mask`` ([B, H, S, S], any dtype): what the
    kept tokens see of each other does not depend on which they are. Raises RuntimeError."""
    _check_mask(mask)
    check_least(0, kept=kept)
    if kept > mask.shape[2]:
        raise RuntimeError(f"kept is {kept}, but mask is for {mask.shape[2]} tokens")
    return mask[:, :, :kept, :kept].clone(memory_format=torch.contiguous_format)


# Gradients


@token_gather.backward
def _gather_gradient(
    grad: Tensor, x: Tensor, indices: Tensor, batch_first: bool
) -> tuple[Tensor | None, ...]:
    tokens = x.shape[_tokens_dim(batch_first)]
    return token_spread(grad, indices, tokens, batch_first), None, None


@token_scatter.backward
def _scatter_gradient(
    grad: Tensor, x: Tensor, part: Tensor, indices: Tensor, batch_first: bool
) -> tuple[Tensor | None, ...]:
    return (
        token_clear(grad, indices, batch_first) if x.requires_grad else None,
        token_gather(grad, indices, batch_first) if part.requires_grad else None,
        None,
        None,
    )


@token_spread.backward
def _spread_gradient(
    grad: Tensor, _part: Tensor, indices: Tensor, _tokens: int, batch_first: bool
) -> tuple[Tensor | None, ...]:
    return token_gather(grad, indices, batch_first), None, None, None


@token_clear.backward
def _clear_gradient(
    grad: Tensor, _x: Tensor, indices: Tensor, batch_first: bool
) -> tuple[Tensor | None, ...]:
    return token_clear(grad, indices, batch_first), None, None


# Checks


def _tokens_dim(batch_first: bool) -> int:
    return 1 if batch_first else 0


def _places(x: Tensor, indices: Tensor, batch_first: bool, part: Tensor | None = None) -> Tensor:
    """The index of each element's token in ``x``. Raises RuntimeError, also for a ``part`` of other
    tokens than these."""
    check("x", x, dims=3)
    check("indices", indices, *WHOLE, at=x)
    batch = x.shape[0 if batch_first else 1]
    if indices.dim() != 2 or indices.shape[0] != batch:
        raise RuntimeError(f"indices has shape {list(indices.shape)}, expected [{batch}, kept]")
    rows = indices if batch_first else indices.t()
    if part is not None:
        check("part", part, like=x, shape=[*rows.shape, x.shape[2]])
    check_within("indices", indices, 0, x.shape[_tokens_dim(batch_first)] - 1)
    return rows.long().unsqueeze(-1).expand(*rows.shape, x.shape[2])


def _check_mask(mask: Tensor) -> None:
    if mask.dim() != 4 or mask.shape[2] != mask.shape[3]:
        raise RuntimeError(
            f"mask has shape {list(mask.shape)}, expected [batch, heads, tokens, tokens]"
        )


def _check_within(indices: Tensor, tokens: int) -> None:
    check("indices", indices, *WHOLE)
    check_least(0, tokens=tokens)
    check_within("indices", indices, 0, tokens - 1)
