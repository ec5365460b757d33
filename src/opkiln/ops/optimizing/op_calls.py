"""Calls of ops that write to long lists of tensors: those of a step, whose lists are passed or kept
by the op; the layout that they need; their results.

An op raises an error for a wrong argument before it writes anything. Nothing here catches that,
because an error of a kernel looks the same. If nothing is wrong but another call is needed, that
is checked before the call, or the op returns a status. Nothing here waits for a GPU.
"""

from __future__ import annotations

import functools
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from functools import cache, partial
from itertools import chain
from operator import is_, itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from opkiln.base import signature
from opkiln.base.model import function_name
from opkiln.errors import UsageError
from opkiln.ops.optimizing.checks import MASTER
from opkiln.ops.optimizing.sharded import has_shards, parts_of, wrap_part

if TYPE_CHECKING:
    from opkiln.builder.base import DeclaredFunctions


class Status(IntEnum):
    """The result of a step over kept lists. Nothing was written unless it is ``MADE``.

    The numbers are those of ``csrc/opkiln/optimizing/status.h``.
    """

    MADE = 0
    NOT_KEPT = 1  # the op keeps nothing for this call, perhaps because its library was replaced
    LAYOUT = 2  # a tensor is not laid out as the kept lists need it


@cache
def arguments_of(functions: DeclaredFunctions, function: str) -> dict[str, str]:
    """The arguments of an op's function: their names and types in its schema."""
    schema = next(each for each in functions.schemas if function_name(each) == function)
    return {name: kind for kind, name in signature.arguments(schema)}


def call_in_place(
    op: Callable[..., Any],
    lists: Sequence[list[Tensor]],
    written: Iterable[list[Tensor]],
    hyper: dict[str, Any],
) -> Any:
    """``op(*lists, **hyper)``, and its result. Then the versions of ``written`` are counted up,
    unless the result is a status that says that no step was made.

    Called directly, the op counts them up itself, in Python. That turns every list into Python
    objects and back, which takes a sixth of a step over ten thousand tensors. Here it comes after
    the call, when a GPU is already working.
    """
    with torch._C._AutoDispatchBelowADInplaceOrView():
        result = op(*lists, **hyper)
    if not result:
        for tensors in written:
            _count_up(tensors)
    return result


def _count_up(tensors: list[Tensor]) -> None:
    try:
        increment_version(tensors)
    except RuntimeError:
        # No kernel is called here. The only possible error says that a tensor was made in inference
        # mode and has no version. Checking each tensor first would take a tenth of a step over ten
        # thousand tensors, and such a tensor is very rare.
        increment_version([tensor for tensor in tensors if not tensor.is_inference()])


def same_tensors(some: list[Tensor], others: list[Tensor]) -> bool:
    """Whether the lists hold the same objects."""
    return len(some) == len(others) and all(map(is_, some, others))


# The calls of a step


class StepCall(NamedTuple):
    """One call of the op, for parameters of one group on one device."""

    group: int
    function: str  # of the op
    device: torch.device
    params: list[Tensor]
    # The op's lists between the parameters and the states. For DTensors, the parts on this rank.
    gradients: list[list[Tensor]]
    states: list[dict[str, Any]]
    # The op's lists after the states: copies in host memory; or masters, which may be an empty
    # list, and counts of steps.
    rest: list[list[Tensor]]
    hyper: dict[str, Any]
    step: int = 0  # its number, if the op is not what counts
    kept: KeptLists | None = None

    def run_kept(self, ops: Any) -> bool:
        """Call the op with the lists that it keeps, if there are any and they can be used."""
        if self.kept is None:
            return False
        op = partial(getattr(ops, f"{self.function}kept_"), *self.kept.handles)
        written = [self.kept.written]
        return bool(call_in_place(op, self.gradients, written, self.hyper) == Status.MADE)

    def written_lists(self, names: Sequence[str]) -> list[list[Tensor]]:
        """The lists that are written to: parameters, states, and the rest."""
        states = [list(map(itemgetter(name), self.states)) for name in names]
        return [self.params, *states, *self.rest]

    def run_lists(self, ops: Any, names: Sequence[str]) -> None:
        """Call the op with the states of these names. Raises before anything is written. Tensors
        whose layouts differ are copied first."""
        op = getattr(ops, self.function)
        lists, dtensors = self.written_lists(names), []
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
                    state[name] = wrap_part(param, tensor)
        laid.write_back()


