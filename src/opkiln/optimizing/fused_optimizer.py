"""What the fused optimizers share: calls, states, masters, plans."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any, ClassVar, overload

import torch
from torch import Tensor

from opkiln.errors import ArgumentError
from opkiln.optimizing.base import ListOptimizer, Place
from opkiln.optimizing.checks import MASTER, as_number, check_numbers
from opkiln.optimizing.op_calls import Call, Kept
from opkiln.optimizing.sharded import has_shards, refuse_fsdp1, sum_over_shards
from opkiln.optimizing.states import refuse_capture, shared_steps, zeros_like

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch.optim.optimizer import ParamsT

MASTERS = "master_weights"
GRAD_NONE = "set_grad_none"
MAX_NORM = "max_grad_norm"


class FusedOptimizer(ListOptimizer):
    """Steps all parameters of a group and device in one call of an op."""

    DEVICES = ("cpu", "cuda")
    DEVICES_TEXT = "on GPUs and the CPU"
    OPTIONS = (MASTERS, GRAD_NONE, MAX_NORM)
    PLANNED_ON = ("cuda",)
    NORMS: ClassVar[bool] = False  # the op needs norms of whole tensors

    # Tells GradScaler to set the attributes grad_scale and found_inf during a step. Neither may
    # exist at any other time.
    _step_supports_amp_scaling = True

    def __init__(self, params: ParamsT, defaults: dict[str, Any], **options: Any) -> None:
        limit = options[MAX_NORM]
        if not 0 <= as_number(MAX_NORM, limit) < math.inf:
            raise ArgumentError(
                f"max_grad_norm is {limit}, expected a finite number of at least 0",
                why="gradients are scaled down to it; 0 leaves them as they are",
            )
        super().__init__(params, defaults, **options)

    def _check_param(self, param: Tensor, name: str) -> None:
        super()._check_param(param, name)
        if self.NORMS or self.defaults[MAX_NORM]:
            refuse_fsdp1(f"{self.OWNER if self.NORMS else MAX_NORM} needs", param, name)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """As torch's. Without the argument, ``set_grad_none`` decides."""
        super().zero_grad(self.defaults[GRAD_NONE] if set_to_none is None else set_to_none)

    @overload
    def step(self, closure: None = ...) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Make one step. A parameter without a gradient is skipped."""
        return self._step(closure, {}, 1.0)

    def _calls(self, copies: Mapping[Tensor, Tensor], grad_scale: float) -> list[Call]:
        """One call per group and device."""
        del copies, grad_scale  # for host optimizers; these have masters and a scaler instead
        places = self._places()
        scales = self._scales(places)
        hypers = [self._numbers(each, scales) for each in places]
        over_lists = iter(self._over_lists([each for each in places if each.kept is None]))
        calls = []
        for here, hyper in zip(places, hypers, strict=True):
            kept = here.kept
            call = next(over_lists) if kept is None else kept.call
            if kept is None:
                kept = self._kept_for(here, call)
            calls.append(call._replace(gradients=[here.grads], hyper=hyper, kept=kept))
        return calls

    def _reads_gradients(self) -> bool:
        # The op itself notices a sparse gradient. With several groups that is too late: another
        # group may have been stepped by then. Clipping also reads the gradients first.
        return len(self.param_groups) > 1 or bool(self.defaults[MAX_NORM])

    def _keep(self, call: Call) -> Kept | None:
        plan = getattr(self._load(call.device.type), f"{self._function}plan")
        return Kept.of(call, self.STATES, f"{self._function}planned_", plan, by_address=True)

    def _over_lists(self, places: list[Place]) -> list[Call]:
        """The calls for these places, without the op's other arguments. Missing states are made."""
        if not places:
            return []
        found = []
        for here in places:
            states = self._states_of(here.params)
            found.append((states, self._masters(here.params, states)))
        # How many states hold each count. This includes parameters of other groups, those without a
        # gradient, and those that were taken out of their group and may come back. Usually all are
        # in one call.
        all_here = len(places) == 1 and len(set(map(id, found[0][0]))) == len(self.state)
        holders = Counter(
            [
                id(state["step"])
                for state in (() if all_here else self.state.values())
                if isinstance(state, dict) and "step" in state  # users may keep other things there
            ]
        )
        function = self._function
        return [
            Call(
                function,
                here.device,
                here.params,
                [here.grads],
                states,
                masters=[masters],
                last=shared_steps(states, holders),
                hyper={},
            )
            for here, (states, masters) in zip(places, found, strict=True)
        ]

    def _initial(self, params: list[Tensor]) -> list[list[Tensor]]:
        return [zeros_like(params) for _ in self.STATES]

    def _masters(self, params: list[Tensor], states: list[dict[str, Any]]) -> list[Tensor]:
        if not self.defaults[MASTERS]:
            return []
        masters = []
        for param, state in zip(params, states, strict=True):
            if not self._has_master(param):
                masters.append(torch.empty(0, dtype=param.dtype, device=param.device))
                continue
            if MASTER not in state:
                refuse_capture(param.device, "parameters have no master yet")
                state[MASTER] = param.detach().to(torch.float32, copy=True)
            masters.append(state[MASTER])
        return masters

    def _has_master(self, param: Tensor) -> bool:
        return bool(self.defaults[MASTERS]) and param.dtype != torch.float32

    def _numbers(self, here: Place, scales: Mapping[torch.device, Tensor | None]) -> dict[str, Any]:
        """The op's arguments in addition to the lists."""
        group, device = self.param_groups[here.group], here.device
        lr = group["lr"]
        # A tensor in host memory is read now, because the device cannot see its changes.
        on_device = isinstance(lr, Tensor) and lr.device.type == device.type
        if not on_device:
            check_numbers(group, "lr", where=f"param_groups[{here.group}]: ")
        found_inf = getattr(self, "found_inf", None)
        return {
            **self._hyper(group),
            "lr": 0.0 if on_device else float(lr),
            "lr_tensor": _moved(device, lr) if on_device else None,
            "grad_scale": scales[device],
            "found_inf": None if found_inf is None else _moved(device, found_inf),
        }

    def _scales(self, places: list[Place]) -> dict[torch.device, Tensor | None]:
        """The divisor of gradients on each device: the scaler's scale, times the factor that brings
        their norm down to ``max_grad_norm``. Does not wait for a GPU."""
        devices = dict.fromkeys(here.device for here in places)
        scale = getattr(self, "grad_scale", None)
        limit = self.defaults[MAX_NORM]
        if limit and places:
            scale = _clipping([(here.params, here.grads) for here in places], scale, limit)
        return {device: None if scale is None else _moved(device, scale) for device in devices}

    def _count(self, made: float, device: torch.device) -> Tensor:
        return torch.full((), made, dtype=torch.float32, device=device)

    def _state_dtypes(self, param: Tensor) -> dict[str, torch.dtype]:
        names = (*self.STATES, MASTER) if self._has_master(param) else self.STATES
        return dict.fromkeys(names, torch.float32)


