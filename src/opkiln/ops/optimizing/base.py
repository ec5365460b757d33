"""The base class of the fused and the host optimizers: groups, calls, kept lists, state dicts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import repeat
from operator import attrgetter, is_
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch._compile import _disable_dynamo  # torch.compiler.disable imports torch._dynamo at once
from torch.optim.optimizer import ParamsT

from opkiln.builder import OpBuilder
from opkiln.builder.base import DeclaredFunctions
from opkiln.errors import ArgumentError, ArgumentTypeError, UsageError
from opkiln.loading.register import is_tracing
from opkiln.ops.optimizing import checks, op_calls
from opkiln.ops.optimizing.sharded import gradient_parts, has_shards, refuse_partial
from opkiln.ops.optimizing.stepping import name_in_graphs, put_into_graph

_KINDS = {"float": float, "bool": bool}
_IN_GROUPS = {"adamw_mode": "decoupled_weight_decay"}  # torch's name, so state dicts have it
_OTHERS = ("lr", "beta1", "beta2", "grad_scale")  # not an entry of a group, or not only a number
_GRAD = attrgetter("grad")
_LAYOUT = attrgetter("layout")
_DEVICE = attrgetter("device")


@cache
def _entries(functions: DeclaredFunctions, function: str) -> dict[str, type[float]]:
    """The arguments of an op's function that are numbers in a group, and their types."""
    kinds = op_calls.arguments_of(functions, function).items()
    return {name: _KINDS[kind] for name, kind in kinds if kind in _KINDS and name not in _OTHERS}


