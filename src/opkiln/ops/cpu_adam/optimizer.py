"""``CPUAdam``: the optimizer over ``cpu_adam``, with DeepSpeedCPUAdam's arguments."""

from __future__ import annotations

from typing import Any

from opkiln.optimizing.checks import check_hyperparameters
from opkiln.optimizing.host_optimizer import HostOptimizer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from torch.optim.optimizer import ParamsT


class CPUAdam(HostOptimizer):
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
    FUNCTION = "cpu_adam_"
    STATES = ("exp_avg", "exp_avg_sq")
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
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "decoupled_weight_decay": adamw_mode,  # torch's name for it: state dicts carry it over
            "maximize": maximize,
        }
        super().__init__(params, defaults, fp32_optimizer_states=fp32_optimizer_states)

    def _check(self, group: dict[str, Any], where: str = "") -> None:
        check_hyperparameters(self.OWNER, group, where)

    def _hyper(self, group: dict[str, Any]) -> dict[str, Any]:
        beta1, beta2 = group["betas"]
        return {
            "lr": float(group["lr"]),  # a tensor, maybe, as schedulers of torch allow
            "beta1": float(beta1),
            "beta2": float(beta2),
            "eps": float(group["eps"]),
            "weight_decay": float(group["weight_decay"]),
            "adamw_mode": group["decoupled_weight_decay"],
            "bias_correction": group["bias_correction"],
            "maximize": group["maximize"],
        }

    def _load(self) -> Any:
        if self._ops is None:
            from opkiln.ops.cpu_adam.op import CPUAdamBuilder

            self._ops = CPUAdamBuilder().load()
        return self._ops
