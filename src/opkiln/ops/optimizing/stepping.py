"""Two other ways to make a step: in a graph that torch.compile traces, and in a separate thread.

A step is already one call of a native op per group, so tracing it gains nothing, and every new
count of steps or learning rate would compile it again. So the graph gets one call of
``opkiln::step_``, which makes the step as it is made without a compiler. Its arguments are the
tensors that the graph may have changed or will read: parameters and gradients.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from opkiln.errors import UsageError
from opkiln.loading.register import at_trace_time

_SCHEMA = (
    "step_(Tensor(a!)[] params, Tensor[] grads, int[] places, float grad_scale, str optimizer) "
    "-> ()"
)
_PLAIN = (Tensor, torch.nn.Parameter)

_library: list[torch.library.Library] = []  # has one element after a step was traced
_numbers = itertools.count()
_optimizers: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()


def name_in_graphs(optimizer: Any) -> str:
    """A new name that identifies the optimizer in the op's arguments, which cannot be objects."""
    name = f"{type(optimizer).__name__}-{next(_numbers)}"
    _optimizers[name] = optimizer
    return name


def put_into_graph(optimizer: Any, grad_scale: float) -> bool:
    """Put a step into the graph that is being traced.

    False if a parameter or a gradient is not a plain dense tensor: an op takes no other kind.
    """
    # Reading the attribute would make torch.compile take every learning rate as a constant of the
    # graph.
    groups = optimizer.__dict__["param_groups"]
    every: list[Any] = [param for group in groups for param in group["params"]]
    places = [place for place, param in enumerate(every) if param.grad is not None]
    params = [every[place] for place in places]
    grads = [param.grad for param in params]
    for tensor in (*params, *grads):
        if type(tensor) not in _PLAIN or tensor.layout != torch.strided:
            return False
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
        # A captured CUDA graph would repeat one step, with the same numbers.
        tags = (torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe)
        library.define(_SCHEMA, tags=tags)  # type: ignore[no-untyped-call]
        library.impl("step_", _step, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
        # No shape changes.
        library.impl("step_", lambda *_: None, "Meta")  # type: ignore[no-untyped-call]
        _library.append(library)


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
    # Some backends pass copies of what a graph writes to, and copy the results back.
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


class StepHandle:
    """A step that runs in a thread. Do not touch parameters, states or copies until ``wait()``
    returns.

    A closed handle raises UsageError when it is used. As a context manager, it waits and closes at
    the end.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        self._error: BaseException | None = None
        self._told = False  # the error was raised by wait()
        self._closed = False

        def run() -> None:
            try:
                work()
            except BaseException as error:
                self._error = error

        # Each step has its own thread: there is nothing to shut down, and no thread has to survive
        # a fork. A thread costs far less than a step that is worth running in the background.
        self._thread = threading.Thread(target=run, name="opkiln-step")
        self._thread.start()

    def done(self) -> bool:
        """Whether the step has ended, with or without an error."""
        self._check_open()
        return not self._thread.is_alive()

    def wait(self, timeout: float | None = None) -> None:
        """Return when the step is made, or raise what it raised, at every call.

        Raises TimeoutError after ``timeout`` seconds; the step continues.
        """
        self._check_open()
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError(f"the step is still running after {timeout} s")
        self._told = True
        if self._error is not None:
            raise self._error

    def raise_untold(self) -> None:
        """Raise what a finished step raised, unless ``wait()`` already did."""
        if not self._told and self._error is not None:
            self._told = True
            raise self._error

    def close(self) -> None:
        """Wait, then close. Calling it again has no effect."""
        if not self._closed:
            try:
                self.wait()
            finally:
                self._closed = True

    @property
    def in_flight(self) -> bool:
        """Whether the step is still running. Also works on a closed handle."""
        return self._thread.is_alive()

    def __enter__(self) -> StepHandle:
        self._check_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError(
                "this handle of a step is closed",
                why="it was closed by close() or at the end of its with block",
                hint="handle = optimizer.step_in_background()",
            )
