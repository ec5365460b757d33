"""``FusedAdam``: the optimizer over ``fused_adam``, with the arguments of DeepSpeed's."""

from __future__ import annotations

from collections import Counter
from operator import attrgetter
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor

from opkiln.errors import UsageError
from opkiln.ops.cpu_adam.layout import lay_out_alike
from opkiln.ops.param_groups import (
    check_dtypes,
    check_hyperparameters,
    place,
    sparse_gradient,
    taking_over,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch.optim.optimizer import ParamsT

_MASTERS = "master_weights"
_GRAD_NONE = "set_grad_none"
_MASTER = "master_param"
_AVERAGES = ("exp_avg", "exp_avg_sq")
_LAYOUT = attrgetter("layout")
_DEVICE = attrgetter("device")


class _Call(NamedTuple):
    """One call of the op, for the parameters of one group on one device."""

    device: torch.device
    params: list[Tensor]
    grads: list[Tensor]
    states: list[dict[str, Any]]
    masters: list[Tensor]
    steps: list[Tensor]
    hyper: dict[str, Any]


class FusedAdam(torch.optim.Optimizer):
    """Adam (``adam_w_mode=False``) or AdamW, all parameters of a group and device in one call.

    Parameters are fp32, bf16 or fp16, on GPUs or the CPU, mixed as you like. States and arithmetic
    are fp32. With ``master_weights``, 16-bit parameters have an fp32 copy in their state which is
    stepped in their place. State dicts are interchangeable with those of ``torch.optim.Adam`` and
    ``AdamW``.

    A step on GPUs never waits for them, and can be captured in a CUDA graph after one that was not:
    the count of steps is on the device, and ``lr`` is read there, at each replay, where it is a
    tensor on the parameters' device. ``torch.amp.GradScaler`` hands its scale and its finding of
    infinite gradients to the op: where one was found nothing changes and the step is not counted.
    Gradients are not written to. Parameters that have made all their steps together share the
    tensor ``step`` of their states: replace it there rather than write to it.
    The native op is loaded (and built, if need be) at the first step; where it cannot be had the
    PyTorch reference serves, with one warning.

    Raises UsageError, naming the argument or parameter: a hyperparameter out of range,
    ``amsgrad=True``, a parameter elsewhere or of another type, a sparse gradient, a capture that
    would have to make states.
    """

    # GradScaler then sets the attributes grad_scale and found_inf for the time of a step, and must
    # find neither at any other.
    _step_supports_amp_scaling = True
    _ops: Mapping[str, Any] = {}  # by type of device

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        *,
        maximize: bool = False,
        master_weights: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "decoupled_weight_decay": adam_w_mode,  # torch's name for it: state dicts carry it over
            "maximize": maximize,
        }
        check_hyperparameters("FusedAdam", defaults)
        super().__init__(params, defaults)
        # Not a group's: how this process keeps states is not for a checkpoint to say.
        self.defaults.update({_MASTERS: master_weights, _GRAD_NONE: set_grad_none})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        index = len(self.param_groups) - 1
        group = self.param_groups[index]
        try:
            group.pop(_MASTERS, None)
            group.pop(_GRAD_NONE, None)
            check_hyperparameters("FusedAdam", group)
            check_dtypes(index, group)
            for i, param in enumerate(group["params"]):
                if param.device.type not in ("cpu", "cuda"):
                    raise UsageError(
                        f"{place(index, group, i)} is on {param.device}: "
                        "FusedAdam steps parameters on GPUs and the CPU",
                        hint="torch.optim.AdamW(params)",
                    )
        except UsageError:
            self.param_groups.pop()
            raise

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """As torch's; what ``set_grad_none`` said unless the argument is given."""
        super().zero_grad(self.defaults[_GRAD_NONE] if set_to_none is None else set_to_none)

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
        with torch.no_grad():
            for call in self._calls():
                _run(self._load(call.device.type).fused_adam_, call)
        return loss

    def state_dict(self) -> dict[str, Any]:
        """As torch's: ``step`` is a tensor of each parameter's own there, in host memory."""
        packed = super().state_dict()
        counts: dict[int, Tensor] = {}  # each is fetched from its device once

        def count(step: Any) -> Tensor:
            if id(step) not in counts:
                counts[id(step)] = torch.tensor(float(step), dtype=torch.float32)
            return counts[id(step)].clone()

        packed["state"] = {
            key: {**state, "step": count(state["step"])}
            if isinstance(state, dict) and "step" in state
            else state
            for key, state in packed["state"].items()
        }
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state dict of this class, ``torch.optim.Adam(W)`` or DeepSpeed's FusedAdam.

        Unlike torch's own, this keeps fp32 states of 16-bit parameters fp32.
        """
        with taking_over("FusedAdam", self, self._take_over):
            super().load_state_dict(state_dict)

    def _take_over(self, loaded: dict[str, Any]) -> None:
        for group, saved_group in zip(self.param_groups, loaded["param_groups"], strict=True):
            for key, value in self.defaults.items():
                if key not in {_MASTERS, _GRAD_NONE}:
                    group.setdefault(key, value)
            counts: dict[tuple[torch.device, float], Tensor] = {}  # equal ones are shared
            for key, param in zip(saved_group["params"], group["params"], strict=True):
                saved = loaded["state"].get(key)
                if not saved:
                    continue
                state = self.state[param]
                state.pop(_MASTER, None)
                for name in (*_AVERAGES, *((_MASTER,) if self._has_master(param) else ())):
                    if name in saved:
                        state[name] = saved[name].to(device=param.device, dtype=torch.float32)
                made = saved.get(
                    "step", saved_group.get("step", 0)
                )  # DeepSpeed had it in the group
                count = (param.device, float(made))
                if count not in counts:
                    counts[count] = torch.tensor(count[1], dtype=torch.float32, device=count[0])
                state["step"] = counts[count]

    def _load(self, kind: str) -> Any:
        if kind not in self._ops:
            from opkiln.ops.fused_adam.op import FusedAdamBuilder

            backend = kind if kind == "cpu" or torch.version.hip is None else "rocm"
            self._ops = {**self._ops, kind: FusedAdamBuilder(backend=backend).load()}
        return self._ops[kind]

    def _has_master(self, param: Tensor) -> bool:
        return self.defaults[_MASTERS] and param.dtype != torch.float32

    def _calls(self) -> list[_Call]:
        """The calls that make up a step: one per group and device.

        Everything that Python can see to be wrong is raised here, before any of them is made.
        """
        calls: list[_Call] = []
        for index, group in enumerate(self.param_groups):
            params: list[Tensor] = group["params"]
            grads: list[Any] = [param.grad for param in params]
            if any(grad is None for grad in grads):
                params = [param for param in params if param.grad is not None]
                grads = [param.grad for param in params]
            if any(layout is not torch.strided for layout in set(map(_LAYOUT, grads))):
                raise sparse_gradient("FusedAdam", index, group)
            for device in dict.fromkeys(map(_DEVICE, params)):
                here, gradients = params, grads
                if any(other != device for other in map(_DEVICE, params)):
                    here = [param for param in params if param.device == device]
                    gradients = [param.grad for param in here]
                states = [self.state[param] for param in here]
                if not all(states):
                    self._initialise(here, states)
                masters, hyper = self._masters(here, states), self._hyper(group, device)
                calls.append(_Call(device, here, gradients, states, masters, [], hyper))
        # Whoever holds a count has a say in it: parameters of other groups, those without a
        # gradient, and those that were taken out of their group and may come back.
        holders = Counter(
            [
                id(state["step"])
                for state in self.state.values()
                if isinstance(state, dict) and "step" in state  # torch lets users keep things there
            ]
        )
        return [call._replace(steps=_steps(call.states, holders)) for call in calls]

    def _initialise(self, params: list[Tensor], states: list[dict[str, Any]]) -> None:
        """Zeros for those without a state; they share a count of steps, having made none."""
        _refuse_capture(params[0].device, "parameters have no state yet")
        step = torch.zeros((), dtype=torch.float32, device=params[0].device)
        for param, state in zip(params, states, strict=True):
            if not state:
                state["step"] = step
                for name in _AVERAGES:
                    state[name] = torch.zeros_like(param, dtype=torch.float32, requires_grad=False)

    def _masters(self, params: list[Tensor], states: list[dict[str, Any]]) -> list[Tensor]:
        if not self.defaults[_MASTERS]:
            return []
        masters = []
        for param, state in zip(params, states, strict=True):
            if not self._has_master(param):
                masters.append(param.new_empty(0))
                continue
            if _MASTER not in state:
                _refuse_capture(param.device, "parameters have no master yet")
                state[_MASTER] = param.detach().to(torch.float32, copy=True)
            masters.append(state[_MASTER])
        return masters

    def _hyper(self, group: dict[str, Any], device: torch.device) -> dict[str, Any]:
        """The op's other arguments."""
        beta1, beta2 = group["betas"]
        lr = group["lr"]
        # A tensor in host memory is read now: the device could not follow its changes.
        on_device = isinstance(lr, Tensor) and lr.device.type == device.type
        return {
            "lr": 0.0 if on_device else float(lr),
            "lr_tensor": _at(device, lr) if on_device else None,
            "beta1": float(beta1),
            "beta2": float(beta2),
            "eps": float(group["eps"]),
            "weight_decay": float(group["weight_decay"]),
            "adamw_mode": group["decoupled_weight_decay"],
            "bias_correction": group["bias_correction"],
            "maximize": group["maximize"],
            "grad_scale": _at(device, getattr(self, "grad_scale", None)),
            "found_inf": _at(device, getattr(self, "found_inf", None)),
        }


