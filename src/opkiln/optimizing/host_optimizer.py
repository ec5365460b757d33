"""What the host optimizers share: steps, rollback, copies."""

from __future__ import annotations

import math
from itertools import repeat
from operator import attrgetter, is_, itemgetter
from typing import Any, ClassVar, overload

import torch
from torch import Tensor

from opkiln.errors import ArgumentError, UsageError
from opkiln.optimizing.base import ListOptimizer
from opkiln.optimizing.checks import as_number, name_in, sparse_gradient
from opkiln.optimizing.host_calls import Call, Kept, alike, check_copies, dense_gradients, take
from opkiln.optimizing.sharded import gradient_parts, has_shards
from opkiln.optimizing.states import ParamState, Plans
from opkiln.optimizing.stepping import StepHandle

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch.optim.optimizer import ParamsT

FP32_STATES = "fp32_optimizer_states"
_GRAD = attrgetter("grad")
_LAYOUT = attrgetter("layout")
_STEP = itemgetter("step")


class HostOptimizer(ListOptimizer):
    """Steps parameters in host memory, in one pass over it.

    If ``COUNTED`` is true, the op gets the number of the step.
    """

    DEVICES = ("cpu",)
    DEVICES_TEXT = "in host memory"
    OPTIONS = (FP32_STATES,)
    SPARSE: ClassVar[bool] = False  # the op has a function for sparse gradients

    _ops: Any = None
    _plans: Plans[Kept] | None = None
    _last: list[Call] | None = None  # the calls of the last step, without their gradients
    _pending: StepHandle | None = None
    _opt_called: bool

    def __init__(
        self, params: ParamsT, defaults: dict[str, Any], *, fp32_optimizer_states: bool
    ) -> None:
        self._check(defaults)
        super().__init__(params, {**defaults, FP32_STATES: fp32_optimizer_states})

    # A subclass defines these. ``_hyper`` leaves out ``step``, ``lr`` and ``grad_scale``.

    def _initial(self) -> float:
        """The initial value of states."""
        return 0.0

    def _sparse_calls(
        self, index: int, params: list[Tensor], copies: Mapping[Tensor, Tensor]
    ) -> list[Call]:
        """The calls for parameters of a group that have sparse gradients. Raises UsageError."""
        raise NotImplementedError

    def _sparse_gradients(self, params: list[Tensor]) -> list[list[Tensor]] | None:
        """The sparse gradients as the op's function needs them. None if one is missing or dense."""
        raise NotImplementedError

    # What users call

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
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step(copies or {}, grad_scale)
        return loss

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
        self._load()  # in this thread, because it may have to be built

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
            if call.function == self._function:
                gradients = dense_gradients(call.params)
            else:
                gradients = self._sparse_gradients(call.params)
            if gradients is None:
                raise UsageError(
                    "a gradient of the last step is missing, so the step cannot be rolled back",
                    hint="call rollback() before zero_grad()",
                )
            function = f"{call.function}rollback_"
            calls.append(call._replace(function=function, gradients=gradients, kept=None))
        with torch.no_grad():
            for call in calls:
                call.run(self._load(), self.STATES, step_after=call.step - 1)
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

    @property
    def _function(self) -> str:
        return f"{self.BUILDER.NAME}_"

    def _load(self) -> Any:
        """The op's functions."""
        if self._ops is None:
            self._ops = self.BUILDER().load()
        return self._ops

    def _make_step(self, copies: Mapping[Tensor, Tensor], grad_scale: float) -> None:
        self._make(self._calls(copies, grad_scale))

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
        for _, param, state, saved, made in self._new_states(loaded):
            state["step"] = int(made)
            for name in self.STATES:
                tensor = saved[self._saved_name(saved, name)]
                state[name] = tensor.to(device="cpu", dtype=self._state_dtype(param))

    def _state_dtype(self, param: Tensor) -> torch.dtype:
        return torch.float32 if self.defaults[FP32_STATES] else param.dtype

    def _calls(self, copies: Mapping[Tensor, Tensor], grad_scale: float) -> list[Call]:
        """The calls that make up a step: one per group, more if steps or copies differ.

        Everything that Python can check is checked here, before the first call.
        """
        if not 0 < as_number("grad_scale", grad_scale) < math.inf:
            raise ArgumentError(f"grad_scale is {grad_scale}, expected a finite number above 0")
        if copies:
            check_copies(self.param_groups, copies)
        # There are two loops, so that the second makes states only after every check.
        found: list[tuple[list[Tensor], list[Tensor], list[Tensor]]] = []
        for index, group in enumerate(self.param_groups):
            self._check(group, f"param_groups[{index}]: ")
            params: list[Tensor] = group["params"]
            grads: list[Any] = list(map(_GRAD, params))
            if any(map(is_, grads, repeat(None))):
                params = [param for param in params if param.grad is not None]
                grads = list(map(_GRAD, params))
            sparse: list[Tensor] = []
            if set(map(_LAYOUT, grads)) - {torch.strided}:
                if not self.SPARSE:
                    raise sparse_gradient(self.OWNER, index, group)
                sparse = [p for p, g in zip(params, grads, strict=True) if g.is_sparse]
                params = [p for p, g in zip(params, grads, strict=True) if not g.is_sparse]
                grads = list(map(_GRAD, params))
            found.append((params, grads, sparse))
        calls: list[Call] = []
        for index, (params, grads, sparse) in enumerate(found):
            if sparse:
                calls += self._sparse_calls(index, sparse, copies)
            calls += self._dense_calls(index, params, grads, copies)
        scale = float(grad_scale)
        return [call._replace(hyper={**call.hyper, "grad_scale": scale}) for call in calls]

    def _dense_calls(
        self,
        index: int,
        params: list[Tensor],
        grads: list[Tensor],
        copies: Mapping[Tensor, Tensor],
    ) -> list[Call]:
        """The calls for dense gradients. If the parameters are the same again, it is one call with
        kept lists."""
        plans = self._known_plans()
        kept = plans.of_group.get(index)
        if kept is not None and (copies or not kept.fits(params)):
            kept = None
            plans.drop(index)
        # Kept lists know whether there are DTensors among these parameters.
        if has_shards(params) if kept is None else kept.sharded:
            grads = gradient_parts(params, grads, name_in(index, self.param_groups[index]))
        if kept is not None:
            step = kept.step + 1
            hyper = self._hyper_at(step, self.param_groups[index])
            call = Call(self._function, kept.params, [grads], kept.states, [], step, hyper, kept)
            return [call]
        calls = self._calls_of(index, self._function, params, [grads], copies)
        whole = len(calls) == 1 and len(params) == len(self.param_groups[index]["params"])
        if copies or not whole or not plans.again(index, params) or index in plans.of_group:
            return calls
        plans.of_group[index] = kept = (
            Kept.of(self._load(), calls[0], self.STATES) if plans.watch(calls[0].states) else None
        )
        return [calls[0]._replace(kept=kept)]

    def _hyper_at(self, step: int, group: dict[str, Any]) -> dict[str, Any]:
        """The op's scalar arguments without ``grad_scale``."""
        counted = {"step": step} if self.COUNTED else {}
        return {**counted, "lr": float(group["lr"]), **self._hyper(group)}

    def _calls_of(
        self,
        index: int,
        function: str,
        params: list[Tensor],
        gradients: list[list[Tensor]],
        copies: Mapping[Tensor, Tensor],
    ) -> list[Call]:
        """The calls of a function that step parameters of one group."""
        states: list[dict[str, Any]] = list(map(self.state.__getitem__, params))
        if not all(states):
            states = list(map(self._initialised, params))
        steps = list(map(_STEP, states))
        if set(map(type, steps)) - {int}:  # a user or torch has set them
            steps = list(map(int, steps))
        calls = []
        found: list[Any] = list(map(copies.get, params)) if copies else [None] * len(params)
        copied = [copy is not None for copy in found]
        for members in alike(list(zip(steps, copied, strict=True)) if copies else steps):
            first = members[0]
            part = take(params, members)
            step = steps[first] + 1
            calls.append(
                Call(
                    function,
                    params=part,
                    gradients=[take(row, members) for row in gradients],
                    states=take(states, members),
                    copies=take(found, members) if copied[first] else [],
                    step=step,
                    hyper=self._hyper_at(step, self.param_groups[index]),
                )
            )
        return calls

    def _initialised(self, param: Tensor) -> dict[str, Any]:
        """The state of a parameter. It is made if there is none."""
        state: dict[str, Any] = self.state[param]
        if not state:
            dtype = self._state_dtype(param)
            entries: dict[str, Any] = {"step": 0}
            for name in self.STATES:
                entries[name] = torch.full_like(param, self._initial(), dtype=dtype)
            state = self.state[param] = ParamState(entries)
        return state

    def _make(self, calls: list[Call]) -> None:
        self._last = []
        for call in calls:
            if not call.run(self._load(), self.STATES, step_after=call.step):
                self._plans = None
            self._last.append(call._replace(gradients=[], kept=None))
