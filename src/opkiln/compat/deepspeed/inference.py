"""DeepSpeed's modules ``transformer_inference`` and ``inference_core_ops``, over opkiln's ops.

The second is small: ``opkiln.nn.core`` has its functions. In the first, functions and their
side effects are those of DeepSpeed's binding. Most exist once for each dtype, with its name at the
end (``softmax_fp16``). Here a tensor's own dtype decides, whatever the name. These things differ:

- All dtypes and sizes are served. DeepSpeed's kernels need rows of whole 16 bytes. With int8
  weights, its ``_fp32`` functions compute nothing, and ``dequantize_bf16`` calls its result fp16.
- Results are new tensors. DeepSpeed's are often parts of its workspace, which later calls
  overwrite.
- ``vector_matmul_int8`` and ``fused_gemm_gelu_int8`` exist. DeepSpeed's Python code asks for them,
  and its binding lacks them.
- The workspace holds caches of keys and values alone, with room for ``max_out_tokens``. DeepSpeed
  makes it smaller if the GPU has less memory free.
- With ``local_attention`` a query sees the ``window_size`` keys up to its own. DeepSpeed's kernel
  hides some of them.
- A query that sees no key gets zeros. DeepSpeed's kernel gives all keys the same weight.
- All work is on the current stream; ``async_op`` is ignored.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from opkiln.compat.deepspeed import inference_matmuls as matmuls
from opkiln.compat.deepspeed import inference_pieces as pieces
from opkiln.compat.deepspeed.inference_context import InferenceContext
from opkiln.compat.deepspeed.modules import OpModule
from opkiln.ops.mixed_gemm import core as fp6
from opkiln.ops.transformer_inference import core
from opkiln.ops.transformer_inference.functions import layer_norm

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

TYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

_ONCE: tuple[Callable[..., Any], ...] = (
    pieces.layer_norm,
    pieces._layer_norm_residual,
    pieces.layer_norm_residual_store_pre_ln_res,
    pieces.rms_norm,
    pieces.pre_rms_norm,
    pieces.gated_activation,
    pieces._vector_add,
    pieces.moe_res_matmul,
    pieces.apply_rotary_pos_emb,
)
_EACH_TYPE: tuple[Callable[..., Any], ...] = (
    pieces.bias_add,
    pieces.bias_gelu,
    pieces.bias_relu,
    pieces.bias_residual,
    pieces.residual_add_bias,
    pieces.softmax,
    matmuls.qkv_gemm,
    matmuls.rms_qkv_gemm,
    matmuls.mlp_gemm,
    matmuls.rms_mlp_gemm,
    matmuls.vector_matmul,
    matmuls.linear_layer,
    matmuls.fused_gemm_gelu,
    matmuls.einsum_sec_sm_ecm,
    matmuls.add_padding,
    matmuls.pad_transform,
)


class TransformerInference(OpModule):
    """``transformer_inference``: the pieces of a decoder or encoder layer, without gradients."""

    NAME = "transformer_inference"

    def __init__(self, rest: Callable[[], Any] | None = None) -> None:
        super().__init__(rest)
        _load()
        for function in _ONCE:
            self._bind(function.__name__, function)
        for function in _EACH_TYPE:
            for name in TYPES:
                self._bind(f"{function.__name__}_{name}", function)
        for name, dtype in TYPES.items():
            self._bind(f"dequantize_{name}", matmuls.dequantize(dtype))
        context = InferenceContext()
        for function in (
            context.release_workspace,
            context.retake_workspace,
            context.reset_cache,
        ):
            self._bind(function.__name__, function)
        for name in TYPES:
            self._bind(f"allocate_workspace_{name}", context.allocate_workspace)
            self._bind(f"repeat_kv_cache_{name}", context.repeat_kv_cache)
            self._bind(f"softmax_context_{name}", context.softmax_context)
        self._bind("softmax_context_int8", matmuls.softmax_context_int8)
        self._bind("vector_matmul_int8", matmuls.vector_matmul)
        self._bind("fused_gemm_gelu_int8", matmuls.fused_gemm_gelu)

    def _bind(self, name: str, function: Callable[..., Any]) -> None:
        setattr(self, name, torch.no_grad()(function))


class InferenceCore(OpModule):
    """``inference_core_ops``: the pieces of FastGen's layers."""

    NAME = "inference_core_ops"

    def __init__(self, rest: Callable[[], Any] | None = None) -> None:
        super().__init__(rest)
        _load()
        for function in (
            core.bias_activation,
            core.gated_activation,
            core.layer_norm,
            core.pre_layer_norm,
            core.post_layer_norm,
            core.rms_norm,
            core.rms_pre_norm,
            core.blas_linear,
            fp6.cuda_wf6af16_linear,
            fp6.preprocess_weight,
        ):
            setattr(self, function.__name__, function)

    @torch.no_grad()
    def blas_4d_matmul(self, C: Tensor, B: Tensor, A: Tensor) -> None:  # noqa: N803 (DeepSpeed's names)
        """``A @ B``, written to ``C``. DeepSpeed's binding takes the columns of ``C`` for those of
        ``A``, so its result is right for square matrices alone."""
        torch.matmul(A, B, out=C)

    def create_handle(self) -> None:
        """Nothing: torch has a handle for its BLAS."""


def _load() -> None:
    """Load the library for the device where DeepSpeed's tensors will be."""
    layer_norm.load("cuda" if torch.cuda.is_available() else "cpu")
