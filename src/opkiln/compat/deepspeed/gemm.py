"""DeepSpeed's module ``cutlass_ops``, over opkiln's ``mixed_gemm``: matrix products of experts'
tokens, and with int8 weights. Results go to ``output``. docs/deepspeed.md says what differs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from opkiln.compat.deepspeed.modules import takes
from opkiln.errors import ArgumentError
from opkiln.ops.mixed_gemm import gemm
from opkiln.ops.quantizer.quantize import Quantized
from opkiln.ops.transformer_inference.core import ACTIVATIONS

_NAMES = {number: name for name, number in ACTIVATIONS.items()}


def moe_gemm(output: Tensor, hidden_states: Tensor, weight: Tensor, *rest: Any) -> None:
    """``rest``: bias, total_rows_before_expert, activation; ``weight``: [experts, in, out]."""
    if len(rest) == 5:
        mixed_moe_gemm(output, hidden_states, weight, *rest)
        return
    bias, rows_before_expert, activation = rest
    if not isinstance(rows_before_expert, Tensor):
        raise ArgumentError(
            f"total_rows_before_expert is {rows_before_expert}, expected a tensor",
            why="DeepSpeed's MixedGEMM calls moe_gemm, without its scales",
            hint="use opkiln.nn.inference.mixed_gemm",
        )
    ends, by_output = rows_before_expert.int(), weight.transpose(1, 2)
    output.copy_(gemm.moe_gemm(hidden_states, by_output, ends, bias, activation=_name(activation)))


@takes("output hidden_states weight scales bias num_bits activation")
def mixed_gemm(given: Any) -> None:
    """``weight`` is int8 [in, out], ``scales`` [out]."""
    weight, name = _quantized_weight(given), _name(given.activation)
    given.output.copy_(gemm.mixed_gemm(given.hidden_states, weight, given.bias, activation=name))


@takes("output hidden_states weight scales bias total_rows_before_expert num_bits activation")
def mixed_moe_gemm(given: Any) -> None:
    """``weight`` is int8 [experts, in, out], ``scales`` [experts, out]."""
    weight, name = _quantized_weight(given), _name(given.activation)
    x, ends, bias = given.hidden_states, given.total_rows_before_expert.int(), given.bias
    given.output.copy_(gemm.mixed_moe_gemm(x, weight, ends, bias, activation=name))


def _name(activation: int) -> str:
    return _NAMES.get(int(activation), str(activation))


def _quantized_weight(given: Any) -> Quantized:
    if given.num_bits != 8:
        raise ArgumentError(
            f"num_bits is {given.num_bits}, expected 8",
            why="DeepSpeed does not say how weights of 4 bits lie in a tensor",
            hint="opkiln.nn.inference.mixed_gemm(x, opkiln.quant.quantize(weight, bits=4))",
        )
    by_output = given.weight.view(torch.int8).transpose(-1, -2).contiguous()
    scales, shape = given.scales, tuple(by_output.shape)
    flat = scales.reshape(-1).float()
    return Quantized(by_output.view(-1), flat, None, shape, scales.dtype, 8, shape[-1])