class KeptLists(NamedTuple):
    """The lists that the op keeps for parameters that are stepped together. Gradients are not kept.

    It keeps the tensors alive. It is valid while ``fits`` is true and no entry of a state is
    replaced; the owner must watch for that.
    """

    handles: Sequence[Tensor]  # the op's first arguments: a ticket, on a GPU after a plan
    call: StepCall  # that passes the lists
    parts: list[Tensor]  # of the parameters, on this rank; usually the same list
    written: list[Tensor]
    where: tuple[torch.device, int]

    @classmethod
    def keep(cls, call: StepCall, ops: Any, names: Sequence[str]) -> KeptLists | None:
        """None if the op keeps nothing: it has no native version, or a tensor is not contiguous.

        It notices by itself if a tensor has moved. Raises its errors.
        """
        # The group's own list may change.
        call = call._replace(params=call.params[:])
        lists = whole = call.written_lists(names)
        if has_shards(call.params):
            lists = list(map(parts_of, whole))
        params, *others = lists
        if not all(map(Tensor.is_contiguous, chain(*call.gradients, *lists))):
            return None
        made = getattr(ops, f"{call.function}keep")(params, *call.gradients, *others)
        *plan, ticket = handles = [made] if isinstance(made, Tensor) else made
        if not ticket.numel():
            return None
        forget = partial(getattr(ops, f"{call.function}forget"), *plan)
        weakref.finalize(ticket, forget, ticket.clone()).atexit = False
        # A view shares the version of its base, which must be counted up once.
        bases = (each if each._base is None else each._base for each in chain(*lists, *whole))
        written = list({id(base): base for base in bases}.values())
        bare = call._replace(gradients=[], hyper={})
        return cls(handles, bare, params, written, _device_and_stream(params))

    def fits(self, params: list[Tensor]) -> bool:
        """Whether they were kept for these parameters and this stream."""
        if not same_tensors(params, self.call.params):
            return False
        # A DTensor may have got another local tensor.
        if self.sharded and not same_tensors(parts_of(params), self.parts):
            return False
        return self.where == _device_and_stream(self.parts)

    @property
    def sharded(self) -> bool:
        """Whether there are DTensors among the parameters."""
        return self.parts is not self.call.params


def _device_and_stream(parts: list[Tensor]) -> tuple[torch.device, int]:
    """The device, which an assignment to ``param.data`` may change, and the stream. One parameter
    stands for all: the op refuses those that are apart by name."""
    device = parts[0].device
    on_gpu = device.type == "cuda"
    return device, torch.cuda.current_stream(device).cuda_stream if on_gpu else 0


# Layouts


class LaidOutLists(NamedTuple):
    """The lists in the layout that a kernel needs."""

    lists: list[list[Tensor]]
    # Parameters with gaps between their elements, and contiguous copies to be stepped instead.
    staged: list[tuple[Tensor, Tensor]]

    def write_back(self) -> None:
        """Write the copies that were stepped to their parameters."""
        for param, contiguous in self.staged:
            param.copy_(contiguous)


