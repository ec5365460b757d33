"""DeepSpeed's modules ``transformer_inference`` and ``inference_core_ops``, over opkiln's ops.

The second is small: ``opkiln.nn.core`` has its functions. In the first, functions and their
side effects are those of DeepSpeed's binding; docs/deepspeed.md says what differs. Most exist once
for each dtype, with its name at the end (``softmax_fp16``). Here a tensor's own dtype decides.
"""

from __future__ import annotations

import torch
from torch import Tensor

from opkiln.compat.deepspeed import inference_matmuls as matmuls
from opkiln.compat.deepspeed import inference_pieces as pieces
from opkiln.compat.deepspeed.inference_context import InferenceContext
from opkiln.compat.deepspeed.modules import OpModule, likely_device
from opkiln.ops.mixed_gemm import core as fp6
from opkiln.ops.transformer_inference import core
from opkiln.ops.transformer_inference import functions as ops


class TransformerInference(OpModule):
    """``transformer_inference``: the pieces of a decoder or encoder layer, without gradients."""

    NAME = "transformer_inference"

    def _load(self) -> None:
        ops.layer_norm.load(likely_device())
        self._take(matmuls, pieces, InferenceContext(), ops)


class InferenceCore(OpModule):
    """``inference_core_ops``: the pieces of FastGen's layers."""

    NAME = "inference_core_ops"

    def _load(self) -> None:
        ops.layer_norm.load(likely_device())
        self._take(core, fp6, no_grad=False)

    @torch.no_grad()
    def blas_4d_matmul(self, C: Tensor, B: Tensor, A: Tensor) -> None:  # noqa: N803 (DeepSpeed's names)
        """``A @ B``, written to ``C``. DeepSpeed's binding takes the columns of ``C`` for those of
        ``A``, so its result is right for square matrices alone."""
        torch.matmul(A, B, out=C)

    def create_handle(self) -> None:
        """Nothing: torch has a handle for its BLAS."""
