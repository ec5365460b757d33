"""Registration with ``torch.library``: the op exists before, and without, any native library.

The schema is defined in Python (FRAGMENT, one namespace per distribution), with the reference as its
CompositeExplicitAutograd implementation. A native library holds only implementations for its
backend: loading it replaces the reference live, also in a graph that was compiled before.
(A library that defines a schema itself crashes the process when a second copy of it is loaded.)

Mutating ops on the stable ABI do not bump version counters, so autograd would not notice a value
that changed under a saved tensor. A kernel at ADInplaceOrView does it here, for every caller.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

from opkiln.errors import SpecError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

_libraries: dict[str, torch.library.Library] = {}
_defined: dict[str, tuple[str, ...]] = {}
_lock = threading.RLock()


class Registration(NamedTuple):
    """What an author declares beside the sources. ``reference`` is called when it is needed."""

    namespace: str
    schemas: tuple[str, ...]
    reference: Callable[[], Any] | None
    fake: Callable[[], Any] | None = None


class Functions:
    """An op's functions as attributes; each is the call into the dispatcher."""

    def __init__(self, op: str, functions: dict[str, Any]) -> None:
        self.__dict__.update(functions)
        self.__dict__["__name__"] = op

    def __repr__(self) -> str:
        names = ", ".join(name for name in vars(self) if not name.startswith("__"))
        return f"<op {self.__dict__['__name__']}: {names}>"


def register(op: str, registration: Registration) -> Functions:
    """Define the schemas, once per process, and give the functions. Raises SpecError."""
    import torch

    namespace = registration.namespace
    with _lock:
        known = _defined.get(f"{namespace}.{op}")
        if known is None:
            _define(op, registration)
            _defined[f"{namespace}.{op}"] = registration.schemas
        elif known != registration.schemas:
            raise SpecError(
                f"op {op} is registered in {namespace} with other schemas",
                why="a schema cannot be changed in a running process",
                hint="restart the process",
            )
    ops = getattr(torch.ops, namespace)
    names = [_function_name(schema) for schema in registration.schemas]
    return Functions(op, {name: getattr(ops, name).default for name in names})


def _function_name(schema: str) -> str:
    return schema.partition("(")[0].strip()


def _define(op: str, registration: Registration) -> None:
    import torch

    namespace = registration.namespace
    library = _libraries.get(namespace)
    if library is None:
        library = _libraries[namespace] = torch.library.Library(namespace, "FRAGMENT")
    reference = None if registration.reference is None else registration.reference()
    fake = None if registration.fake is None else registration.fake()
    for text in registration.schemas:
        name = _function_name(text)
        try:
            schema = torch._C.parse_schema(f"{namespace}::{text}")
        except RuntimeError as error:
            raise SpecError(f"op {op}: the schema {text!r} is malformed", why=str(error)) from error
        mutated = [i for i, a in enumerate(schema.arguments) if a.alias_info and a.alias_info.is_write]
        library.define(text, tags=(torch.Tag.pt2_compliant_tag,))
        if reference is not None:
            function = getattr(reference, name, None)
            if function is None:
                raise SpecError(f"op {op}: the reference has no function {name!r}")
            library.impl(name, function, "CompositeExplicitAutograd")
        fake_function = getattr(fake, name, None)
        if fake_function is None and not schema.returns:
            fake_function = _nothing
        if fake_function is not None:
            torch.library.register_fake(f"{namespace}::{name}", fake_function, lib=library)
        if mutated:
            _bump_versions(library, namespace, name, mutated)


def _nothing(*args: Any, **kwargs: Any) -> None:
    """The fake kernel of an op that only writes in place: shapes do not change."""


def _bump_versions(library: Any, namespace: str, name: str, mutated: list[int]) -> None:
    import torch
    from torch.autograd.graph import increment_version

    overload = getattr(getattr(torch.ops, namespace), name).default
    names = [argument.name for argument in overload._schema.arguments]

    def with_bump(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        for index in mutated:
            value = args[index] if index < len(args) else kwargs.get(names[index])
            if value is not None:
                increment_version(value)
        with torch._C._AutoDispatchBelowADInplaceOrView():
            return overload.redispatch(
                keyset & torch._C._after_ADInplaceOrView_keyset, *args, **kwargs
            )

    library.impl(name, with_bump, "ADInplaceOrView", with_keyset=True)
