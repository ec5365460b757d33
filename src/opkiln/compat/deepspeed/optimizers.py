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
from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from opkiln.builder.registry import ALL_OPS, get_builder
from opkiln.compat.deepspeed.modules import OpModule, takes
from opkiln.errors import UsageError
from opkiln.ops.optimizing.op_calls import call_in_place, lay_out_alike

_log = logging.getLogger("opkiln.deepspeed")

# The arguments of a step between the optimizer's number and the tensors, in DeepSpeed's order; and
# of an op over lists of tensors, after those lists.
_HOST = {
    "cpu_adam": "step lr beta1 beta2 eps weight_decay bias_correction",
    "cpu_adagrad": "step lr eps weight_decay",
    "cpu_lion": "step lr beta1 beta2 weight_decay",
}
_LISTS = {
    "fused_adam": "lr beta1 beta2 eps step adamw_mode bias_correction weight_decay",
    "fused_lion": "lr beta1 beta2 step weight_decay",
}
_LAMB = ("lr", "beta1", "beta2", "eps", "weight_decay", "min_coeff", "max_coeff", "step")


class HostOptimizers:
    """``cpu_adam`` (Adam and AdamW), ``cpu_adagrad`` or ``cpu_lion``: the op's functions, and the
    optimizers by their numbers, with the arguments of each."""

    def __init__(self, module: OpModule) -> None:
        self._name = module.__name__
        self._ops: Any = get_builder(self._name).load()
        self._made: dict[int, tuple[Any, ...]] = {}
        self._theirs: Any = None  # DeepSpeed's module, if it was built for other functions of it
        module.when_built.append(self._share)
        family = self._family = self._name.removeprefix("cpu_")
        setattr(self, f"{family}_update", partial(self._step, f"{self._name}_"))
        setattr(self, f"{family}_rollback", partial(self._step, f"{self._name}_rollback_"))

    def create(self, optimizer_id: int, *given: Any) -> int:
        """Create this optimizer. Only Adam's mode matters, the last of ``given`` but one: each step
        gets the rest again. The last one says whether to log."""
        *hyper, should_log = given
        self._made[int(optimizer_id)] = tuple(hyper)
        self._call_theirs("create", optimizer_id, *hyper, False)
        if should_log:
            _log.info("%s: optimizer %d steps on opkiln's kernel", self._name, optimizer_id)
        return 0

    def destroy(self, optimizer_id: int) -> int:
        """Forget this optimizer. Calling it again has no effect."""
        self._made.pop(int(optimizer_id), None)
        self._call_theirs("destroy", optimizer_id)
        return 0

    def _share(self, theirs: Any) -> None:
        """Create the existing optimizers in DeepSpeed's module, and from now on all."""
        self._theirs = theirs
        for optimizer_id, hyper in self._made.items():
            self._call_theirs("create", optimizer_id, *hyper, False)

    def _call_theirs(self, verb: str, *given: Any) -> None:
        if self._theirs is not None:
            getattr(self._theirs, f"{verb}_{self._family}")(*given)

    def _step(self, op: str, optimizer_id: int, *given: Any) -> int:
        """Make a step (the first is 1) in place, or undo one that was made with these arguments.
        ``given``: the hyperparameters, the parameter, the gradient, which stays as it is, and the
        states."""
        if optimizer_id not in self._made:
            raise UsageError(
                f"{self._name}: there is no optimizer {optimizer_id}",
                why="it was not created, or it was destroyed",
            )
        names = _HOST[self._name].split()
        hyper = dict(zip(names, given, strict=False))
        if self._family == "adam":
            hyper["adamw_mode"] = bool(self._made[optimizer_id][-1])
        elif self._family == "adagrad":
            hyper["lr_decay"] = 0.0
        else:
            del hyper["step"]
        params, grads, *states = ([tensor] for tensor in given[len(names) :])
        hyper |= {"maximize": False, "grad_scale": 1.0}
        make_step(getattr(self._ops, op), params, grads, states, [[]], hyper)
        return 0


