"""The calls that a step of a host optimizer is made of."""

from __future__ import annotations

import weakref
from collections import deque
from functools import partial
from itertools import repeat
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from opkiln.errors import ArgumentError, ArgumentTypeError
from opkiln.ops.in_place import call_in_place
from opkiln.ops.layout import lay_out_alike
from opkiln.ops.param_groups import DTYPES, place
from opkiln.ops.sharded import (
    gradient_parts,
    has_shards,
    like,
    parts_of,
    placement_text,
    same_placement,
)
from opkiln.ops.watched import same_tensors

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

_T = TypeVar("_T")


class Kept(NamedTuple):
    """The lists of a whole group that is at one step, which the op has kept: all but the gradients.

    They are good for as long as ``fits`` says so, and no state's entries were replaced: who has
    this has to see to that. What else may become of a tensor, the op sees when it is called.
    """

    ticket: Tensor
    params: list[Tensor]
    parts: list[Tensor]  # of the parameters, on this rank: mostly the same list
    states: list[dict[str, Any]]
    written: list[list[Tensor]]

    @classmethod
    def of(cls, ops: Any, call: Call, names: Sequence[str]) -> Kept | None:
        """None where the op keeps nothing: it has no native version, say."""
        params = call.params[:]  # the group's own list may change
        parts = parts_of(params)
        if not all(map(Tensor.is_contiguous, parts)):
            return None  # it would be copied at each step anyway
        whole = call.state_lists(names)
        states = list(map(parts_of, whole)) if call.sharded else whole
        try:
            ticket = getattr(ops, f"{call.function}keep")(parts, *states, [])
        except RuntimeError:
            return None  # the call itself will say what is wrong
        forget = getattr(ops, f"{call.function}forget")
        weakref.finalize(ticket, forget, ticket.clone()).atexit = False
        beside = [params, *whole] if call.sharded else []
        return cls(ticket, params, parts, call.states, [parts, *states, *beside])

    def fits(self, params: list[Tensor]) -> bool:
        """Whether these are the parameters that it was made for."""
        if not same_tensors(params, self.params):
            return False
        # A DTensor may have been given another local tensor.
        return not self.sharded or same_tensors(parts_of(params), self.parts)

    @property
    def sharded(self) -> bool:
        """Whether there are DTensors among the parameters."""
        return self.parts is not self.params

    @property
    def step(self) -> int:
        """The one that was made last."""
        made: int = self.states[0]["step"]
        return made


class Call(NamedTuple):
    """One call of the op, for parameters of one group that are at the same step."""

    function: str  # of the op; the one that undoes it has `rollback_` appended
    params: list[Tensor]
    gradients: list[list[Tensor]]  # the op's arguments between the parameters and the states
    states: list[dict[str, Any]]
    copies: list[Tensor]
    step: int  # that this makes
    hyper: dict[str, Any]
    kept: Kept | None = None

    @property
    def sharded(self) -> bool:
        """Whether parameters are DTensors, of which the op gets what is on this rank."""
        return has_shards(self.params)

    def state_lists(self, names: Sequence[str]) -> list[list[Tensor]]:
        """The states of these names, as the op takes them."""
        return [list(map(itemgetter(name), self.states)) for name in names]

    def run(self, ops: Any, names: Sequence[str], step_after: int) -> bool:
        """Call the op with the states of these names. Raises RuntimeError before it writes.

        False where there are lists that were kept, and they did not serve.
        """
        served = self.kept is not None and self._run_kept(ops, self.kept)
        if not served:
            self._run_lists(ops, names)
        # Past what watches the states: all of what was kept for them is at the same step again.
        counted = map(dict.__setitem__, self.states, repeat("step"), repeat(step_after))
        deque(counted, maxlen=0)
        return served or self.kept is None

    def _run_kept(self, ops: Any, kept: Kept) -> bool:
        """Whether the op took it. A gradient may not go with what was kept."""
        op = partial(getattr(ops, f"{self.function}kept_"), kept.ticket)
        try:
            call_in_place(op, self.gradients, kept.written, self.hyper)
        except RuntimeError:
            return False  # lists can be laid out alike, or say what is wrong
        return True

    def _run_lists(self, ops: Any, names: Sequence[str]) -> None:
        op = getattr(ops, self.function)
        states = self.state_lists(names)
        params, copies = self.params, self.copies
        beside: list[list[Tensor]] = []
        if self.sharded:
            # The DTensors' own versions count, too: autograd looks at them.
            beside = [params, *states, copies]
            params, copies, *states = map(parts_of, (params, copies, *states))
        lists = [params, *self.gradients, *states, copies]
        try:
            call_in_place(op, lists, [params, *states, copies, *beside], self.hyper)
        except RuntimeError:
            # The op refuses before it writes. Looking at all layouts first would cost every step.
            in_rows = len(self.gradients) > 1
            dense = [] if in_rows else self.gradients
            laid = lay_out_alike(params, *dense, *states, in_rows=in_rows)
            if laid is None:
                raise
            params, *rest = laid.lists
            gradients, states = self.gradients if in_rows else rest[:1], rest[len(dense) :]
            op(params, *gradients, *states, copies, **self.hyper)
            for name, tensors in zip(names, states, strict=True):
                for param, state, tensor in zip(self.params, self.states, tensors, strict=True):
                    state[name] = like(param, tensor)
            for staged in laid.staged:
                staged.write_back()


def dense_gradients(params: list[Tensor]) -> list[list[Tensor]] | None:
    """None where one is not there, or sparse."""
    grads: list[Any] = [param.grad for param in params]
    if any(grad is None or grad.layout is not torch.strided for grad in grads):
        return None
    return [gradient_parts(params, grads, _by_shape) if has_shards(params) else grads]


def _by_shape(param: Tensor) -> str:
    return f"a parameter of shape {tuple(param.shape)}"


def alike(keys: Sequence[Hashable]) -> list[Sequence[int]]:
    """The positions of equal keys, for each distinct key."""
    if keys and keys.count(keys[0]) == len(keys):
        return [range(len(keys))]
    return [[i for i, other in enumerate(keys) if other == key] for key in dict.fromkeys(keys)]


def take(items: list[_T], members: Sequence[int]) -> list[_T]:
    """The items at these positions, in a list of their own."""
    return items[:] if len(members) == len(items) else [items[i] for i in members]


def check_copies(groups: list[dict[str, Any]], copies: Mapping[Tensor, Tensor]) -> None:
    """Raises UsageError for one that cannot receive its parameter, or has none in the groups."""
    strangers = set(copies).difference(*(group["params"] for group in groups))
    if strangers:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in strangers)
        raise ArgumentError(f"copies has keys that are no parameters here, of shapes {shapes}")
    for index, group in enumerate(groups):
        for i, param in enumerate(group["params"]):
            copy = copies.get(param)
            if copy is None:
                continue
            where = f"copies: that of {place(index, group, i)}"
            if copy.device.type != "cpu" or copy.dtype not in DTYPES:
                raise ArgumentTypeError(
                    f"{where} is {copy.dtype} on {copy.device}, "
                    "expected float32, bfloat16 or float16 on the CPU"
                )
            if not same_placement(copy, param):
                raise ArgumentError(
                    f"{where} is {placement_text(copy)}, expected {placement_text(param)}",
                    hint="torch.empty_like(param, dtype=torch.bfloat16)",
                )
            if copy.numel() != param.numel():
                raise ArgumentError(f"{where} has {copy.numel()} elements, not {param.numel()}")
