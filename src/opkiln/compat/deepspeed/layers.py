"""DeepSpeed's ``cutlass_ops``, ``evoformer_attn``, ``sparse_attn``, ``utils``, over opkiln's ops.

Functions and arguments are those of DeepSpeed's bindings. As there, attention has no gradient of
its own: front ends have autograd functions. docs/deepspeed.md says what differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from opkiln.compat.deepspeed.modules import takes
from opkiln.errors import ArgumentError
from opkiln.ops.evoformer_attn.functions import evoformer_attention, evoformer_attention_backward
from opkiln.ops.mixed_gemm import gemm
from opkiln.ops.quantizer.quantize import Quantized
from opkiln.ops.sparse_attn import attention as sparse
from opkiln.ops.sparse_attn.layouts import Blocks, Layout
from opkiln.ops.transformer_inference.core import ACTIVATIONS
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


# cutlass_ops, over mixed_gemm: matrix products of experts' tokens, and with int8 weights. Results
# go to `output`.

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
            why="DeepSpeed does not document the layout of 4-bit weights in a tensor",
            hint="opkiln.nn.inference.mixed_gemm(x, opkiln.quant.quantize(weight, bits=4))",
        )
    by_output = given.weight.view(torch.int8).transpose(-1, -2).contiguous()
    scales, shape = given.scales, tuple(by_output.shape)
    flat = scales.reshape(-1).float()
    return Quantized(by_output.view(-1), flat, None, shape, scales.dtype, 8, shape[-1])


# sparse_attn. Results equal those of DeepSpeed's documentation: a mask of the mode `mul` hides keys
# where it is 0, and one of the mode `add` is added to the scores.


class SparseSelfAttention(nn.Module):
    """DeepSpeed's module of this name. ``sparsity_config`` is one of DeepSpeed's configurations, or
    any object with ``make_layout(tokens)`` and ``block``.

    ``master_layout`` is a buffer, as in DeepSpeed: it travels with the state dict, and processes
    that drew other random blocks have the same after ``load_state_dict`` or a broadcast of it.
    """

    master_layout: Tensor

    def __init__(
        self,
        sparsity_config: Any,
        key_padding_mask_mode: str = "add",
        attn_mask_mode: str = "mul",
        max_seq_length: int = 2048,
    ) -> None:
        super().__init__()
        self.sparsity_config = sparsity_config
        self.key_padding_mask_mode, self.attn_mask_mode = key_padding_mask_mode, attn_mask_mode
        self.register_buffer("master_layout", sparsity_config.make_layout(max_seq_length))
        self._made: tuple[tuple[int, int], Layout] | None = None

    def layout(self) -> Layout:
        """The layout of the buffer. It is made again when the buffer has changed."""
        layout = self.master_layout
        state = (id(layout), layout._version)
        if self._made is None or self._made[0] != state:
            # One layout if all heads have the same: its lists are shorter.
            if torch.equal(layout, layout[:1].expand_as(layout)):
                layout = layout[:1]
            self._made = (state, Blocks(layout, self.sparsity_config.block))
        return self._made[1]

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *masks: Tensor | None, **named: Any
    ) -> Tensor:
        """The attention, [batch, heads, tokens, head] like the first three arguments. ``rpe``,
        ``key_padding_mask`` and ``attn_mask`` follow. ``key`` may be transposed, as DeepSpeed takes
        it. Its shape shows that, so only if ``tokens`` and ``head`` differ."""
        if key.shape != query.shape and key.mT.shape == query.shape:
            key = key.mT
        modes = self.key_padding_mask_mode, self.attn_mask_mode
        out: Tensor = sparse.SparseSelfAttention(self.layout(), *modes)(
            query, key, value, *masks, **named
        )
        return out
