"""DeepSpeed's modules of optimizers in host memory: ``cpu_adam``, ``cpu_adagrad``, ``cpu_lion``.

They know an optimizer by a number that its front end chose. Unlike DeepSpeed's kernels, which step
a copy of a tensor with gaps between its elements and lose it, these step the tensor itself; and
gradients are not written to.
"""

from __future__ import annotations

import logging
from typing import Any

from opkiln.compat.deepspeed.modules import OpModule
from opkiln.compat.deepspeed.stepping import make_step
from opkiln.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

_log = logging.getLogger("opkiln.deepspeed")


class _HostOptimizers(OpModule):
    """The numbers of the optimizers that there are, each with what it was made with."""

    def __init__(self, rest: Callable[[], Any] | None = None) -> None:
        super().__init__(rest)
        self._made: dict[int, tuple[Any, ...]] = {}

    def _create(self, optimizer_id: int, given: tuple[Any, ...], should_log: bool) -> int:
        self._made[int(optimizer_id)] = given
        if should_log:
            _log.info("%s: optimizer %d steps on opkiln's kernel", self.NAME, optimizer_id)
        return 0

    def _destroy(self, optimizer_id: int) -> int:
        self._made.pop(int(optimizer_id), None)
        return 0

    def _of(self, optimizer_id: int) -> tuple[Any, ...]:
        try:
            return self._made[optimizer_id]
        except KeyError:
            raise UsageError(
                f"{self.NAME}: there is no optimizer {optimizer_id}",
                why="it was not created, or is destroyed",
            ) from None


class CPUAdam(_HostOptimizers):
    """``cpu_adam``: Adam and AdamW, a step and its undoing."""

    NAME = "cpu_adam"
    # An optimizer that runs in a process of its own, on threads of its own, over shared memory.
    REST = (
        "zenflow_adam_create", "zenflow_adam_register_group", "zenflow_adam_destroy",
        "zenflow_adam_ctrl_size", "zenflow_adam_ctrl_init", "zenflow_adam_run_worker",
        "zenflow_adam_submit", "zenflow_adam_wait", "zenflow_adam_ctrl_exit",
    )  # fmt: skip

    def __init__(self, rest: Callable[[], Any] | None = None) -> None:
        from opkiln.ops.cpu_adam.op import CPUAdamBuilder

        super().__init__(rest)
        self._ops = CPUAdamBuilder().load()

    def create_adam(
        self,
        optimizer_id: int,
        alpha: float = 1e-3,
        betta1: float = 0.9,
        betta2: float = 0.999,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adamw_mode: bool = True,
        should_log: bool = False,
    ) -> int:
        """Make the optimizer of this number; what counts is ``adamw_mode``, a step has the rest."""
        given = (alpha, betta1, betta2, eps, weight_decay, bool(adamw_mode))
        if self._rest is not None:
            self._rest.create_adam(optimizer_id, *given, False)
        return self._create(optimizer_id, given, should_log)

    def destroy_adam(self, optimizer_id: int) -> int:
        """Forget the optimizer of this number; twice is once."""
        if self._rest is not None:
            self._rest.destroy_adam(optimizer_id)
        return self._destroy(optimizer_id)

    def rest(self) -> Any:
        """DeepSpeed's module, which is told of the optimizers that there are."""
        known = self._rest
        module = super().rest()
        if known is None:
            for optimizer_id, given in self._made.items():
                module.create_adam(optimizer_id, *given, False)
        return module

    def adam_update(
        self, optimizer_id: int, step: int, lr: float, beta1: float, beta2: float, epsilon: float,
        weight_decay: float, bias_correction: bool, params: Tensor, grads: Tensor, exp_avg: Tensor,
        exp_avg_sq: Tensor,
    ) -> int:  # fmt: skip
        """Make the ``step``-th step (the first is 1), in place."""
        return self._step(
            self._ops.cpu_adam_, optimizer_id, step, lr, beta1, beta2, epsilon, weight_decay,
            bias_correction, params, grads, exp_avg, exp_avg_sq,
        )  # fmt: skip

    def adam_rollback(
        self, optimizer_id: int, step: int, lr: float, beta1: float, beta2: float, epsilon: float,
        weight_decay: float, bias_correction: bool, params: Tensor, grads: Tensor, exp_avg: Tensor,
        exp_avg_sq: Tensor,
    ) -> int:  # fmt: skip
        """Undo the ``step``-th step, given what it was given, in place."""
        return self._step(
            self._ops.cpu_adam_rollback_, optimizer_id, step, lr, beta1, beta2, epsilon,
            weight_decay, bias_correction, params, grads, exp_avg, exp_avg_sq,
        )  # fmt: skip

    def _step(
        self, op: Callable[..., None], optimizer_id: int, step: int, lr: float, beta1: float,
        beta2: float, epsilon: float, weight_decay: float, bias_correction: bool, params: Tensor,
        grads: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor,
    ) -> int:  # fmt: skip
        hyper = {
            "step": int(step),
            "lr": float(lr),
            "beta1": float(beta1),
            "beta2": float(beta2),
            "eps": float(epsilon),
            "weight_decay": float(weight_decay),
            "adamw_mode": self._of(optimizer_id)[-1],
            "bias_correction": bool(bias_correction),
            "maximize": False,
            "grad_scale": 1.0,
        }
        make_step(op, [params], [grads], [[exp_avg], [exp_avg_sq]], [[]], hyper)
        return 0


