"""Calls of an optimizer's op, over lists of tensors or over a plan that was made of such lists."""

from __future__ import annotations

from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from opkiln.ops.in_place import call_in_place
from opkiln.ops.layout import lay_out_alike
from opkiln.ops.multi_tensor.states import counted_up_once
from opkiln.ops.saved_states import MASTER
from opkiln.ops.sharded import like, parts_of
from opkiln.ops.watched import same_tensors

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


class Call(NamedTuple):
    """One call of the op, for the parameters of one group on one device."""

    device: torch.device
    whole: list[Tensor]  # the parameters
    params: list[Tensor]  # what the op steps of them: the same list, or the parts of DTensors
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
        """Those of the op up to the masters; ``names`` are the states'."""
        return [
            self.params,
            self.grads,
            *(self._parts([state[name] for state in self.states]) for name in names),
        ]

    def _parts(self, tensors: list[Tensor]) -> list[Tensor]:
        return parts_of(tensors) if self.sharded else tensors

    def dtensors(self, names: tuple[str, ...]) -> list[list[Tensor]]:
        """The DTensors that are written to, whose own versions count, too: autograd looks at them.

        (Ordinary tensors among them are counted up twice.)
        """
        if not self.sharded:
            return []
        states = [[state[name] for state in self.states if name in state] for name in names]
        return [self.whole, *states]


def run(op: Callable[..., None], call: Call, names: tuple[str, ...]) -> None:
    """Make the call; tensors that the op cannot walk in step are copied to where it can."""
    lists = call.lists(names)
    try:
        _run_lists(op, lists, call.masters, call, names)
    except RuntimeError:
        # The op refuses before it writes. Looking at all layouts first would cost every step.
        places = _pick(call.masters, call.masters, call.params)
        laid = lay_out_alike(*lists, *([places] if places else []))
        if laid is None:
            raise
        rows = laid.lists
        masters = _pick(call.masters, rows[-1], call.masters)
        _run_lists(op, rows[: len(lists)], masters, call, names)
        for i, state in enumerate(call.states):
            for name, row in zip(names, rows[2:], strict=False):
                state[name] = like(call.whole[i], row[i])
            if MASTER in state and masters:
                state[MASTER] = like(call.whole[i], masters[i])
        for staged in laid.staged:
            staged.write_back()


def _run_lists(
    op: Callable[..., None],
    lists: list[list[Tensor]],
    masters: list[Tensor],
    call: Call,
    names: tuple[str, ...],
) -> None:
    params, _, *states = lists
    written = [params, *states, masters, call.steps, *call.dtensors((*names, MASTER))]
    call_in_place(op, [*lists, masters, call.steps], written, call.hyper)


def _pick(masters: list[Tensor], there: list[Tensor], absent: list[Tensor]) -> list[Tensor]:
    """For each master one of the first list where there is one, of the second where there is none.

    (None is a tensor without elements; no masters at all are an empty list.)
    """
    return [there[i] if master.numel() else absent[i] for i, master in enumerate(masters)]


class Planned(NamedTuple):
    """A call whose lists the op has in the GPU's memory, as addresses: all but the gradients.

    It keeps the tensors alive. It is good for as long as ``fits`` says so, and no state's entries
    were replaced: who keeps it has to see to that.
    """

    device: torch.device
    memory: Tensor
    ledger: Tensor
    whole: list[Tensor]  # the parameters
    params: list[Tensor]  # what is stepped of them: the same list, or the parts of DTensors
    addresses: list[int]  # of these: to assign to `param.data` changes them
    kept: list[list[Tensor]]
    written: list[Tensor]
    stream: int  # that the memory belongs to

    @classmethod
    def of(cls, plan: Callable[..., Any], call: Call, names: tuple[str, ...]) -> Planned | None:
        """None where the op cannot have a plan of this: it has no native version, say."""
        if not all(map(Tensor.is_contiguous, call.params)):
            return None
        lists = call.lists(names)
        try:
            memory, ledger = plan(*lists, call.masters, call.steps)
        except RuntimeError:
            return None  # the call itself will say what is wrong
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
            counted_up_once(chain(call.params, *kept, *dtensors)),
            stream_of(call.device),
        )

    def fits(self, params: list[Tensor]) -> bool:
        """Whether it is a plan for these parameters, where they are now, on the current stream."""
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

    def run(self, op: Callable[..., None], grads: list[Tensor], hyper: dict[str, Any]) -> None:
        """Raises RuntimeError, before anything is written, where gradients do not fit the plan."""
        planned = partial(op, self.memory, self.ledger)
        call_in_place(planned, [grads], [self.written], hyper)


def stream_of(device: torch.device) -> int:
    """The handle of the current stream; 0 where there are none."""
    return int(torch.cuda.current_stream(device).cuda_stream) if device.type == "cuda" else 0
