"""The gelu of ``transformer`` with the GPU's approximate tanh: its error, up to 2**-11, is that of
a rounding to fp16. The reference is exact."""

from __future__ import annotations

from torch import Tensor

from opkiln.ops.stochastic_transformer.op import kit
from opkiln.ops.transformer.functions import gelu_dropout, gelu_dropout_backward


@kit.op()
def stochastic_gelu_dropout(
    x: Tensor, bias: Tensor, seed: Tensor | None = None, site: int = 0, p: float = 0.0
) -> Tensor:
    """See ``opkiln.ops.transformer.functions.gelu_dropout``."""
    out: Tensor = gelu_dropout.reference(x, bias, seed, site, p)
    return out


@kit.op()
def stochastic_gelu_dropout_backward(
    grad: Tensor,
    x: Tensor,
    bias: Tensor,
    seed: Tensor | None = None,
    site: int = 0,
    p: float = 0.0,
    recompute: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """See ``opkiln.ops.transformer.functions.gelu_dropout_backward``."""
    found: tuple[Tensor, Tensor, Tensor] = gelu_dropout_backward.reference(
        grad, x, bias, seed, site, p, recompute
    )
    return found
