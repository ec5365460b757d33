"""``CPUAdagrad``: the optimizer over ``cpu_adagrad``, for dense and sparse gradients."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from opkiln.errors import UsageError
from opkiln.ops.cpu_adagrad.op import CPUAdagradBuilder
from opkiln.ops.optimizing.checks import check_numbers
from opkiln.ops.optimizing.host_optimizer import HostOptimizer
from opkiln.ops.optimizing.op_calls import StepCall

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor
    from torch.optim.optimizer import ParamsT

_ROWS = "cpu_adagrad_rows_"


class CPUAdagrad(HostOptimizer):
    """Adagrad for parameters in host memory, in one pass over it.

    Parameters are fp32, bf16 or fp16, mixed as you like. Their sum of squares is fp32, or of the
    parameter's own type with ``fp32_optimizer_states=False``; arithmetic is fp32 throughout.
    Gradients are dense or sparse (``torch.sparse_coo``, of an embedding say): of a parameter, its
    sum and its copy, only the rows that the gradient has are read and written.
    State dicts are interchangeable with those of ``torch.optim.Adagrad``.
    The native op is loaded (and built, if need be) at the first step. If that is impossible, the
    PyTorch reference runs instead, with one warning.

    Raises UsageError, naming the argument or parameter: a hyperparameter out of range,
    ``amsgrad=True``, a parameter that is not on the CPU or of another type, a sparse gradient with
    weight decay.
    """

    OWNER = "CPUAdagrad"
    BUILDER = CPUAdagradBuilder
    STATES = ("sum",)
    ALTERNATIVE = "torch.optim.Adagrad(params)"
    IN_DEEPSPEED: ClassVar[Mapping[str, str]] = {"sum": "exp_avg_sq"}

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
        *,
        lr_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        maximize: bool = False,
    ) -> None:
        if amsgrad:
            raise UsageError("amsgrad is not supported by CPUAdagrad: Adagrad has no such variant")
        super().__init__(
            params, lr=lr, lr_decay=lr_decay, eps=eps, weight_decay=weight_decay,
            initial_accumulator_value=initial_accumulator_value, maximize=maximize,
            fp32_optimizer_states=fp32_optimizer_states,
        )  # fmt: skip

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        # Now, as torch's does: its Adagrad does not load a state dict without states.
        self._states_of(self.param_groups[-1]["params"])

    def _check(self, group: dict[str, Any], where: str = "") -> None:
        super()._check(group, where)
        check_numbers(group, "initial_accumulator_value", where=where)

    def _sparse_calls(self, index: int, params: list[Tensor]) -> list[StepCall]:
        gradients = _rows(params)
        assert gradients is not None  # torch gives a strided parameter no other sparse gradient
        decay = self.param_groups[index]["weight_decay"]
        if float(decay) != 0:
            raise UsageError(
                f"param_groups[{index}]: weight_decay is {decay}, but there is a sparse gradient",
                why="decay would also change the rows without a gradient",
                hint="put parameters with sparse gradients into a group with weight_decay=0",
            )
        return [StepCall(index, _ROWS, torch.device("cpu"), params, gradients, [], [], {})]

    def _gradients(self, call: StepCall) -> list[list[Tensor]] | None:
        return _rows(call.params) if call.function == _ROWS else super()._gradients(call)


def _rows(params: list[Tensor]) -> list[list[Tensor]] | None:
    """The numbers and the values of the rows of sparse gradients. None if one is missing or
    dense."""
    indices, values = [], []
    for param in params:
        grad = param.grad
        if grad is None or grad.layout is not torch.sparse_coo:
            return None
        grad = grad.coalesce()  # sorted, and each row once: the update is not linear
        indices.append(_row_numbers(grad))
        values.append(grad.values().contiguous())
    return [indices, values]


def _row_numbers(grad: Tensor) -> Tensor:
    """The positions of a coalesced gradient's rows, its sparse dimensions taken as one."""
    rows = grad.indices()[0]
    for dimension in range(1, grad.sparse_dim()):
        rows = rows * grad.shape[dimension] + grad.indices()[dimension]
    return rows.contiguous()