def _at(device: torch.device, number: Tensor | None) -> Tensor | None:
    """The number where the op wants it; itself, mostly."""
    if number is None:
        return None
    wide = number.dtype if number.dtype == torch.float64 else torch.float32
    # Towards the CPU it must have arrived when the op reads it; the GPU's stream keeps the order.
    return number.to(device=device, dtype=wide, non_blocking=device.type == "cuda")


def _steps(states: list[dict[str, Any]], holders: Counter[int]) -> list[Tensor]:
    """The counts of steps: one where all share one, otherwise one for each, no two the same.

    ``holders`` is how many states hold a count, by its id. A count that states outside this call
    hold, too, is left to them, and these states get a copy.
    """
    first: Tensor = states[0]["step"]
    if all(state["step"] is first for state in states):
        here = len(set(map(id, states)))  # a group may name a parameter twice
        if holders[id(first)] > here:
            _refuse_capture(first.device, "parameters that were stepped together no longer are")
            holders[id(first)] -= here
            first = first.clone()
            for state in states:
                state["step"] = first
        return [first]
    steps: dict[int, Tensor] = {}
    for state in states:
        step = state["step"]
        if holders[id(step)] > 1 or id(step) in steps:
            _refuse_capture(first.device, "parameters that were stepped together no longer are")
            holders[id(step)] -= 1
            step = state["step"] = step.clone()
        steps[id(step)] = step
    return list(steps.values())


