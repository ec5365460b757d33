"""The calls that make up a step of a host optimizer, over lists that are passed or kept."""

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
from opkiln.optimizing.checks import DTYPES, place
from opkiln.optimizing.op_calls import Status, call_in_place, lay_out_alike, same_tensors
from opkiln.optimizing.sharded import (
    gradient_parts,
    has_shards,
    like,
    parts_of,
    placement_text,
    same_placement,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

_T = TypeVar("_T")


class Kept(NamedTuple):
    """The lists that the op keeps for a group whose parameters are all at one step. Gradients are
    not kept.

    It is valid while ``fits`` is true and no entry of a state is replaced; the owner must watch for
    that. The op notices other changes of a tensor when it is called.
    """

    ticket: Tensor
    params: list[Tensor]
    parts: list[Tensor]  # of the parameters, on this rank; usually the same list
    states: list[dict[str, Any]]
    written: list[list[Tensor]]

    @classmethod
    def of(cls, ops: Any, call: Call, names: Sequence[str]) -> Kept | None:
        """None if the op keeps nothing: it has no native version, or the layouts differ."""
        params = call.params[:]  # the group's own list may change
        parts = parts_of(params)
        if not all(map(Tensor.is_contiguous, parts)):
            return None  # it would be copied at each step anyway
        whole = call.state_lists(names)
        states = list(map(parts_of, whole)) if call.sharded else whole
        ticket = getattr(ops, f"{call.function}keep")(parts, *states, [])
        if not ticket.numel():
            return None
        forget = getattr(ops, f"{call.function}forget")
        weakref.finalize(ticket, forget, ticket.clone()).atexit = False
        beside = [params, *whole] if call.sharded else []
        return cls(ticket, params, parts, call.states, [parts, *states, *beside])

    def fits(self, params: list[Tensor]) -> bool:
        """Whether these are the parameters that it was made for."""
        if not same_tensors(params, self.params):
            return False
        # A DTensor may have got another local tensor.
        return not self.sharded or same_tensors(parts_of(params), self.parts)

    @property
    def sharded(self) -> bool:
        """Whether there are DTensors among the parameters."""
        return self.parts is not self.params

    @property
    def step(self) -> int:
        """The number of the last step."""
        made: int = self.states[0]["step"]
        return made


class Call(NamedTuple):
    """One call of the op, for parameters of one group that are at the same step."""

    function: str  # of the op; the one that undoes it has `rollback_` appended
    params: list[Tensor]
    gradients: list[list[Tensor]]  # the op's arguments between the parameters and the states
    states: list[dict[str, Any]]
    copies: list[Tensor]
    step: int  # its number
    hyper: dict[str, Any]
    kept: Kept | None = None

    @property
    def sharded(self) -> bool:
        """Whether parameters are DTensors. The op gets their parts on this rank."""
        return has_shards(self.params)

    def state_lists(self, names: Sequence[str]) -> list[list[Tensor]]:
        """The states of these names, as the op takes them."""
        return [list(map(itemgetter(name), self.states)) for name in names]

    def run(self, ops: Any, names: Sequence[str], step_after: int) -> bool:
        """Call the op with the states of these names. Raises before anything is written.

        False if there were kept lists and they could not be used.
        """
        served = self.kept is not None and self._run_kept(ops, self.kept) == Status.MADE
        if not served:
            self._run_lists(ops, names)
        # Not through the watched dicts: the kept lists stay valid, because all states change alike.
        counted = map(dict.__setitem__, self.states, repeat("step"), repeat(step_after))
        deque(counted, maxlen=0)
        return served or self.kept is None

    def _run_kept(self, ops: Any, kept: Kept) -> int:
        op = partial(getattr(ops, f"{self.function}kept_"), kept.ticket)
        status: int = call_in_place(op, self.gradients, kept.written, self.hyper)
        return status

    def _run_lists(self, ops: Any, names: Sequence[str]) -> None:
        op = getattr(ops, self.function)
        states = self.state_lists(names)
        params, copies = self.params, self.copies
        beside: list[list[Tensor]] = []
        if self.sharded:
            # The DTensors' own versions are also counted up, because autograd looks at them.
            beside = [params, *states, copies]
            params, copies, *states = map(parts_of, (params, copies, *states))
        # A sparse gradient, which comes as rows and their numbers, is laid out as the op takes it.
        in_rows = len(self.gradients) > 1
        gradients, dense = self.gradients, [] if in_rows else self.gradients
        laid = lay_out_alike(params, *dense, *states, in_rows=in_rows)
        if laid is not None:
            params, *rest = laid.lists
            gradients, states = gradients if in_rows else rest[:1], rest[len(dense) :]
        written = [params, *states, copies, *beside]
        call_in_place(op, [params, *gradients, *states, copies], written, self.hyper)
        if laid is not None:
            for name, tensors in zip(names, states, strict=True):
                for param, state, tensor in zip(self.params, self.states, tensors, strict=True):
                    state[name] = like(param, tensor)
            for staged in laid.staged:
                staged.write_back()


def dense_gradients(params: list[Tensor]) -> list[list[Tensor]] | None:
    """The gradients, as an op's lists; None if one is missing or sparse."""
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
    """The items at these positions, in a new list."""
    return items[:] if len(members) == len(items) else [items[i] for i in members]


def check_copies(groups: list[dict[str, Any]], copies: Mapping[Tensor, Tensor]) -> None:
    """Raises UsageError for a copy of the wrong kind, or of a tensor that is not in the groups."""
    unknown = set(copies).difference(*(group["params"] for group in groups))
    if unknown:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in unknown)
        raise ArgumentError(
            f"unexpected keys in copies, of shapes {shapes}: they are not parameters in the groups"
        )
    for index, group in enumerate(groups):
        for i, param in enumerate(group["params"]):
            if (copy := copies.get(param)) is not None:
                _check_copy(f"the copy of {place(index, group, i)}", param, copy)


def _check_copy(name: str, param: Tensor, copy: Tensor) -> None:
    """Raises UsageError for a copy that cannot receive its parameter."""
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
