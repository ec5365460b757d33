"""DeepSpeed's modules ``transformer`` and ``stochastic_transformer``, over opkiln's ops of these
names: the layer of ``opkiln.nn.TransformerLayer``, in DeepSpeed's arguments and order.

``forward_*`` returns the seventeen tensors of DeepSpeed's binding: the output, and what
``backward_*`` takes again. docs/deepspeed.md says what differs. A tensor's own dtype decides,
whatever the function's name.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from opkiln.compat.deepspeed.modules import OpModule
from opkiln.errors import UsageError
from opkiln.nn.halves import (
    OutputKept,
    ProjectionKept,
    output,
    output_backward,
    project,
    project_backward,
)
from opkiln.ops.stochastic_transformer.functions import stochastic_gelu_dropout
from opkiln.ops.transformer.functions import norm_with_moments

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


class Layer(NamedTuple):
    """What a layer is created with, in DeepSpeed's order."""

    batch_size: int
    hidden_dim: int
    num_heads: int
    intermediate_size: int
    attn_dropout_ratio: float
    hidden_dropout_ratio: float
    layer_norm_eps: float
    seed: int
    pre_layer_norm: bool
    test_gemm: bool
    attn_dropout_checkpoint: bool
    normalize_invertible: bool
    gelu_checkpoint: bool
    stochastic_mode: bool  # DeepSpeed asks the other module then


class Weights(NamedTuple):
    """The parameters of a layer, in DeepSpeed's order. The first norm of a layer is ``norm_*`` if
    it comes before the attention, and ``attn_n*`` if not."""

    attn_qkvw: Tensor
    attn_qkvb: Tensor
    attn_ow: Tensor
    attn_ob: Tensor
    attn_nw: Tensor
    attn_nb: Tensor
    inter_w: Tensor
    inter_b: Tensor
    output_w: Tensor
    output_b: Tensor
    norm_w: Tensor
    norm_b: Tensor


class Kept(NamedTuple):
    """What ``forward_*`` returns and ``backward_*`` takes, in DeepSpeed's order and names.
    ``attn_o_inp`` carries torch's gradient, up to ``qkv_tf``, whose rows are a token's query, key
    and value. The masks of hidden states are the drawn seed."""

    output: Tensor
    inp_norm: Tensor  # pre: the first norm, or its input if invertible; post: the last norm's input
    qkv_tf: Tensor
    soft_out: Tensor  # empty, or the last norm's input if that is post and invertible
    ctx_bufB: Tensor  # noqa: N815 (DeepSpeed's name)
    attn_o_inp: Tensor
    add_res: Tensor
    ff1_inp: Tensor  # the norm of add_res, or add_res itself if invertible
    gelu_inp: Tensor
    ff2_inp: Tensor  # the gelu, or its input with gelu_checkpoint
    attn_prob_dropout_mask: Tensor
    attn_output_dropout_mask: Tensor
    layer_output_dropout_mask: Tensor
    attn_layer_norm_var: Tensor
    attn_layer_norm_mean: Tensor
    layer_norm_var: Tensor
    layer_norm_mean: Tensor


