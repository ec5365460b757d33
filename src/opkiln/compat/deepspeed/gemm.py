"""DeepSpeed's module ``cutlass_ops``, over opkiln's ``mixed_gemm``.

Functions and arguments are those of DeepSpeed's binding; docs/deepspeed.md says what differs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from opkiln.compat.deepspeed.modules import OpModule
from opkiln.errors import ArgumentError
from opkiln.ops.mixed_gemm import gemm
from opkiln.ops.quantizer.quantize import Quantized
from opkiln.ops.transformer_inference.core import ACTIVATIONS

_NAMES = {number: name for name, number in ACTIVATIONS.items()}


class CutlassOps(OpModule):
    """``cutlass_ops``: matrix products of experts' tokens, and with int8 weights. Results go to
    ``output``."""

    NAME = "cutlass_ops"

    @torch.no_grad()
    def moe_gemm(self, output: Tensor, hidden_states: Tensor, weight: Tensor, *rest: Any) -> None:
        """``rest``: bias, total_rows_before_expert, activation; ``weight``: [experts, in, out]."""
        if len(rest) == 5:
            return self.mixed_moe_gemm(output, hidden_states, weight, *rest)
        bias, total_rows_before_expert, activation = rest
        if not isinstance(total_rows_before_expert, Tensor):
            raise ArgumentError(
                f"total_rows_before_expert is {total_rows_before_expert}, expected a tensor",
                why="DeepSpeed's MixedGEMM calls moe_gemm, without its scales",
                hint="use opkiln.nn.inference.mixed_gemm",
            )
        ends, name = total_rows_before_expert.int(), _name(activation)
        by_output = weight.transpose(1, 2)
        output.copy_(gemm.moe_gemm(hidden_states, by_output, ends, bias, activation=name))
        return None

    @torch.no_grad()
    def mixed_gemm(
        self,
        output: Tensor,
        hidden_states: Tensor,
        weight: Tensor,
        scales: Tensor,
        bias: Tensor | None,
        num_bits: int,
        activation_raw: int,
    ) -> None:
        """``weight`` is int8 [in, out], ``scales`` [out]."""
        made, name = _quantized(weight, scales, num_bits), _name(activation_raw)
        output.copy_(gemm.mixed_gemm(hidden_states, made, bias, activation=name))

    @torch.no_grad()
    def mixed_moe_gemm(
        self,
        output: Tensor,
        hidden_states: Tensor,
        weight: Tensor,
        scales: Tensor,
        bias: Tensor | None,
        total_rows_before_expert: Tensor,
        num_bits: int,
        activation_raw: int,
    ) -> None:
        """``weight`` is int8 [experts, in, out], ``scales`` [experts, out]."""
        made, name = _quantized(weight, scales, num_bits), _name(activation_raw)
        ends = total_rows_before_expert.int()
        output.copy_(gemm.mixed_moe_gemm(hidden_states, made, ends, bias, activation=name))


def _name(activation: int) -> str:
    return _NAMES.get(int(activation), str(activation))


def _quantized(weight: Tensor, scales: Tensor, num_bits: int) -> Quantized:
    if num_bits != 8:
        raise ArgumentError(
            f"num_bits is {num_bits}, expected 8",
            why="DeepSpeed does not say how weights of 4 bits lie in a tensor",
            hint="opkiln.nn.inference.mixed_gemm(x, opkiln.quant.quantize(weight, bits=4))",
        )
    by_output = weight.view(torch.int8).transpose(-1, -2).contiguous()
    flat = scales.reshape(-1).float()
    shape = tuple(by_output.shape)
    return Quantized(by_output.view(-1), flat, None, shape, scales.dtype, 8, shape[-1])
