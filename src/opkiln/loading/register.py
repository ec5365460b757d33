"""Registration with ``torch.library``: the op exists before, and without, any native library.

The schema is defined in Python (FRAGMENT, one namespace per distribution), with the reference as
its CompositeExplicitAutograd implementation. A native library holds only implementations for its
backend: loading it replaces the reference live, also in a graph that was compiled before.
(A library that defines a schema itself crashes the process when a second copy of it is loaded.)

Mutating ops on the stable ABI do not bump version counters, so autograd would not notice a value
that changed under a saved tensor. A kernel at ADInplaceOrView does it here, for every caller.
"""

from __future__ import annotations

import os
import threading
from typing import Any

from opkiln.errors import LoadError, SpecError
from opkiln.model import CPU, CUDA, ROCM, XPU
from opkiln.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

_libraries: dict[str, torch.library.Library] = {}
_defined: dict[str, tuple[str, ...]] = {}
_current: dict[str, Registration] = {}  # the latest declaration of each op
_made: set[str] = set()  # functions that are defined, by qualified name
_lock = threading.RLock()


def _after_fork() -> None:
    # Another thread may have been inside, importing torch, when this one forked.
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)


class Registration(Record):
    """What an author declares beside the sources. ``reference`` is called when it is needed."""

    namespace: str
    schemas: tuple[str, ...]
    reference: Callable[[], Any] | None
    fake: Callable[[], Any] | None = None
    autograd: Callable[[], Any] | None = None


class Functions:
    """An op's functions as attributes; each is the call into the dispatcher."""

    def __init__(self, op: str, namespace: str, names: tuple[str, ...]) -> None:
        self._op, self._namespace, self._names = op, namespace, names

    def __getattr__(self, name: str) -> Any:
        # torch makes its objects for an op when they are first asked for; so does this.
        if name not in self.__dict__.get("_names", ()):
            raise AttributeError(f"op {self.__dict__.get('_op')} has no function {name!r}")
        import torch

        function = getattr(getattr(torch.ops, self._namespace), name).default
        self.__dict__[name] = function
        return function

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._names]

    def __repr__(self) -> str:
        return f"<op {self._op}: {', '.join(self._names)}>"


def register(op: str, registration: Registration) -> Functions:
    """Define the schemas, once per process, and give the functions. Raises SpecError."""
    namespace = registration.namespace
    with _lock:
        known = _defined.get(f"{namespace}.{op}")
        _current[f"{namespace}.{op}"] = registration
        if known is None:
            _define(op, registration)
            _defined[f"{namespace}.{op}"] = registration.schemas
        elif known != registration.schemas:
            raise SpecError(
                f"op {op} is registered in {namespace} with other schemas",
                why="a schema cannot be changed in a running process",
                hint="restart the process",
            )
    return Functions(op, namespace, tuple(_function_name(each) for each in registration.schemas))


# The dispatch keys under which a backend's library may register: torch calls ROCm's devices CUDA,
# and SYCL runs on CPUs, too.
_KEYS = {CPU: ("CPU",), CUDA: ("CUDA",), ROCM: ("CUDA",), XPU: ("XPU", "CPU")}


def require_kernels(op: str, backend: str, registration: Registration) -> None:
    """Raise LoadError where a library that was just loaded serves none of the op's functions."""
    import torch

    names = [f"{registration.namespace}::{_function_name(s)}" for s in registration.schemas]
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    if not any(has(name, key) for name in names for key in _KEYS[backend]):
        raise LoadError(
            f"op {op}: its library registers none of {', '.join(names)} for {_KEYS[backend][0]}",
            why="it was loaded, and torch has no kernel from it: the namespace, the names or the "
            "dispatch key in C++ are others",
            hint=f"STABLE_TORCH_LIBRARY_IMPL({registration.namespace}, {_KEYS[backend][0]}, m)",
        )


def _function_name(schema: str) -> str:
    return schema.partition("(")[0].strip()


def _define(op: str, registration: Registration) -> None:
    import torch

    namespace = registration.namespace
    library = _libraries.get(namespace)
    if library is None:
        library = _libraries[namespace] = torch.library.Library(  # type: ignore[no-untyped-call]
            namespace, "FRAGMENT"
        )
    for text in registration.schemas:
        name = _function_name(text)
        if f"{namespace}.{name}" in _made:
            continue  # by an attempt that failed at a later schema
        arguments, _, returns = text.rpartition("->")
        try:
            library.define(  # type: ignore[no-untyped-call]
                text, tags=(torch.Tag.pt2_compliant_tag,)
            )
        except RuntimeError as error:
            raise SpecError(f"op {op}: the schema {text!r} is malformed", why=str(error)) from error
        _made.add(f"{namespace}.{name}")
        if registration.reference is not None:
            library.impl(  # type: ignore[no-untyped-call]
                name, _Declared(f"{namespace}.{op}", name, "reference"), "CompositeExplicitAutograd"
            )
        if returns.strip() == "()":
            # The same as a fake kernel here, and registered in less time.
            library.impl(name, _nothing, "Meta")  # type: ignore[no-untyped-call]
        elif registration.fake is not None:
            # One that the author's fakes lack has its shapes from the reference.
            fake = _Declared(f"{namespace}.{op}", name, "fake", "reference")
            _register_fake(library, f"{namespace}::{name}", fake)
        if "!" in arguments:  # `Tensor(a!)`: it writes to what it is given
            library.impl(  # type: ignore[no-untyped-call]
                name, _WithBump(namespace, name), "ADInplaceOrView", with_keyset=True
            )
        elif registration.autograd is not None:
            _differentiate(library, namespace, name, arguments, registration.autograd())


