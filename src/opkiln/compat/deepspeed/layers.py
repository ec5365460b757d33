"""DeepSpeed's modules ``evoformer_attn`` and ``utils``, over opkiln's ops.

Functions and arguments are those of DeepSpeed's bindings. As there, attention has no gradient of
its own: front ends have autograd functions. docs/deepspeed.md says what differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from opkiln.compat.deepspeed.modules import takes
from opkiln.ops.evoformer_attn.functions import evoformer_attention, evoformer_attention_backward
from opkiln.ops.utils.flatten import byte_view

# evoformer_attn: attention over alignments and pairs, and its gradients, written to given tensors


@takes("q k v bias1 bias2 output lse")
def attention(given: Any) -> None:
    """Write the result to ``output``, and to ``lse``, [rows, heads, length or more], for each query
    the logarithm of its sum of weights."""
    q, mask, pair = given.q, _bias(given.bias1), _bias(given.bias2)
    out, moments = evoformer_attention(q, given.k, given.v, mask, pair, q.shape[-1] ** -0.5)
    given.output.copy_(out)
    greatest, share = moments.flatten(1, 2).unbind()
    given.lse[..., : q.shape[-3]] = greatest - share.log2()


@takes("grad q k v output lse delta bias1 bias2 q_grad k_grad v_grad bias1_grad bias2_grad")
def attention_bwd(given: Any) -> None:
    """Write the gradients, but for those of biases that have no elements. ``delta`` is memory for
    DeepSpeed's kernel."""
    q, mask, pair = given.q, _bias(given.bias1), _bias(given.bias2)
    logarithms = given.lse[..., : q.shape[-3]]
    moments = torch.stack([logarithms, torch.ones_like(logarithms)])
    moments = moments.view(2, *q.shape[:2], *logarithms.shape[1:])
    to = (given.q_grad, given.k_grad, given.v_grad, given.bias1_grad, given.bias2_grad)
    found = evoformer_attention_backward(
        given.grad, q, given.k, given.v, given.output, moments, mask, pair, q.shape[-1] ** -0.5,
        *(tensor.numel() > 0 for tensor in to[3:]),
    )  # fmt: skip
    for tensor, value in zip(to, found, strict=True):
        if value.numel():
            tensor.copy_(value)


def _bias(given: Tensor) -> Tensor | None:
    """DeepSpeed gives a tensor without elements if there is no bias."""
    return given if given.numel() else None


# utils


def cast_to_byte_tensor(given: Tensor | Sequence[Tensor]) -> Tensor | list[Tensor]:
    """The memory of a tensor, or of each of several, as bytes in one dimension. Nothing is
    copied."""
    return _bytes_of(given) if isinstance(given, Tensor) else [_bytes_of(each) for each in given]


def _bytes_of(tensor: Tensor) -> Tensor:
    # DeepSpeed returns a tensor of at most one byte as it is.
    return tensor if tensor.nbytes <= 1 else byte_view(tensor)
