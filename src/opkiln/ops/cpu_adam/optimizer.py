"""``CPUAdam``: the optimizer over ``cpu_adam``, a drop-in for ``torch.optim.Adam`` and ``AdamW``."""

from __future__ import annotations

import math
from collections import defaultdict
from itertools import chain
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor

from opkiln.errors import UsageError
from opkiln.ops.cpu_adam.layout import Staged, lay_out_alike

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch.optim.optimizer import ParamsT

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class _Stepped(NamedTuple):
    """What a call of the op was about, kept so that it can be undone. Holds no gradient."""

    params: list[Tensor]
    copies: list[Tensor]
    hyper: dict[str, Any]


class _Call(NamedTuple):
    stepped: _Stepped
    states: list[dict[str, Any]]
    tensors: tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]
    staged: list[Staged]


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
    _last: list[_Stepped] | None = None

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
        _check_hyperparameters(defaults)
        super().__init__(params, defaults)
        # Not a group's: how this process keeps states is not for a checkpoint to say.
        self.defaults["fp32_optimizer_states"] = fp32_optimizer_states

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        try:
            group = self.param_groups[-1]
            _check_hyperparameters(group)
            for i, param in enumerate(group["params"]):
                name = _name(len(self.param_groups) - 1, group, i)
                if param.device.type != "cpu":
                    raise UsageError(
                        f"{name} is on {param.device}: CPUAdam steps parameters in host memory",
                        hint="torch.optim.AdamW(params, fused=True)",
                    )
                if param.dtype not in _DTYPES:
                    raise UsageError(
                        f"{name} has dtype {param.dtype}, expected float32, bfloat16 or float16"
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
            ops = self._load() if calls else None
            self._last = []
            for call in calls:
                ops.cpu_adam_(*call.tensors, call.stepped.copies, **call.stepped.hyper)
                _finish(call, call.stepped.hyper["step"])
                self._last.append(call.stepped)
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
        with torch.no_grad():
            calls = []
            for stepped in self._last:
                if any(param.grad is None for param in stepped.params):
                    raise UsageError(
                        "a gradient of the last step is gone, and without it the step cannot be "
                        "rolled back",
                        hint="call rollback() before zero_grad()",
                    )
                calls.append(self._call(stepped, [param.grad for param in stepped.params]))
            for call in calls:
                self._load().cpu_adam_rollback_(
                    *call.tensors, call.stepped.copies, **call.stepped.hyper
                )
                _finish(call, call.stepped.hyper["step"] - 1)
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
        seen: dict[str, Any] = {}

        # Last of the hooks before and first of those after: it sees what the user's hooks made of
        # the state dict, and they see the states as they will be.
        def before(_: torch.optim.Optimizer, loaded: dict[str, Any]) -> None:
            for index, group in enumerate(loaded["param_groups"]):
                _check_hyperparameters({**self.defaults, **group}, f"param_groups[{index}]: ")
            seen.update(loaded)

        def after(_: torch.optim.Optimizer) -> None:
            self._take_over(seen)

        handles = (
            self.register_load_state_dict_pre_hook(before),
            self.register_load_state_dict_post_hook(after, prepend=True),
        )
        try:
            super().load_state_dict(state_dict)
        finally:
            for handle in handles:
                handle.remove()

    def _take_over(self, loaded: dict[str, Any]) -> None:
        self._last = None
        for group in self.param_groups:
            for key, value in self.defaults.items():
                if key != "fp32_optimizer_states":
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
        return torch.float32 if self.defaults["fp32_optimizer_states"] else param.dtype

    def _calls(self, copies: Mapping[Tensor, Tensor], grad_scale: float) -> list[_Call]:
        """The calls that make up a step: one per group, more where steps or copies differ.

        Everything that Python can see to be wrong is raised here, before any of them is made.
        """
        calls = []
        found = 0
        for index, group in enumerate(self.param_groups):
            params, grads = group["params"], [param.grad for param in group["params"]]
            for i, grad in enumerate(grads):
                if grad is not None and grad.layout is not torch.strided:
                    raise UsageError(
                        f"the gradient of {_name(index, group, i)} is sparse "
                        f"({grad.layout}); CPUAdam takes dense gradients only",
                        hint="torch.optim.SparseAdam(params)",
                    )
            if any(grad is None for grad in grads):
                params = [p for p, g in zip(params, grads, strict=True) if g is not None]
                grads = [g for g in grads if g is not None]
            if not params:
                continue
            hyper = _hyper(group, grad_scale)
            steps = [self._state(param)["step"] for param in params]
            present = [p in copies for p in params] if copies else [False] * len(params)
            found += sum(present)
            if steps.count(steps[0]) == len(steps) and len(set(present)) == 1:
                out = [copies[p] for p in params] if present[0] else []
                stepped = _Stepped(params, out, {**hyper, "step": steps[0] + 1})
                calls.append(self._call(stepped, grads))
                continue
            parts: dict[tuple[int, bool], list[int]] = defaultdict(list)
            for i, key in enumerate(zip(steps, present, strict=True)):
                parts[key].append(i)
            for (step, has_copy), members in parts.items():
                part = [params[i] for i in members]
                out = [copies[p] for p in part] if has_copy else []
                stepped = _Stepped(part, out, {**hyper, "step": step + 1})
                calls.append(self._call(stepped, [grads[i] for i in members]))
        return calls
