"""The base class of the fused and the host optimizers: groups, plans, state dicts."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from opkiln.errors import ArgumentError, UsageError
from opkiln.optimizing.checks import (
    MASTER,
    check_dtypes,
    check_form,
    check_saved_group,
    check_saved_state,
    own_entries,
    place,
    refuse_partials,
)
from opkiln.optimizing.states import ParamState, Plans, watchable
from opkiln.optimizing.stepping import CompiledStep

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from opkiln.builder import OpBuilder


class ListOptimizer(CompiledStep, torch.optim.Optimizer):
    """An optimizer whose op steps lists of tensors.

    A subclass says what its op is called, which states it has, and what its hyperparameters are.
    """

    OWNER: ClassVar[str]  # its name in messages
    BUILDER: ClassVar[type[OpBuilder]]  # the op; its function that makes a step is `<NAME>_`
    STATES: ClassVar[tuple[str, ...]]  # in the order of the op's arguments
    DEVICES: ClassVar[tuple[str, ...]]  # types of devices that parameters may be on
    DEVICES_TEXT: ClassVar[str]  # the same in messages
    ALTERNATIVE: ClassVar[str]  # the optimizer to use for parameters on other devices
    IN_DEEPSPEED: ClassVar[Mapping[str, str]] = {}  # states that have another name there
    COUNTED: ClassVar[bool] = True  # steps differ by their number: a saved state must have it
    # Options that are in the defaults, which are pickled with the optimizer, but not in the groups:
    # a checkpoint must not decide how this process keeps states.
    OPTIONS: ClassVar[tuple[str, ...]]

    _plans: Plans[Any] | None = None

    # A subclass defines these

    def _check(self, group: dict[str, Any], where: str = "") -> None:
        """Raises UsageError for a hyperparameter out of range."""
        raise NotImplementedError

    def _hyper(self, group: dict[str, Any]) -> dict[str, Any]:
        """The op's scalar arguments, without those that the caller adds."""
        raise NotImplementedError

    def _check_group(self, index: int, group: dict[str, Any]) -> None:
        """Raises UsageError for a new group that this optimizer cannot step."""

    def _take_over(self, loaded: dict[str, Any]) -> None:
        """Take over the states of a state dict that torch has just loaded."""
        raise NotImplementedError

    # The same for all

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's. If it raises UsageError, nothing is added."""
        super().add_param_group(param_group)
        index = len(self.param_groups) - 1
        group = self.param_groups[index]
        try:
            for name in self.OPTIONS:
                group.pop(name, None)
            self._check(group)
            check_dtypes(index, group)
            refuse_partials(index, group)
            for i, param in enumerate(group["params"]):
                if param.device.type not in self.DEVICES:
                    raise ArgumentError(
                        f"{place(index, group, i)} is on {param.device}: "
                        f"{self.OWNER} steps parameters {self.DEVICES_TEXT}",
                        hint=self.ALTERNATIVE,
                    )
            self._check_group(index, group)
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
        def before(_: torch.optim.Optimizer, loaded: dict[str, Any]) -> None:
            self._check_loaded(loaded)
            seen.update(loaded)

        handles = (
            self.register_load_state_dict_pre_hook(before),
            self.register_load_state_dict_post_hook(lambda _: self._take_over(seen), prepend=True),
        )
        try:
            super().load_state_dict(state_dict)
        finally:
            for handle in handles:
                handle.remove()

    def _check_loaded(self, loaded: dict[str, Any]) -> None:
        """Raises UsageError for a state dict that cannot be taken over."""
        check_form(self.OWNER, loaded)
        # If the numbers of groups or parameters differ, torch reports that next.
        pairs = zip(loaded["param_groups"], self.param_groups, strict=False)
        for index, (group, ours) in enumerate(pairs):
            where = f"param_groups[{index}]: "
            check_saved_group(self.OWNER, self.defaults, group, where)
            self._check({**self.defaults, **group}, where)
            for key, param in zip(group["params"], ours["params"], strict=False):
                if saved := loaded["state"].get(key):
                    self._check_saved(param, saved, group, f"state[{key!r}]: ")

    def _check_saved(
        self, param: Tensor, saved: dict[str, Any], group: dict[str, Any], where: str
    ) -> None:
        names = [self._saved_name(saved, name) for name in self.STATES]
        # DeepSpeed has the count in the group.
        made = saved.get("step", group.get("step", None if self.COUNTED else 0))
        check_saved_state(self.OWNER, saved, where, param, names, made)

    def _saved_name(self, saved: dict[str, Any], name: str) -> str:
        """The name of a state in a state dict that is being loaded."""
        there = self.IN_DEEPSPEED.get(name, name)
        return there if name not in saved and there in saved else name

    def _new_states(
        self, loaded: dict[str, Any]
    ) -> Iterator[tuple[int, Tensor, ParamState, dict[str, Any], Any]]:
        """For each parameter with a saved state: its group, itself, a new state for it without
        another rule's entries, the saved state and the count of steps. Drops all plans first."""
        self._plans = None  # they hold the old states
        pairs = zip(self.param_groups, loaded["param_groups"], strict=True)
        for index, (group, saved_group) in enumerate(pairs):
            for key, value in self.defaults.items():
                if key not in self.OPTIONS:
                    group.setdefault(key, value)
            for key, param in zip(saved_group["params"], group["params"], strict=True):
                saved = loaded["state"].get(key)
                if not saved:
                    continue
                state = ParamState(own_entries(self.state[param], param, self.STATES))
                state.pop(MASTER, None)
                self.state[param] = state
                # DeepSpeed's fused optimizers, and old versions of its others, have the count in
                # the group.
                yield index, param, state, saved, saved.get("step", saved_group.get("step", 0))

    def _known_plans(self) -> Plans[Any]:
        if self._plans is None or not self._plans.are_for(self.state):
            # New, or a copy, or torch has loaded a state dict.
            self.state = states = watchable(self.state)
            self._plans = Plans(states)
        return self._plans
