"""``CPUAdam``: the optimizer over ``cpu_adam``, with DeepSpeedCPUAdam's arguments."""

from __future__ import annotations

from opkiln.ops.cpu_adam.op import CPUAdamBuilder
from opkiln.ops.optimizing.base import Adam
from opkiln.ops.optimizing.host_optimizer import HostOptimizer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from torch.optim.optimizer import ParamsT


class CPUAdam(Adam, HostOptimizer):
    """Adam (``adamw_mode=False``) or AdamW for parameters in host memory, in one pass over it.

    Parameters are fp32, bf16 or fp16, mixed as you like. Their states are fp32, or of the
    parameter's own type with ``fp32_optimizer_states=False``; arithmetic is fp32 throughout.
    State dicts are interchangeable with those of ``torch.optim.Adam`` and ``AdamW``.
    The native op is loaded (and built, if need be) at the first step. If that is impossible, the
    PyTorch reference runs instead, with one warning.

    Raises UsageError, naming the argument or parameter: a hyperparameter out of range,
    ``amsgrad=True``, a parameter that is not on the CPU or of another type, a sparse gradient.
    """

    OWNER = "CPUAdam"
    BUILDER = CPUAdamBuilder
    ALTERNATIVE = "opkiln.optim.FusedAdam(params)"

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        maximize: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> None:
        super().__init__(
            params, lr=lr, bias_correction=bias_correction, betas=betas, eps=eps,
            weight_decay=weight_decay, amsgrad=amsgrad,
            decoupled_weight_decay=adamw_mode,  # torch's name for it: state dicts carry it over
            maximize=maximize, fp32_optimizer_states=fp32_optimizer_states,
        )  # fmt: skip
