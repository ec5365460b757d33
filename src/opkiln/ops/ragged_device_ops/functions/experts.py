"""Mixture of experts: which experts a token goes to, tokens sorted by expert, and back.

T counts the tokens, E the experts, k the experts of a token, and C the elements of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from opkiln.ops.checks import (
    check_device,
    check_dim,
    check_dtype,
    check_float,
    check_shape,
    check_within,
    widened,
)
from opkiln.ops.ragged_device_ops.op import gating
from opkiln.ops.ragged_device_ops.op import rows as row_kit

_MOST_EXPERTS = 1024
_MOST_CHOSEN = 32


@gating.op()
def top_k_gating(
    logits: Tensor, k: int, normalize: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The ``k`` experts with the greatest logits, for each token: ``weights``, ``experts``,
    ``slots``, ``counts`` and ``offsets``.

    ``logits`` is [T, E], fp32, fp16 or bf16, with at most 1024 experts; ``k`` is 1 to 32.
    ``weights``, fp32 [T, k], are softmax over all experts; with ``normalize`` they are divided by
    their sum. ``experts``, int32 [T, k], begin with the greatest logit; of equal ones the lower
    expert is first, and NaN is greater than all numbers.

    ``slots``, int32 [T, k], is a row for each token and expert such that the rows of an expert lie
    together, in the order of the tokens; ``moe_scatter`` and ``moe_gather`` take it. ``counts``,
    int32 [E], are the rows of each expert, and ``offsets``, int32 [E], where its rows end, as
    torch's grouped matmul takes it. The result is the same in every run. ``weights`` have a
    gradient. Raises RuntimeError, naming the argument.
    """
    check_float("logits", logits)
    check_dim("logits", logits, 2)
    tokens, count = logits.shape
    if not 1 <= count <= _MOST_EXPERTS:
        raise RuntimeError(
            f"logits has shape {list(logits.shape)}, expected 1 to {_MOST_EXPERTS} experts"
        )
    if not 1 <= k <= min(count, _MOST_CHOSEN):
        raise RuntimeError(f"k is {k}, expected 1 to {min(count, _MOST_CHOSEN)}")
    chosen = logits.detach().sort(dim=1, descending=True, stable=True).indices[:, :k]
    weights = widened(logits).softmax(1).gather(1, chosen)
    if normalize:
        weights = weights / weights.sum(1, keepdim=True)
    flat = chosen.flatten()
    sums = torch.zeros(count, dtype=torch.int64, device=logits.device)
    counts = sums.scatter_add(0, flat, torch.ones_like(flat))
    # Row i of the sorted rows is of `order[i]`.
    order = flat.argsort(stable=True)
    places = torch.arange(tokens * k, device=logits.device)
    slots = torch.empty_like(places).scatter(0, order, places)
    return (
        weights.contiguous(),
        chosen.to(torch.int32).contiguous(),
        slots.to(torch.int32).view(tokens, k),
        counts.to(torch.int32),
        counts.cumsum(0).to(torch.int32),
    )


@row_kit.op()
def moe_scatter(x: Tensor, slots: Tensor) -> Tensor:
    """Rows sorted by expert, [T * k, C]: row ``slots[t, j]`` is ``x[t]``.

    ``x`` is [T, C], fp32, fp16 or bf16; ``slots`` is int32 [T, k] and has each row once. A row that
    is not there is an error: on a GPU an assertion. Raises RuntimeError, naming the argument.
    """
    check_float("x", x)
    check_dim("x", x, 2)
    _check_slots(slots, x, "x")
    check_shape("slots", slots, [x.shape[0], slots.shape[1]])
    rows = x.repeat_interleave(slots.shape[1], 0)
    check_within("slots", slots, 0, rows.shape[0] - 1)
    return torch.zeros_like(rows).index_copy(0, slots.flatten().long(), rows)


@moe_scatter.backward
def _scatter_gradient(grad: Tensor, x: Tensor, slots: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ARG001
    return moe_gather(grad, slots), None


@row_kit.op()
def moe_gather(rows: Tensor, slots: Tensor, weights: Tensor | None = None) -> Tensor:
    """The sum over ``j`` of ``weights[t, j] * rows[slots[t, j]]``, [T, C].

    ``rows`` is [rows, C], fp32, fp16 or bf16; ``slots`` is int32 [T, k]; ``weights`` is fp32
    [T, k], and all 1 if it is not given. Sums are computed in fp32, in the order of ``j``, and
    rounded once. A row that is not there is an error: on a GPU an assertion. Raises RuntimeError,
    naming the argument.
    """
    check_float("rows", rows)
    check_dim("rows", rows, 2)
    _check_slots(slots, rows, "rows")
    tokens, k = slots.shape
    wide = widened(rows)
    check_within("slots", slots, 0, rows.shape[0] - 1)
    if weights is not None:
        check_dtype("weights", weights, wide.dtype)
        check_shape("weights", weights, [tokens, k])
        check_device("weights", weights, rows, "rows")
    out = wide.new_zeros(tokens, rows.shape[1])
    for j in range(k):
        part = torch.nn.functional.embedding(slots[:, j], wide)
        out = out + (part if weights is None else part * weights[:, j : j + 1])
    return out.to(rows.dtype)


def _check_slots(slots: Tensor, of: Tensor, of_name: str) -> None:
    check_dtype("slots", slots, torch.int32)
    check_dim("slots", slots, 2)
    check_device("slots", slots, of, of_name)
