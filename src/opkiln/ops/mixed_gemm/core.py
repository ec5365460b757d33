"""DeepSpeed-FastGen's linear layer with fp6 weights, with its names and arguments.

FastGen quantizes: it gives weights that are numbers of e3m2 in fp16, and a scale for each output.
Its two tensors of 2 and 4 bits are an order for its own kernel. Here the first one has all bits,
as ``opkiln.quant.FPQuantizer`` packs them, and the second one none.
"""

from __future__ import annotations

import torch
from torch import Tensor

from opkiln.errors import ArgumentError, ArgumentTypeError
from opkiln.ops.fp_quantizer.functions import FORMATS, packed_codes
from opkiln.ops.fp_quantizer.quantizer import FPQuantized
from opkiln.ops.mixed_gemm.gemm import mixed_gemm


@torch.no_grad()
def preprocess_weight(weight: Tensor) -> list[Tensor]:
    """The codes of ``weight``, fp16 [outputs, inputs], which holds numbers of e3m2; and an empty
    tensor. Other numbers are rounded to the nearest one. Raises UsageError, naming the argument."""
    if weight.dim() != 2 or weight.shape[1] % 16:
        expected = "expected 2 dimensions, the second a multiple of 16"
        raise ArgumentError(f"weight has shape {list(weight.shape)}, {expected}")
    if weight.dtype != torch.float16:
        raise ArgumentTypeError(f"weight has dtype {weight.dtype}, expected float16")
    codes = packed_codes(weight, FORMATS["e3m2"])
    return [codes, codes.new_empty(0)]


def cuda_wf6af16_linear(
    output: Tensor,
    hidden_states: Tensor,
    weights_2bit: Tensor,
    weights_4bit: Tensor,  # noqa: ARG001 (the names are FastGen's)
    scale: Tensor,
    workspace: Tensor | None,  # noqa: ARG001
    out_channels: int,
    tokens: int,
    in_channels: int,
    split_k: int,  # noqa: ARG001
) -> None:
    """``hidden_states @ w.T``, with ``w`` of ``preprocess_weight`` and a scale for each output.

    ``hidden_states`` is [tokens, in_channels] in fp16 or bf16, ``output`` [tokens, out_channels].
    """
    shape = (out_channels, in_channels)
    with torch.no_grad():
        scales = scale.reshape(-1).float()
        weight = FPQuantized(weights_2bit, scales, shape, output.dtype, "e3m2", in_channels)
        result = mixed_gemm(hidden_states.view(tokens, in_channels), weight)
    output.copy_(result)
