"""DeepSpeed's modules ``transformer`` and ``stochastic_transformer``, over opkiln's ops of these
names: the layer of ``opkiln.nn.TransformerLayer``, in DeepSpeed's arguments and order.

``forward_*`` returns the seventeen tensors of DeepSpeed's binding: the output, and what
``backward_*`` takes again. docs/deepspeed.md says what differs. A tensor's own dtype decides,
whatever the function's name.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from opkiln.compat.deepspeed.modules import OpModule, takes
from opkiln.errors import UsageError
from opkiln.nn import halves

_LAYER = (
    "layer_id batch_size hidden_dim num_heads intermediate_size attn_dropout_ratio "
    "hidden_dropout_ratio layer_norm_eps seed pre_layer_norm test_gemm attn_dropout_checkpoint "
    "normalize_invertible gelu_checkpoint stochastic_mode"
)
# The first norm of a layer is ``norm_*`` if it comes before the attention, and ``attn_n*`` if not.
WEIGHTS = (
    "attn_qkvw attn_qkvb attn_ow attn_ob attn_nw attn_nb inter_w inter_b output_w output_b "
    "norm_w norm_b"
)


# The results of ``forward_*``, which ``backward_*`` takes, in DeepSpeed's order and names.
KEPT = (
    "output inp_norm qkv_tf soft_out ctx_bufB attn_o_inp add_res ff1_inp gelu_inp ff2_inp "
    "attn_prob_dropout_mask attn_output_dropout_mask layer_output_dropout_mask "
    "attn_layer_norm_var attn_layer_norm_mean layer_norm_var layer_norm_mean"
)


def _disable_autocast(function: Callable[..., list[Tensor]]) -> Callable[..., list[Tensor]]:
    """Disable autocast for the kernels: the front end calls them with its own dtypes."""

    @wraps(function)
    def call(self: Transformer, given: Any) -> list[Tensor]:
        with torch.autocast(given.attn_qkvw.device.type, enabled=False):
            return function(self, given)

    return call


class Transformer:
    """``transformer``: one layer, forward and backward, for training. ``stochastic_transformer``:
    the same with the GPU's approximate tanh in the gelu. Functions raise UsageError."""

    def __init__(self, module: OpModule) -> None:
        self._relaxed = module.__name__ == "stochastic_transformer"
        self._layers: dict[int, Any] = {}

    @takes(_LAYER)
    def create_transformer_layer(self, layer: Any) -> int:
        """Remember a layer by its number. Returns 0."""
        if layer.hidden_dim % layer.num_heads:
            raise UsageError(
                f"hidden_dim is {layer.hidden_dim}, not a multiple of {layer.num_heads} heads"
            )
        self._layers[layer.layer_id] = layer
        return 0

    def _layer(self, layer_id: int) -> Any:
        if layer_id not in self._layers:
            raise UsageError(f"no layer was created with the number {layer_id}")
        return self._layers[layer_id]

    @takes(
        f"layer_id input mask {WEIGHTS} training pre_norm attention_again norms_again gelu_again"
    )
    @_disable_autocast
    def forward(self, given: Any) -> list[Tensor]:
        """The last three flags choose what the backward pass computes again."""
        layer, x, training = self._layer(given.layer_id), given.input, given.training
        pre, norm_again = given.pre_norm, given.norms_again
        first, between, last = _norms(given, pre)
        qkv, projection = halves.project(
            x, *first, given.attn_qkvw, given.attn_qkvb, layer.layer_norm_eps, norm_again
        )
        qkv = qkv.flatten(0, 1).requires_grad_(training)
        with torch.set_grad_enabled(training):
            attended = _attend(qkv, given, layer)
        p = max(layer.hidden_dropout_ratio, 0.0) if training else 0.0
        seed = torch.randint(2**63 - 1, (1,), device=x.device) if p > 0 else None
        out, kept = halves.output(
            attended.detach(), x, given.attn_ow, given.attn_ob, *between, given.inter_w,
            given.inter_b, given.output_w, given.output_b, *last, seed, p, 0.0,
            layer.layer_norm_eps, norm_again, given.gelu_again, self._relaxed,
        )  # fmt: skip
        empty = x.new_empty(0)
        drawn = torch.empty(0, dtype=torch.int64) if seed is None else seed
        up = kept.up.flatten(0, 1)
        first_read = x if projection.normal is None else projection.normal
        outer = (projection.scale, projection.mean) if pre else (kept.last_scale, kept.last_mean)
        return [
            out,
            # The first norm, or its input if invertible; post: the last norm's input.
            first_read if pre else _require(kept.last_total),
            qkv,  # a row is a token's query, key and value
            _require(kept.last_total) if norm_again and not pre else empty,
            empty,
            attended,  # it carries torch's gradient, up to qkv
            kept.total,
            kept.total if kept.normal is None else kept.normal,
            up,
            up if kept.active is None else kept.active.flatten(0, 1),
            torch.empty(0, dtype=torch.int8),
            drawn,  # the masks of hidden states are the seed
            drawn,
            kept.scale.flatten(),
            kept.mean.flatten(),
            *(_require(each).flatten() for each in outer),
        ]

    @takes(f"layer_id grad_output {KEPT} input mask {WEIGHTS}")
    @_disable_autocast
    def backward(self, given: Any) -> list[Tensor]:
        """The gradients of the input and of the weights."""
        layer, seed = self._layer(given.layer_id), given.attn_output_dropout_mask
        pre, norm_again = layer.pre_layer_norm, layer.normalize_invertible
        first, between, last = _norms(given, pre)
        p = max(layer.hidden_dropout_ratio, 0.0) if seed.numel() else 0.0
        last_total = None if pre else given.soft_out if norm_again else given.inp_norm
        mean, scale, attn_mean, attn_scale = (
            each.view(given.grad_output.shape[:-1])
            for each in (
                given.layer_norm_mean, given.layer_norm_var,
                given.attn_layer_norm_mean, given.attn_layer_norm_var,
            )
        )  # fmt: skip
        kept = halves.OutputKept(
            given.attn_o_inp.detach(), given.add_res, attn_mean, attn_scale,
            None if norm_again else given.ff1_inp, given.gelu_inp,
            None if layer.gelu_checkpoint else given.ff2_inp, last_total,
            None if pre else mean, None if pre else scale, given.attn_ow, *between,
            given.inter_w, given.inter_b, given.output_w, last[0], seed if p > 0 else None,
        )  # fmt: skip
        attention_grad, residual_grad, *grads = halves.output_backward(
            kept, given.grad_output.contiguous(), p, 0.0, self._relaxed
        )
        (joined,) = torch.autograd.grad(
            given.attn_o_inp, given.qkv_tf, attention_grad, retain_graph=True
        )
        projection = halves.ProjectionKept(
            given.input, mean if pre else None, scale if pre else None, *first, given.attn_qkvw,
            given.inp_norm if pre and not norm_again else None,
        )  # fmt: skip
        input_grad, first_weight, first_bias, qkvw = halves.project_backward(
            projection, _require(residual_grad), joined
        )
        if pre:
            grads[-2:] = first_weight, first_bias  # of norm_w and norm_b, the last two
        return [_require(each) for each in (input_grad, qkvw, joined.sum(0), *grads)]