class FusedOptimizers:
    """``fused_adam``, ``fused_lion`` or ``fused_lamb``: the op's functions, loaded for each type of
    device on first use."""

    def __init__(self, module: OpModule) -> None:
        self._name = module.__name__
        self._functions = ALL_OPS[self._name]().load()

    def multi_tensor(
        self, _chunk_size: int, _noop_flag: Tensor, lists: list[list[Tensor]], *given: Any
    ) -> None:
        """Make the ``step``-th step of the parameters, in place. ``lists`` has gradients,
        parameters and averages, and for Adam averages of squares; its mode 1 is AdamW. As in
        DeepSpeed's kernels, the flag has no effect: a step with infinities is made like any
        other. Of Lion, a parameter whose momentum and gradient are 0 only decays."""
        hyper = dict(zip(_LISTS[self._name].split(), given, strict=True))
        if self._name == "fused_adam":
            hyper["adamw_mode"] = hyper["adamw_mode"] == 1
            hyper["bias_correction"] = bool(hyper["bias_correction"])
        self._step(lists, [], hyper)

    @takes(
        "p p_copy m v g lr beta1 beta2 max_coeff min_coeff eps grad_scale step mode "
        "bias_correction weight_decay"
    )
    def lamb(self, given: Any) -> Tensor:
        """Make the ``step``-th step of ``p``, in place, and return its coefficient.

        ``mode`` 0 puts ``eps`` under the root. ``p_copy``, if it is not empty, gets the new values.
        The averages start at 0. As in DeepSpeed, the learning rate is corrected for that, not the
        averages.
        """
        p, step, device = given.p, given.step, given.p.device
        hyper = {name: getattr(given, name) for name in _LAMB}
        if given.bias_correction:
            hyper["lr"] = given.lr * math.sqrt(1 - given.beta2**step) / (1 - given.beta1**step)
        coefficient = torch.empty(1, dtype=torch.float32, device=device)
        scale = None
        if given.grad_scale != 1:
            scale = torch.full((), given.grad_scale, dtype=torch.float32, device=device)
        hyper |= {
            "eps_inside_sqrt": given.mode == 0, "bias_correction": False, "grad_scale": scale
        }  # fmt: skip
        self._step([[given.g], [p], [given.m], [given.v]], [coefficient], hyper)
        if given.p_copy.numel():
            given.p_copy.copy_(p.view(given.p_copy.shape))
        return coefficient

    def _step(
        self, lists: list[list[Tensor]], results: list[Tensor], hyper: dict[str, Any]
    ) -> None:
        grads, params, *states = lists
        if not params:
            return
        device = params[0].device
        op = getattr(self._functions, f"{self._name}_")
        made = torch.full((), hyper.pop("step") - 1, dtype=torch.float32, device=device)
        wide = [[state.float() for state in row] for row in states]  # itself, if it is fp32
        hyper["maximize"] = False
        make_step(op, list(params), list(grads), wide, [[], [made], *results], hyper)
        _store(wide, states)


def make_step(
    op: Callable[..., None],
    params: list[Tensor],
    grads: list[Tensor],
    states: list[list[Tensor]],
    rest: list[Any],
    hyper: dict[str, Any],
) -> None:
    """``op(params, grads, *states, *rest, **hyper)``, in place, for any layout of the tensors.

    Raises RuntimeError, naming the argument, before anything is written.
    """
    laid = lay_out_alike(params, grads, *states)
    lists = [params, grads, *states] if laid is None else laid.lists
    stepped, _, *averages = lists
    call_in_place(op, [*lists, *rest], [stepped, *averages], hyper)
    if laid is not None:
        _store(averages, states)
        laid.write_back()


def _store(stepped: list[list[Tensor]], states: list[list[Tensor]]) -> None:
    for tensor, state in zip(chain(*stepped), chain(*states), strict=True):
        if tensor is not state:
            state.copy_(tensor)
