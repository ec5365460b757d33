"""``CPULion``: the optimizer over ``cpu_lion``, with DeepSpeedCPULion's arguments."""

from __future__ import annotations

from opkiln.ops.cpu_lion.op import CPULionBuilder
from opkiln.ops.optimizing.base import Lion
from opkiln.ops.optimizing.host_optimizer import HostOptimizer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from torch.optim.optimizer import ParamsT


class CPULion(Lion, HostOptimizer):
    """Lion, with decoupled weight decay, for parameters in host memory, in one pass over it.

    Parameters are fp32, bf16 or fp16, mixed as you like. Their average is fp32, or of the
    parameter's own type with ``fp32_optimizer_states=False``; arithmetic is fp32 throughout.
    State dicts of DeepSpeed's CPULion and FusedLion are taken.
    The native op is loaded (and built, if need be) at the first step. If that is impossible, the
    PyTorch reference runs instead, with one warning.

    Raises UsageError, naming the argument or parameter: a hyperparameter out of range, a parameter
    that is not on the CPU or of another type, a sparse gradient.
    """

    OWNER = "CPULion"
    BUILDER = CPULionBuilder
    ALTERNATIVE = "opkiln.optim.FusedLion(params)"

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        fp32_optimizer_states: bool = True,
        *,
        maximize: bool = False,
    ) -> None:
        super().__init__(
            params, lr=lr, betas=betas, weight_decay=weight_decay, maximize=maximize,
            fp32_optimizer_states=fp32_optimizer_states,
        )  # fmt: skip
