"""The rules that a host and a fused optimizer share: their states, hyperparameters and checks."""

from __future__ import annotations

from typing import Any, ClassVar

from opkiln.errors import ArgumentTypeError, UsageError
from opkiln.optimizing.base import ListOptimizer


class Adam(ListOptimizer):
    """Adam and AdamW."""

    STATES = ("exp_avg", "exp_avg_sq")
    NUMBERS: ClassVar[tuple[str, ...]] = ("eps", "weight_decay")
    FLAGS: ClassVar[tuple[str, ...]] = ("adamw_mode", "bias_correction", "maximize")

    def _check(self, group: dict[str, Any], where: str = "") -> None:
        if not isinstance(group["bias_correction"], bool):
            raise ArgumentTypeError(
                f"{where}bias_correction is {group['bias_correction']!r}, expected True or False",
                why="it is the third positional argument, as in DeepSpeed",
                hint=f"{self.OWNER}(params, lr, betas=(0.9, 0.999))",
            )
        super()._check(group, where)
        if group["amsgrad"]:
            raise UsageError(
                f"{where}amsgrad is not supported by {self.OWNER}",
                hint="torch.optim.AdamW(params, amsgrad=True)",
            )


class Lion(ListOptimizer):
    """Lion, with decoupled weight decay."""

    STATES = ("exp_avg",)
    NUMBERS = ("weight_decay",)
    COUNTED = False
