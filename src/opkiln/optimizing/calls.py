"""The calls that make up a step, over lists that are passed or that the op keeps.

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
from opkiln.optimizing.sharded import has_shards, like, parts_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class Call(NamedTuple):
    """One call of the op, for parameters of one group on one device."""

    function: str  # of the op
    device: torch.device
    params: list[Tensor]
    gradients: list[list[Tensor]]  # the op's arguments between the parameters and the states
    states: list[dict[str, Any]]
    masters: list[list[Tensor]]  # a host op has no such list; without any master it is empty
    last: list[Tensor]  # the op's last list: copies in host memory, or counts of steps
    hyper: dict[str, Any]
    step: int = 0  # its number, if the op is not what counts
    kept: Kept | None = None

    def run(self, ops: Any, names: Sequence[str]) -> bool:
        """Call the op with the states of these names. Raises before anything is written.

        False if there were kept lists and they could not be used.
        """
        if self.kept is not None:
            op = partial(getattr(ops, self.kept.function), *self.kept.handles)
            status = call_in_place(op, self.gradients, [self.kept.written], self.hyper)
            if status == Status.MADE:
                return True
        self._run_lists(getattr(ops, self.function), names)
        return self.kept is None

    def written(self, names: Sequence[str]) -> list[list[Tensor]]:
        """The lists that are written to: parameters, states, masters, the last one."""
        states = [list(map(itemgetter(name), self.states)) for name in names]
        return [self.params, *states, *self.masters, self.last]

    def _run_lists(self, op: Callable[..., None], names: Sequence[str]) -> None:
        """Tensors whose layouts differ are copied first."""
        lists, dtensors = self.written(names), []
        if has_shards(self.params):
            # The DTensors' own versions are also counted up, because autograd looks at them.
            lists, dtensors = list(map(parts_of, lists)), lists
        params, *others, last = lists
        # A sparse gradient, which comes as rows and their numbers, is laid out as the op takes it.
        in_rows = len(self.gradients) > 1
        gradients = [] if in_rows else self.gradients
        laid = lay_out_alike(params, *gradients, *filter(None, others), in_rows=in_rows)
        if laid is not None:
            rows = iter(laid.lists)
            params, gradients = next(rows), [next(rows) for _ in gradients]
            others = [next(rows) if row else row for row in others]
        arguments = [params, *(gradients or self.gradients), *others, last]
        call_in_place(op, arguments, [params, *others, last, *dtensors], self.hyper)
        if laid is None:
            return
        for name, row in zip((*names, MASTER), others, strict=False):
            for param, state, tensor in zip(self.params, self.states, row, strict=False):
                if name in state:
                    state[name] = like(param, tensor)
        laid.write_back()


class Kept(NamedTuple):
    """The lists that the op keeps for parameters that are stepped together. Gradients are not kept.

    It keeps the tensors alive. It is valid while ``fits`` is true and no entry of a state is
    replaced; the owner must watch for that.
    """

    function: str  # of the op; makes a step
    handles: Sequence[Tensor]  # its first arguments
    call: Call  # that passes the lists
    parts: list[Tensor]  # of the parameters, on this rank; usually the same list
    written: list[Tensor]
    where: tuple[Any, ...] | None

    @classmethod
    def of(
        cls,
        call: Call,
        names: Sequence[str],
        function: str,
        keep: Callable[..., Sequence[Tensor]],
        by_address: bool,
    ) -> Kept | None:
        """None if the op keeps nothing: it has no native version, or a tensor is not contiguous.

        ``keep`` is called with the op's lists. ``by_address`` says that they are kept as addresses
        in the memory of a GPU, and so for one stream. Otherwise the op notices by itself if a
        tensor has changed. Raises the op's errors.
        """
        # The group's own list may change.
        call = call._replace(params=call.params[:])
        lists = whole = call.written(names)
        if has_shards(call.params):
            lists = list(map(parts_of, whole))
        params, *others = lists
        if not all(map(Tensor.is_contiguous, chain(*call.gradients, *lists))):
            return None
        handles = keep(params, *call.gradients, *others)
        if not handles[-1].numel():
            return None
        where = _where(params, call.device) if by_address else None
        written = each_base_once(chain(*lists, *whole))
        return cls(function, handles, call._replace(gradients=[]), params, written, where)

    def fits(self, params: list[Tensor]) -> bool:
        """Whether they were kept for these parameters, at these addresses and this stream."""
        if not same_tensors(params, self.call.params):
            return False
        # A DTensor may have got another local tensor.
        parts = parts_of(params) if self.sharded else params
        return (not self.sharded or same_tensors(parts, self.parts)) and (
            self.where is None or self.where == _where(parts, self.call.device)
        )

    @property
    def sharded(self) -> bool:
        """Whether there are DTensors among the parameters."""
        return self.parts is not self.call.params


def _where(parts: list[Tensor], device: torch.device) -> tuple[Any, ...]:
    """The tensors' addresses, which an assignment to ``param.data`` changes, and the stream."""
    on_gpu = device.type == "cuda"
    stream = torch.cuda.current_stream(device).cuda_stream if on_gpu else 0
    return list(map(Tensor.data_ptr, parts)), stream