class Transformer(OpModule):
    """``transformer``: one layer, forward and backward, for training."""

    NAME = "transformer"
    RELAXED: ClassVar[bool] = False

    def _load(self) -> None:
        self._layers: dict[int, Layer] = {}
        if torch.cuda.is_available():
            norm_with_moments.load("cuda")
            if self.RELAXED:
                stochastic_gelu_dropout.load("cuda")
        for dtype in ("fp32", "fp16"):
            setattr(self, f"create_transformer_layer_{dtype}", self._create)
            setattr(self, f"forward_{dtype}", _as_a_kernel(self._forward))
            setattr(self, f"backward_{dtype}", _as_a_kernel(self._backward))

    def _create(self, layer_id: int, *given: Any) -> int:
        """Remember a layer by its number. Returns 0. Raises UsageError."""
        layer = Layer(*given)
        if layer.hidden_dim % layer.num_heads:
            raise UsageError(
                f"hidden_dim is {layer.hidden_dim}, not a multiple of {layer.num_heads} heads"
            )
        self._layers[layer_id] = layer
        return 0

    def _layer(self, layer_id: int) -> Layer:
        if layer_id not in self._layers:
            raise UsageError(f"no layer was created with the number {layer_id}")
        return self._layers[layer_id]

    def _forward(
        self, layer_id: int, input: Tensor, input_mask: Tensor | None, *given: Any  # noqa: A002
    ) -> list[Tensor]:  # fmt: skip
        """``given``: the twelve weights, and five flags: training, pre-norm, and what is computed
        again, of attention, norms and gelu. Raises UsageError."""
        layer = self._layer(layer_id)
        weights = Weights(*given[:12])
        training, pre, attention_again, norm_again, gelu_again = given[12:]
        first, between, last = _norms(weights, pre)
        qkv, projection = project(
            input, *first, weights.attn_qkvw, weights.attn_qkvb, layer.layer_norm_eps, norm_again
        )
        qkv = qkv.flatten(0, 1).requires_grad_(training)
        with torch.set_grad_enabled(training):
            attended = _attended(qkv, input, input_mask, layer, training, attention_again)
        p = max(layer.hidden_dropout_ratio, 0.0) if training else 0.0
        seed = torch.randint(2**63 - 1, (1,), device=input.device) if p > 0 else None
        out, kept = output(
            attended.detach(), input, weights.attn_ow, weights.attn_ob, *between, weights.inter_w,
            weights.inter_b, weights.output_w, weights.output_b, *last, seed, p, 0.0,
            layer.layer_norm_eps, norm_again, gelu_again, self.RELAXED,
        )  # fmt: skip
        empty = input.new_empty(0)
        drawn = torch.empty(0, dtype=torch.int64) if seed is None else seed
        up = kept.up.flatten(0, 1)
        first_read = input if projection.normal is None else projection.normal
        outer = (projection.scale, projection.mean) if pre else (kept.last_scale, kept.last_mean)
        return list(
            Kept(
                output=out,
                inp_norm=first_read if pre else _given(kept.last_total),
                qkv_tf=qkv,
                soft_out=_given(kept.last_total) if norm_again and not pre else empty,
                ctx_bufB=empty,
                attn_o_inp=attended,
                add_res=kept.total,
                ff1_inp=kept.total if kept.normal is None else kept.normal,
                gelu_inp=up,
                ff2_inp=up if kept.active is None else kept.active.flatten(0, 1),
                attn_prob_dropout_mask=torch.empty(0, dtype=torch.int8),
                attn_output_dropout_mask=drawn,
                layer_output_dropout_mask=drawn,
                attn_layer_norm_var=kept.scale.flatten(),
                attn_layer_norm_mean=kept.mean.flatten(),
                layer_norm_var=_given(outer[0]).flatten(),
                layer_norm_mean=_given(outer[1]).flatten(),
            )
        )

    def _backward(self, layer_id: int, grad_output: Tensor, *given: Any) -> list[Tensor]:
        """``given``: what ``forward_*`` returned, its input, its mask, and the twelve weights.
        Returns the gradients of the input and of the weights. Raises UsageError."""
        layer = self._layer(layer_id)
        state, input_, weights = Kept(*given[:17]), given[17], Weights(*given[19:])
        pre, norm_again = layer.pre_layer_norm, layer.normalize_invertible
        first, between, last = _norms(weights, pre)
        seed = state.attn_output_dropout_mask
        p = max(layer.hidden_dropout_ratio, 0.0) if seed.numel() else 0.0
        last_total = None if pre else state.soft_out if norm_again else state.inp_norm
        mean, scale, attn_mean, attn_scale = (
            each.view(grad_output.shape[:-1])
            for each in (
                state.layer_norm_mean, state.layer_norm_var,
                state.attn_layer_norm_mean, state.attn_layer_norm_var,
            )
        )  # fmt: skip
        kept = OutputKept(
            state.attn_o_inp.detach(), state.add_res, attn_mean, attn_scale,
            None if norm_again else state.ff1_inp, state.gelu_inp,
            None if layer.gelu_checkpoint else state.ff2_inp, last_total,
            None if pre else mean, None if pre else scale, weights.attn_ow, *between,
            weights.inter_w, weights.inter_b, weights.output_w, last[0], seed if p > 0 else None,
        )  # fmt: skip
        attention_grad, residual_grad, *grads = output_backward(
            kept, grad_output.contiguous(), p, 0.0, self.RELAXED
        )
        (joined,) = torch.autograd.grad(
            state.attn_o_inp, state.qkv_tf, attention_grad, retain_graph=True
        )
        projection = ProjectionKept(
            input_, mean if pre else None, scale if pre else None, *first, weights.attn_qkvw,
            state.inp_norm if pre and not norm_again else None,
        )  # fmt: skip
        input_grad, first_weight, first_bias, qkvw = project_backward(
            projection, _given(residual_grad), joined
        )
        if pre:
            grads[-2:] = first_weight, first_bias  # of norm_w and norm_b, the last two
        return [_given(each) for each in (input_grad, qkvw, joined.sum(0), *grads)]


class StochasticTransformer(Transformer):
    """``stochastic_transformer``: the same with the GPU's approximate tanh in the gelu."""

    NAME = "stochastic_transformer"
    RELAXED = True


def _as_a_kernel(function: Callable[..., list[Tensor]]) -> Callable[..., list[Tensor]]:
    """Kernels know neither gradients nor autocast: the front end calls them with its own dtypes."""

    def call(layer_id: int, x: Tensor, *given: Any) -> list[Tensor]:
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            return function(layer_id, x, *given)

    return call


_Two = tuple[Tensor, Tensor]
_TwoOrNone = tuple[Tensor | None, Tensor | None]


def _norms(weights: Weights, pre: bool) -> tuple[_TwoOrNone, _Two, _TwoOrNone]:
    """The norms before, between and after the two halves of a layer."""
    outer = (weights.norm_w, weights.norm_b)
    between = (weights.attn_nw, weights.attn_nb)
    return (outer, between, (None, None)) if pre else ((None, None), between, outer)


def _attended(
    qkv: Tensor, x: Tensor, mask: Tensor | None, layer: Layer, training: bool, again: bool
) -> Tensor:
    batch, seq = x.shape[:2]
    p = max(layer.attn_dropout_ratio, 0.0) if training else 0.0
    if mask is not None:
        if mask.numel() == batch * seq:
            mask = mask.reshape(batch, 1, 1, seq)
        mask = mask.to(qkv.dtype)

    def attention(qkv: Tensor) -> Tensor:
        parts = qkv.view(batch, seq, 3, layer.num_heads, -1).unbind(2)
        q, k, v = (part.transpose(1, 2) for part in parts)
        return scaled_dot_product_attention(q, k, v, mask, p).transpose(1, 2).flatten(2)

    if again and training:
        found: Tensor = checkpoint(attention, qkv, use_reentrant=False)
        return found
    return attention(qkv)


def _given(tensor: Tensor | None) -> Tensor:
    """A tensor that the kind of layer at hand always has."""
    return cast("Tensor", tensor)
