"""Registration with ``torch.library``: the op exists before, and without, any native library.

The schema is defined in Python (FRAGMENT, one namespace per distribution), with the reference as
its CompositeExplicitAutograd implementation. A native library holds only implementations for its
backend: loading it replaces the reference live, also in a graph that was compiled before.
(A library that defines a schema itself crashes the process when a second copy of it is loaded.)

Mutating ops on the stable ABI do not bump version counters, so autograd would not notice a value
that changed under a saved tensor. A kernel at ADInplaceOrView does it here, for every caller.

Loading an op takes locks, reads files and starts compilers, none of which torch.compile can trace.
So the functions that load are called at trace time instead, and their results are constants of the
graph: it holds the call of the op, and nothing of how the op was loaded.
"""

from __future__ import annotations

import sys
import warnings
from contextlib import contextmanager
from itertools import product
from typing import Any

from opkiln.base.model import DISPATCH_KEYS, Op
from opkiln.errors import LoadError
from opkiln.loading.here import here

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import TypeVar

    import torch

    _F = TypeVar("_F", bound=Callable[..., Any])


def at_trace_time(function: _F) -> _F:
    """Have a traced call of this function made at once, with its result as a constant.

    Its arguments must be constants, too: strings, numbers, classes, lists and dicts of these, or
    objects that exist before the trace. Traced code outside of it must not read what it changes:
    the graph would depend on a value that the trace itself has changed.
    """
    # What torch.compiler.assume_constant_result does; that imports torch._dynamo, a second's work.
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def is_tracing() -> bool:
    """Whether this call is being traced by torch.compile, or by torch.export in its strict mode."""
    compiler = getattr(sys.modules.get("torch"), "compiler", None)
    return compiler is not None and bool(compiler.is_dynamo_compiling())


class Functions:
    """An op's functions as attributes; each is the call into the dispatcher."""

    def __init__(self, op: str, namespace: str, names: tuple[str, ...]) -> None:
        self._op, self._namespace, self._names = op, namespace, names

    @property
    def made_of(self) -> tuple[str, str, tuple[str, ...]]:
        """The arguments that make another one."""
        return self._op, self._namespace, self._names

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


def load_in_trace(load: Callable[..., Any], *args: Any) -> Any:
    """What ``load(*args)`` returns, in a function that is traced: it is called at trace time."""
    # The trace makes the Functions itself: it refuses torch's ops that another object holds.
    made_of, value = _load_at_trace_time(load, *args)
    return value if made_of is None else Functions(*made_of)


@at_trace_time
def _load_at_trace_time(load: Callable[..., Any], *args: Any) -> tuple[tuple[Any, ...] | None, Any]:
    """(the arguments that make the Functions, None), or (None, anything else that is loaded)."""
    value = load(*args)
    return (value.made_of, None) if isinstance(value, Functions) else (None, value)


