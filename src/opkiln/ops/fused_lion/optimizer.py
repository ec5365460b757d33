"""``FusedLion``: the optimizer over ``fused_lion``, with the arguments of DeepSpeed's."""

from __future__ import annotations

from opkiln.ops.fused_lion.op import FusedLionBuilder
from opkiln.ops.optimizing.base import Lion
from opkiln.ops.optimizing.fused_optimizer import FusedOptimizer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim.optimizer import ParamsT


class FusedLion(Lion, FusedOptimizer):
    """Lion, with decoupled weight decay, all parameters of a group and device in one call.

    Parameters, masters, captures, scaling and clipping of gradients are as with FusedAdam. State
    dicts of DeepSpeed's FusedLion and CPULion are taken.

    Raises UsageError, naming the argument or parameter: a hyperparameter out of range, a parameter
    elsewhere or of another type, a sparse gradient, a capture that would have to make states.
    """

    OWNER = "FusedLion"
    BUILDER = FusedLionBuilder

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
        *,
        maximize: bool = False,
        master_weights: bool = False,
        max_grad_norm: float = 0.0,
    ) -> None:
        super().__init__(
            params, lr=lr, betas=betas, weight_decay=weight_decay, maximize=maximize,
            master_weights=master_weights, set_grad_none=set_grad_none, max_grad_norm=max_grad_norm,
        )  # fmt: skip
