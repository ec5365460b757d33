"""A step of an optimizer in a function that torch.compile traces: one call of an op in its graph.

There is nothing to gain from tracing a step, which is one call of a native op per group already.
Counts of steps, learning rates and addresses would have it compiled anew again and again. So the
graph gets ``opkiln::step_`` instead, whose arguments are what the graph may have changed or will
read: parameters and gradients. It makes the step as it is made without a compiler.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any, Self

import torch
from torch import Tensor
from torch._compile import _disable_dynamo  # torch.compiler.disable imports torch._dynamo at once

from opkiln.loading.register import at_trace_time, is_tracing

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

_SCHEMA = (
    "step_(Tensor(a!)[] params, Tensor[] grads, int[] places, float grad_scale, str optimizer) "
    "-> ()"
)
_PLAIN = (Tensor, torch.nn.Parameter)

_library: list[torch.library.Library] = []  # one, once a step was traced
_numbers = itertools.count()
_optimizers: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()


class CompiledStep:
    """What an optimizer inherits so that its step can be in a function that is compiled."""

    _name_in_graphs: str  # what the op calls it: an object cannot be an argument

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:  # noqa: ARG004 (those of __init__)
        # Not in __init__, which makes no copies.
        made = super().__new__(cls)
        made._name_in_graphs = f"{cls.__name__}-{next(_numbers)}"
        _optimizers[made._name_in_graphs] = made
        return made

    def _make_step(self, copies: Mapping[Tensor, Tensor], grad_scale: float) -> None:
        """The step itself, without gradients being recorded."""
        raise NotImplementedError

    def _step(self, copies: Mapping[Tensor, Tensor], grad_scale: float) -> None:
        # With copies a step is not in the graph: torch.compile takes the keys of a dictionary,
        # and the gradients that they have, for objects that must stay the same.
        if not is_tracing():
            with torch.no_grad():
                self._make_step(copies, grad_scale)
        elif copies or not _traced(self, grad_scale):
            self._step_outside_the_graph(copies, grad_scale)

    @_disable_dynamo
    def _step_outside_the_graph(self, copies: Mapping[Tensor, Tensor], grad_scale: float) -> None:
        self._step(copies, grad_scale)


def _traced(optimizer: Any, grad_scale: float) -> bool:
    """Put a step into the graph that is being traced.

    False where a parameter or a gradient is not a plain dense tensor, which an op does not take.
    """
    params: list[Tensor] = []
    grads: list[Tensor] = []
    places: list[int] = []
    place = 0
    # Not by the attribute: torch.compile has a rule for that of an optimizer, by which every
    # learning rate is a constant of the graph.
    for group in optimizer.__dict__["param_groups"]:
        for param in group["params"]:
            grad = param.grad
            if grad is not None:
                if type(param) not in _PLAIN or type(grad) not in _PLAIN:
                    return False
                if grad.layout != torch.strided:
                    return False
                params.append(param)
                grads.append(grad)
                places.append(place)
            place += 1
    if params:
        name = optimizer._name_in_graphs
        _define_at_trace_time()
        with torch.no_grad():
            torch.ops.opkiln.step_(params, grads, places, grad_scale, name)
    return True


@at_trace_time
def _define_at_trace_time() -> None:
    """Define the op, once."""
    if not _library:
        library = torch.library.Library("opkiln", "FRAGMENT")  # type: ignore[no-untyped-call]
        # A captured CUDA graph would repeat the kernels of one step, and with them its numbers.
        tags = (torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe)
        library.define(_SCHEMA, tags=tags)  # type: ignore[no-untyped-call]
        library.impl("step_", _step, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
        library.impl("step_", _nothing, "Meta")  # type: ignore[no-untyped-call]
        _library.append(library)


def _nothing(*args: Any) -> None:
    """Shapes do not change."""


def _step(
    params: list[Tensor],
    grads: list[Tensor],
    places: list[int],
    grad_scale: float,
    optimizer: str,
) -> None:
    made = _optimizers[optimizer]
    every: list[Any] = [param for group in made.param_groups for param in group["params"]]
    own = [every[place] for place in places]
    # Some backends hand over copies of what a graph writes to, and copy the results back.
    staged = [
        (param, given)
        for param, given in zip(own, params, strict=True)
        if param.data_ptr() != given.data_ptr()
    ]
    kept = [param.grad for param in every]
    with torch.no_grad():
        for param, given in staged:
            param.copy_(given)
        try:
            for param in every:
                param.grad = None
            for param, grad in zip(own, grads, strict=True):
                param.grad = grad
            made._make_step({}, grad_scale)
        finally:
            for param, grad in zip(every, kept, strict=True):
                param.grad = grad
        for param, given in staged:
            given.copy_(param)