class ListOptimizer(torch.optim.Optimizer):
    """An optimizer whose op steps lists of tensors.

    A subclass says what its op is called, which states it has, and what its hyperparameters are.
    """

    OWNER: ClassVar[str]  # its name in messages
    BUILDER: ClassVar[type[OpBuilder]]  # the op; its function that makes a step is `<NAME>_`
    STATES: ClassVar[tuple[str, ...]]  # in the order of the op's arguments
    DEVICES: ClassVar[tuple[str, ...]]  # types of devices that parameters may be on
    DEVICES_TEXT: ClassVar[str]  # the same in messages
    ALTERNATIVE: ClassVar[str]  # the optimizer to use for parameters on other devices
    KEPT_ON: ClassVar[tuple[str, ...]]  # types of devices on which the op keeps lists
    IN_DEEPSPEED: ClassVar[Mapping[str, str]] = {}  # states that have another name there
    COUNTED: ClassVar[bool] = True  # steps differ by their number: a saved state must have it
    # Options that are in the defaults, which are pickled with the optimizer, but not in the groups:
    # a checkpoint must not decide how this process keeps states.
    OPTIONS: ClassVar[tuple[str, ...]]

    _ops: Mapping[str, Any] = {}  # by type of device
    _name_in_graphs: str

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:  # noqa: ARG004 (those of __init__)
        # This is not in __init__, because copies do not call that.
        made = super().__new__(cls)
        made._name_in_graphs = name_in_graphs(made)
        return made

    def __init__(self, params: ParamsT, **defaults: Any) -> None:
        """``defaults`` has a value for each hyperparameter and each of ``OPTIONS``."""
        self._check(defaults)
        super().__init__(params, defaults)

    # A subclass defines these

    def _calls(self, copies: Mapping[Tensor, Tensor], grad_scale: float) -> list[op_calls.StepCall]:
        """The calls that make up a step.

        Everything that Python can check is checked here, before the first call.
        """
        raise NotImplementedError

    def _count(self, made: float, device: torch.device) -> Any:
        """A count of steps for states on this device."""
        raise NotImplementedError

    def _initial(self, params: list[Tensor]) -> list[list[Tensor]]:
        """New states of these parameters, a list for each of ``STATES``."""
        raise NotImplementedError

    def _state_dtypes(self, param: Tensor) -> dict[str, torch.dtype]:
        """The types that a parameter's states are kept in, by their names."""
        raise NotImplementedError

    def _reads_gradients(self) -> bool:
        """Whether a sparse gradient must be found before the first call."""
        return True

    def _sparse_calls(self, index: int, params: list[Tensor]) -> list[op_calls.StepCall]:
        """The calls for parameters of a group that have sparse gradients, without states. Raises
        UsageError if the op takes none."""
        del params
        group = self.param_groups[index]
        grads = enumerate(map(_GRAD, group["params"]))
        i, grad = next(
            (i, grad) for i, grad in grads if grad is not None and grad.layout != torch.strided
        )
        raise UsageError(
            f"the gradient of {checks.param_position(index, group, i)} is sparse ({grad.layout}); "
            f"{self.OWNER} takes dense gradients only",
            hint="torch.optim.SparseAdam(params)",
        )

    # The same for all

    def _check(self, group: dict[str, Any], where: str = "") -> None:
        """Raises UsageError for a hyperparameter out of range."""
        entries = _entries(self.BUILDER.FUNCTIONS, self._function)
        numbers = [name for name, kind in entries.items() if kind is float]
        checks.check_numbers(group, "lr", *numbers, where=where)
        if "betas" in group:
            checks.check_betas(group, where)

    def _hyper(self, call: op_calls.StepCall) -> dict[str, Any]:
        """The arguments of the op's function after the lists, without the learning rate, the step
        and what scales gradients."""
        group = self.param_groups[call.group]
        # Numbers may be tensors, as torch's schedulers allow.
        hyper = {
            name: kind(group[_IN_GROUPS.get(name, name)])
            for name, kind in _entries(self.BUILDER.FUNCTIONS, call.function).items()
        }
        if "betas" in self.defaults:
            hyper["beta1"], hyper["beta2"] = map(float, group["betas"])
        return hyper

    def _check_param(self, param: Tensor, name: str) -> None:
        """Raises UsageError for a parameter that this optimizer cannot step."""
        if param.dtype not in checks.DTYPES:
            raise ArgumentTypeError(
                f"{name} has dtype {param.dtype}, expected float32, bfloat16 or float16"
            )
        refuse_partial(param, name)
        if param.device.type not in self.DEVICES:
            raise ArgumentError(
                f"{name} is on {param.device}: {self.OWNER} steps parameters {self.DEVICES_TEXT}",
                hint=self.ALTERNATIVE,
            )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's. If it raises UsageError, nothing is added."""
        super().add_param_group(param_group)
        index = len(self.param_groups) - 1
        group = self.param_groups[index]
        try:
            for name in self.OPTIONS:
                group.pop(name, None)
            self._check(group)
            for i, param in enumerate(group["params"]):
                self._check_param(param, checks.param_position(index, group, i))
        except UsageError:
            self.param_groups.pop()
            raise

    def state_dict(self) -> dict[str, Any]:
        """As torch's. Each parameter has its own ``step`` there, a 0-dim fp32 tensor on the CPU."""
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
        """Load a state dict of this class, or of torch's or DeepSpeed's optimizer of the same rule.

        Unlike torch's own, this keeps fp32 states of 16-bit parameters fp32.
        """
        seen: dict[str, Any] = {}

        # The last hook before loading and the first one after: it sees the state dict as the user's
        # hooks left it, and the user's later hooks see the final states. In between, torch casts
        # the states to the parameters' own types.
        def check(_: torch.optim.Optimizer, loaded: dict[str, Any]) -> None:
            self._check_loaded(loaded)
            seen.update(loaded)

        handles = (
            self.register_load_state_dict_pre_hook(check),
            self.register_load_state_dict_post_hook(lambda _: self._take_over(seen), prepend=True),
        )
        try:
            super().load_state_dict(state_dict)
        finally:
            for handle in handles:
                handle.remove()

    def _check_loaded(self, loaded: dict[str, Any]) -> None:
        """Raises UsageError for a state dict that cannot be taken over."""
        checks.check_form(self.OWNER, loaded)
        for index, group in enumerate(loaded["param_groups"][: len(self.param_groups)]):
            where = f"param_groups[{index}]: "
            checks.check_saved_group(self.OWNER, self.defaults, group, where)
            self._check({**self.defaults, **group}, where)
        for _, key, param, saved, made in self._read_saved(loaded):
            names = [self._saved_name(saved, name) for name in self.STATES]
            checks.check_saved_state(self.OWNER, saved, f"state[{key!r}]: ", param, names, made)

    def _read_saved(
        self, loaded: dict[str, Any]
    ) -> Iterator[tuple[int, Any, Tensor, dict[str, Any], Any]]:
        """The states in a state dict: the index of the group, the key, the parameter, the state and
        its count of steps, None if that is missing."""
        # If the numbers of groups or parameters differ, torch reports that next.
        pairs = zip(loaded["param_groups"], self.param_groups, strict=False)
        for index, (group, ours) in enumerate(pairs):
            # DeepSpeed's fused optimizers, and old versions of its others, have the count here.
            shared = group.get("step", None if self.COUNTED else 0)
            for key, param in zip(group["params"], ours["params"], strict=False):
                if saved := loaded["state"].get(key):
                    yield index, key, param, saved, saved.get("step", shared)

    def _saved_name(self, saved: dict[str, Any], name: str) -> str:
        """The name of a state in a state dict that is being loaded."""
        there = self.IN_DEEPSPEED.get(name, name)
        return there if name not in saved and there in saved else name

    def _take_over(self, loaded: dict[str, Any]) -> None:
        """Take over the states of a state dict that torch has just loaded. Another rule's entries
        are dropped."""
        for group in self.param_groups:
            for key, value in self.defaults.items():
                if key not in self.OPTIONS:
                    group.setdefault(key, value)
        counts: dict[tuple[int, torch.device, float], Any] = {}  # equal ones of a group are shared
        for index, _, param, saved, made in self._read_saved(loaded):
            state = op_calls.ParamState(checks.own_entries(self.state[param], param, self.STATES))
            state.pop(checks.MASTER, None)
            self.state[param] = state
            for name, dtype in self._state_dtypes(param).items():
                if (there := self._saved_name(saved, name)) in saved:
                    state[name] = saved[there].to(device=param.device, dtype=dtype)
            if (count := (index, param.device, float(made))) not in counts:
                counts[count] = self._count(float(made), param.device)
            state["step"] = counts[count]

    # Steps

    def _load(self, kind: str) -> Any:
        """The op's functions for this type of device."""
        if kind not in self._ops:
            backend = kind if kind == "cpu" or torch.version.hip is None else "rocm"
            self._ops = {**self._ops, kind: self.BUILDER(backend=backend).load()}
        return self._ops[kind]

    @property
    def _function(self) -> str:
        """The op's function that makes a step."""
        return f"{self.BUILDER.NAME}_"

    def _step(
        self,
        closure: Callable[[], float] | None,
        copies: Mapping[Tensor, Tensor],
        grad_scale: float,
    ) -> float | None:
        """Make a step after the closure, and return the closure's result."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # A step with copies is not in the graph: torch.compile requires the keys of a dictionary,
        # and their gradients, to stay the same objects.
        if not is_tracing():
            with torch.no_grad():
                self._make_step(copies, grad_scale)
        elif copies or not put_into_graph(self, grad_scale):
            self._step_outside_the_graph(copies, grad_scale)
        return loss

    @_disable_dynamo
    def _step_outside_the_graph(self, copies: Mapping[Tensor, Tensor], grad_scale: float) -> None:
        self._step(None, copies, grad_scale)

    def _make_step(self, copies: Mapping[Tensor, Tensor], grad_scale: float) -> None:
        self._make(self._calls(copies, grad_scale))

    def _make(self, calls: Sequence[op_calls.StepCall]) -> None:
        for call in calls:
            self._run(call)

    def _run(self, call: op_calls.StepCall) -> None:
        ops = self._load(call.device.type)
        if call.run_kept(ops):
            return
        if call.kept is not None:
            self._plans.forget()
        call.run_lists(ops, self.STATES)

    def _states_of(self, params: list[Tensor]) -> list[dict[str, Any]]:
        """The states of parameters on one device. Missing ones are made; no step is counted in
        them."""
        states: list[dict[str, Any]] = list(map(self.state.__getitem__, params))
        if all(states):
            return states
        device = params[0].device
        op_calls.refuse_capture(device, "parameters have no state yet")
        new = [param for param in dict.fromkeys(params) if not self.state[param]]
        step = self._count(0, device)
        for param, *tensors in zip(new, *self._initial(new), strict=True):
            entries = {"step": step, **dict(zip(self.STATES, tensors, strict=True))}
            self.state[param] = op_calls.ParamState(entries)
        return [self.state[param] for param in params]

    def _find_calls(self, keep: bool = True) -> list[op_calls.StepCall]:
        """The calls for all gradients. Calls that are not over kept lists lack their states and
        numbers. Raises UsageError for a gradient that the op does not take. Without ``keep`` no
        kept lists are used."""
        return [
            call
            for index, group in enumerate(self.param_groups)
            for call in self._find_calls_of(index, group, keep)
        ]

    def _find_calls_of(
        self, index: int, group: dict[str, Any], keep: bool
    ) -> list[op_calls.StepCall]:
        plans = self._plans
        params: list[Tensor] = group["params"]
        grads: list[Any] = list(map(_GRAD, params))
        if any(map(is_, grads, repeat(None))):
            params = [param for param in params if param.grad is not None]
            grads = list(map(_GRAD, params))
        kept = plans.of_group.get(index)
        if kept is not None and op_calls.is_capturing(kept.call.device):
            kept = None  # a graph may outlive the plan, so this step uses lists; the plan stays
        elif kept is not None and not (keep and kept.fits(params)):
            plans.drop(index)
            kept = None
        calls: list[op_calls.StepCall] = []
        must_look = kept is None or self._reads_gradients()
        if must_look and set(map(_LAYOUT, grads)) - {torch.strided}:
            pairs = list(zip(params, grads, strict=True))
            calls = self._sparse_calls(index, [param for param, grad in pairs if grad.is_sparse])
            plans.drop(index)
            kept = None
            params = [param for param, grad in pairs if not grad.is_sparse]
            grads = list(map(_GRAD, params))
        # Kept lists know whether there are DTensors among these parameters.
        if has_shards(params) if kept is None else kept.sharded:
            grads = gradient_parts(params, grads, partial(checks.name_param, index, group))
        if kept is not None:
            return [kept.call._replace(gradients=[grads], hyper={}, kept=kept)]
        devices = [torch.device("cpu")]
        if len(self.DEVICES) > 1:
            devices = list(dict.fromkeys(map(_DEVICE, params)))
        for device in devices:
            # A copy: plans compare later parameters with it, and the group's own list may change.
            own, their = params[:], grads
            if len(devices) > 1:
                own = [param for param in params if param.device == device]
                their = [g for p, g in zip(params, grads, strict=True) if p.device == device]
            calls.append(op_calls.StepCall(index, self._function, device, own, [their], [], [], {}))
        return calls

    def _use_kept(self, call: op_calls.StepCall) -> op_calls.StepCall:
        """The call, over kept lists if these are stepped for the second time: they will probably be
        again."""
        plans, index = self._plans, call.group
        if (
            call.device.type not in self.KEPT_ON
            or op_calls.is_capturing(call.device)
            or len(call.params) != len(self.param_groups[index]["params"])
            or not plans.is_repeated(index, call.params)
        ):
            return call
        if index not in plans.of_group:
            ops, can = self._load(call.device.type), plans.watch(call.states)
            plans.of_group[index] = op_calls.KeptLists.keep(call, ops, self.STATES) if can else None
        return call._replace(kept=plans.of_group[index])

    @property
    def _plans(self) -> op_calls.States:
        """The states, which also hold the lists that the op keeps of each group."""
        if not isinstance(self.state, op_calls.States):  # new, or torch has loaded a state dict
            self.state = op_calls.States(dict, self.state)
        return self.state


# The rules that a host and a fused optimizer share: their states, hyperparameters and checks


class Adam(ListOptimizer):
    """Adam and AdamW."""

    STATES = ("exp_avg", "exp_avg_sq")

    def _check(self, group: dict[str, Any], where: str = "") -> None:
        if not isinstance(group["bias_correction"], bool):
            raise ArgumentTypeError(
                f"{where}bias_correction is {group['bias_correction']!r}, expected True or False",
                why="it is the third positional argument, as in DeepSpeed",
                hint=f"{self.OWNER}(params, lr, betas=(0.9, 0.999))",
            )
        super()._check(group, where)
        if group["amsgrad"]:
            raise UsageError(
                f"{where}amsgrad is not supported by {self.OWNER}",
                hint="torch.optim.AdamW(params, amsgrad=True)",
            )


class Lion(ListOptimizer):
    """Lion, with decoupled weight decay."""

    STATES = ("exp_avg",)
    COUNTED = False
