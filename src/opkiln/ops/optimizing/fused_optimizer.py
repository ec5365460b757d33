"""Shared by the fused optimizers: calls, states, masters, plans."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import accumulate, repeat
from operator import is_, itemgetter
from typing import Any, ClassVar, overload

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from opkiln.errors import ArgumentError
from opkiln.ops.optimizing.base import ListOptimizer
from opkiln.ops.optimizing.checks import MASTER, as_number, check_numbers
from opkiln.ops.optimizing.op_calls import StepCall, refuse_capture
from opkiln.ops.optimizing.sharded import has_shards, refuse_fsdp1, sum_over_shards

MASTERS = "master_weights"
GRAD_NONE = "set_grad_none"
MAX_NORM = "max_grad_norm"
_STEP = itemgetter("step")
_POOLED = 1 << 16  # elements up to which a state shares its memory with others
_ALIGNED = 64  # elements: 256 bytes, so that each state begins where torch's own would


class FusedOptimizer(ListOptimizer):
    """Steps all parameters of a group and device in one call of an op."""

    DEVICES = ("cpu", "cuda")
    DEVICES_TEXT = "on GPUs and the CPU"
    OPTIONS = (MASTERS, GRAD_NONE, MAX_NORM)
    ALTERNATIVE = "torch.optim.AdamW(params)"
    KEPT_ON = ("cuda",)
    NORMS: ClassVar[bool] = False  # the op needs norms of whole tensors

    # Tells GradScaler to set the attributes grad_scale and found_inf during a step. Neither may
    # exist at any other time.
    _step_supports_amp_scaling = True

    def __init__(self, params: ParamsT, **defaults: Any) -> None:
        limit = defaults[MAX_NORM]
        if not 0 <= as_number(MAX_NORM, limit) < math.inf:
            raise ArgumentError(
                f"max_grad_norm is {limit}, expected a finite number of at least 0",
                why="gradients are scaled down to it; 0 leaves them as they are",
            )
        super().__init__(params, **defaults)

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

    def _calls(self, copies: Mapping[Tensor, Tensor], grad_scale: float) -> list[StepCall]:
        """One call per group and device."""
        del copies, grad_scale  # for host optimizers; these have masters and a scaler instead
        calls = self._find_calls()
        scales = self._scales(calls)
        for call in calls:
            call.hyper.update(self._hyper(call), grad_scale=scales[call.device])
        complete = iter(self._add_states([call for call in calls if call.kept is None]))
        return [self._use_kept(next(complete)) if call.kept is None else call for call in calls]

    def _reads_gradients(self) -> bool:
        # The op itself notices a sparse gradient. With several groups that is too late: another
        # group may have been stepped by then. Clipping also reads the gradients first.
        return len(self.param_groups) > 1 or bool(self.defaults[MAX_NORM])

    def _add_states(self, calls: list[StepCall]) -> list[StepCall]:
        """The calls with the states of their parameters. Missing states are made."""
        if not calls:
            return []
        found = []
        for call in calls:
            states = self._states_of(call.params)
            masters = self._masters(call.params, states)
            found.append(call._replace(states=states, rest=[masters]))
        # How many states hold each count. This includes parameters of other groups, those without a
        # gradient, and those that were taken out of their group and may come back. Usually all are
        # in one call.
        all_here = len(found) == 1 and len(set(map(id, found[0].states))) == len(self.state)
        holders = Counter(
            [
                id(state["step"])
                for state in (() if all_here else self.state.values())
                if isinstance(state, dict) and "step" in state  # users may keep other things there
            ]
        )
        return [
            call._replace(rest=[*call.rest, _shared_steps(call.states, holders)]) for call in found
        ]

    def _initial(self, params: list[Tensor]) -> list[list[Tensor]]:
        return [_zeros_like(params) for _ in self.STATES]

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

    def _hyper(self, call: StepCall) -> dict[str, Any]:
        group = self.param_groups[call.group]
        lr = group["lr"]
        # A tensor in host memory is read now, because the device cannot see its changes.
        on_device = isinstance(lr, Tensor) and lr.device.type == call.device.type
        if not on_device:
            check_numbers(group, "lr", where=f"param_groups[{call.group}]: ")
        found_inf = getattr(self, "found_inf", None)
        return {
            **super()._hyper(call),
            "lr": 0.0 if on_device else float(lr),
            "lr_tensor": _move(call.device, lr) if on_device else None,
            "found_inf": None if found_inf is None else _move(call.device, found_inf),
        }

    def _scales(self, calls: list[StepCall]) -> dict[torch.device, Tensor | None]:
        """The divisor of gradients on each device: the scaler's scale, times the factor that brings
        their norm down to ``max_grad_norm``. Does not wait for a GPU."""
        devices = dict.fromkeys(call.device for call in calls)
        scale = getattr(self, "grad_scale", None)
        limit = self.defaults[MAX_NORM]
        if limit and calls:
            scale = _clipping_divisor(calls, scale, limit)
        return {device: None if scale is None else _move(device, scale) for device in devices}

    def _count(self, made: float, device: torch.device) -> Tensor:
        return torch.full((), made, dtype=torch.float32, device=device)

    def _state_dtypes(self, param: Tensor) -> dict[str, torch.dtype]:
        names = (*self.STATES, MASTER) if self._has_master(param) else self.STATES
        return dict.fromkeys(names, torch.float32)


def _move(device: torch.device, number: Tensor) -> Tensor:
    """The number on the device, in the form that an op takes; usually the same tensor."""
    wide = number.dtype if number.dtype == torch.float64 else torch.float32
    # A copy to the CPU must be complete when the op reads it. On a GPU the stream keeps the order.
    return number.to(device=device, dtype=wide, non_blocking=device.type == "cuda")


def _clipping_divisor(calls: list[StepCall], scale: Tensor | None, limit: float) -> Tensor:
    """The divisor that unscales the gradients of all calls and brings their norm down to ``limit``,
    as ``torch.nn.utils.clip_grad_norm_`` does with unscaled gradients. For DTensors the norm is
    that of the whole tensors."""
    first = calls[0].device
    norms = []
    for call in calls:
        each = torch.stack(torch._foreach_norm(call.gradients[0], 2, dtype=torch.float32))
        if has_shards(call.params):
            squares = each.double().square()
            sum_over_shards(call.params, squares)
            each = squares.sqrt().float()
        norms.append(_move(first, torch.linalg.vector_norm(each)))
    total = torch.linalg.vector_norm(torch.stack(norms))
    given = 1.0 if scale is None else _move(first, scale).reshape(())
    return torch.clamp((total / given + 1e-6) / limit, min=1.0) * given


def _zeros_like(params: list[Tensor]) -> list[Tensor]:
    """An fp32 tensor of zeros for each parameter of one device, with the parameter's layout.

    Small ones are views of one tensor. It is made once for all, and only its version is counted up.
    """
    small = [p for p in params if p.numel() <= _POOLED and p.is_contiguous()]
    if len(small) < 2 or has_shards(params):
        small = []
    offsets = list(accumulate((-(-p.numel() // _ALIGNED) * _ALIGNED for p in small), initial=0))
    pool = torch.zeros(offsets[-1], dtype=torch.float32, device=params[0].device)
    pooled = {
        id(param): pool[offset : offset + param.numel()].view(param.shape)
        for param, offset in zip(small, offsets, strict=False)
    }
    return [
        pooled[id(param)]
        if id(param) in pooled
        else torch.zeros_like(param, dtype=torch.float32, requires_grad=False)
        for param in params
    ]


def _shared_steps(states: list[dict[str, Any]], holders: Counter[int]) -> list[Tensor]:
    """The counts of steps: one if all states share it, otherwise one for each, all distinct.

    ``holders`` is how many states hold a count, by its id; it is empty if these are all states. If
    states outside this call also hold a count, they keep it and these states get a copy.
    """
    first: Tensor = states[0]["step"]
    if all(map(is_, map(_STEP, states), repeat(first))):
        # A group may name a parameter twice.
        if holders and holders[id(first)] > (here := len(set(map(id, states)))):
            refuse_capture(first.device, "parameters are no longer stepped together as before")
            holders[id(first)] -= here
            first = first.clone()
            for state in states:
                state["step"] = first
        return [first]
    if not holders:
        distinct = {id(state): state for state in states}.values()
        holders = Counter(id(state["step"]) for state in distinct)
    steps: dict[int, Tensor] = {}
    for state in states:
        step = state["step"]
        if holders[id(step)] > 1 or id(step) in steps:
            refuse_capture(first.device, "parameters are no longer stepped together as before")
            holders[id(step)] -= 1
            step = state["step"] = step.clone()
        steps[id(step)] = step
    return list(steps.values())