def _moved(device: torch.device, number: Tensor) -> Tensor:
    """The number on the device, in the form that an op takes; usually the same tensor."""
    wide = number.dtype if number.dtype == torch.float64 else torch.float32
    # A copy to the CPU must be complete when the op reads it. On a GPU the stream keeps the order.
    return number.to(device=device, dtype=wide, non_blocking=device.type == "cuda")


def _clipping(
    lists: list[tuple[list[Tensor], list[Tensor]]], scale: Tensor | None, limit: float
) -> Tensor:
    """The divisor that unscales gradients and brings their norm, over all lists, down to ``limit``,
    as ``torch.nn.utils.clip_grad_norm_`` does with unscaled gradients.

    A list has parameters and their gradients. For DTensors it has the gradients' parts on this
    rank, but the norm is that of the whole tensors.
    """
    first = lists[0][1][0].device
    norms = [torch.linalg.vector_norm(_norms(params, grads)) for params, grads in lists]
    total = torch.linalg.vector_norm(torch.stack([_moved(first, norm) for norm in norms]))
    given = 1.0 if scale is None else _moved(first, scale).reshape(())
    return torch.clamp((total / given + 1e-6) / limit, min=1.0) * given


def _norms(params: list[Tensor], grads: list[Tensor]) -> Tensor:
    """The norm of each gradient."""
    here = torch.stack(torch._foreach_norm(grads, 2, dtype=torch.float32))
    if not has_shards(params):
        return here
    squares = here.double().square()
    sum_over_shards(params, squares)
    return squares.sqrt().float()
