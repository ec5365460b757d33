"""The rules that a host and a fused optimizer share: their states, hyperparameters and checks."""

from __future__ import annotations

from typing import Any, ClassVar

from opkiln.errors import ArgumentTypeError, UsageError
from opkiln.optimizing.checks import check_betas, check_numbers


def as_floats(group: dict[str, Any], *names: str) -> dict[str, float]:
    """Hyperparameters as an op takes them. (They may be tensors, as torch's schedulers allow.)"""
    return {name: float(group[name]) for name in names}


def both_betas(group: dict[str, Any]) -> dict[str, float]:
    """The betas as an op takes them."""
    beta1, beta2 = group["betas"]
    return {"beta1": float(beta1), "beta2": float(beta2)}


class Adam:
    """Adam and AdamW."""

    OWNER: ClassVar[str]
    STATES: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")

    def _check(self, group: dict[str, Any], where: str = "") -> None:
        if not isinstance(group["bias_correction"], bool):
            raise ArgumentTypeError(
                f"{where}bias_correction is {group['bias_correction']!r}, expected True or False",
                why="it is the third positional argument, as in DeepSpeed",
                hint=f"{self.OWNER}(params, lr, betas=(0.9, 0.999))",
            )
        check_numbers(group, "lr", "eps", "weight_decay", where=where)
        check_betas(group, where)
        if group["amsgrad"]:
            raise UsageError(
                f"{where}amsgrad is not supported by {self.OWNER}",
                hint="torch.optim.AdamW(params, amsgrad=True)",
            )

    def _hyper(self, group: dict[str, Any]) -> dict[str, Any]:
        return {
            **both_betas(group),
            **as_floats(group, "eps", "weight_decay"),
            "adamw_mode": group["decoupled_weight_decay"],
            "bias_correction": group["bias_correction"],
            "maximize": group["maximize"],
        }


class Lion:
    """Lion, with decoupled weight decay."""

    STATES: ClassVar[tuple[str, ...]] = ("exp_avg",)
    COUNTED = False

    def _check(self, group: dict[str, Any], where: str = "") -> None:
        check_numbers(group, "lr", "weight_decay", where=where)
        check_betas(group, where)

    def _hyper(self, group: dict[str, Any]) -> dict[str, Any]:
        weight_decay = as_floats(group, "weight_decay")
        return {**both_betas(group), **weight_decay, "maximize": group["maximize"]}
