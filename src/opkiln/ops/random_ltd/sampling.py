"""Which tokens each layer sees: ``opkiln.nn.random_ltd.bert_sample_tokens`` and
``gpt_sample_tokens``.

They draw from torch's generator of the device in one call of ``torch.multinomial``, as DeepSpeed's
functions of these names do: a seed gives the same tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from opkiln.errors import ArgumentError
from opkiln.ops.random_ltd.functions import mask_gather_bert, mask_gather_gpt, token_sort_


def gpt_sample_tokens(
    reserved_length: int,
    seq_length: int,
    batch_size: int,
    layers: int = 1,
    device: torch.device | str = "cpu",
    attn_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Draw ``reserved_length`` of ``seq_length`` tokens for each layer and sequence.

    The indices are [layers, batch_size, reserved_length], int32, sorted in each row. The second
    result is the part of a causal ``attn_mask`` ([B, H, S, S]) for the kept tokens, the same for
    all layers; None without a mask. Raises ArgumentError.
    """
    indices = _sample(reserved_length, seq_length, batch_size, layers, device)
    if attn_mask is None:
        return indices, None
    return indices, mask_gather_gpt(attn_mask, reserved_length)


def bert_sample_tokens(
    reserved_length: int,
    seq_length: int,
    batch_size: int,
    layers: int = 1,
    device: torch.device | str = "cpu",
    attn_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Draw tokens as ``gpt_sample_tokens`` does, for layers that see both ways.

    The second result has the rows and columns of ``attn_mask`` ([B, H, S, S]) at each layer's
    indices: [layers, B, H, reserved_length, reserved_length]. Raises ArgumentError.
    """
    if attn_mask is None:
        raise ArgumentError("bert_sample_tokens needs an attn_mask")
    indices = _sample(reserved_length, seq_length, batch_size, layers, device)
    return indices, mask_gather_bert(attn_mask, indices)


def _sample(
    reserved_length: int, seq_length: int, batch_size: int, layers: int, device: torch.device | str
) -> Tensor:
    if not 0 < reserved_length <= seq_length:
        raise ArgumentError(f"reserved_length is {reserved_length}, expected 1 to {seq_length}")
    chances = torch.ones((layers * batch_size, seq_length), device=device)
    drawn = torch.multinomial(chances, reserved_length)
    indices = drawn.reshape(layers, batch_size, reserved_length).to(torch.int32)
    token_sort_(indices, seq_length)
    return indices