def _refuse_capture(device: torch.device, why: str) -> None:
    """Raises UsageError while a graph is captured: each replay would make the new tensor again."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise UsageError(
            f"the step cannot be captured: {why}",
            why="what a step makes for later ones would be made anew at each replay",
            hint="call step() once, with the same gradients present, before the capture",
        )


def _run(op: Callable[..., None], call: _Call) -> None:
    lists = [
        call.params,
        call.grads,
        *([state[name] for state in call.states] for name in _AVERAGES),
    ]
    try:
        op(*lists, call.masters, call.steps, **call.hyper)
    except RuntimeError:
        # The op refuses before it writes. Looking at all layouts first would cost every step.
        places = _pick(call.masters, call.masters, call.params)
        laid = lay_out_alike(*lists, *([places] if places else []))
        if laid is None:
            raise
        rows = laid.lists
        masters = _pick(call.masters, rows[-1], call.masters)
        op(*rows[:4], masters, call.steps, **call.hyper)
        for i, state in enumerate(call.states):
            state["exp_avg"], state["exp_avg_sq"] = rows[2][i], rows[3][i]
            if _MASTER in state and masters:
                state[_MASTER] = masters[i]
        for staged in laid.staged:
            staged.write_back()


def _pick(masters: list[Tensor], there: list[Tensor], absent: list[Tensor]) -> list[Tensor]:
    """For each master one of the first list where there is one, of the second where there is none.

    (None is a tensor without elements; no masters at all are an empty list.)
    """
    return [there[i] if master.numel() else absent[i] for i, master in enumerate(masters)]
