"""``CPULion``: the optimizer over ``cpu_lion``, with DeepSpeedCPULion's arguments."""

from __future__ import annotations

from typing import Any

from opkiln.optimizing.checks import check_betas, check_numbers
from opkiln.optimizing.host_optimizer import HostOptimizer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from torch.optim.optimizer import ParamsT


class CPULion(HostOptimizer):
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
    FUNCTION = "cpu_lion_"
    STATES = ("exp_avg",)
    ALTERNATIVE = "opkiln.optim.FusedLion(params)"
    COUNTED = False

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
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults, fp32_optimizer_states=fp32_optimizer_states)

    def _check(self, group: dict[str, Any], where: str = "") -> None:
        check_numbers(group, "lr", "weight_decay", where=where)
        check_betas(group, where)

    def _hyper(self, group: dict[str, Any]) -> dict[str, Any]:
        beta1, beta2 = group["betas"]
        return {
            "lr": float(group["lr"]),  # a tensor, maybe, as schedulers of torch allow
            "beta1": float(beta1),
            "beta2": float(beta2),
            "weight_decay": float(group["weight_decay"]),
            "maximize": group["maximize"],
        }

    def _load(self) -> Any:
        if self._ops is None:
            from opkiln.ops.cpu_lion.op import CPULionBuilder

            self._ops = CPULionBuilder().load()
        return self._ops
