"""DeepSpeed's modules ``random_ltd`` and ``spatial_inference``, over opkiln's ops of these names.

Results equal DeepSpeed's, with these differences:

- All dtypes and sizes are served. DeepSpeed's ``spatial_inference`` reads every dtype as fp16, and
  its ``random_ltd`` every dtype except fp32 as one of two bytes. Its kernels need rows of whole 16
  bytes, and sort at most 2048 tokens.
- Sums in ``spatial_inference`` are rounded once. DeepSpeed rounds each to fp16.
- ``mask_gather_bert`` takes each layer's own indices. DeepSpeed's kernel takes those of the first
  layer for all; DeepSpeed's Python code does not call it.

As in DeepSpeed, no function has a gradient: its front ends have autograd functions of their own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from opkiln.compat.deepspeed.modules import OpModule
from opkiln.ops.random_ltd import functions as tokens
from opkiln.ops.spatial_inference.functions import spatial_bias_add

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


class RandomLTD(OpModule):
    """``random_ltd``: tokens that a layer sees, and the masks for them."""

    NAME = "random_ltd"

    def __init__(self, rest: Callable[[], Any] | None = None) -> None:
        super().__init__(rest)
        tokens.token_sort.load(_device())

    @torch.no_grad()
    def token_sort_(self, unsorted_token_ids: Tensor, original_tokens: int) -> Tensor:
        """Sort each row ([layers, batch, kept]) in place. Returns the same tensor."""
        tokens.token_sort_(unsorted_token_ids, original_tokens)
        return unsorted_token_ids

    @torch.no_grad()
    def token_gather(
        self, activations: Tensor, sorted_indices: Tensor, batch_first: bool
    ) -> Tensor:
        """The activations ([N, S, C] or [S, N, C]) at the indices ([N, kept])."""
        return tokens.token_gather(activations, sorted_indices, batch_first)

    @torch.no_grad()
    def token_scatter_(
        self,
        all_activations: Tensor,
        layer_activations: Tensor,
        sorted_indices: Tensor,
        batch_first: bool,
    ) -> Tensor:
        """Write the layer's activations to their places in all of them. Returns those."""
        tokens.token_scatter_(all_activations, layer_activations, sorted_indices, batch_first)
        return all_activations

    @torch.no_grad()
    def mask_gather_bert(self, dense_mask: Tensor, sorted_indices: Tensor) -> Tensor:
        """A mask ([N, 1, S, S]) for each layer's tokens ([layers, N, kept])."""
        return tokens.mask_gather_bert(dense_mask, sorted_indices)

    @torch.no_grad()
    def mask_gather_gpt(self, dense_mask: Tensor, truncated_seq_len: int) -> Tensor:
        """A causal mask ([N, 1, S, S]) for so many tokens."""
        return tokens.mask_gather_gpt(dense_mask, truncated_seq_len)


class SpatialInference(OpModule):
    """``spatial_inference``: biases and residuals of images with channels last, or [N, S, C]."""

    NAME = "spatial_inference"

    def __init__(self, rest: Callable[[], Any] | None = None) -> None:
        super().__init__(rest)
        spatial_bias_add.load(_device())

    @torch.no_grad()
    def nhwc_bias_add(self, input: Tensor, bias: Tensor) -> Tensor:  # noqa: A002 (DeepSpeed's name)
        """``input + bias``"""
        return spatial_bias_add(input, bias)

    @torch.no_grad()
    def nhwc_bias_add_add(self, input: Tensor, bias: Tensor, other: Tensor) -> Tensor:  # noqa: A002
        """``input + bias + other``"""
        return spatial_bias_add(input, bias, other)

    @torch.no_grad()
    def nhwc_bias_add_bias_add(
        self,
        input: Tensor,  # noqa: A002
        bias: Tensor,
        other: Tensor,
        other_bias: Tensor,
    ) -> Tensor:
        """``(input + bias) + (other + other_bias)``"""
        return spatial_bias_add(input, bias, other, other_bias)


def _device() -> str:
    """Where DeepSpeed's tensors will be: the library for that device is loaded at once."""
    return "cuda" if torch.cuda.is_available() else "cpu"
