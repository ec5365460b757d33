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
from typing import Any

from opkiln.errors import LoadError, SpecError
from opkiln.loading.here import here
from opkiln.model import DISPATCH_KEYS, Op, OpSpec, Registration, function_name

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


def same(one: Registration | None, other: Registration | None) -> bool:
    """Whether two declarations say the same. Every builder has methods of its own, so it is their
    functions that are compared."""
    if one is None or other is None:
        return one is other
    return one[:2] == other[:2] and all(map(_is_same_function, one[2:], other[2:]))


def _is_same_function(one: object, other: object) -> bool:
    return getattr(one, "__func__", one) is getattr(other, "__func__", other)


# What is loaded at trace time: (what makes the Functions, None), or (None, anything else). A trace
# makes the Functions itself: it refuses the torch ops that an object from elsewhere holds.
LoadedInTrace = tuple[tuple[Any, ...] | None, Any]


def for_trace(value: Any) -> LoadedInTrace:
    """What a function that is called at trace time returns for what it has loaded."""
    return (value.made_of, None) if isinstance(value, Functions) else (None, value)


def in_trace(made_of: tuple[Any, ...] | None, value: Any) -> Any:
    """What the traced caller makes of it."""
    return value if made_of is None else Functions(*made_of)


def register(op: str, registration: Registration, *, anew: bool = False) -> Functions:
    """Tell torch of an op's functions, and give them.

    Where the op was declared before, its new reference, fakes and gradients replace the old ones;
    ``anew`` asks for them again, although the declaration is the same. Raises SpecError, also for
    a function whose schema is another one than before.
    """
    namespace = registration.namespace
    name = f"{namespace}.{op}"
    if registration.defined:
        return Functions(op, namespace, registration.names)
    with here.lock:
        before = here.declared.get(name)
        if anew or before is None or not same(before, registration):
            _refuse_changed_schemas(op, registration)
            for schema in registration.schemas:
                _define(op, schema, registration)
            formulas = None if registration.autograd is None else registration.autograd()
            here.declared[name] = registration
            changed = [here.functions[f"{namespace}.{function_name(each)}"].forget() for each in
                       registration.schemas]  # fmt: skip
            if _differentiate(registration, formulas) or any(changed):
                drop_compiled_graphs()
    return Functions(op, namespace, tuple(function_name(each) for each in registration.schemas))


def _refuse_changed_schemas(op: str, registration: Registration) -> None:
    for schema in registration.schemas:
        name = function_name(schema)
        known = here.functions.get(f"{registration.namespace}.{name}")
        if known is None:
            continue
        if known.op != op:
            raise SpecError(
                f"op {op}: {registration.namespace}::{name} is a function of op {known.op}",
                why="a function belongs to one op",
                hint="give it another name, or another NAMESPACE; after renaming an op, restart "
                "the process",
            )
        if known.schema != schema:
            raise SpecError(
                f"op {op}: the schema of {name} has changed",
                why=f"in this process it is {known.schema!r}\n"
                "kernels and compiled graphs rely on it, so it stays as long as the process",
                hint="restart the process",
            )


def refuse_defined(namespace: str, name: str) -> None:
    """Raise SpecError if a builder has declared this function."""
    known = here.functions.get(f"{namespace}.{name}")
    if known is not None:
        raise SpecError(
            f"op {name}: {namespace}::{name} is a function of op {known.op}",
            why="a function belongs to one op",
            hint='@opkiln.op(..., namespace="another")',
        )


