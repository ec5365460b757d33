"""``CPUAdam``: the optimizer over ``cpu_adam``, with DeepSpeedCPUAdam's arguments."""

from __future__ import annotations

import math
from itertools import chain
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
    from collections.abc import Callable, Mapping, Sequence

    from torch.optim.optimizer import ParamsT

_FP32_STATES = "fp32_optimizer_states"
_LAYOUT = attrgetter("layout")


class _Call(NamedTuple):
    """One call of the op, for parameters of one group that are at the same step."""

    params: list[Tensor]
    grads: list[Tensor]
    states: list[dict[str, Any]]
    copies: list[Tensor]
    hyper: dict[str, Any]


class CPUAdam(torch.optim.Optimizer):
    """Adam (``adamw_mode=False``) or AdamW for parameters in host memory, in one pass over it.

    Parameters are fp32, bf16 or fp16, mixed as you like. Their states are fp32, or of the
    parameter's own type with ``fp32_optimizer_states=False``; arithmetic is fp32 throughout.
    State dicts are interchangeable with those of ``torch.optim.Adam`` and ``AdamW``.
    The native op is loaded (and built, if need be) at the first step; where it cannot be had the
    PyTorch reference serves, with one warning.

    Raises UsageError, naming the argument or parameter: a hyperparameter out of range,
    ``amsgrad=True``, a parameter that is not on the CPU or of another type, a sparse gradient.
    """

    _ops: Any = None
    _last: list[_Call] | None = None  # the calls of the last step, without their gradients

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        maximize: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> None:
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "decoupled_weight_decay": adamw_mode,  # torch's name for it: state dicts carry it over
            "maximize": maximize,
        }
        check_hyperparameters("CPUAdam", defaults)
        super().__init__(params, defaults)
        # Not a group's: how this process keeps states is not for a checkpoint to say.
        self.defaults[_FP32_STATES] = fp32_optimizer_states

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        index = len(self.param_groups) - 1
        group = self.param_groups[index]
        try:
            group.pop(_FP32_STATES, None)
            check_hyperparameters("CPUAdam", group)
            check_dtypes(index, group)
            for i, param in enumerate(group["params"]):
                if param.device.type != "cpu":
                    raise UsageError(
                        f"{place(index, group, i)} is on {param.device}: "
                        "CPUAdam steps parameters in host memory",
                        hint="torch.optim.AdamW(params, fused=True)",
                    )
        except UsageError:
            self.param_groups.pop()
            raise

    @overload
    def step(
        self, closure: None = ..., *, copies: Mapping[Tensor, Tensor] | None = ...,
        grad_scale: float = ...,
    ) -> None: ...  # fmt: skip
    @overload
    def step(
        self, closure: Callable[[], float], *, copies: Mapping[Tensor, Tensor] | None = ...,
        grad_scale: float = ...,
    ) -> float: ...  # fmt: skip
    def step(
        self,
        closure: Callable[[], float] | None = None,
        *,
        copies: Mapping[Tensor, Tensor] | None = None,
        grad_scale: float = 1.0,
    ) -> float | None:
        """Make one step with the gradients divided by ``grad_scale``.

        ``copies`` maps parameters to tensors of the same size (fp32, bf16 or fp16) that receive the
        new values in the same pass, for example the bf16 weights of fp32 master parameters. A
        parameter without a gradient is skipped, and so is its copy.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not (math.isfinite(grad_scale) and grad_scale > 0):
            raise UsageError(f"grad_scale is {grad_scale}, expected a finite number above 0")
        with torch.no_grad():
            calls = self._calls(copies or {}, float(grad_scale))
            self._last = []
            for call in calls:
                _run(self._load().cpu_adam_, call, step_after=call.hyper["step"])
                self._last.append(call._replace(grads=[]))
        return loss

    def rollback(self) -> None:
        """Undo the last step, once: parameters, states, step counts and the copies it wrote.

        The gradients must be those of that step, untouched; its learning rate and the like are
        remembered. What comes back differs from what was there by rounding only (the bound is in
        ``reference.cpu_adam_rollback_``). Raises UsageError when there is no step to undo or a
        gradient is gone, and then changes nothing.
        """
        if self._last is None:
            raise UsageError("there is no step to roll back: none was made since the last rollback")
        calls = []
        for call in self._last:
            grads: list[Any] = [param.grad for param in call.params]
            if any(grad is None for grad in grads):
                raise UsageError(
                    "a gradient of the last step is gone, without which it cannot be rolled back",
                    hint="call rollback() before zero_grad()",
                )
            calls.append(call._replace(grads=grads))
        with torch.no_grad():
            for call in calls:
                _run(self._load().cpu_adam_rollback_, call, step_after=call.hyper["step"] - 1)
        self._last = None

    def state_dict(self) -> dict[str, Any]:
        """As torch's: ``step`` is a 0-dim fp32 tensor there, though a plain int here."""
        packed = super().state_dict()
        packed["state"] = {
            key: {**state, "step": torch.tensor(float(state["step"]), dtype=torch.float32)}
            if "step" in state
            else state
            for key, state in packed["state"].items()
        }
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state dict of this class, ``torch.optim.Adam(W)`` or DeepSpeed's CPUAdam.

        Unlike torch's own, this keeps fp32 states of 16-bit parameters fp32.
        """
        with taking_over("CPUAdam", self, self._take_over):
            super().load_state_dict(state_dict)

    def _take_over(self, loaded: dict[str, Any]) -> None:
        self._last = None
        for group in self.param_groups:
            for key, value in self.defaults.items():
                if key != _FP32_STATES:
                    group.setdefault(key, value)
        keys = chain.from_iterable(group["params"] for group in loaded["param_groups"])
        params = chain.from_iterable(group["params"] for group in self.param_groups)
        for key, param in zip(keys, params, strict=True):
            saved = loaded["state"].get(key)
            if saved:
                state = self.state[param]
                state["step"] = int(saved["step"])
                for name in ("exp_avg", "exp_avg_sq"):
                    state[name] = saved[name].to(device="cpu", dtype=self._state_dtype(param))

    def _load(self) -> Any:
        if self._ops is None:
            from opkiln.ops.cpu_adam.op import CPUAdamBuilder

            self._ops = CPUAdamBuilder().load()
        return self._ops

    def _state_dtype(self, param: Tensor) -> torch.dtype:
        return torch.float32 if self.defaults[_FP32_STATES] else param.dtype

    def _calls(self, copies: Mapping[Tensor, Tensor], grad_scale: float) -> list[_Call]:
        """The calls that make up a step: one per group, more where steps or copies differ.

        Everything that Python can see to be wrong is raised here, before any of them is made.
        """
        if copies:
            strangers = set(copies).difference(*(group["params"] for group in self.param_groups))
            if strangers:
                shapes = ", ".join(str(tuple(tensor.shape)) for tensor in strangers)
                raise UsageError(f"copies has keys that are no parameters here, of shapes {shapes}")
        calls: list[_Call] = []
        for index, group in enumerate(self.param_groups):
            params: list[Tensor] = group["params"]
            grads: list[Any] = [param.grad for param in params]
            if any(grad is None for grad in grads):
                params = [param for param in params if param.grad is not None]
                grads = [param.grad for param in params]
            if any(layout is not torch.strided for layout in set(map(_LAYOUT, grads))):
                raise sparse_gradient("CPUAdam", index, group)
            states = [self.state[param] for param in params]
            if not all(states):
                states = [self._initialised(param) for param in params]
            steps = [int(state["step"]) for state in states]
            copied = [param in copies for param in params] if copies else [False] * len(params)
            for members in _alike(list(zip(steps, copied, strict=True))):
                first = members[0]
                part = [params[i] for i in members]
                calls.append(
                    _Call(
                        params=part,
                        grads=[grads[i] for i in members],
                        states=[states[i] for i in members],
                        copies=[copies[param] for param in part] if copied[first] else [],
                        hyper=_hyper(group, steps[first] + 1, grad_scale),
                    )
                )
        return calls

    def _initialised(self, param: Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[param]
        if not state:
            dtype = self._state_dtype(param)
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(param, dtype=dtype)
            state["exp_avg_sq"] = torch.zeros_like(param, dtype=dtype)
        return state


def _alike(keys: list[tuple[int, bool]]) -> list[Sequence[int]]:
    """The positions of equal keys, for each distinct key."""
    if keys and keys.count(keys[0]) == len(keys):
        return [range(len(keys))]
    return [[i for i, other in enumerate(keys) if other == key] for key in dict.fromkeys(keys)]


def _run(op: Callable[..., None], call: _Call, step_after: int) -> None:
    lists = [
        call.params,
        call.grads,
        [state["exp_avg"] for state in call.states],
        [state["exp_avg_sq"] for state in call.states],
    ]
    try:
        op(*lists, call.copies, **call.hyper)
    except RuntimeError:
        # The op refuses before it writes. Looking at all layouts first would cost every step.
        laid = lay_out_alike(*lists)
        if laid is None:
            raise
        op(*laid.lists, call.copies, **call.hyper)
        for state, exp_avg, exp_avg_sq in zip(call.states, *laid.lists[2:], strict=True):
            state["exp_avg"], state["exp_avg_sq"] = exp_avg, exp_avg_sq
        for staged in laid.staged:
            staged.write_back()
    for state in call.states:
        state["step"] = step_after


def _hyper(group: dict[str, Any], step: int, grad_scale: float) -> dict[str, Any]:
    """The op's scalar arguments. ``lr`` may be a tensor, as schedulers of torch allow."""
    beta1, beta2 = group["betas"]
    return {
        "step": step,
        "lr": float(group["lr"]),
        "beta1": float(beta1),
        "beta2": float(beta2),
        "eps": float(group["eps"]),
        "weight_decay": float(group["weight_decay"]),
        "adamw_mode": group["decoupled_weight_decay"],
        "bias_correction": group["bias_correction"],
        "maximize": group["maximize"],
        "grad_scale": grad_scale,
    }