def _norms(weights: Any, pre: bool) -> tuple[tuple[Any, Any], ...]:
    """The norms before, between and after the two halves of a layer."""
    outer = (weights.norm_w, weights.norm_b)
    between = (weights.attn_nw, weights.attn_nb)
    return (outer, between, (None, None)) if pre else ((None, None), between, outer)


def _attend(qkv: Tensor, given: Any, layer: Any) -> Tensor:
    batch, seq = given.input.shape[:2]
    p, mask = max(layer.attn_dropout_ratio, 0.0) if given.training else 0.0, given.mask
    if mask is not None:
        if mask.numel() == batch * seq:
            mask = mask.reshape(batch, 1, 1, seq)
        mask = mask.to(qkv.dtype)

    def attention(qkv: Tensor) -> Tensor:
        parts = qkv.view(batch, seq, 3, layer.num_heads, -1).unbind(2)
        q, k, v = (part.transpose(1, 2) for part in parts)
        return scaled_dot_product_attention(q, k, v, mask, p).transpose(1, 2).flatten(2)

    if given.attention_again and given.training:
        found: Tensor = checkpoint(attention, qkv, use_reentrant=False)
        return found
    return attention(qkv)


def _require(tensor: Tensor | None) -> Tensor:
    """The tensor, which a layer of this kind always has."""
    return cast("Tensor", tensor)