def drop_compiled_graphs() -> None:
    """Have torch.compile trace anew: its graphs hold the gradients and shapes they were traced
    with. Its cache of differentiated graphs knows an op by its name alone and would bring them
    back, so this process does without it from now on."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        from torch._functorch import config

        dynamo.reset()
        config.enable_autograd_cache = False


def require_kernels(spec: OpSpec, overloads: tuple[str, ...] = ("",)) -> None:
    """Raise LoadError where torch has no kernel for a function that the library must implement, as
    the first of ``overloads``."""
    import torch

    has, keys = torch._C._dispatch_has_kernel_for_dispatch_key, DISPATCH_KEYS[spec.backend]
    ending = f".{overloads[0]}" if overloads[0] else ""
    missing = [name for name in spec.kernels if not any(has(name + ending, key) for key in keys)]
    if missing:
        from opkiln.building.wording import missing_kernels

        what, why, hint = missing_kernels(spec, missing)
        raise LoadError(what, why=why, hint=hint)


@contextmanager
def covered(ops: Sequence[Op]) -> Iterator[None]:
    """Within the block torch runs the references of these ops in the place of their kernels. For
    libraries that register their kernels themselves when they are opened: nobody can take those
    back, but what is registered later comes first."""
    if not ops:
        yield
        return
    import torch

    has = torch._C._dispatch_has_kernel_for_dispatch_key
    made: list[Any] = []
    try:
        for op in ops:
            for kernel in op.spec.kernels:
                namespace, _, name = kernel.partition("::")
                library = torch.library.Library(namespace, "IMPL")  # type: ignore[no-untyped-call]
                made.append(library)
                for each in DISPATCH_KEYS[op.spec.backend]:
                    if has(kernel, each):
                        reference = here.functions[f"{namespace}.{name}"].reference
                        with warnings.catch_warnings():
                            warnings.simplefilter("ignore")  # torch tells of the replaced kernel
                            library.impl(name, reference, each)  # type: ignore[no-untyped-call]
        yield
    finally:
        for library in made:
            library._destroy()


class Function:
    """What torch was told of a function. What is declared later is told then."""

    def __init__(self, op: str, schema: str) -> None:
        self.op, self.schema = op, schema
        self.reference: _Declared | None = None
        self.fake: _Declared | None = None
        self.gradient: _Gradient | None = None

    @property
    def mutates(self) -> bool:
        return "!" in self.schema.rpartition("->")[0]  # `Tensor(a!)`: it writes to what it is given

    def forget(self) -> bool:
        """Have the reference and the fake looked up anew; whether the fake is another one."""
        if self.reference is not None:
            self.reference.forget()
        return self.fake is not None and self.fake.forget()


def _define(op: str, schema: str, registration: Registration) -> None:
    import torch

    namespace, name = registration.namespace, function_name(schema)
    library = here.namespaces.get(namespace)
    if library is None:
        library = here.namespaces[namespace] = torch.library.Library(  # type: ignore[no-untyped-call]
            namespace, "FRAGMENT"
        )
    returns_nothing = schema.rpartition("->")[2].strip() == "()"
    known = here.functions.get(f"{namespace}.{name}")
    if known is None:
        try:
            library.define(  # type: ignore[no-untyped-call]
                schema, tags=(torch.Tag.pt2_compliant_tag,)
            )
        except RuntimeError as error:
            raise SpecError(
                f"op {op}: the schema {schema!r} is malformed", why=str(error)
            ) from error
        known = here.functions[f"{namespace}.{name}"] = Function(op, schema)
        if known.mutates:
            library.impl(  # type: ignore[no-untyped-call]
                name, WithBump(namespace, name), "ADInplaceOrView", with_keyset=True
            )
        if returns_nothing:
            # The same as a fake kernel here, and registered in less time.
            library.impl(name, _nothing, "Meta")  # type: ignore[no-untyped-call]
    if registration.reference is not None and known.reference is None:
        known.reference = _Declared(f"{namespace}.{op}", name, "reference")
        library.impl(  # type: ignore[no-untyped-call]
            name, known.reference, "CompositeExplicitAutograd"
        )
    if registration.fake is not None and known.fake is None and not returns_nothing:
        # One that the author's fakes lack has its shapes from the reference.
        known.fake = _Declared(f"{namespace}.{op}", name, "fake", "reference")
        register_fake(library, f"{namespace}::{name}", known.fake)


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


def _differentiate(registration: Registration, formulas: Any) -> bool:
    """Give each function the gradient that is declared now; whether one replaced another."""
    namespace = registration.namespace
    replaced = False
    for schema in registration.schemas:
        name = function_name(schema)
        known = here.functions[f"{namespace}.{name}"]
        backward = getattr(formulas, f"{name}_backward", None)
        saving = getattr(formulas, f"{name}_setup_context", None)
        if known.gradient is not None:
            replaced |= known.gradient.replace(backward, saving)
        elif backward is not None and not known.mutates:
            known.gradient = _Gradient(namespace, name, backward, saving)
            known.gradient.register(here.namespaces[namespace], schema)
    return replaced


class _Declared:
    """One function of an op's reference, or of its fakes, imported when it is first called: a hit
    never needs it. Of several kinds, the first that has the function."""

    def __init__(self, op: str, name: str, *kinds: str) -> None:
        self._op, self._name, self._kinds = op, name, kinds
        self._function: Callable[..., Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        function = self._function
        if function is None:
            function = self._function = self._find()
            if function is None:
                from opkiln.loading import declaration

                provide = getattr(here.declared[self._op], self._kinds[-1])
                raise declaration.missing(
                    self._op, self._kinds[-1], self._name, provide and provide()
                )
        return function(*args, **kwargs)

    def forget(self) -> bool:
        """Look the function up anew at the next call; whether it is another than was called."""
        used, self._function = self._function, None
        return used is not None and self._find() is not used

    def _find(self) -> Callable[..., Any] | None:
        for kind in self._kinds:
            provide = getattr(here.declared[self._op], kind)
            found: Callable[..., Any] | None = getattr(provide and provide(), self._name, None)
            if found is not None:
                return found
        return None


def _nothing(*args: Any, **kwargs: Any) -> None:
    """The fake kernel of an op that only writes in place: shapes do not change."""


class WithBump:
    """Goes on to the op below, after counting up the versions of what it is about to change.

    Raises RuntimeError where an op must not write: to a tensor that autograd differentiates, and to
    one whose elements share memory.
    """

    def __init__(self, namespace: str, name: str, overload: str = "default") -> None:
        self._names = namespace, name, overload
        self._overload: Any = None
        self._mutated: list[tuple[int, str]] = []

    def __call__(self, keyset: Any, *args: Any, **kwargs: Any) -> Any:
        import torch
        from torch.autograd.graph import increment_version

        if self._overload is None:
            overload: Any = torch.ops
            for part in self._names:
                overload = getattr(overload, part)
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

        differentiates = torch.is_grad_enabled()
        for tensor in (value,) if isinstance(value, torch.Tensor) else value:
            if differentiates and tensor.requires_grad:
                raise RuntimeError(
                    f"{self._names[1]} writes to {name}, which requires a gradient: the op has none"
                    "\nhint: with torch.no_grad():"
                )
            if tensor.is_contiguous():
                continue  # nearly all: this takes a tenth of the time
            if type(tensor) in (torch.Tensor, torch.nn.Parameter) and _overlaps(tensor):
                raise RuntimeError(
                    f"{self._names[1]} writes to {name}, and elements of it share memory: shape "
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


class _Gradient:
    """What ``torch.library.register_autograd`` registers, made when it is first called: it has
    a class or two made for each function, which a load need not wait for. And replaceable: torch's
    own keeps the first formula."""

    def __init__(self, namespace: str, name: str, backward: Any, saving: Any) -> None:
        self._namespace, self._name = namespace, name
        self._backward, self._saving = backward, saving
        self._kernel: Callable[..., Any] | None = None

    def register(self, library: Any, schema: str) -> None:
        import torch

        make = getattr(getattr(torch._library, "autograd", None), "make_autograd_impl", None)
        if make is None or "*" in schema:  # another torch; arguments that it may have to refuse
            torch.library.register_autograd(
                f"{self._namespace}::{self._name}", self._call_backward,
                setup_context=self._call_saving, lib=library,
            )  # fmt: skip
        else:
            library.impl(self._name, self, "Autograd", with_keyset=True)

    def replace(self, backward: Any, saving: Any) -> bool:
        """Take another formula; False if it is this one. A backward pass that has begun ends with
        the formula it began with."""
        if backward is self._backward and saving is self._saving:
            return False
        self._backward, self._saving, self._kernel = backward, saving, None
        return True

    def __call__(self, keyset: Any, *args: Any, **kwargs: Any) -> Any:
        kernel = self._kernel
        if kernel is None:
            import torch
            from torch._library import autograd

            overload = getattr(getattr(torch.ops, self._namespace), self._name).default
            info = autograd.Info(self._backward, self._saving)
            kernel = self._kernel = autograd.make_autograd_impl(overload, info)
        return kernel(keyset, *args, **kwargs)

    def _call_saving(self, ctx: Any, **given: Any) -> None:
        if self._saving is not None:
            self._saving(ctx, **given)

    def _call_backward(self, ctx: Any, *grads: Any) -> Any:
        if self._backward is None:
            raise RuntimeError(f"{self._namespace}::{self._name} has no gradient any more")
        return self._backward(ctx, *grads)
