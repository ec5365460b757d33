"""What torch is told of a decorated op, all in one torch.library.Library.

Decorating a function again (a notebook's cell is run once more, a module is reloaded) replaces
everything: schema, reference, shapes, gradient and kernels. torch frees an operator with its last
registration, and whoever still holds it would then call freed memory. So each operator keeps one
registration for good, and old references to it reach the new definition.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

from opkiln.authoring.gradient import Gradient, with_defaults
from opkiln.errors import SpecError
from opkiln.loading import register

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from opkiln.authoring.entrance import Entrance

NO_GRAD = "no_grad"  # the overload without a gradient
NATIVE = "native"  # the overload that libraries implement if every call is to be compared

_KEPT_KEY = "FPGA"  # a device that no tensor is on
_kept: dict[str, Any] = {}
_defined: dict[str, Defined] = {}
_lock = threading.RLock()


class Defined:
    """An op that torch knows."""

    def __init__(
        self, owner: tuple[str, str], namespace: str, schema: str, written: tuple[str, ...]
    ) -> None:
        self.owner, self.namespace, self.schema = owner, namespace, schema
        self.name = schema.partition("(")[0]
        self.written = written
        self._library: Any = None
        self.gradient: Gradient | None = None
        self.fake: Callable[..., Any] | None = None  # the author's own
        self._overloads: tuple[str, ...] = ()
        self._batching: Any = None

    @property
    def qualified(self) -> str:
        return f"{self.namespace}::{self.name}"

    def overload(self, name: str = "default") -> Any:
        return getattr(getattr(getattr(torch.ops, self.namespace), self.name), name)

    def define(
        self, entrance: Entrance, reference: Callable[..., Any], overloads: tuple[str, ...]
    ) -> None:
        """Tell torch. ``overloads`` are names besides the default one. Raises SpecError."""
        with _lock:
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
            self._define(entrance, reference, overloads)
            if before is not None:
                register.drop_compiled_graphs()

    def retire(self) -> None:
        """Have torch forget it, but for the operator itself."""
        for each in (self._library, self._batching):
            if each is not None:
                each._destroy()
        self._library = self._batching = None

    def batch_with(self, rule: Callable[..., Any]) -> None:
        """Take an author's batching rule."""
        if self._batching is not None:
            self._batching._destroy()
            self._batching = None
        schema = self.overload()._schema

        def batched(info: Any, in_dims: Any, *args: Any, **kwargs: Any) -> Any:
            all_args, named = with_defaults(schema, args, kwargs)
            dims = (*in_dims, *(None for _ in all_args[len(args) :]))
            return rule(info, dims, *all_args, **named)

        for each in self._overloads:
            name = f"{self.namespace}::{self._named(each)}"
            torch.library.register_vmap(name, batched, lib=self._library)

    def _define(
        self, entrance: Entrance, reference: Callable[..., Any], overloads: tuple[str, ...]
    ) -> None:
        library = self._library = _library(self.namespace)
        self._overloads = ("", *overloads)
        parameters = self.schema[len(self.name) :]
        for overload in ("", *overloads):
            name = self._named(overload)
            try:
                library.define(name + parameters, tags=(torch.Tag.pt2_compliant_tag,))
            except RuntimeError as error:
                raise SpecError(
                    f"op {self.name}: torch refuses the schema {self.schema!r}", why=str(error)
                ) from error
            _keep(self.namespace, name)
            register.register_fake(library, f"{self.namespace}::{name}", self._shapes(reference))
            if overload != NATIVE:
                library.impl(name, entrance, "CompositeExplicitAutograd")
            if self.written:
                bump = register.WithBump(self.namespace, self.name, overload or "default")
                library.impl(name, bump, "ADInplaceOrView", with_keyset=True)
        if not self.written:
            below = self.overload(NO_GRAD) if NO_GRAD in overloads else self.overload()
            self.gradient = Gradient(self.overload(), below, reference)
            library.impl(self.name, self.gradient, "Autograd", with_keyset=True)
            # Under vmap the reference runs, on batched tensors.
            self._batching = _library(self.namespace)
            for overload in ("", *overloads):
                self._batching.impl(self._named(overload), reference, "FuncTorchBatched")

    def _shapes(self, reference: Callable[..., Any]) -> Callable[..., Any]:
        def fake(*args: Any, **kwargs: Any) -> Any:
            return (self.fake or reference)(*args, **kwargs)

        return fake

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
