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

import threading
from typing import Any

import torch

from opkiln.authoring.builders import NATIVE, NO_GRAD, UNSERVED
from opkiln.authoring.gradient import Gradient, with_defaults
from opkiln.errors import LoadError, SpecError
from opkiln.loading import register

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

REASON = "unserved_because"  # the argument that the overload ``unserved`` has besides the op's
_KEPT_KEY = "FPGA"  # a device that no tensor is on
_kept: dict[str, Any] = {}
_defined: dict[str, Defined] = {}
lock = threading.RLock()  # of what torch is told of decorated ops


class Defined:
    """An op that torch knows."""

    def __init__(
        self, owner: tuple[str, str], namespace: str, schema: str, written: tuple[str, ...]
    ) -> None:
        self.owner, self.namespace, self.schema = owner, namespace, schema
        self.name = schema.partition("(")[0]
        self.written = written
        self._first: Any = None  # the torch.library.Library of the default overload
        self._library: Any = None  # that of the others
        self._unserved: Any = None  # that of ``unserved``
        self._reference: Callable[..., Any] = _nowhere
        self.gradient: Gradient | None = None
        self.fake: Callable[..., Any] | None = None  # the author's own
        self._overloads: list[str] = []
        # What an earlier declaration had and this one does not; and the kernels of those.
        self._left: list[str] = []
        self._leftovers: dict[str, Any] = {}
        self._batching: Any = None
        self._rule: Callable[..., Any] | None = None  # the author's, for vmap
        self.on_retiring: Callable[[], None] | None = None

    @property
    def qualified(self) -> str:
        return f"{self.namespace}::{self.name}"

    def overload(self, name: str = "default") -> Any:
        return getattr(getattr(getattr(torch.ops, self.namespace), self.name), name)

    def define(
        self,
        entrance: Callable[..., Any],
        reference: Callable[..., Any],
        overloads: tuple[str, ...],
        unserved: Callable[..., Any],
    ) -> None:
        """Tell torch. ``overloads`` are names besides the default one. ``unserved`` takes the calls
        that a kernel does not serve. Raises SpecError."""
        with lock:
            before = _defined.get(self.qualified)
            if before is not None and before.owner != self.owner:
                raise SpecError(
                    f"op {self.name}: {self.qualified} is declared in {before.owner[0]} already",
                    why="a function belongs to one op",
                    hint='@opkiln.op(..., namespace="another")',
                )
            register.refuse_defined(self.namespace, self.name)
            if before is not None:
                before.retire()
            _defined[self.qualified] = self
            self._reference = reference
            self._library, self._first = _library(self.namespace), _library(self.namespace)
            for overload in ("", *overloads):
                self._define_overload(overload, None if overload == NATIVE else entrance)
                self._batch(overload)
            self._define_unserved(unserved)
            if before is not None:
                self._define_leftovers(before, entrance)
            if not self.written:
                below = self.overload(NO_GRAD) if NO_GRAD in overloads else self.overload()
                self.gradient = Gradient(self.overload(), below, reference)
                self._first.impl(self.name, self.gradient, "Autograd", with_keyset=True)
            if before is not None:
                register.drop_compiled_graphs()

    def retire(self) -> None:
        """Have torch forget it, but for the operator itself."""
        others = [self._batching, *self._leftovers.values(), self._library, self._first]
        for each in filter(None, (self._unserved, *others)):
            each._destroy()
        self._library = self._first = self._batching = self._unserved = None
        self._leftovers.clear()
        if self.on_retiring is not None:
            self.on_retiring()

    def add(self, overload: str, kernel: Callable[..., Any] | None) -> Any:
        """Tell torch of one more overload, that of a variant; torch's object for it. ``kernel`` is
        for the devices that no library has kernels for."""
        with lock:
            if self._library is None:
                raise LoadError(f"op {self.name} was declared anew: this function is the old one")
            self._define_overload(overload, kernel)
            self._batch(overload)
        return self.overload(overload)

    def batch_with(self, rule: Callable[..., Any]) -> None:
        """Take an author's batching rule."""
        schema = self.overload()._schema

        def batched(info: Any, in_dims: Any, *args: Any, **kwargs: Any) -> Any:
            all_args, named = with_defaults(schema, args, kwargs)
            dims = (*in_dims, *(None for _ in all_args[len(args) :]))
            return rule(info, dims, *all_args, **named)

        with lock:
            if self._batching is not None:
                self._batching._destroy()
                self._batching = None
            self._rule = batched
            for each in self._overloads:
                self._batch(each)

    def _batch(self, overload: str) -> None:
        """Register what runs under vmap: the author's rule, or the reference on batched tensors."""
        if self._rule is not None:
            name = f"{self.namespace}::{self._named(overload)}"
            torch.library.register_vmap(name, self._rule, lib=self._library)
        elif not self.written:
            self._batching = self._batching or _library(self.namespace)
            self._batching.impl(self._named(overload), self._reference, "FuncTorchBatched")

    def _define_leftovers(self, before: Defined, entrance: Callable[..., Any]) -> None:
        """Define the overloads that the op had and does not have any more."""
        for overload in (*before._overloads, *before._left):
            if overload not in self._overloads and overload not in self._left:
                self._left.append(overload)
                self._library.define(self._named(overload) + self.schema[len(self.name) :])
                self._leftovers[overload] = _library(self.namespace)
                self._leftovers[overload].impl(
                    self._named(overload), entrance, "CompositeExplicitAutograd"
                )

    def _define_overload(self, overload: str, kernel: Callable[..., Any] | None) -> None:
        library, name = self._library if overload else self._first, self._named(overload)
        if overload in self._leftovers:
            self._leftovers.pop(overload)._destroy()
        else:
            try:
                library.define(
                    name + self.schema[len(self.name) :], tags=(torch.Tag.pt2_compliant_tag,)
                )
            except (RuntimeError, IndexError) as error:
                raise SpecError(
                    f"op {self.name}: torch refuses the schema {self.schema!r}", why=str(error)
                ) from error
        self._overloads.append(overload)
        _keep(self.namespace, name)
        register.register_fake(library, f"{self.namespace}::{name}", self._shapes)
        if kernel is not None:
            library.impl(name, kernel, "CompositeExplicitAutograd")
        if self.written:
            bump = register.WithBump(self.namespace, self.name, overload or "default")
            library.impl(name, bump, "ADInplaceOrView", with_keyset=True)

    def _define_unserved(self, kernel: Callable[..., Any]) -> None:
        """Only kernels call it, with real tensors: no tracer sees it."""
        arguments, _, results = self.schema[len(self.name) + 1 :].rpartition(") -> ")
        star = "" if "*, " in arguments else "*, "
        more = f"{arguments}{', ' if arguments else ''}{star}str {REASON}"
        name = self._named(UNSERVED)
        self._unserved = _library(self.namespace)
        self._unserved.define(f"{name}({more}) -> {results}")
        _keep(self.namespace, name)
        self._unserved.impl(name, kernel, "CompositeExplicitAutograd")

    def _shapes(self, *args: Any, **kwargs: Any) -> Any:
        return (self.fake or self._reference)(*args, **kwargs)

    def _named(self, overload: str) -> str:
        return f"{self.name}.{overload}" if overload else self.name


def _library(namespace: str) -> Any:
    return torch.library.Library(namespace, "FRAGMENT")  # type: ignore[no-untyped-call]


def _keep(namespace: str, name: str) -> None:
    key = f"{namespace}::{name}"
    if key not in _kept:
        _kept[key] = _library(namespace)
        _kept[key].impl(name, _nowhere, _KEPT_KEY)


def _nowhere(*args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError("there are no kernels for this device")
