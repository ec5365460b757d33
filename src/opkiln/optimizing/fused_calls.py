"""The calls that make up a step of a fused optimizer, over lists or over a plan made of them.

Nothing here waits for a GPU.
"""

from __future__ import annotations

from functools import partial
from itertools import chain
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from opkiln.optimizing.checks import MASTER
from opkiln.optimizing.op_calls import (
    Status,
    call_in_place,
    each_base_once,
    lay_out_alike,
    same_tensors,
)
from opkiln.optimizing.sharded import has_shards, like, parts_of, sum_over_shards

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


class Call(NamedTuple):
    """One call of the op, for the parameters of one group on one device."""

    device: torch.device
    whole: list[Tensor]  # the parameters
    params: list[Tensor]  # the tensors that the op steps: the same list, or the parts of DTensors
    grads: list[Tensor]
    states: list[dict[str, Any]]
    masters: list[Tensor]
    steps: list[Tensor]
    hyper: dict[str, Any]

    @property
    def sharded(self) -> bool:
        """Whether there are DTensors among the parameters."""
        return self.params is not self.whole

    def lists(self, names: tuple[str, ...]) -> list[list[Tensor]]:
        """The op's lists up to the masters; ``names`` are the names of the states."""
        return [
            self.params,
            self.grads,
            *(self._parts(list(map(itemgetter(name), self.states))) for name in names),
        ]

    def _parts(self, tensors: list[Tensor]) -> list[Tensor]:
        return parts_of(tensors) if self.sharded else tensors

    def dtensors(self, names: tuple[str, ...]) -> list[list[Tensor]]:
        """The DTensors that are written to. Their own versions are counted up as well, because
        autograd looks at them.

        (Ordinary tensors among them are counted up twice.)
        """
        if not self.sharded:
            return []
        states = [[state[name] for state in self.states if name in state] for name in names]
        return [self.whole, *states]


def run(op: Callable[..., None], call: Call, names: tuple[str, ...]) -> None:
    """Make the call. Tensors whose layouts differ are copied first. Raises the op's errors."""
    lists, masters = call.lists(names), call.masters
    places = _pick(masters, masters, call.params)
    laid = lay_out_alike(*lists, *([places] if places else []))
    if laid is not None:
        lists, masters = laid.lists[: len(lists)], _pick(masters, laid.lists[-1], masters)
    params, _, *states = lists
    written = [params, *states, masters, call.steps, *call.dtensors((*names, MASTER))]
    call_in_place(op, [*lists, masters, call.steps], written, call.hyper)
    if laid is not None:
        for i, state in enumerate(call.states):
            for name, row in zip(names, states, strict=True):
                state[name] = like(call.whole[i], row[i])
            if MASTER in state and masters:
                state[MASTER] = like(call.whole[i], masters[i])
        for staged in laid.staged:
            staged.write_back()


def _pick(masters: list[Tensor], there: list[Tensor], absent: list[Tensor]) -> list[Tensor]:
    """For each master the tensor ``there``, or the one in ``absent`` if the parameter has no
    master.

    A tensor without elements means that there is no master; the list is empty if none has one.
    """
    return [there[i] if master.numel() else absent[i] for i, master in enumerate(masters)]


class Planned(NamedTuple):
    """A call whose lists, except the gradients, are stored as addresses in the GPU's memory.

    It keeps the tensors alive. It is valid while ``fits`` is true and no entry of a state is
    replaced; the owner must watch for that.
    """

    device: torch.device
    memory: Tensor
    ledger: Tensor
    whole: list[Tensor]  # the parameters
    params: list[Tensor]  # the tensors that are stepped: the same list, or the parts of DTensors
    addresses: list[int]  # of these; an assignment to `param.data` changes them
    kept: list[list[Tensor]]
    written: list[Tensor]
    stream: int  # that the memory belongs to

    @classmethod
    def of(cls, plan: Callable[..., Any], call: Call, names: tuple[str, ...]) -> Planned | None:
        """None if the op cannot make a plan: it has no native version, or a tensor is not
        contiguous. Raises the op's errors."""
        lists = call.lists(names)
        if not all(map(Tensor.is_contiguous, chain(*lists, call.masters))):
            return None
        memory, ledger = plan(*lists, call.masters, call.steps)
        if not ledger.numel():
            return None
        kept = [*lists[2:], call.masters, call.steps]
        dtensors = call.dtensors((*names, MASTER))
        return cls(
            call.device,
            memory,
            ledger,
            call.whole,
            call.params,
            list(map(Tensor.data_ptr, call.params)),
            kept,
            each_base_once(chain(call.params, *kept, *dtensors)),
            stream_of(call.device),
        )

    def fits(self, params: list[Tensor]) -> bool:
        """Whether it is a plan for these parameters at their present addresses and this stream."""
        parts = parts_of(params) if self.sharded else params
        return (
            same_tensors(params, self.whole)
            and (parts is params or same_tensors(parts, self.params))
            and list(map(Tensor.data_ptr, parts)) == self.addresses
            and stream_of(self.device) == self.stream
        )

    @property
    def sharded(self) -> bool:
        """Whether there are DTensors among the parameters."""
        return self.params is not self.whole

    def run(self, op: Callable[..., int], grads: list[Tensor], hyper: dict[str, Any]) -> bool:
        """Whether the step was made. If not, a gradient is not contiguous, or the op has no native
        version for it. Then nothing was written. Raises the op's errors."""
        planned = partial(op, self.memory, self.ledger)
        status: int = call_in_place(planned, [grads], [self.written], hyper)
        return status == Status.MADE


def stream_of(device: torch.device) -> int:
    """The handle of the current stream; 0 if the device has no streams."""
    return int(torch.cuda.current_stream(device).cuda_stream) if device.type == "cuda" else 0


def moved(device: torch.device, number: Tensor) -> Tensor:
    """The number on the device, in the form that an op takes; usually the same tensor."""
    wide = number.dtype if number.dtype == torch.float64 else torch.float32
    # A copy to the CPU must be complete when the op reads it. On a GPU the stream keeps the order.
    return number.to(device=device, dtype=wide, non_blocking=device.type == "cuda")


def clipping(
    lists: list[tuple[list[Tensor], list[Tensor]]], scale: Tensor | None, limit: float
) -> Tensor:
    """The divisor that unscales gradients and brings their norm, over all lists, down to ``limit``,
    as ``torch.nn.utils.clip_grad_norm_`` does with unscaled gradients.

    A list has parameters and their gradients. For DTensors it has the gradients' parts on this
    rank, but the norm is that of the whole tensors.
    """
    first = lists[0][1][0].device
    norms = [torch.linalg.vector_norm(_norms(params, grads)) for params, grads in lists]
    total = torch.linalg.vector_norm(torch.stack([moved(first, norm) for norm in norms]))
    given = 1.0 if scale is None else moved(first, scale).reshape(())
    return torch.clamp((total / given + 1e-6) / limit, min=1.0) * given


def _norms(params: list[Tensor], grads: list[Tensor]) -> Tensor:
    """The norm of each gradient."""
    here = torch.stack(torch._foreach_norm(grads, 2, dtype=torch.float32))
    if not has_shards(params):
        return here
    squares = here.double().square()
    sum_over_shards(params, squares)
    return squares.sqrt().float()
