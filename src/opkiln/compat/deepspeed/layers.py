"""DeepSpeed's modules ``random_ltd``, ``spatial_inference`` and ``utils``, over opkiln's ops.

As in DeepSpeed, no function on tokens or images has a gradient: its front ends have autograd
functions of their own. docs/deepspeed.md says what differs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from opkiln.compat.deepspeed.modules import OpModule, likely_device
from opkiln.ops.random_ltd import functions as tokens
from opkiln.ops.spatial_inference.functions import spatial_bias_add
from opkiln.ops.utils import flatten as lists

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence


class RandomLTD(OpModule):
    """``random_ltd``: tokens that a layer sees, and the masks for them."""

    NAME = "random_ltd"

    def _load(self) -> None:
        tokens.token_sort.load(likely_device())
        self._take(tokens)

    @torch.no_grad()
    def token_sort_(self, unsorted_token_ids: Tensor, original_tokens: int) -> Tensor:
        """Sort each row ([layers, batch, kept]) in place. Returns the same tensor."""
        tokens.token_sort_(unsorted_token_ids, original_tokens)
        return unsorted_token_ids

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


class SpatialInference(OpModule):
    """``spatial_inference``: biases and residuals of images with channels last, or [N, S, C]."""

    NAME = "spatial_inference"

    def _load(self) -> None:
        spatial_bias_add.load(likely_device())

    @torch.no_grad()
    def nhwc_bias_add(
        self,
        input: Tensor,  # noqa: A002 (DeepSpeed's name)
        bias: Tensor,
        other: Tensor | None = None,
        other_bias: Tensor | None = None,
    ) -> Tensor:
        """``(input + bias) + (other + other_bias)``, without those that are not given."""
        return spatial_bias_add(input, bias, other, other_bias)

    nhwc_bias_add_add = nhwc_bias_add_bias_add = nhwc_bias_add


class ByteTensors(OpModule):
    """``utils``: tensors as bytes, and lists of tensors as one tensor.

    Only earlier releases of DeepSpeed have ``flatten`` and ``unflatten``.
    """

    NAME = "utils"

    def _load(self) -> None:
        self._take(lists, no_grad=False)

    def cast_to_byte_tensor(self, src_tensor: Tensor | Sequence[Tensor]) -> Tensor | list[Tensor]:
        """The memory of a tensor, or of each of several, as bytes in one dimension. Nothing is
        copied."""
        if not isinstance(src_tensor, Tensor):
            return [_bytes_of(each) for each in src_tensor]
        return _bytes_of(src_tensor)


def _bytes_of(tensor: Tensor) -> Tensor:
    # DeepSpeed returns a tensor of at most one byte as it is.
    return tensor if tensor.nbytes <= 1 else lists.byte_view(tensor)
