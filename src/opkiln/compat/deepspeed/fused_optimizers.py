"""DeepSpeed's modules of optimizers over lists: ``fused_adam``, ``fused_lion``, ``fused_lamb``.

The op is that of the device that the parameters are on. DeepSpeed keeps the states of 16-bit
parameters in 16 bits; opkiln's kernels step fp32 states: those are widened for the step, and
rounded once, when they are stored, which is what DeepSpeed's kernels do in registers.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from opkiln.compat.deepspeed.modules import OpModule
from opkiln.compat.deepspeed.stepping import make_step
from opkiln.model import CPU
from opkiln.registry import get_builder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


class _FusedOptimizers(OpModule):
    """The op's functions, for each type of device that they were needed on."""

    def __init__(self, rest: Callable[[], Any] | None = None) -> None:
        super().__init__(rest)
        self._loaded: dict[str, Any] = {}
        self._ops("cpu" if get_builder(self.NAME).backend == CPU else "cuda")

    def _ops(self, device: str) -> Any:
        if device not in self._loaded:
            backend = "rocm" if device == "cuda" and torch.version.hip is not None else device
            self._loaded[device] = get_builder(self.NAME, backend=backend).load()
        return self._loaded[device]

    def _step(
        self,
        params: list[Tensor],
        grads: list[Tensor],
        states: list[list[Tensor]],
        step: int,
        more: list[Any],
        hyper: dict[str, Any],
    ) -> None:
        device = params[0].device
        op = getattr(self._ops(device.type), f"{self.NAME}_")
        made = torch.full((), step - 1, dtype=torch.float32, device=device)
        with torch.no_grad():
            wide = [
                [state if state.dtype == torch.float32 else state.float() for state in row]
                for row in states
            ]
            make_step(op, params, grads, wide, [[], [made], *more], hyper)
            for row, were in zip(wide, states, strict=True):
                for state, was in zip(row, were, strict=True):
                    if state is not was:
                        was.copy_(state)


class FusedAdam(_FusedOptimizers):
    """``fused_adam``: Adam and AdamW over a list of tensors."""

    NAME = "fused_adam"

    def multi_tensor_adam(
        self, chunk_size: int, noop_flag: Tensor, tensor_lists: list[list[Tensor]], lr: float,  # noqa: ARG002
        beta1: float, beta2: float, epsilon: float, step: int, mode: int, bias_correction: int,
        weight_decay: float,
    ) -> None:  # fmt: skip
        """Make the ``step``-th step of parameters, in place. ``tensor_lists`` has gradients,
        parameters, averages and averages of squares; ``mode`` 1 is AdamW. As in DeepSpeed's
        kernels, ``noop_flag`` decides nothing: infinities go where they will."""
        grads, params, exp_avgs, exp_avg_sqs = tensor_lists
        if not params:
            return
        hyper = {
            "lr": float(lr),
            "beta1": float(beta1),
            "beta2": float(beta2),
            "eps": float(epsilon),
            "weight_decay": float(weight_decay),
            "adamw_mode": mode == 1,
            "bias_correction": bool(bias_correction),
            "maximize": False,
        }
        self._step(list(params), list(grads), [exp_avgs, exp_avg_sqs], int(step), [], hyper)


class FusedLion(_FusedOptimizers):
    """``fused_lion``: Lion over a list of tensors. Where momentum and gradient are 0 a parameter
    only decays."""

    NAME = "fused_lion"

    def multi_tensor_lion(
        self, chunk_size: int, noop_flag: Tensor, tensor_lists: list[list[Tensor]], lr: float,  # noqa: ARG002
        beta1: float, beta2: float, step: int, weight_decay: float,
    ) -> None:  # fmt: skip
        """Make a step of parameters, in place. ``tensor_lists`` has gradients, parameters and
        averages."""
        grads, params, exp_avgs = tensor_lists
        if not params:
            return
        hyper = {
            "lr": float(lr),
            "beta1": float(beta1),
            "beta2": float(beta2),
            "weight_decay": float(weight_decay),
            "maximize": False,
        }
        self._step(list(params), list(grads), [exp_avgs], int(step), [], hyper)


class FusedLamb(_FusedOptimizers):
    """``fused_lamb``: LAMB of one tensor."""

    NAME = "fused_lamb"

    def lamb(
        self, p: Tensor, p_copy: Tensor, m: Tensor, v: Tensor, g: Tensor, lr: float, beta1: float,
        beta2: float, max_coeff: float, min_coeff: float, eps: float, grad_scale: float, step: int,
        mode: int, bias_correction: int, decay: float,
    ) -> Tensor:  # fmt: skip
        """Make the ``step``-th step of ``p``, in place, and give its coefficient.

        ``mode`` 0 has ``eps`` below the root. ``p_copy``, where it is not empty, receives the new
        values. DeepSpeed corrects the rate for the averages' start at 0, and not the averages: so
        it does here.
        """
        if bias_correction:
            lr = float(lr) * math.sqrt(1 - beta2**step) / (1 - beta1**step)
        coefficient = torch.empty(1, dtype=torch.float32, device=p.device)
        scale = None
        if grad_scale != 1:
            scale = torch.full((), float(grad_scale), dtype=torch.float32, device=p.device)
        hyper = {
            "lr": float(lr),
            "beta1": float(beta1),
            "beta2": float(beta2),
            "eps": float(eps),
            "weight_decay": float(decay),
            "eps_inside_sqrt": mode == 0,
            "bias_correction": False,
            "maximize": False,
            "min_coeff": float(min_coeff),
            "max_coeff": float(max_coeff),
            "grad_scale": scale,
        }
        self._step([p], [g], [[m], [v]], int(step), [coefficient], hyper)
        if p_copy.numel():
            with torch.no_grad():
                p_copy.copy_(p.view(p_copy.shape))
        return coefficient
