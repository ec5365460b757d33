"""``FusedLamb``: the optimizer over ``fused_lamb``, with the arguments of DeepSpeed's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from opkiln.errors import ArgumentError
from opkiln.ops.fused_lamb.op import FusedLambBuilder
from opkiln.ops.optimizing.base import Adam
from opkiln.ops.optimizing.fused_optimizer import FusedOptimizer
from opkiln.ops.optimizing.op_calls import StepCall, arguments_of
from opkiln.ops.optimizing.sharded import has_shards, sum_over_shards

TYPE_CHECKING = False
if TYPE_CHECKING:
    from torch.optim.optimizer import ParamsT


class FusedLamb(Adam, FusedOptimizer):
    """LAMB: Adam's step with the decay added, for each tensor times its norm over the step's.

    That coefficient is clamped to ``[min_coeff, max_coeff]``, and is 1 if one of the norms is 0;
    ``coefficients()`` gives those of the last step. The averages are corrected for their start at 0
    before the norm is taken, as in the paper. (DeepSpeed's takes the norm before.)
    Parameters, masters, captures, scaling and clipping of gradients are as with FusedAdam. State
    dicts of DeepSpeed's FusedLamb are taken.
    The norms of DTensors (FSDP2, tensor parallelism) are those of the whole tensors: a step then
    makes one collective per mesh dimension over which they are sharded.

    Raises UsageError, naming the argument or parameter: a hyperparameter out of range,
    ``amsgrad=True``, a parameter elsewhere or of another type, a sparse gradient, a capture that
    would have to make states, a parameter that FullyShardedDataParallel (FSDP1) has flattened.
    """

    OWNER = "FusedLamb"
    BUILDER = FusedLambBuilder
    NORMS = True

    _coefficients: dict[tuple[int, torch.device], tuple[list[Tensor], Tensor]] | None = None

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        master_weights: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        super().__init__(
            params, lr=lr, bias_correction=bias_correction, betas=betas, eps=eps,
            eps_inside_sqrt=eps_inside_sqrt, weight_decay=weight_decay, max_coeff=max_coeff,
            min_coeff=min_coeff, amsgrad=amsgrad, maximize=maximize,
            master_weights=master_weights, set_grad_none=set_grad_none, max_grad_norm=max_grad_norm,
        )  # fmt: skip

    def coefficients(self) -> list[tuple[Tensor, Tensor]]:
        """Each parameter of the last step with its coefficient, a tensor of no dimension on its
        device. The next step overwrites them."""
        return [
            pair
            for params, values in (self._coefficients or {}).values()
            for pair in zip(params, values.unbind(), strict=True)
        ]

    def _check(self, group: dict[str, Any], where: str = "") -> None:
        super()._check(group, where)
        low, high = group["min_coeff"], group["max_coeff"]
        if low > high:
            raise ArgumentError(f"{where}min_coeff is {low}, more than max_coeff, which is {high}")

    def _hyper(self, call: StepCall) -> dict[str, Any]:
        # The same tensor while the number of parameters stays the same: a captured graph goes on
        # writing to it.
        if self._coefficients is None:
            self._coefficients = {}
        place, count = (call.group, call.device), len(call.params)
        _, values = self._coefficients.get(place, ([], None))
        if values is None or len(values) != count:
            values = torch.ones(count, dtype=torch.float32, device=call.device)
        self._coefficients[place] = (call.params, values)
        return {**super()._hyper(call), "coefficients": values}

    def _use_kept(self, call: StepCall) -> StepCall:
        # Both halves of a step of DTensors take lists.
        return call if has_shards(call.params) else super()._use_kept(call)

    def _run(self, call: StepCall) -> None:
        if not has_shards(call.params):
            super()._run(call)
            return
        squares = torch.zeros(len(call.params), 2, dtype=torch.float64, device=call.device)
        given = {**call.hyper, "squares": squares}

        def half(function: str) -> None:
            taken = given.keys() & arguments_of(self.BUILDER.FUNCTIONS, function)
            hyper = {name: given[name] for name in taken}
            super(FusedLamb, self)._run(call._replace(function=function, hyper=hyper))

        half("fused_lamb_average_")
        sum_over_shards(call.params, squares)
        half("fused_lamb_move_")
