"""Where a call arrives that no native kernel takes, and which library it goes to.

It is an op's implementation for all devices that have no other (CompositeExplicitAutograd). The
first call with a tensor of a device loads the library for that device, whoever makes the call: the
decorated function, ``torch.ops``, a compiled graph, an exported program. The library registers
kernels for its device, so later calls do not come here. Where there is no library, the reference
runs. It also runs for a call that a kernel does not serve: the kernel says why, and passes it here.

Every op has variants, each with a library: a plain op has one. The arguments of a call choose.

- With compile-time parameters, each variant is an overload of the op, ``attn.HEAD_64_T_half``, and
  the op itself has no library. So a compiled graph, which holds the op and not a variant, chooses
  anew whenever it runs, also with other shapes. The decorated function, outside of graphs, chooses
  before torch is called.
- With dtypes, all libraries implement the op itself. torch calls the first that is loaded, and the
  libraries pass a call on among themselves (``loading/native.py``), so a dtype costs a call nothing
  in Python, also in a compiled graph. A dtype that is not loaded yet arrives here.

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
from torch import Tensor

from opkiln.base import signature
from opkiln.base.model import NATIVE, NO_GRAD, UNSERVED
from opkiln.builder.variants import (
    Variant,
    add_defaults,
    autocast_off,
    device_of,
    require_allowed,
    tensors,
)
from opkiln.decision import terms
from opkiln.errors import FallbackWarning, LoadError, SpecError, warn_caller
from opkiln.loading.here import here
from opkiln.loading.register import (
    WithBump,
    drop_compiled_graphs,
    library_of,
    register_fake,
    returns_nothing,
)
from opkiln.settings import settings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from opkiln.builder.base import OpBuilder
    from opkiln.builder.gradient import Gradient
    from opkiln.builder.parameters import Value
    from opkiln.builder.tuning import Tuning

REASON = "unserved_because"  # the argument that the overload ``unserved`` has besides the op's
_KEPT_KEY = "FPGA"  # a device that no tensor is on
_MOST_REASONS = 16  # that are told and kept: a program may call with a thousand sizes
_MOST_CALLS = 4096  # that are remembered for one variant


class Entrance:
    """A function that torch knows. Chooses and loads its libraries, and runs its reference for the
    calls that none serves."""

    def __init__(
        self,
        builder: type[OpBuilder],
        schema: str,
        function: Callable[..., Any],
        *,
        has_gradient: bool,
    ) -> None:
        self._builder, self._function, self.schema = builder, function, schema
        self.namespace = builder.NAMESPACE or builder().distribution
        self.name = function.__name__
        self.qualified = f"{self.namespace}::{self.name}"
        self.mutates = "!" in schema.rpartition("->")[0]  # `Tensor(a!)`: it writes to its argument
        self.has_gradient = has_gradient and not self.mutates
        self.gradient: Gradient | None = None
        # The functions in Python, by the part of a declaration that they are.
        self.parts: dict[str, Callable[..., Any]] = {"reference": function}
        self.without_gradient = "default"  # the overload to call if no gradient is needed
        self.parameters = parameters = builder.PARAMETERS
        # Read in each call.
        self._is_plain = not parameters
        self.has_overloads = bool(parameters) and parameters.are_overloads
        self.variants: dict[tuple[Value, ...], Variant] = {}
        # From the arguments of a call to the values of the parameters that are not tuned.
        self.choose: Callable[..., Any] | None = None
        if parameters and parameters.by_dtype:
            self.choose = _choose_dtype(schema)
        # The calls of the overloads: a dict for each parameter, one in the other, which is
        # faster than one with tuples. With tuning, the innermost one is by what is tuned for.
        self.calls: dict[Any, Any] = {}
        self.tuning: Tuning | None = None
        if parameters and parameters.tuned:
            from opkiln.builder.tuning import Tuning

            self.tuning = Tuning(builder, self.variant)
        self.chosen_names = tuple(name for name, _ in parameters.chosen) if parameters else ()
        self._defaults: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self.reasons: dict[str, None] = {}  # why calls in this process ran as the reference
        self.refused = 0  # such calls
        self._first: Any = None  # the torch.library.Library of the default overload
        self._library: Any = None  # that of the others
        self._unserved: Any = None  # that of ``unserved``
        self._batching: Any = None  # that of the rules for vmap
        self._rule: Callable[..., Any] | None = None  # the author's
        # By overload: what takes the calls that no library has a kernel for. Also those that an
        # earlier declaration had.
        self._kernels: dict[str, Callable[..., Any]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_plain:
            return self.variant(())(*args, **kwargs)
        args, kwargs = self._add_defaults(args, kwargs)
        if self.calls:
            try:
                found, call = self._values_for(args, kwargs), self.calls
                for name in self.chosen_names:
                    call = call[found[name]]
                if self.tuning is not None:
                    call = call[self.tuning.exact(*args, **kwargs)]
            except (KeyError, TypeError):  # not called before, none, or a mistake: see below
                pass
            else:
                return call(*args, **kwargs)  # type: ignore[operator]
        if device_of(args, kwargs) == "meta" or settings.mode == terms.REFERENCE:
            return self.reference(*args, **kwargs)
        variant, why = self.find_variant(args, kwargs)
        if variant is None:
            return self._fall_back(why, args, kwargs)
        return (variant.overload if self.has_overloads else variant)(*args, **kwargs)

    def take_without_gradient(self, *args: Any, **kwargs: Any) -> Any:
        """Take a call of the overload without a gradient: a library that registers itself has
        kernels for the default overload alone."""
        if self._is_plain and self.variant(()).is_native(device_of(args, kwargs)):
            return self.overload()(*args, **kwargs)
        return self(*args, **kwargs)

    def take_unserved(self, *args: Any, unserved_because: str, **kwargs: Any) -> Any:
        """Take a call that a kernel does not serve, or one with a dtype that is not loaded: then
        there is no reason."""
        if unserved_because:
            return self._fall_back(unserved_because, args, kwargs)
        variant, _ = self.find_variant(args, kwargs)
        if variant is not None and variant.is_native(device_of(args, kwargs)):
            return variant.overload(*args, **kwargs)  # another thread has just loaded it
        return self(*args, **kwargs)

    def reference(self, *args: Any, **kwargs: Any) -> Any:
        """The reference, in the dtypes that it is given."""
        with autocast_off(tuple(tensors(args, kwargs))):
            return self._function(*args, **kwargs)

    def fake(self, *args: Any, **kwargs: Any) -> Any:
        """What gives the shapes: the author's fake, or else the reference."""
        return self.parts.get("fake", self.reference)(*args, **kwargs)

    def compare(self, native: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the native version gives. Raises DifferenceError."""
        from opkiln.builder.checking import Comparison

        return Comparison(self.name, self._function)(native, args, kwargs)

    def overload(self, name: str = "default") -> Any:
        """torch's object for an overload."""
        return getattr(getattr(getattr(torch.ops, self.namespace), self.name), name)

    def overload_name(self, overload: str) -> str:
        """The name of an overload; "" is the default one."""
        return f"{self.name}.{overload}" if overload else self.name

    def _fall_back(self, why: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the reference, and say so once for each reason; not for a call that it refuses, too:
        then its error says all. Raises LoadError where it must not run."""
        require_allowed(self.name, "reference", why)
        result = self.reference(*args, **kwargs)
        self.refused += 1
        if why not in self.reasons and len(self.reasons) < _MOST_REASONS:
            self.reasons[why] = None
            warn_caller(
                f"op {self.name} runs as its pure-PyTorch reference: {why}", FallbackWarning
            )
        return result

    def matching(self, wanted: Mapping[str, Value]) -> list[Variant]:
        """The variants that have these values. Raises SpecError if there is none."""
        if self._is_plain and not wanted:
            return [self.variant(())]
        from opkiln.builder.parameters import Parameters

        parameters = self.parameters or Parameters(self._builder.NAME)
        return [self.variant(values) for values in parameters.matching(wanted)]

    @property
    def notes(self) -> tuple[str, ...]:
        """What calls in this process came to, for explanations."""
        tuned = () if self.tuning is None else self.tuning.notes
        return (*(f"the reference ran: {each}" for each in self.reasons), *tuned)

    def variant(self, values: tuple[Value, ...]) -> Variant:
        """The variant with these values, known to torch."""
        found = self.variants.get(values)
        if found is not None:
            return found
        with here.lock:
            if values in self.variants:
                return self.variants[values]
            made = Variant(self._builder.variant(values), self.compare, self.reference)
            compared = NATIVE in self._builder.OVERLOADS
            if self.has_overloads:
                ending = self.parameters.suffix(values)
                made.overload = self.add(ending, made)
                if compared:
                    made.native = self.add(f"{ending}_{NATIVE}", self.reference)
            else:
                made.overload = self.overload()
                made.native = self.overload(NATIVE) if compared else None
            self.variants[values] = made
            return made

    def find_variant(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Variant | None, str]:
        """The variant for a call; or None, and why none serves it. Raises SpecError, and LoadError
        where the reference must not serve."""
        if self._is_plain:
            return self.variant(()), ""
        args, kwargs = self._add_defaults(args, kwargs)
        found = self._values_for(args, kwargs)
        if found is None:
            return None, f"the function of @{self.name}.variant chose none for these arguments"
        values, why = self.parameters.find_values(found)
        if why:
            return None, why
        keys: tuple[Any, ...] = values
        lasting = True
        if self.tuning is not None:
            tuned, lasting = self.tuning.best(values, args, kwargs)
            keys, values = (*values, self.tuning.exact(*args, **kwargs)), (*values, *tuned)
        variant = self.variant(values)
        if lasting and self.has_overloads:
            self._remember(keys, variant)
        return variant, ""

    def _remember(self, keys: tuple[Any, ...], variant: Variant) -> None:
        """Have the decorated function call this variant at once."""
        with here.lock:
            calls = self.calls
            for each in keys[:-1]:
                calls = calls.setdefault(each, {})
            if len(calls) >= _MOST_CALLS:
                calls.clear()  # of a program whose shapes never repeat
            # As in ``declaration.py``: what calling torch's object does, without its Python method.
            calls[keys[-1]] = getattr(variant.overload, "_op", variant.overload)

    def _add_defaults(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with the defaults of those that torch leaves out."""
        if self._defaults is None:  # asking torch for a schema takes long
            self._defaults = add_defaults(self.overload()._schema, (), {})
        plain, named = self._defaults
        if len(args) < len(plain):
            args = (*args, *plain[len(args) :])
        return args, {**named, **kwargs} if named else kwargs

    def _values_for(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.parameters.chosen:
            return {}
        if self.choose is None:
            raise SpecError(
                f"op {self.name} has variants, and nothing chooses one",
                why=f"variants= lists {self.parameters.in_words()}",
                hint=f"@{self.name}.variant on a function that takes the arguments of {self.name} "
                "and returns a value for each name",
            )
        return self.choose(*args, **kwargs)

    # What torch is told

    def tell_all(self) -> None:
        """Tell torch of the op, with the overload for comparing or the one without a gradient.
        Raises SpecError."""
        compared = NATIVE in self._builder.OVERLOADS and not self.has_overloads
        with here.lock:
            before: Entrance | None = here.functions.get(self.qualified)
            if before is not None:
                self._require_same_owner(before)
                before.retire()
            here.functions[self.qualified] = self
            self._first = library_of(self.namespace)
            if compared or self.has_gradient or self.has_overloads or before is not None:
                self._library = library_of(self.namespace)
            self._tell_overload("", self)
            if compared:
                self._tell_overload(NATIVE, self.reference)
            elif self.has_gradient:
                self._tell_overload(NO_GRAD, self.take_without_gradient)
                self.without_gradient = NO_GRAD
            if self._builder.PASSES_ON:
                self._tell_unserved()
            for overload in () if before is None else before._kernels:
                if overload not in self._kernels:
                    self._tell_overload(overload, self)
            if self.has_gradient:
                self._first.impl(self.name, self.differentiate, "Autograd", with_keyset=True)
            if before is not None:
                drop_compiled_graphs()

    def _require_same_owner(self, before: Entrance) -> None:
        """Raise SpecError if the name is that of another function."""
        ours, theirs = (
            (each._function.__module__, each._function.__qualname__) for each in (self, before)
        )
        if ours != theirs:
            raise SpecError(
                f"op {self.name}: {self.qualified} is declared in {theirs[0]} already",
                why="a function belongs to one op",
                hint='@opkiln.op(..., namespace="another")',
            )

    def differentiate(self, keyset: Any, *args: Any, **kwargs: Any) -> Any:
        """The kernel at torch's dispatch key Autograd."""
        return self.find_gradient()(keyset, *args, **kwargs)

    def find_gradient(self) -> Gradient:
        """Its gradient, made when it is first needed."""
        if self.gradient is None:
            from opkiln.builder.gradient import Gradient

            below = self.overload(self.without_gradient)
            self.gradient = Gradient(self.overload(), below, self._function)
        return self.gradient

    def retire(self) -> None:
        """Have torch forget it, but for the operator itself, and this process its libraries."""
        for each in (*self._kernels, *((UNSERVED,) if self._unserved else ())):
            self._keep(self.overload_name(each))
        for each in filter(None, (self._unserved, self._batching, self._library, self._first)):
            each._destroy()
        self._library = None
        self.calls.clear()
        self._builder.forget()
        self.variants.clear()

    def add(self, overload: str, kernel: Callable[..., Any]) -> Any:
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
            all_args, named = add_defaults(schema, args, kwargs)
            dims = (*in_dims, *(None for _ in all_args[len(args) :]))
            return rule(info, dims, *all_args, **named)

        with here.lock:
            if self._batching is not None:
                self._batching._destroy()
                self._batching = None
            self._rule = batched
            for each in self._kernels:
                self._batch(each)

    def _batch(self, overload: str) -> None:
        """Register what runs under vmap: the author's rule, or the reference on batched tensors."""
        if self._rule is not None:
            name = f"{self.namespace}::{self.overload_name(overload)}"
            torch.library.register_vmap(name, self._rule, lib=self._library or self._first)
        elif not self.mutates:
            self._batching = self._batching or library_of(self.namespace)
            self._batching.impl(self.overload_name(overload), self._function, "FuncTorchBatched")

    def _tell_overload(self, overload: str, kernel: Callable[..., Any]) -> None:
        """Define an overload, with the kernel for the devices that no library has kernels for. One
        that an earlier declaration had is defined already, and gets another kernel."""
        if overload not in self._kernels:
            self._define(overload)
        self._kernels[overload] = kernel

    def _define(self, overload: str) -> None:
        """Tell torch of an overload. Raises SpecError."""
        library, name = self._library if overload else self._first, self.overload_name(overload)
        try:
            library.define(
                name + self.schema[len(self.name) :], tags=(torch.Tag.pt2_compliant_tag,)
            )
        except (RuntimeError, IndexError) as error:  # IndexError: a number that is too large
            raise SpecError(
                f"op {self.name}: the schema {self.schema!r} is malformed", why=str(error)
            ) from error
        if self.mutates:
            bump = WithBump(self.namespace, self.name, overload or "default")
            library.impl(name, bump, "ADInplaceOrView", with_keyset=True)
        if self.schema.endswith("-> ()"):
            # The same as a fake here, and registered in less time.
            library.impl(name, returns_nothing, "Meta")
        else:
            register_fake(library, f"{self.namespace}::{name}", self.fake)

        def call_kernel(*args: Any, **kwargs: Any) -> Any:
            return self._kernels[overload](*args, **kwargs)

        library.impl(name, call_kernel, "CompositeExplicitAutograd")
        self._batch(overload)

    def _tell_unserved(self) -> None:
        """Only kernels call it, with real tensors: no tracer sees it."""
        arguments, _, results = self.schema[len(self.name) + 1 :].rpartition(") -> ")
        star = "" if "*, " in arguments else "*, "
        more = f"{arguments}{', ' if arguments else ''}{star}str {REASON}"
        name = self.overload_name(UNSERVED)
        self._unserved = library_of(self.namespace)
        self._unserved.define(f"{name}({more}) -> {results}")
        self._unserved.impl(name, self.take_unserved, "CompositeExplicitAutograd")

    def _keep(self, name: str) -> None:
        """Have torch keep an operator for good."""
        qualified = f"{self.namespace}::{name}"
        if qualified not in here.kept:
            here.kept[qualified] = library_of(self.namespace)
            here.kept[qualified].impl(name, _nowhere, _KEPT_KEY)


def _nowhere(*args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError("there are no kernels for this device")


def _choose_dtype(schema: str) -> Callable[..., dict[str, str]]:
    """What gives the dtype of a call: its ScalarType argument; without one, the dtype of the first
    argument that is a floating-point tensor. ``op/registering.h`` has the same rule."""
    arguments = enumerate(signature.arguments(schema))
    listed = [(place, name, signature.canonical(kind)) for place, (kind, name) in arguments]
    deciding = [each for each in listed if each[2] == "ScalarType"]
    deciding = deciding or [each for each in listed if each[2] in ("Tensor", "Tensor(!)")]

    def choose(*args: Any, **kwargs: Any) -> dict[str, str]:
        for place, name, _ in deciding:
            value = args[place] if place < len(args) else kwargs.get(name)
            if not isinstance(value, Tensor):
                return {"dtype": str(value).removeprefix("torch.")}
            if value.dtype.is_floating_point:
                return {"dtype": str(value.dtype).removeprefix("torch.")}
        return {"dtype": ""}

    return choose