def drop_compiled_graphs() -> None:
    """Have torch.compile trace anew: its graphs hold the gradients and shapes they were traced
    with. Its cache of differentiated graphs knows an op by its name alone and would bring them
    back, so this process does without it from now on."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        from torch._functorch import config

        dynamo.reset()
        config.enable_autograd_cache = False


def require_kernels(op: Op) -> None:
    """Raise LoadError where torch has no kernel for a function that the library must implement, as
    the first overload that it is registered as."""
    import torch

    spec, told = op.spec, op.registration
    first = told.overloads[0] if told is not None else ""
    has, keys = torch._C._dispatch_has_kernel_for_dispatch_key, DISPATCH_KEYS[spec.backend]
    ending = f".{first}" if first else ""
    missing = [name for name in spec.kernels if not any(has(name + ending, key) for key in keys)]
    if missing:
        from opkiln.building.wording import missing_kernels

        what, why, hint = missing_kernels(spec, missing)
        raise LoadError(what, why=why, hint=hint)


@contextmanager
def cover_kernels(ops: Sequence[Op]) -> Iterator[None]:
    """Within the block torch runs the references of these ops in the place of their kernels: what
    is registered later comes first. That also holds for a library that is opened in the block."""
    import torch

    has = torch._C._dispatch_has_kernel_for_dispatch_key
    made: list[Any] = []
    try:
        for op, kernel in [(each, kernel) for each in ops for kernel in each.spec.kernels]:
            assert op.registration is not None
            function = here.functions[kernel]
            made.append(torch.library.Library(function.namespace, "IMPL"))  # type: ignore[no-untyped-call]
            overloads = map(function.overload_name, op.registration.overloads_of(function.name))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch tells of the replaced kernel
                for name, key in product(overloads, DISPATCH_KEYS[op.spec.backend]):
                    if has(f"{function.namespace}::{name}", key):
                        made[-1].impl(name, function.reference, key)
        yield
    finally:
        for library in made:
            library._destroy()


def library_of(namespace: str) -> Any:
    """A torch.library.Library that adds to a namespace."""
    import torch

    return torch.library.Library(namespace, "FRAGMENT")  # type: ignore[no-untyped-call]


def register_fake(library: Any, qualified: str, fake: Callable[..., Any]) -> None:
    """``torch.library.register_fake``, without its look at who calls it: for a line in a message
    that names the author of a fake, that reads source files, and takes longer than all the rest."""
    import torch

    registry = getattr(torch._library, "simple_registry", None)
    if registry is None:  # a torch that keeps them elsewhere
        torch.library.register_fake(qualified, fake, lib=library)
        return
    holder = registry.singleton.find(qualified).fake_impl
    library._registration_handles.append(holder.register(fake, f"the fake of {qualified}", library))


def returns_nothing(*args: Any, **kwargs: Any) -> None:
    """The fake kernel of an op that only writes in place: shapes do not change."""


class WithBump:
    """Goes on to the op below, after counting up the versions of what it is about to change.

    Raises RuntimeError where an op must not write: to a tensor that autograd differentiates, and to
    one whose elements share memory.
    """

    def __init__(self, namespace: str, function: str, overload: str) -> None:
        self._place, self._name = (namespace, function, overload), function
        self._overload: Any = None
        self._mutated: list[tuple[int, str]] = []

    def __call__(self, keyset: Any, *args: Any, **kwargs: Any) -> Any:
        import torch
        from torch.autograd.graph import increment_version

        if self._overload is None:
            overload: Any = torch.ops
            for each in self._place:
                overload = getattr(overload, each)
            self._mutated = [
                (index, argument.name)
                for index, argument in enumerate(overload._schema.arguments)
                if argument.alias_info is not None and argument.alias_info.is_write
            ]
            self._overload = overload
        for index, name in self._mutated:
            value = args[index] if index < len(args) else kwargs.get(name)
            if value is not None:
                self._require_writable(name, value)
                increment_version(value)
        with torch._C._AutoDispatchBelowADInplaceOrView():
            return self._overload.redispatch(
                keyset & torch._C._after_ADInplaceOrView_keyset, *args, **kwargs
            )

    def _require_writable(self, name: str, value: torch.Tensor | list[torch.Tensor]) -> None:
        import torch

        op, differentiates = self._name, torch.is_grad_enabled()
        for tensor in (value,) if isinstance(value, torch.Tensor) else value:
            if differentiates and tensor.requires_grad:
                raise RuntimeError(
                    f"{op} writes to {name}, which requires a gradient: the op has none"
                    "\nhint: with torch.no_grad():"
                )
            if tensor.is_contiguous():
                continue  # nearly all: this takes a tenth of the time
            if type(tensor) in (torch.Tensor, torch.nn.Parameter) and _overlaps(tensor):
                raise RuntimeError(
                    f"{op} writes to {name}, and elements of it share memory: shape "
                    f"{[*tensor.shape]}, strides {[*tensor.stride()]}\nhint: {name}.clone()"
                )


def _overlaps(tensor: torch.Tensor) -> bool:
    """Whether elements of a tensor share memory, or seem to: strides such as (2, 3) may miss each
    other."""
    import torch

    known: int = torch._debug_has_internal_overlap(tensor)
    if known != _HARD_TO_SAY:
        return bool(known)
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reach:
            return True
        reach += (size - 1) * stride
    return False


_HARD_TO_SAY = 2  # as torch has it; 0: they do not, 1: they do
