"""The pieces of a layer with DeepSpeed-FastGen's names: results go to tensors that are given.
Importing this is cheap: each name is imported when used."""

from __future__ import annotations

from opkiln.base import lazy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from opkiln.ops.mixed_gemm.core import cuda_wf6af16_linear as cuda_wf6af16_linear
    from opkiln.ops.mixed_gemm.core import preprocess_weight as preprocess_weight
    from opkiln.ops.transformer_inference.core import bias_activation as bias_activation
    from opkiln.ops.transformer_inference.core import blas_linear as blas_linear
    from opkiln.ops.transformer_inference.core import gated_activation as gated_activation
    from opkiln.ops.transformer_inference.core import layer_norm as layer_norm
    from opkiln.ops.transformer_inference.core import post_layer_norm as post_layer_norm
    from opkiln.ops.transformer_inference.core import pre_layer_norm as pre_layer_norm
    from opkiln.ops.transformer_inference.core import rms_norm as rms_norm
    from opkiln.ops.transformer_inference.core import rms_pre_norm as rms_pre_norm

__all__, __getattr__, __dir__ = lazy.names(__name__, {
    "opkiln.ops.mixed_gemm.core": "cuda_wf6af16_linear preprocess_weight",
    "opkiln.ops.transformer_inference.core":
        "bias_activation blas_linear gated_activation layer_norm post_layer_norm pre_layer_norm "
        "rms_norm rms_pre_norm",
})  # fmt: skip