def _register_fake(library: Any, qualified: str, fake: Callable[..., Any]) -> None:
    """``torch.library.register_fake``, without its look at who calls it: for a line in a message
    that names the author of a fake, that reads source files, and takes longer than all the rest."""
    import torch

    registry = getattr(torch._library, "simple_registry", None)
    if registry is None:  # a torch that keeps them elsewhere
        torch.library.register_fake(qualified, fake, lib=library)
        return
    holder = registry.singleton.find(qualified).fake_impl
    library._registration_handles.append(holder.register(fake, f"the fake of {qualified}", library))


def _differentiate(library: Any, namespace: str, name: str, arguments: str, formulas: Any) -> None:
    import torch

    backward = getattr(formulas, f"{name}_backward", None)
    if backward is None:
        return
    saving = getattr(formulas, f"{name}_setup_context", None)
    make = getattr(getattr(torch._library, "autograd", None), "make_autograd_impl", None)
    if make is None or "*" in arguments:  # another torch; arguments that it may have to refuse
        torch.library.register_autograd(
            f"{namespace}::{name}", backward, setup_context=saving, lib=library
        )
    else:
        kernel = _WithGradient(namespace, name, backward, saving)
        library.impl(name, kernel, "Autograd", with_keyset=True)


class _Declared:
    """One function of an op's reference, or of its fakes, imported when it is first called: a hit
    never needs it. Of several kinds, the first that has the function."""

    def __init__(self, op: str, name: str, *kinds: str) -> None:
        self._op, self._name, self._kinds = op, name, kinds
        self._providers: list[object] = []
        self._function: Callable[..., Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        provide = [getattr(_current[self._op], kind) for kind in self._kinds]
        # Every builder's is a method of its own.
        providers = [getattr(each, "__func__", each) for each in provide]
        if self._function is None or providers != self._providers:
            # First called, or declared anew in a notebook.
            self._function, self._providers = self._find(provide), providers
        return self._function(*args, **kwargs)

    def _find(self, provide: list[Callable[[], Any] | None]) -> Callable[..., Any]:
        for each in provide:
            found: Callable[..., Any] | None = getattr(each and each(), self._name, None)
            if found is not None:
                return found
        raise SpecError(f"op {self._op}: the {self._kinds[-1]} has no function {self._name!r}")


def _nothing(*args: Any, **kwargs: Any) -> None:
    """The fake kernel of an op that only writes in place: shapes do not change."""


class _WithBump:
    """Goes on to the op below, after counting up the versions of what it is about to change."""

    def __init__(self, namespace: str, name: str) -> None:
        self._namespace, self._name = namespace, name
        self._overload: Any = None
        self._mutated: list[tuple[int, str]] = []

    def __call__(self, keyset: Any, *args: Any, **kwargs: Any) -> Any:
        import torch
        from torch.autograd.graph import increment_version

        if self._overload is None:
            overload = getattr(getattr(torch.ops, self._namespace), self._name).default
            self._mutated = [
                (index, argument.name)
                for index, argument in enumerate(overload._schema.arguments)
                if argument.alias_info is not None and argument.alias_info.is_write
            ]
            self._overload = overload
        for index, name in self._mutated:
            value = args[index] if index < len(args) else kwargs.get(name)
            if value is not None:
                increment_version(value)
        with torch._C._AutoDispatchBelowADInplaceOrView():
            return self._overload.redispatch(
                keyset & torch._C._after_ADInplaceOrView_keyset, *args, **kwargs
            )


class _WithGradient:
    """What ``torch.library.register_autograd`` registers, made when it is first called: it has
    a class or two made for each function, which a load need not wait for."""

    def __init__(self, namespace: str, name: str, backward: Any, saving: Any) -> None:
        self._namespace, self._name = namespace, name
        self._backward, self._saving = backward, saving
        self._kernel: Callable[..., Any] | None = None

    def __call__(self, keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if self._kernel is None:
            import torch
            from torch._library import autograd

            overload = getattr(getattr(torch.ops, self._namespace), self._name).default
            info = autograd.Info(self._backward, self._saving)
            self._kernel = autograd.make_autograd_impl(overload, info)
        return self._kernel(keyset, *args, **kwargs)
