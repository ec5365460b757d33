"""Shared by the host optimizers: steps, rollback, copies."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import repeat
from operator import itemgetter
from typing import Any, TypeVar, overload

import torch
from torch import Tensor

from opkiln.errors import ArgumentError, ArgumentTypeError, UsageError
from opkiln.ops.optimizing.base import ListOptimizer
from opkiln.ops.optimizing.checks import DTYPES, as_number, param_position
from opkiln.ops.optimizing.op_calls import StepCall
from opkiln.ops.optimizing.sharded import gradient_parts, has_shards, placement_text, same_placement
from opkiln.ops.optimizing.stepping import StepHandle

FP32_STATES = "fp32_optimizer_states"
_STEP = itemgetter("step")
_T = TypeVar("_T")


class HostOptimizer(ListOptimizer):
    """Steps parameters in host memory, in one pass over it.

    If ``COUNTED`` is true, the op gets the number of the step.
    """

    DEVICES = ("cpu",)
    DEVICES_TEXT = "in host memory"
    KEPT_ON = ("cpu",)
    OPTIONS = (FP32_STATES,)

    _last: list[StepCall] | None = None  # the calls of the last step, without their gradients
    _pending: StepHandle | None = None
    _opt_called: bool

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self._refuse_in_flight("add_param_group()")
        super().add_param_group(param_group)

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
        self._refuse_in_flight("step()")
        return self._step(closure, copies or {}, grad_scale)

    def step_in_background(
        self, *, copies: Mapping[Tensor, Tensor] | None = None, grad_scale: float = 1.0
    ) -> StepHandle:
        """Begin a step as ``step()`` makes it, and return a handle to wait for it.

        Gradients and hyperparameters are read and checked before this returns. The step itself is
        made in a separate thread, which uses torch's threads. Until the handle says that it is
        done, do not touch parameters, states, copies or the memory of gradients (``zero_grad()`` is
        fine). Meanwhile every other method raises UsageError. Hooks of ``step()`` are not called.
        """
        self._refuse_in_flight("step_in_background()")
        with torch.no_grad():
            calls = self._calls(copies or {}, grad_scale)
        self._load("cpu")  # in this thread, because it may have to be built

        def work() -> None:
            with torch.no_grad():  # each thread has its own setting
                self._make(calls)

        self._opt_called = True  # step() also sets it, for learning rate schedulers
        self._pending = StepHandle(work)
        return self._pending

    def rollback(self) -> None:
        """Undo the last step, once: parameters, states, step counts and the copies it wrote.

        The gradients must still be those of that step. Its learning rate and other numbers are
        remembered. The result differs from the values before the step by rounding only (the bound
        is in the docstring of the op's reference). Raises UsageError, and changes nothing, if there
        is no step to undo or a gradient is missing.
        """
        self._refuse_in_flight("rollback()")
        if self._last is None:
            raise UsageError("there is no step to roll back: none was made since the last rollback")
        calls = []
        for call in self._last:
            gradients = self._gradients(call)
            if gradients is None:
                raise UsageError(
                    "a gradient of the last step is missing, so the step cannot be rolled back",
                    hint="call rollback() before zero_grad()",
                )
            function = f"{call.function}rollback_"
            calls.append(call._replace(function=function, gradients=gradients))
        with torch.no_grad():
            for call in calls:
                super()._run(call)
                _set_counts(call.states, call.step - 1)
        self._last = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's. Does not write to gradients while a step in the background reads them."""
        if not set_to_none:
            self._refuse_in_flight("zero_grad(set_to_none=False)")
        super().zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """As torch's. ``step`` is a 0-dim fp32 tensor there, and a plain int in ``state``."""
        self._refuse_in_flight("state_dict()")
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._refuse_in_flight("load_state_dict()")
        super().load_state_dict(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        self._refuse_in_flight("a copy")
        state: dict[str, Any] = super().__getstate__()
        return state

    # Implementation

    def _refuse_in_flight(self, what: str) -> None:
        if self._pending is not None:
            if self._pending.in_flight:
                raise UsageError(
                    f"{what} was called while a step runs in the background",
                    hint="wait() for the handle that step_in_background() returned",
                )
            pending, self._pending = self._pending, None
            pending.raise_untold()

    def _take_over(self, loaded: dict[str, Any]) -> None:
        self._last = None  # it holds the old states
        super()._take_over(loaded)

    def _count(self, made: float, _: torch.device) -> int:
        return int(made)

    def _initial(self, params: list[Tensor]) -> list[list[Tensor]]:
        value = float(self.defaults.get("initial_accumulator_value", 0))
        return [
            [torch.full_like(p, value, dtype=self._state_dtypes(p)[name]) for p in params]
            for name in self.STATES
        ]

    def _state_dtypes(self, param: Tensor) -> dict[str, torch.dtype]:
        dtype = torch.float32 if self.defaults[FP32_STATES] else param.dtype
        return dict.fromkeys(self.STATES, dtype)

    def _calls(self, copies: Mapping[Tensor, Tensor], grad_scale: float) -> list[StepCall]:
        """One call per group, more if steps or copies differ."""
        if not 0 < as_number("grad_scale", grad_scale) < math.inf:
            raise ArgumentError(f"grad_scale is {grad_scale}, expected a finite number above 0")
        if copies:
            _check_copies(self.param_groups, copies)
        for index, group in enumerate(self.param_groups):
            self._check(group, f"param_groups[{index}]: ")
        found = self._find_calls(keep=not copies)
        # Makes states, so it comes after every check.
        return [
            each for call in found for each in self._add_states(call, copies, float(grad_scale))
        ]

    def _add_states(
        self, call: StepCall, copies: Mapping[Tensor, Tensor], grad_scale: float
    ) -> list[StepCall]:
        """A call with the states of its parameters, as one call for each number of a step, with
        copies or without. Missing states are made."""
        hyper = self._hyper(call)
        hyper["lr"] = float(self.param_groups[call.group]["lr"])
        hyper["grad_scale"] = grad_scale
        if call.kept is not None:
            return [self._number_call(call, call.states[0]["step"] + 1, hyper)]
        states = self._states_of(call.params)
        steps = list(map(_STEP, states))
        if set(map(type, steps)) - {int}:  # a user or torch has set them
            steps = list(map(int, steps))
        found: list[Any] = list(map(copies.get, call.params)) if copies else [None] * len(steps)
        copied = [copy is not None for copy in found]
        calls = []
        for members in _group_equal(list(zip(steps, copied, strict=True)) if copies else steps):
            first = members[0]
            part = call._replace(
                params=_take(call.params, members),
                gradients=[_take(row, members) for row in call.gradients],
                states=_take(states, members),
                rest=[_take(found, members) if copied[first] else []],
            )
            calls.append(self._number_call(part, steps[first] + 1, hyper))
        if len(calls) == 1 and not copies and call.function == self._function:
            return [self._use_kept(calls[0])]
        return calls

    def _number_call(self, call: StepCall, step: int, hyper: dict[str, Any]) -> StepCall:
        return call._replace(step=step, hyper={**hyper, "step": step} if self.COUNTED else hyper)

    def _make(self, calls: Sequence[StepCall]) -> None:
        self._last = []
        super()._make(calls)

    def _run(self, call: StepCall) -> None:
        super()._run(call)
        _set_counts(call.states, call.step)
        assert self._last is not None
        self._last.append(call._replace(gradients=[], kept=None))

    def _gradients(self, call: StepCall) -> list[list[Tensor]] | None:
        """The gradients, as the lists of a call; None if one is missing or of another layout."""
        params = call.params
        grads: list[Any] = [param.grad for param in params]
        if any(grad is None or grad.layout is not torch.strided for grad in grads):
            return None
        return [gradient_parts(params, grads, _name_by_shape) if has_shards(params) else grads]


def _set_counts(states: list[dict[str, Any]], step: int) -> None:
    # dict's own method does not notify: the kept lists stay valid, because all states change alike.
    deque(map(dict.__setitem__, states, repeat("step"), repeat(step)), maxlen=0)


def _name_by_shape(param: Tensor) -> str:
    return f"a parameter of shape {tuple(param.shape)}"


def _group_equal(keys: Sequence[Hashable]) -> list[Sequence[int]]:
    """The positions of equal keys, for each distinct key."""
    if keys and keys.count(keys[0]) == len(keys):
        return [range(len(keys))]
    return [[i for i, other in enumerate(keys) if other == key] for key in dict.fromkeys(keys)]


def _take(items: list[_T], members: Sequence[int]) -> list[_T]:
    """The items at these positions, in a new list."""
    return items[:] if len(members) == len(items) else [items[i] for i in members]


def _check_copies(groups: list[dict[str, Any]], copies: Mapping[Tensor, Tensor]) -> None:
    """Raises UsageError for a copy of the wrong kind, or of a tensor that is not in the groups."""
    unknown = set(copies).difference(*(group["params"] for group in groups))
    if unknown:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in unknown)
        raise ArgumentError(
            f"unexpected keys in copies, of shapes {shapes}: they are not parameters in the groups"
        )
    for index, group in enumerate(groups):
        for i, param in enumerate(group["params"]):
            if (copy := copies.get(param)) is None:
                continue
            name = f"the copy of {param_position(index, group, i)}"
            if copy.device.type != "cpu" or copy.dtype not in DTYPES:
                raise ArgumentTypeError(
                    f"{name} is {copy.dtype} on {copy.device}, "
                    "expected float32, bfloat16 or float16 on the CPU"
                )
            if not same_placement(copy, param):
                raise ArgumentError(
                    f"{name} is {placement_text(copy)}, expected {placement_text(param)}",
                    hint="torch.empty_like(param, dtype=torch.bfloat16)",
                )
            if copy.numel() != param.numel():
                raise ArgumentError(f"{name} has {copy.numel()} elements, not {param.numel()}")
