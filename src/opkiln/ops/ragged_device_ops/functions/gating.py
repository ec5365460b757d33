"""Mixture of experts: which experts a token goes to.

T counts the tokens, E the experts, and k the experts of a token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from opkiln.ops.checks import check_float, widen
from opkiln.ops.ragged_device_ops.op import gating as kit

_MOST_EXPERTS = 1024
_MOST_CHOSEN = 32


@kit.op()
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
    check_float("logits", logits, 2)
    tokens, count = logits.shape
    if not 1 <= count <= _MOST_EXPERTS:
        raise RuntimeError(
            f"logits has shape {list(logits.shape)}, expected 1 to {_MOST_EXPERTS} experts"
        )
    if not 1 <= k <= min(count, _MOST_CHOSEN):
        raise RuntimeError(f"k is {k}, expected 1 to {min(count, _MOST_CHOSEN)}")
    chosen = logits.detach().sort(dim=1, descending=True, stable=True).indices[:, :k]
    weights = widen(logits).softmax(1).gather(1, chosen)
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
