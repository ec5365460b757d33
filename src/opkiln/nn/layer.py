"""``opkiln.nn.TransformerLayer``: one layer of a transformer, to be trained."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from opkiln.errors import ArgumentError, ArgumentTypeError
from opkiln.nn.halves import OutputFunction, ProjectionFunction

_INITIAL_DEVIATION = 0.02


class TransformerLayer(nn.Module):
    """Self-attention and a multilayer perceptron with gelu (tanh), each with a residual and a norm.

    With ``pre_layer_norm`` a norm comes before each of the two, otherwise after its residual was
    added. ``intermediate`` is the width of the perceptron, four times ``hidden`` unless given.

    Dropout happens in training only: ``attention_dropout`` of the attention's weights,
    ``hidden_dropout`` of what is added to the residuals, ``activation_dropout`` after the gelu. It
    is drawn from torch's generator of the device, so ``torch.manual_seed`` and
    ``torch.utils.checkpoint`` repeat it. No mask is kept. A captured CUDA graph draws new masks at
    each replay.

    Little is kept for the backward pass: norms (``normalize_invertible``) and the gelu
    (``gelu_checkpoint``) are computed again, as by-products of kernels that read their inputs there
    anyway; False keeps them. ``attn_dropout_checkpoint`` also computes the attention again. Results
    do not change.

    ``stochastic`` takes the GPU's approximate tanh, whose error is up to 2**-11.

    Raises ArgumentError for sizes that do not fit.
    """

    def __init__(
        self,
        hidden: int,
        heads: int,
        intermediate: int | None = None,
        *,
        attention_dropout: float = 0.1,
        hidden_dropout: float = 0.1,
        activation_dropout: float = 0.0,
        pre_layer_norm: bool = True,
        eps: float = 1e-5,
        normalize_invertible: bool = True,
        attn_dropout_checkpoint: bool = False,
        gelu_checkpoint: bool = True,
        stochastic: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        wide = 4 * hidden if intermediate is None else intermediate
        if min(hidden, heads, wide) < 1 or hidden % heads != 0:
            raise ArgumentError(
                f"hidden is {hidden}, heads is {heads}, intermediate is {wide}; "
                "expected positive numbers, and hidden a multiple of heads"
            )
        for name, p in (
            ("attention_dropout", attention_dropout),
            ("hidden_dropout", hidden_dropout),
            ("activation_dropout", activation_dropout),
        ):
            if not 0 <= p < 1:
                raise ArgumentError(f"{name} is {p}, expected at least 0 and less than 1")
        self.hidden, self.heads, self.intermediate = hidden, heads, wide
        self.attention_dropout, self.hidden_dropout = attention_dropout, hidden_dropout
        self.activation_dropout = activation_dropout
        self.pre_layer_norm, self.eps = pre_layer_norm, eps
        self.normalize_invertible, self.gelu_checkpoint = normalize_invertible, gelu_checkpoint
        self.attn_dropout_checkpoint, self.stochastic = attn_dropout_checkpoint, stochastic

        def parameter(*sizes: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(sizes, device=device, dtype=dtype))

        self.qkv_weight, self.qkv_bias = parameter(3 * hidden, hidden), parameter(3 * hidden)
        self.out_weight, self.out_bias = parameter(hidden, hidden), parameter(hidden)
        self.up_weight, self.up_bias = parameter(wide, hidden), parameter(wide)
        self.down_weight, self.down_bias = parameter(hidden, wide), parameter(hidden)
        self.attention_norm_weight = parameter(hidden)
        self.attention_norm_bias = parameter(hidden)
        self.mlp_norm_weight, self.mlp_norm_bias = parameter(hidden), parameter(hidden)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Matrices from a normal distribution with a deviation of 0.02; norms and biases do
        nothing."""
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=_INITIAL_DEVIATION)
            elif "norm_weight" in name:
                nn.init.ones_(parameter)
            else:
                nn.init.zeros_(parameter)

    def forward(
        self, x: Tensor, attention_mask: Tensor | None = None, *, is_causal: bool = False
    ) -> Tensor:
        """``x`` is [batch, sequence, hidden]. ``attention_mask`` and ``is_causal`` are those of
        torch's ``scaled_dot_product_attention``.

        Under autocast the whole layer is computed in autocast's dtype. Raises ArgumentError.
        """
        if x.dim() != 3 or x.shape[-1] != self.hidden:
            raise ArgumentError(
                f"x has shape {list(x.shape)}, expected [batch, sequence, {self.hidden}]"
            )
        device = x.device.type
        casts = torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if casts else self.qkv_weight.dtype
        if not casts and x.dtype != dtype:
            raise ArgumentTypeError(f"x has dtype {x.dtype}, the layer has {dtype}")
        with torch.autocast(device, enabled=False):
            return self._compute(x.to(dtype), attention_mask, is_causal, dtype)

    def _compute(
        self, x: Tensor, mask: Tensor | None, is_causal: bool, dtype: torch.dtype
    ) -> Tensor:
        def cast(*parameters: Tensor) -> list[Tensor]:
            return [each.to(dtype) for each in parameters]

        first_norm = cast(self.attention_norm_weight, self.attention_norm_bias)
        second_norm = cast(self.mlp_norm_weight, self.mlp_norm_bias)
        before, between, after = (
            (first_norm, second_norm, (None, None))
            if self.pre_layer_norm
            else ((None, None), first_norm, second_norm)
        )
        x, query, key, value = ProjectionFunction.apply(  # type: ignore[no-untyped-call]
            x, *before, *cast(self.qkv_weight, self.qkv_bias), self.eps, self.normalize_invertible
        )
        if self.attn_dropout_checkpoint and self.training:
            attended = checkpoint(
                self._attend, query, key, value, mask, is_causal, use_reentrant=False
            )
        else:
            attended = self._attend(query, key, value, mask, is_causal)
        p = self.hidden_dropout if self.training else 0.0
        activation_p = self.activation_dropout if self.training else 0.0
        seed = None
        if p > 0 or activation_p > 0:
            seed = torch.randint(2**63 - 1, (1,), device=x.device)
        return OutputFunction.apply(  # type: ignore[no-any-return, no-untyped-call]
            attended, x, *cast(self.out_weight, self.out_bias), *between,
            *cast(self.up_weight, self.up_bias, self.down_weight, self.down_bias), *after,
            seed, p, activation_p, self.eps, self.normalize_invertible, self.gelu_checkpoint,
            self.stochastic,
        )  # fmt: skip

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool
    ) -> Tensor:
        q, k, v = (
            each.view(*each.shape[:2], self.heads, self.hidden // self.heads).transpose(1, 2)
            for each in (query, key, value)
        )
        p = self.attention_dropout if self.training else 0.0
        out = scaled_dot_product_attention(q, k, v, mask, p, is_causal)
        return out.transpose(1, 2).flatten(2)

    def extra_repr(self) -> str:
        """The sizes, for ``repr``."""
        return f"{self.hidden}, heads={self.heads}, intermediate={self.intermediate}"
