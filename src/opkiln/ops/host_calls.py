"""The calls that a step of a host optimizer is made of."""

from __future__ import annotations

from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from opkiln.ops.in_place import call_in_place
from opkiln.ops.layout import lay_out_alike

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

_T = TypeVar("_T")


class Call(NamedTuple):
    """One call of the op, for parameters of one group that are at the same step."""

    function: str  # of the op; the one that undoes it has `rollback_` appended
    params: list[Tensor]
    gradients: list[list[Tensor]]  # the op's arguments between the parameters and the states
    states: list[dict[str, Any]]
    copies: list[Tensor]
    step: int  # that this makes
    hyper: dict[str, Any]

    def run(self, ops: Any, names: Sequence[str], step_after: int) -> None:
        """Call the op with the states of these names. Raises RuntimeError before it writes."""
        op = getattr(ops, self.function)
        states = [list(map(itemgetter(name), self.states)) for name in names]
        params, copies = self.params, self.copies
        lists = [params, *self.gradients, *states, copies]
        try:
            call_in_place(op, lists, [params, *states, copies], self.hyper)
        except RuntimeError:
            # The op refuses before it writes. Looking at all layouts first would cost every step.
            in_rows = len(self.gradients) > 1
            beside = [] if in_rows else self.gradients
            laid = lay_out_alike(params, *beside, *states, in_rows=in_rows)
            if laid is None:
                raise
            params, *rest = laid.lists
            gradients, states = self.gradients if in_rows else rest[:1], rest[len(beside) :]
            op(params, *gradients, *states, copies, **self.hyper)
            for name, tensors in zip(names, states, strict=True):
                for state, tensor in zip(self.states, tensors, strict=True):
                    state[name] = tensor
            for staged in laid.staged:
                staged.write_back()
        for state in self.states:
            state["step"] = step_after


def dense_gradients(params: list[Tensor]) -> list[list[Tensor]] | None:
    """None where one is not there, or sparse."""
    grads: list[Any] = [param.grad for param in params]
    if any(grad is None or grad.layout is not torch.strided for grad in grads):
        return None
    return [grads]


def alike(keys: Sequence[Hashable]) -> list[Sequence[int]]:
    """The positions of equal keys, for each distinct key."""
    if keys and keys.count(keys[0]) == len(keys):
        return [range(len(keys))]
    return [[i for i, other in enumerate(keys) if other == key] for key in dict.fromkeys(keys)]


def take(items: list[_T], members: Sequence[int]) -> list[_T]:
    """The items at these positions, in a list of their own."""
    return items[:] if len(members) == len(items) else [items[i] for i in members]