class CPUAdagrad(_HostOptimizers):
    """``cpu_adagrad``: Adagrad."""

    NAME = "cpu_adagrad"

    def __init__(self, rest: Callable[[], Any] | None = None) -> None:
        from opkiln.ops.cpu_adagrad.op import CPUAdagradBuilder

        super().__init__(rest)
        self._ops = CPUAdagradBuilder().load()

    def create_adagrad(
        self,
        optimizer_id: int,
        alpha: float = 1e-2,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        should_log: bool = False,
    ) -> int:
        """Make the optimizer of this number; a step has its own hyperparameters."""
        return self._create(optimizer_id, (alpha, eps, weight_decay), should_log)

    def destroy_adagrad(self, optimizer_id: int) -> int:
        """Forget the optimizer of this number; twice is once."""
        return self._destroy(optimizer_id)

    def adagrad_update(
        self, optimizer_id: int, step: int, lr: float, epsilon: float, weight_decay: float,
        params: Tensor, grads: Tensor, exp_avg_sq: Tensor,
    ) -> int:  # fmt: skip
        """Make the ``step``-th step (the first is 1), in place; the gradients stay as they are."""
        self._of(optimizer_id)
        hyper = {
            "step": int(step),
            "lr": float(lr),
            "lr_decay": 0.0,
            "eps": float(epsilon),
            "weight_decay": float(weight_decay),
            "maximize": False,
            "grad_scale": 1.0,
        }
        make_step(self._ops.cpu_adagrad_, [params], [grads], [[exp_avg_sq]], [[]], hyper)
        return 0


class CPULion(_HostOptimizers):
    """``cpu_lion``: Lion. Where momentum and gradient are 0 a parameter stays as it is."""

    NAME = "cpu_lion"

    def __init__(self, rest: Callable[[], Any] | None = None) -> None:
        from opkiln.ops.cpu_lion.op import CPULionBuilder

        super().__init__(rest)
        self._ops = CPULionBuilder().load()

    def create_lion(
        self,
        optimizer_id: int,
        alpha: float = 1e-3,
        betta1: float = 0.9,
        betta2: float = 0.999,
        weight_decay: float = 0.0,
        should_log: bool = False,
    ) -> int:
        """Make the optimizer of this number; a step has its own hyperparameters."""
        return self._create(optimizer_id, (alpha, betta1, betta2, weight_decay), should_log)

    def destroy_lion(self, optimizer_id: int) -> int:
        """Forget the optimizer of this number; twice is once."""
        return self._destroy(optimizer_id)

    def lion_update(
        self, optimizer_id: int, step: int, lr: float, beta1: float, beta2: float,  # noqa: ARG002
        weight_decay: float, params: Tensor, grads: Tensor, exp_avg: Tensor,
    ) -> int:  # fmt: skip
        """Make a step, in place."""
        self._of(optimizer_id)
        hyper = {
            "lr": float(lr),
            "beta1": float(beta1),
            "beta2": float(beta2),
            "weight_decay": float(weight_decay),
            "maximize": False,
            "grad_scale": 1.0,
        }
        make_step(self._ops.cpu_lion_, [params], [grads], [[exp_avg]], [[]], hyper)
        return 0
