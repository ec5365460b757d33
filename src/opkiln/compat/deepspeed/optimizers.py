"""DeepSpeed's optimizer modules over opkiln's ops: in host memory, and over lists of tensors.

``cpu_adam``, ``cpu_adagrad`` and ``cpu_lion`` identify an optimizer by a number that its front end
chose. ``fused_adam``, ``fused_lion`` and ``fused_lamb`` use the op of the device that the
parameters are on. DeepSpeed keeps the states of 16-bit parameters in 16 bits, but opkiln's kernels
step fp32 states. So the states are widened for the step and rounded once, when they are stored, as
DeepSpeed's kernels do in registers. docs/deepspeed.md says what differs.
"""

from __future__ import annotations

import logging
import math
from functools import partialmethod
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from opkiln.compat.deepspeed.modules import OpModule
from opkiln.errors import UsageError
from opkiln.optimizing.op_calls import call_in_place, lay_out_alike
from opkiln.registry import ALL_OPS, get_builder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

_log = logging.getLogger("opkiln.deepspeed")


# In host memory


class _HostOptimizers(OpModule):
    """The op's functions, and the optimizers by their numbers, with the arguments of each."""

    def _load(self) -> None:
        self._ops: Any = get_builder(self.NAME).load()
        self._made: dict[int, tuple[Any, ...]] = {}

    def _create(self, optimizer_id: int, given: tuple[Any, ...], should_log: bool) -> int:
        self._made[int(optimizer_id)] = given
        if should_log:
            _log.info("%s: optimizer %d steps on opkiln's kernel", self.NAME, optimizer_id)
        return 0

    def _destroy(self, optimizer_id: int) -> int:
        """Forget this optimizer. Calling it again has no effect."""
        self._made.pop(int(optimizer_id), None)
        return 0

    def _of(self, optimizer_id: int) -> tuple[Any, ...]:
        try:
            return self._made[optimizer_id]
        except KeyError:
            raise UsageError(
                f"{self.NAME}: there is no optimizer {optimizer_id}",
                why="it was not created, or it was destroyed",
            ) from None

    def _step(self, op: str, names: tuple[str, ...], given: tuple[Any, ...], **more: Any) -> int:
        """Make a step (the first is 1) in place. ``given``: the hyperparameters of these names, the
        parameters, the gradients, which stay as they are, and the states."""
        hyper = dict(zip(names, given, strict=False))
        params, grads, *states = ([tensor] for tensor in given[len(names) :])
        hyper |= {"maximize": False, "grad_scale": 1.0, **more}
        return _make_step(getattr(self._ops, op), params, grads, states, [[]], hyper)


class CPUAdam(_HostOptimizers):
    """``cpu_adam``: Adam and AdamW, with steps and rollback."""

    NAME = "cpu_adam"

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
        """Create this optimizer. Only ``adamw_mode`` matters: each step gets the rest again."""
        given = (alpha, betta1, betta2, eps, weight_decay, bool(adamw_mode))
        if self._rest is not None:
            self._rest.create_adam(optimizer_id, *given, False)
        return self._create(optimizer_id, given, should_log)

    def destroy_adam(self, optimizer_id: int) -> int:
        """Forget this optimizer. Calling it again has no effect."""
        if self._rest is not None:
            self._rest.destroy_adam(optimizer_id)
        return self._destroy(optimizer_id)

    def rest(self) -> Any:
        """DeepSpeed's module. The existing optimizers are created in it first."""
        known = self._rest
        module = super().rest()
        if known is None:
            for optimizer_id, given in self._made.items():
                module.create_adam(optimizer_id, *given, False)
        return module

    def _update(self, op: str, optimizer_id: int, *given: Any) -> int:
        """To undo a step, the arguments must be those of that step."""
        names = ("step", "lr", "beta1", "beta2", "eps", "weight_decay", "bias_correction")
        return self._step(op, names, given, adamw_mode=self._of(optimizer_id)[-1])

    adam_update = partialmethod(_update, "cpu_adam_")
    adam_rollback = partialmethod(_update, "cpu_adam_rollback_")


class CPUAdagrad(_HostOptimizers):
    """``cpu_adagrad``: Adagrad."""

    NAME = "cpu_adagrad"
    destroy_adagrad = _HostOptimizers._destroy

    def create_adagrad(
        self,
        optimizer_id: int,
        alpha: float = 1e-2,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        should_log: bool = False,
    ) -> int:
        """Create this optimizer. Each step gets its hyperparameters again."""
        return self._create(optimizer_id, (alpha, eps, weight_decay), should_log)

    def adagrad_update(self, optimizer_id: int, *given: Any) -> int:
        self._of(optimizer_id)
        names = ("step", "lr", "eps", "weight_decay")
        return self._step("cpu_adagrad_", names, given, lr_decay=0.0)


class CPULion(_HostOptimizers):
    """``cpu_lion``: Lion. A parameter whose momentum and gradient are 0 stays as it is."""

    NAME = "cpu_lion"
    destroy_lion = _HostOptimizers._destroy

    def create_lion(
        self,
        optimizer_id: int,
        alpha: float = 1e-3,
        betta1: float = 0.9,
        betta2: float = 0.999,
        weight_decay: float = 0.0,
        should_log: bool = False,
    ) -> int:
        """Create this optimizer. Each step gets its hyperparameters again."""
        return self._create(optimizer_id, (alpha, betta1, betta2, weight_decay), should_log)

    def lion_update(self, optimizer_id: int, _step: int, *given: Any) -> int:
        self._of(optimizer_id)
        return self._step("cpu_lion_", ("lr", "beta1", "beta2", "weight_decay"), given)


