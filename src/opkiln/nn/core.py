"""The pieces of a layer with DeepSpeed-FastGen's names: results go to tensors that are given.
Importing this is cheap: each name is imported when used."""

from __future__ import annotations

from opkiln.base import lazy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from opkiln.ops.mixed_gemm.core import cuda_wf6af16_linear, preprocess_weight
    from opkiln.ops.transformer_inference.core import (
        bias_activation,
        blas_linear,
        gated_activation,
        layer_norm,
        post_layer_norm,
        pre_layer_norm,
        rms_norm,
        rms_pre_norm,
    )

__all__ = [
    "bias_activation",
    "blas_linear",
    "cuda_wf6af16_linear",
    "gated_activation",
    "layer_norm",
    "post_layer_norm",
    "pre_layer_norm",
    "preprocess_weight",
    "rms_norm",
    "rms_pre_norm",
]

_FP6 = ("cuda_wf6af16_linear", "preprocess_weight")
_HOMES = {
    **dict.fromkeys(__all__, "opkiln.ops.transformer_inference.core"),
    **dict.fromkeys(_FP6, "opkiln.ops.mixed_gemm.core"),
}

__getattr__, __dir__ = lazy.names(__name__, _HOMES)
