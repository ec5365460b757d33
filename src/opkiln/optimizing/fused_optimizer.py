"""What the fused optimizers share: calls, states, masters, plans."""

from __future__ import annotations

import math
from collections import Counter
from functools import partial
from itertools import repeat
from operator import attrgetter, is_
from typing import Any, ClassVar, NamedTuple, overload

import torch
from torch import Tensor

from opkiln.errors import ArgumentError
from opkiln.optimizing.base import ListOptimizer
from opkiln.optimizing.checks import MASTER, as_number, name_in, place, sparse_gradient
from opkiln.optimizing.fused_calls import Call, Planned, clipping, moved, run
from opkiln.optimizing.sharded import gradient_parts, has_shards, parts_of, refuse_fsdp1
from opkiln.optimizing.states import (
    ParamState,
    Plans,
    is_capturing,
    refuse_capture,
    shared_steps,
    zeros_like,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch.optim.optimizer import ParamsT

MASTERS = "master_weights"
GRAD_NONE = "set_grad_none"
MAX_NORM = "max_grad_norm"
_GRAD = attrgetter("grad")
_LAYOUT = attrgetter("layout")
_DEVICE = attrgetter("device")


class _Place(NamedTuple):
    """The parameters of a group on one device, and their gradients; local parts for DTensors."""

    group: int
    device: torch.device
    params: list[Tensor]
    grads: list[Tensor]
    sharded: bool  # there are DTensors among the parameters of the group
    plan: Planned | None = None


class FusedOptimizer(ListOptimizer):
    """Steps all parameters of a group and device in one call of an op."""

    DEVICES = ("cpu", "cuda")
    DEVICES_TEXT = "on GPUs and the CPU"
    OPTIONS = (MASTERS, GRAD_NONE, MAX_NORM)
    PLANNED_ON: ClassVar[tuple[str, ...]] = ("cuda",)  # types of devices
    NORMS: ClassVar[bool] = False  # the op needs norms of whole tensors

    # Tells GradScaler to set the attributes grad_scale and found_inf during a step. Neither may
    # exist at any other time.
    _step_supports_amp_scaling = True
    _ops: Mapping[str, Any] = {}  # by type of device
    _plans: Plans[Planned] | None = None

    def __init__(
        self,
        params: ParamsT,
        defaults: dict[str, Any],
        *,
        master_weights: bool,
        set_grad_none: bool,
        max_grad_norm: float,
    ) -> None:
        self._check(defaults)
        if not 0 <= as_number(MAX_NORM, max_grad_norm) < math.inf:
            raise ArgumentError(
                f"max_grad_norm is {max_grad_norm}, expected a finite number of at least 0",
                why="gradients are scaled down to it; 0 leaves them as they are",
            )
        super().__init__(params, defaults)
        self.defaults.update(
            {MASTERS: master_weights, GRAD_NONE: set_grad_none, MAX_NORM: max_grad_norm}
        )
        for index, group in enumerate(self.param_groups):
            self._check_group(index, group)

    # A subclass defines these. ``_hyper`` leaves out the learning rate and what scales gradients.

    def _written(self, group: int, device: torch.device, params: list[Tensor]) -> dict[str, Tensor]:
        """More arguments that the op writes to, in addition to the lists."""
        del group, device, params
        return {}

    # The same for all

    def _check_group(self, index: int, group: dict[str, Any]) -> None:
        if self.NORMS or self.defaults.get(MAX_NORM):
            why = f"{self.OWNER} needs" if self.NORMS else f"{MAX_NORM} needs"
            for i, param in enumerate(group["params"]):
                refuse_fsdp1(why, param, place(index, group, i))

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """As torch's. Without the argument, ``set_grad_none`` decides."""
        super().zero_grad(self.defaults[GRAD_NONE] if set_to_none is None else set_to_none)

    @overload
    def step(self, closure: None = ...) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Make one step. A parameter without a gradient is skipped."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step({}, 1.0)
        return loss

    def _make_step(self, copies: Mapping[Tensor, Tensor], grad_scale: float) -> None:
        del copies, grad_scale  # for host optimizers; these have masters and a scaler instead
        for call in self._prepared():
            call()

    def _prepared(self) -> list[Callable[[], None]]:
        """The calls that make up a step, one per group and device.

        Everything that Python can check is checked here, before the first call.
        """
        plans = self._known_plans()
        places = [
            each
            for index, group in enumerate(self.param_groups)
            for each in self._places(index, group, plans)
        ]
        scales = self._scales(places)
        hypers = [self._numbers(each, scales) for each in places]
        unplanned = [pair for pair in zip(places, hypers, strict=True) if pair[0].plan is None]
        calls = iter(self._calls(unplanned))
        out: list[Callable[[], None]] = []
        for each, hyper in zip(places, hypers, strict=True):
            plan, call = each.plan, None
            if plan is None:
                call = next(calls)
                plan = self._new_plan(plans, each, call)
            if plan is not None:
                out.append(partial(self._run_plan, plan, each, hyper))
            else:
                assert call is not None
                out.append(partial(self._run_call, call))
        return out

    def _places(
        self, index: int, group: dict[str, Any], plans: Plans[Planned] | None
    ) -> list[_Place]:
        params: list[Tensor] = group["params"]
        grads: list[Any] = list(map(_GRAD, params))
        plan = None if plans is None else plans.of_group.get(index)
        if plan is not None and is_capturing(plan.device):
            plan = None  # a graph may outlive the plan, so this step uses lists; the plan stays
        if plan is not None and not plan.fits(params):
            assert plans is not None
            plans.drop(index)
            plan = None
        sharded = has_shards(params) if plan is None else plan.sharded
        if sharded:
            grads = gradient_parts(params, grads, name_in(index, group))
        missing = any(map(is_, grads, repeat(None)))
        if plan is not None and not missing:
            # The op itself notices a sparse gradient. With several groups that is too late: another
            # group may have been stepped by then. Clipping also reads the gradients first.
            if len(self.param_groups) > 1 or self.defaults[MAX_NORM]:
                self._refuse_sparse(index, group, grads)
            return [_Place(index, plan.device, params, grads, sharded, plan)]
        if missing:
            params = [param for param in params if param.grad is not None]
            grads = [grad for grad in grads if grad is not None]
        self._refuse_sparse(index, group, grads)
        devices = list(dict.fromkeys(map(_DEVICE, params)))
        if len(devices) == 1:
            # A copy: plans compare later parameters with it, and the group's own list may change.
            return [_Place(index, devices[0], params[:], grads, sharded)]
        return [
            _Place(
                index,
                device,
                [param for param in params if param.device == device],
                [g for param, g in zip(params, grads, strict=True) if param.device == device],
                sharded,
            )
            for device in devices
        ]

    def _refuse_sparse(self, index: int, group: dict[str, Any], grads: list[Tensor]) -> None:
        if any(layout is not torch.strided for layout in set(map(_LAYOUT, grads))):
            raise sparse_gradient(self.OWNER, index, group)

    def _new_plan(self, plans: Plans[Planned], here: _Place, call: Call) -> Planned | None:
        """A plan, if the lists are stepped for the second time: they will probably be again."""
        if here.device.type not in self.PLANNED_ON or is_capturing(here.device):
            return None
        if len(here.params) != len(self.param_groups[here.group]["params"]):
            return None
        if not plans.again(here.group, here.params):
            return None
        if here.group not in plans.of_group:
            function = getattr(self._load(here.device.type), f"{self.BUILDER.NAME}_plan", None)
            plans.of_group[here.group] = (
                Planned.of(function, call, self.STATES)
                if function is not None and plans.watch(call.states)
                else None
            )
        return plans.of_group[here.group]

    def _run_plan(self, plan: Planned, here: _Place, hyper: dict[str, Any]) -> None:
        op = getattr(self._load(here.device.type), f"{self.BUILDER.NAME}_planned_")
        if plan.run(op, here.grads, hyper):
            return
        # A gradient does not fit the plan. With lists, its layout can be changed.
        places = self._places(here.group, self.param_groups[here.group], None)
        scales = {here.device: hyper["grad_scale"]}
        for call in self._calls([(each, self._numbers(each, scales)) for each in places]):
            self._run_call(call)

    def _run_call(self, call: Call) -> None:
        run(getattr(self._load(call.device.type), f"{self.BUILDER.NAME}_"), call, self.STATES)

    def _calls(self, places: list[tuple[_Place, dict[str, Any]]]) -> list[Call]:
        """The calls for these places, each given with the op's other arguments. Missing states are
        made."""
        if not places:
            return []
        found = []
        for here, _ in places:
            states = list(map(self.state.__getitem__, here.params))
            if not all(states):
                states = self._initialise(here.params)
            masters = self._masters(here.params, states)
            found.append((states, parts_of(masters) if here.sharded else masters))
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
        calls = []
        for (here, hyper), (states, masters) in zip(places, found, strict=True):
            parts = parts_of(here.params) if here.sharded else here.params
            steps = shared_steps(states, holders)
            calls.append(
                Call(here.device, here.params, parts, here.grads, states, masters, steps, hyper)
            )
        return calls

    def _initialise(self, params: list[Tensor]) -> list[dict[str, Any]]:
        """Make the missing states, with zeros. They share one count of steps, which is 0."""
        refuse_capture(params[0].device, "parameters have no state yet")
        new = [param for param in dict.fromkeys(params) if not self.state[param]]
        step = torch.zeros((), dtype=torch.float32, device=params[0].device)
        rows = [zeros_like(new) for _ in self.STATES]
        for param, *tensors in zip(new, *rows, strict=True):
            entries = {"step": step, **dict(zip(self.STATES, tensors, strict=True))}
            self.state[param] = ParamState(entries)
        return [self.state[param] for param in params]

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

    def _numbers(
        self, here: _Place, scales: Mapping[torch.device, Tensor | None]
    ) -> dict[str, Any]:
        """The op's arguments in addition to the lists."""
        group, device = self.param_groups[here.group], here.device
        lr = group["lr"]
        # A tensor in host memory is read now, because the device cannot see its changes.
        on_device = isinstance(lr, Tensor) and lr.device.type == device.type
        number = 0.0 if on_device else float(lr)
        found_inf = getattr(self, "found_inf", None)
        if not 0 <= number < math.inf:
            raise ArgumentError(
                f"param_groups[{here.group}]: lr is {number}, "
                "expected a finite number of at least 0"
            )
        return {
            **self._hyper(group),
            **self._written(here.group, device, here.params),
            "lr": number,
            "lr_tensor": moved(device, lr) if on_device else None,
            "grad_scale": scales[device],
            "found_inf": None if found_inf is None else moved(device, found_inf),
        }

    def _scales(self, places: list[_Place]) -> dict[torch.device, Tensor | None]:
        """The divisor of gradients on each device: the scaler's scale, times the factor that brings
        their norm down to ``max_grad_norm``. Does not wait for a GPU."""
        devices = dict.fromkeys(here.device for here in places)
        scale = getattr(self, "grad_scale", None)
        limit = self.defaults[MAX_NORM]
        if limit and places:
            scale = clipping([(here.params, here.grads) for here in places], scale, limit)
        return {device: None if scale is None else moved(device, scale) for device in devices}

    def _take_over(self, loaded: dict[str, Any]) -> None:
        # Equal counts of a group share a tensor.
        counts: dict[tuple[int, torch.device, float], Tensor] = {}
        for group, param, state, saved, made in self._new_states(loaded):
            for name in (*self.STATES, *((MASTER,) if self._has_master(param) else ())):
                if name in saved:
                    state[name] = saved[name].to(device=param.device, dtype=torch.float32)
            count = (group, param.device, float(made))
            if count not in counts:
                counts[count] = torch.tensor(count[2], dtype=torch.float32, device=count[1])
            state["step"] = counts[count]

    def _load(self, kind: str) -> Any:
        if kind not in self._ops:
            backend = kind if kind == "cpu" or torch.version.hip is None else "rocm"
            self._ops = {**self._ops, kind: self.BUILDER(backend=backend).load()}
        return self._ops[kind]