# Over lists of tensors


class _FusedOptimizers(OpModule):
    """The op's functions, loaded for each type of device on first use."""

    def _load(self) -> None:
        self._functions = ALL_OPS[self.NAME].functions
        self._functions()

    @torch.no_grad()
    def _step(
        self,
        grads: list[Tensor],
        params: list[Tensor],
        *states: list[Tensor],
        step: int,
        more: tuple[Any, ...] = (),
        **hyper: Any,
    ) -> None:
        if not params:
            return
        device = params[0].device
        op = getattr(self._functions(device.type), f"{self.NAME}_")
        made = torch.full((), step - 1, dtype=torch.float32, device=device)
        wide = [[state.float() for state in row] for row in states]  # itself, if it is fp32
        hyper["maximize"] = False
        _make_step(op, list(params), list(grads), wide, [[], [made], *more], hyper)
        _store(wide, list(states))


class FusedAdam(_FusedOptimizers):
    """``fused_adam``: Adam and AdamW over a list of tensors."""

    NAME = "fused_adam"

    def multi_tensor_adam(
        self, chunk_size: int, noop_flag: Tensor, tensor_lists: list[list[Tensor]], lr: float,  # noqa: ARG002
        beta1: float, beta2: float, epsilon: float, step: int, mode: int, bias_correction: int,
        weight_decay: float,
    ) -> None:  # fmt: skip
        """Make the ``step``-th step of the parameters, in place. ``tensor_lists`` has gradients,
        parameters, averages and averages of squares. ``mode`` 1 is AdamW. As in DeepSpeed's
        kernels, ``noop_flag`` has no effect: a step with infinities is made like any other."""
        self._step(
            *tensor_lists, step=step, lr=lr, beta1=beta1, beta2=beta2, eps=epsilon,
            weight_decay=weight_decay, adamw_mode=mode == 1, bias_correction=bool(bias_correction),
        )  # fmt: skip


class FusedLion(_FusedOptimizers):
    """``fused_lion``: Lion over a list of tensors. A parameter whose momentum and gradient are 0
    only decays."""

    NAME = "fused_lion"

    def multi_tensor_lion(
        self, chunk_size: int, noop_flag: Tensor, tensor_lists: list[list[Tensor]], lr: float,  # noqa: ARG002
        beta1: float, beta2: float, step: int, weight_decay: float,
    ) -> None:  # fmt: skip
        """Make a step of parameters, in place. ``tensor_lists`` has gradients, parameters and
        averages."""
        self._step(
            *tensor_lists, step=step, lr=lr, beta1=beta1, beta2=beta2, weight_decay=weight_decay
        )


class FusedLamb(_FusedOptimizers):
    """``fused_lamb``: LAMB of one tensor."""

    NAME = "fused_lamb"

    def lamb(
        self, p: Tensor, p_copy: Tensor, m: Tensor, v: Tensor, g: Tensor, lr: float, beta1: float,
        beta2: float, max_coeff: float, min_coeff: float, eps: float, grad_scale: float, step: int,
        mode: int, bias_correction: int, decay: float,
    ) -> Tensor:  # fmt: skip
        """Make the ``step``-th step of ``p``, in place, and return its coefficient.

        ``mode`` 0 puts ``eps`` under the root. ``p_copy``, if it is not empty, gets the new values.
        The averages start at 0. As in DeepSpeed, the learning rate is corrected for that, not the
        averages.
        """
        if bias_correction:
            lr = lr * math.sqrt(1 - beta2**step) / (1 - beta1**step)
        coefficient = torch.empty(1, dtype=torch.float32, device=p.device)
        scale = None
        if grad_scale != 1:
            scale = torch.full((), grad_scale, dtype=torch.float32, device=p.device)
        self._step(
            [g], [p], [m], [v], step=step, more=(coefficient,), lr=lr, beta1=beta1, beta2=beta2,
            eps=eps, weight_decay=decay, eps_inside_sqrt=mode == 0, bias_correction=False,
            min_coeff=min_coeff, max_coeff=max_coeff, grad_scale=scale,
        )  # fmt: skip
        if p_copy.numel():
            with torch.no_grad():
                p_copy.copy_(p.view(p_copy.shape))
        return coefficient


# Shared by both


def _make_step(
    op: Callable[..., None],
    params: list[Tensor],
    grads: list[Tensor],
    states: list[list[Tensor]],
    rest: list[Any],
    hyper: dict[str, Any],
) -> int:
    """``op(params, grads, *states, *rest, **hyper)``, in place, for any layout of the tensors; 0.

    Raises RuntimeError, naming the argument, before anything is written.
    """
    with torch.no_grad():
        laid = lay_out_alike(params, grads, *states)
        lists = [params, grads, *states] if laid is None else laid.lists
        stepped, _, *averages = lists
        call_in_place(op, [*lists, *rest], [stepped, *averages], hyper)
        if laid is not None:
            _store(averages, states)
            laid.write_back()
    return 0


def _store(stepped: list[list[Tensor]], states: list[list[Tensor]]) -> None:
    for tensor, state in zip(chain(*stepped), chain(*states), strict=True):
        if tensor is not state:
            state.copy_(tensor)
