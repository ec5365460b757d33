"""Rows of tables for the tokens of a ragged batch, its last tokens, and tokens sorted by expert.

T counts the tokens, k the experts of a token, and C the elements of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from opkiln.ops.checks import WHOLE, check, check_all, check_float, check_within, widen
from opkiln.ops.ragged_device_ops.op import rows as kit


@kit.op()
def ragged_embedding(
    tokens: Tensor,
    weight: Tensor,
    positions: Tensor | None = None,
    position_weight: Tensor | None = None,
    position_offset: int = 0,
) -> Tensor:
    """The row of ``weight`` for each token, [T, C].

    ``tokens`` is int32 or int64 [T]; ``weight`` is [words, C], fp32, fp16 or bf16. With
    ``positions``, int32 [T], the row ``positions + position_offset`` of ``position_weight``,
    [positions, C], is added, in fp32, and the sum is rounded once. A token or position without a
    row is an error: on a GPU an assertion, as with torch's own functions. Raises RuntimeError,
    naming the argument.
    """
    check_float("weight", weight, 2)
    check("tokens", tokens, *WHOLE, at=weight, of="weight", dims=1)
    if (positions is None) != (position_weight is None):
        raise RuntimeError("positions and position_weight are given together, or neither")
    check_within("tokens", tokens, 0, weight.shape[0] - 1)
    out = torch.nn.functional.embedding(tokens, weight)
    if positions is None or position_weight is None:
        return out
    check("positions", positions, torch.int32, at=weight, of="weight", shape=[*tokens.shape])
    check("position_weight", position_weight, like=weight, of="weight", dims=2)
    check("position_weight", position_weight, shape=[len(position_weight), weight.shape[1]])
    least, most = -position_offset, position_weight.shape[0] - 1 - position_offset
    check_within("positions", positions, least, most)
    added = torch.nn.functional.embedding(positions + position_offset, position_weight)
    return (widen(out) + widen(added)).to(weight.dtype)


@kit.op()
def logits_gather(x: Tensor, starts: Tensor, lengths: Tensor) -> Tensor:
    """The last token of each sequence, [batch, C]: what the next token is computed from.

    ``x`` is [T, C], fp32, fp16 or bf16; a sequence has ``lengths`` tokens from ``starts`` on, both
    int32 [batch]. One without tokens gives zeros. A token that is not there is an error, as in
    ``ragged_embedding``. Raises RuntimeError, naming the argument.
    """
    check_float("x", x, 2)
    check("starts", starts, torch.int32, at=x, dims=1)
    check("lengths", lengths, torch.int32, at=x, shape=[*starts.shape])
    check_within("starts", starts, 0, x.shape[0])
    check_all(
        lengths <= x.shape[0] - starts, f"starts and lengths reach beyond {x.shape[0]} tokens"
    )
    # A row of zeros for sequences without tokens.
    rows = torch.cat((x.new_zeros(1, x.shape[1]), x))
    last = torch.where(lengths > 0, starts + lengths, 0)
    return torch.nn.functional.embedding(last, rows)


@kit.op()
def moe_scatter(x: Tensor, slots: Tensor) -> Tensor:
    """Rows sorted by expert, [T * k, C]: row ``slots[t, j]`` is ``x[t]``.

    ``x`` is [T, C], fp32, fp16 or bf16; ``slots`` is int32 [T, k] and has each row once. A row that
    is not there is an error: on a GPU an assertion. Raises RuntimeError, naming the argument.
    """
    check_float("x", x, 2)
    check("slots", slots, torch.int32, at=x, dims=2)
    check("slots", slots, shape=[x.shape[0], slots.shape[1]])
    rows = x.repeat_interleave(slots.shape[1], 0)
    check_within("slots", slots, 0, rows.shape[0] - 1)
    return torch.zeros_like(rows).index_copy(0, slots.flatten().long(), rows)


@moe_scatter.backward
def _scatter_gradient(grad: Tensor, x: Tensor, slots: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ARG001
    return moe_gather(grad, slots), None


@kit.op()
def moe_gather(rows: Tensor, slots: Tensor, weights: Tensor | None = None) -> Tensor:
    """The sum over ``j`` of ``weights[t, j] * rows[slots[t, j]]``, [T, C].

    ``rows`` is [rows, C], fp32, fp16 or bf16; ``slots`` is int32 [T, k]; ``weights`` is fp32
    [T, k], and all 1 if it is not given. Sums are computed in fp32, in the order of ``j``, and
    rounded once. A row that is not there is an error: on a GPU an assertion. Raises RuntimeError,
    naming the argument.
    """
    check_float("rows", rows, 2)
    check("slots", slots, torch.int32, at=rows, of="rows", dims=2)
    tokens, k = slots.shape
    wide = widen(rows)
    check_within("slots", slots, 0, rows.shape[0] - 1)
    if weights is not None:
        check("weights", weights, wide.dtype, at=rows, of="rows", shape=[tokens, k])
    out = wide.new_zeros(tokens, rows.shape[1])
    for j in range(k):
        part = torch.nn.functional.embedding(slots[:, j], wide)
        out = out + (part if weights is None else part * weights[:, j : j + 1])
    return out.to(rows.dtype)
