"""What torch is told of a decorated op, all in one torch.library.Library.

Decorating a function again (a notebook's cell is run once more, a module is reloaded) replaces
everything: schema, reference, shapes, gradient and kernels. torch frees an operator with its last
registration, and whoever still holds it would then call freed memory. So each operator keeps one
registration for good, and old references to it reach the new definition.

torch also has a list of each op's overloads, by which ``torch.ops.ns.f(x)`` finds the first that
fits. When several overloads with one signature lose their schemas, the first one leaves the list,
and the others stay in it (torch 2.13). So an overload that was defined once is always defined
again, or looking up the op would fail; and the default one loses its schema last, to stay first.
The overload ``unserved`` has another signature. To take it out of the list, torch reads the schemas
of those before it, so it goes first, also at the end of the process, where the newest library does.
"""

from __future__ import annotations

from typing import Any

import torch

from opkiln.authoring.gradient import Gradient, tensors, with_defaults, without_autocast
from opkiln.authoring.parameters import NATIVE, NO_GRAD, UNSERVED
from opkiln.errors import LoadError
from opkiln.loading.here import here
from opkiln.loading.register import Function, drop_compiled_graphs, library_of, register_fake

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from opkiln.model import Registration

REASON = "unserved_because"  # the argument that the overload ``unserved`` has besides the op's
_KEPT_KEY = "FPGA"  # a device that no tensor is on


class Decorated(Function):
    """A decorated function that torch knows."""

    def __init__(
        self, registration: Registration, schema: str, function: Callable[..., Any]
    ) -> None:
        owner = f"declared in {function.__module__} already", function.__qualname__
        hint = '@opkiln.op(..., namespace="another")'
        super().__init__(function.__name__, registration, schema, owner, hint)
        self._function = function
        self._first: Any = None  # the torch.library.Library of the default overload
        self._library: Any = None  # that of the others
        self._unserved: Any = None  # that of ``unserved``
        self.gradient: Gradient | None = None
        self._overloads: list[str] = []
        # What an earlier declaration had and this one does not; and the kernels of those.
        self._left: list[str] = []
        self._leftovers: dict[str, Any] = {}
        self._batching: Any = None
        self._rule: Callable[..., Any] | None = None  # the author's, for vmap
        self._forget: Callable[[], None] | None = None

    def reference(self, *args: Any, **kwargs: Any) -> Any:
        """The reference, in the dtypes that it is given."""
        with without_autocast(tuple(tensors(args, kwargs))):
            return self._function(*args, **kwargs)

    def tell_all(
        self,
        entrance: Callable[..., Any],
        overload: str,
        unserved: Callable[..., Any],
        forget: Callable[[], None],
    ) -> None:
        """Tell torch of the op, with one overload besides the default one. ``unserved`` takes the
        calls that a kernel does not serve; ``forget`` is called when the op is declared anew.
        Raises SpecError."""
        with here.lock:
            before = self.claim()
            if isinstance(before, Decorated):
                before.retire()
            here.functions[self.qualified] = self
            self._forget = forget
            self._library, self._first = library_of(self.namespace), library_of(self.namespace)
            for each in ("", overload):
                self._tell_overload(each, None if each == NATIVE else entrance)
            self._tell_unserved(unserved)
            if isinstance(before, Decorated):
                self._tell_leftovers(before, entrance)
            if not self.mutates:
                below = self.overload(NO_GRAD) if overload == NO_GRAD else self.overload()
                self.gradient = Gradient(self.overload(), below, self._function)
                self._first.impl(self.name, self.gradient, "Autograd", with_keyset=True)
            if before is not None:
                drop_compiled_graphs()

    def retire(self) -> None:
        """Have torch forget it, but for the operator itself."""
        others = [self._batching, *self._leftovers.values(), self._library, self._first]
        for each in filter(None, (self._unserved, *others)):
            each._destroy()
        self._library = self._first = self._batching = self._unserved = None
        self._leftovers.clear()
        if self._forget is not None:
            self._forget()

    def add(self, overload: str, kernel: Callable[..., Any] | None) -> Any:
        """Tell torch of one more overload, that of a variant; torch's object for it. ``kernel`` is
        for the devices that no library has kernels for."""
        with here.lock:
            if self._library is None:
                raise LoadError(f"op {self.name} was declared anew: this function is the old one")
            self._tell_overload(overload, kernel)
        return self.overload(overload)

    def batch_with(self, rule: Callable[..., Any]) -> None:
        """Take an author's batching rule."""
        schema = self.overload()._schema

        def batched(info: Any, in_dims: Any, *args: Any, **kwargs: Any) -> Any:
            all_args, named = with_defaults(schema, args, kwargs)
            dims = (*in_dims, *(None for _ in all_args[len(args) :]))
            return rule(info, dims, *all_args, **named)

        with here.lock:
            if self._batching is not None:
                self._batching._destroy()
                self._batching = None
            self._rule = batched
            for each in self._overloads:
                self._batch(each)

    def _batch(self, overload: str) -> None:
        """Register what runs under vmap: the author's rule, or the reference on batched tensors."""
        if self._rule is not None:
            name = f"{self.namespace}::{self.named(overload)}"
            torch.library.register_vmap(name, self._rule, lib=self._library)
        elif not self.mutates:
            self._batching = self._batching or library_of(self.namespace)
            self._batching.impl(self.named(overload), self._function, "FuncTorchBatched")

    def _tell_leftovers(self, before: Decorated, entrance: Callable[..., Any]) -> None:
        """Define the overloads that the op had and does not have any more."""
        for overload in (*before._overloads, *before._left):
            if overload not in self._overloads and overload not in self._left:
                self._left.append(overload)
                self.define(self._library, overload)
                kernel = self._leftovers[overload] = library_of(self.namespace)
                kernel.impl(self.named(overload), entrance, "CompositeExplicitAutograd")

    def _tell_overload(self, overload: str, kernel: Callable[..., Any] | None) -> None:
        library, name = self._library if overload else self._first, self.named(overload)
        if overload in self._leftovers:
            self._leftovers.pop(overload)._destroy()
        else:
            self.define(library, overload)
        self._overloads.append(overload)
        self._keep(name)
        register_fake(library, f"{self.namespace}::{name}", self.fake)
        if kernel is not None:
            library.impl(name, kernel, "CompositeExplicitAutograd")
        self._batch(overload)

    def _tell_unserved(self, kernel: Callable[..., Any]) -> None:
        """Only kernels call it, with real tensors: no tracer sees it."""
        arguments, _, results = self.schema[len(self.name) + 1 :].rpartition(") -> ")
        star = "" if "*, " in arguments else "*, "
        more = f"{arguments}{', ' if arguments else ''}{star}str {REASON}"
        name = self.named(UNSERVED)
        self._unserved = library_of(self.namespace)
        self._unserved.define(f"{name}({more}) -> {results}")
        self._keep(name)
        self._unserved.impl(name, kernel, "CompositeExplicitAutograd")

    def _keep(self, name: str) -> None:
        """Have torch keep an operator for good."""
        qualified = f"{self.namespace}::{name}"
        if qualified not in here.kept:
            here.kept[qualified] = library_of(self.namespace)
            here.kept[qualified].impl(name, _nowhere, _KEPT_KEY)


def _nowhere(*args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError("there are no kernels for this device")