def lay_out_alike(
    params: list[Tensor], *others: list[Tensor], in_rows: bool = False
) -> LaidOutLists | None:
    """The lists with a copy in place of each tensor that is not laid out like its parameter.

    None if a kernel can walk the tensors as they are. A dense parameter (such as a channels-last
    one) decides the layout of the others, unless all must be ``in_rows``. A parameter with gaps is
    staged. Tensors of another shape than their parameter's are not changed: the op refuses them by
    name.
    """
    if all(map(Tensor.is_contiguous, chain(params, *others))):
        return None
    is_dense = torch.ops.aten.is_non_overlapping_and_dense
    dense = [param.is_contiguous() or (not in_rows and is_dense(param)) for param in params]
    strides = list(map(Tensor.stride, params))
    if all(dense) and all(list(map(Tensor.stride, row)) == strides for row in others):
        return None
    staged: list[tuple[Tensor, Tensor]] = []
    rows = []
    for is_model, param, *rest in zip(dense, params, *others, strict=True):
        model = param if is_model else param.contiguous()
        if not is_model:
            staged.append((param, model))
        rows.append([model, *(_match_layout(model, tensor) for tensor in rest)])
    lists = [list(column) for column in zip(*rows, strict=True)]
    return None if all(map(same_tensors, lists, (params, *others))) else LaidOutLists(lists, staged)


def _match_layout(model: Tensor, tensor: Tensor) -> Tensor:
    """The tensor, or a copy that is laid out like the model."""
    if tensor.stride() == model.stride() or tensor.shape != model.shape or not tensor.numel():
        return tensor
    return torch.empty_like(model, dtype=tensor.dtype, requires_grad=False).copy_(tensor)


# The states of parameters. They hold the op's kept lists until a state changes


def _notify_after(method: Any) -> Any:
    """The method of a dict, which then tells it that an entry was set or removed."""

    @functools.wraps(method)
    def call(self: _Watched, *args: Any, **kwargs: Any) -> Any:
        result = method(self, *args, **kwargs)
        self.forget()
        return result

    return call


class _Watched(dict[Any, Any]):
    """A dict that calls ``forget()`` when an entry is set or removed."""

    def forget(self) -> None:
        raise NotImplementedError

    __setitem__ = _notify_after(dict.__setitem__)
    __delitem__ = _notify_after(dict.__delitem__)
    __ior__ = _notify_after(dict.__ior__)
    update = _notify_after(dict.update)
    setdefault = _notify_after(dict.setdefault)
    pop = _notify_after(dict.pop)
    popitem = _notify_after(dict.popitem)
    clear = _notify_after(dict.clear)


class ParamState(_Watched):
    """The state of one parameter. A copy is not watched."""

    # This is a weak reference, because kept lists hold these dicts. An optimizer's states should be
    # freed with it, not at the next collection of cycles.
    watcher: weakref.ref[States] | None = None

    def forget(self) -> None:
        states = None if self.watcher is None else self.watcher()
        if states is not None:
            states.forget()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (dict(self),)


class States(_Watched, defaultdict[Any, Any]):
    """The states of all parameters, and the lists that the op keeps of each group, by its index.
    The lists hold the states' tensors or their addresses, so they are forgotten when a state
    changes.

    torch's own are also a defaultdict. A copy keeps nothing.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.of_group: dict[int, KeptLists | None] = {}  # None: the op keeps nothing for this group
        self._stepped: dict[int, list[Tensor]] = {}  # parameters of the last step over lists

    def is_repeated(self, group: int, params: list[Tensor]) -> bool:
        """Whether a group was also stepped with these parameters the last time."""
        last, self._stepped[group] = self._stepped.get(group), params
        return last is not None and same_tensors(last, params)

    def forget(self) -> None:
        """Forget the kept lists of all groups."""
        self.of_group.clear()
        self._stepped.clear()

    def drop(self, group: int) -> None:
        """Forget the kept lists of a group that has changed."""
        self.of_group.pop(group, None)
        self._stepped.pop(group, None)

    def watch(self, states: list[dict[str, Any]]) -> bool:
        """Watch these states. False if one cannot be watched."""
        own = weakref.ref(self)
        for state in states:
            if not isinstance(state, ParamState):
                return False  # a plain dict that a user put there
            state.watcher = own
        return True

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.default_factory, dict(self))


def refuse_capture(device: torch.device, why: str) -> None:
    """Raises UsageError while a graph is captured: each replay would make new tensors."""
    if is_capturing(device):
        raise UsageError(
            f"the step cannot be captured: {why}",
            why="each replay would create new tensors in place of those that later steps use",
            hint="call step() once, with the same gradients present, before the capture",
        )


def is_capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
