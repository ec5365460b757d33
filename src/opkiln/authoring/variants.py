"""An op with several libraries, by compile-time parameters or by dtype: which one a call goes to.

Each variant is an overload of the op with a library of its own: ``attn.HEAD_64_T_half``. It is told
to torch, found or built when a call first needs it. The op itself has no library: its
implementation for all devices (CompositeExplicitAutograd) chooses by the arguments of each call.
So a compiled graph, which holds the op and not a variant, chooses anew whenever it runs, also with
other shapes. The decorated function, outside of graphs, chooses before torch is called.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from opkiln import signature
from opkiln.authoring.builders import NATIVE
from opkiln.authoring.entrance import Entrance, WithReference, device_of
from opkiln.authoring.gradient import with_defaults
from opkiln.decision import policy
from opkiln.errors import LoadError, SpecError
from opkiln.loading import loader
from opkiln.loading.here import here
from opkiln.settings import settings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from opkiln.authoring.builders import DecoratedBuilder
    from opkiln.authoring.parameters import Value
    from opkiln.authoring.registration import Decorated
    from opkiln.authoring.tuning import Tuning

_MOST_CALLS = 4096  # that are remembered for one variant


class Entrances(WithReference):
    """The entrances of an op that has several libraries, by the values of its parameters."""

    def __init__(
        self,
        builder: type[DecoratedBuilder],
        reference: Callable[..., Any],
        name: str,
        defined: Decorated,
    ) -> None:
        super().__init__(builder, reference, name)
        self._defined = defined
        self._entrances: dict[tuple[Value, ...], Entrance] = {}

    def entrance(self, values: tuple[Value, ...]) -> Entrance:
        """The entrance of the library with these values, known to torch."""
        with here.lock:
            entrance = self._entrances.get(values)
            if entrance is None:
                entrance = self._entrances[values] = self._made(values)
            return entrance

    def _made(self, values: tuple[Value, ...]) -> Entrance:
        raise NotImplementedError

    def matching(self, wanted: Mapping[str, Value]) -> list[Entrance]:
        """The entrances that have these values. Raises SpecError if there is none."""
        return [self.entrance(values) for values in self._builder.PARAMETERS.matching(wanted)]

    def reload(self) -> None:
        """Look at the sources of what is loaded again. Raises OpkilnError."""
        for each in list(self._entrances.values()):
            each.reload()


class Variants(Entrances):
    """The variants of one op: chooses, loads and calls them."""

    def __init__(
        self, builder: type[DecoratedBuilder], reference: Callable[..., Any], defined: Decorated
    ) -> None:
        super().__init__(builder, reference, builder.NAME, defined)
        builder.TELL_TORCH[defined.name] = self.entrance
        self._parameters = builder.PARAMETERS
        self.choose: Callable[..., Any] | None = None  # the author's, from arguments to values
        # The calls of the overloads: a dict for each parameter, one in the other, which is
        # faster than one with tuples. With tuning, the innermost one is by what is tuned for.
        self.calls: dict[Any, Any] = {}
        self.tuning: Tuning | None = None
        if self._parameters.tuned:
            from opkiln.authoring.tuning import Tuning

            self.tuning = Tuning(builder, self.entrance)
        self._defaults: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self.chosen_names = tuple(name for name, _ in self._parameters.chosen)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self._filled(args, kwargs)
        try:
            found, call = self._found(args, kwargs), self.calls
            for name in self.chosen_names:
                call = call[found[name]]
            if self.tuning is not None:
                call = call[self.tuning.exact(*args, **kwargs)]
        except (KeyError, TypeError):  # not called before, none, or a mistake: what follows tells
            return self._call_first(args, kwargs)
        return call(*args, **kwargs)  # type: ignore[operator]

    def _call_first(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if device_of(args, kwargs) == "meta" or settings.mode == policy.REFERENCE:
            return self.reference(*args, **kwargs)
        entrance = self.chosen(args, kwargs)
        if entrance is None:
            return self.reference(*args, **kwargs)
        return entrance.overload(*args, **kwargs)

    def chosen(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Entrance | None:
        """The variant for a call; None if none serves it: the user is told. Raises SpecError, and
        LoadError where the reference must not serve."""
        args, kwargs = self._filled(args, kwargs)
        found = self._found(args, kwargs)
        if found is None:
            why = f"the function of @{self._builder.NAME}.variant chose none for these arguments"
        else:
            values, why = self._parameters.listed(found)
        if why:
            self.refuse(why)
            return None
        if self.tuning is None:
            entrance = self.entrance(values)
            self._remember(values, entrance)
            return entrance
        tuned, lasting = self.tuning.best(values, args, kwargs)
        entrance = self.entrance((*values, *tuned))
        if lasting:
            self._remember((*values, self.tuning.exact(*args, **kwargs)), entrance)
        return entrance

    def _remember(self, keys: tuple[Any, ...], entrance: Entrance) -> None:
        """Have the decorated function call this variant at once."""
        with here.lock:
            calls = self.calls
            for each in keys[:-1]:
                calls = calls.setdefault(each, {})
            if len(calls) >= _MOST_CALLS:
                calls.clear()  # of a program whose shapes never repeat
            # As in ``calls.py``: what calling torch's object does, without its Python method.
            calls[keys[-1]] = getattr(entrance.overload, "_op", entrance.overload)

    def _made(self, values: tuple[Value, ...]) -> Entrance:
        made = Entrance(self._builder.variant(values), self._reference)
        ending = self._parameters.suffix(values)
        made.overload = self._defined.add(ending, made)
        if NATIVE in self._builder.REGISTRATION.overloads:
            made.native = self._defined.add(f"{ending}_{NATIVE}", None)
        return made

    def load_native(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Entrance:
        """The variant for a call, with its library loaded. Raises LoadError if there is none."""
        entrance = self.chosen(args, kwargs)
        if entrance is None:
            why = "; ".join(self.reasons)
            raise LoadError(f"op {self._builder.NAME} has no variant for these arguments", why=why)
        return entrance.load_native(args, kwargs)

    def retire(self) -> None:
        """Have this process forget the libraries: the op is declared anew."""
        with here.lock:
            self.calls.clear()
            for values in self._entrances:
                builder = self._builder.variant(values)
                loader.forget(builder().distribution, builder.NAME)
            self._entrances.clear()

    @property
    def notes(self) -> tuple[str, ...]:
        tuned = () if self.tuning is None else self.tuning.notes
        return (*super().notes, *tuned)

    def _filled(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with the defaults of those that torch leaves out."""
        if self._defaults is None:  # asking torch for a schema takes long
            self._defaults = with_defaults(self._defined.overload()._schema, (), {})
        plain, named = self._defaults
        if len(args) < len(plain):
            args = (*args, *plain[len(args) :])
        return args, {**named, **kwargs} if named else kwargs

    def _found(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._parameters.chosen:
            return {}
        if self.choose is None:
            name = self._builder.NAME
            raise SpecError(
                f"op {name} has variants, and nothing chooses one",
                why=f"variants= lists {self._parameters.in_words()}",
                hint=f"@{name}.variant on a function that takes the arguments of {name} and "
                "returns a value for each name",
            )
        return self.choose(*args, **kwargs)


class Dtypes(Entrances):
    """The libraries of an op, by dtype.

    All of them implement the op itself. torch calls the first that is loaded, and the libraries
    pass a call on among themselves (``loading/light.py``), so a dtype costs a call nothing in
    Python, also in a compiled graph. A dtype that is not loaded yet arrives here, and so does one
    that has no library.

    The dtype of a call is its ScalarType argument; without one, the dtype of the first argument
    that is a floating-point tensor. ``op/registering.h`` has the same rule.
    """

    def __init__(
        self, builder: type[DecoratedBuilder], reference: Callable[..., Any], defined: Decorated
    ) -> None:
        super().__init__(builder, reference, defined.name, defined)
        arguments = enumerate(signature.arguments(defined.schema))
        listed = [(i, name, signature.canonical(kind)) for i, (kind, name) in arguments]
        scalars = [(i, name) for i, name, kind in listed if kind == "ScalarType"]
        self._deciding = scalars or [
            (i, name) for i, name, kind in listed if kind in ("Tensor", "Tensor(!)")
        ]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        entrance = self._chosen(args, kwargs)
        return (entrance or self.reference)(*args, **kwargs)

    def unserved(self, *args: Any, unserved_because: str, **kwargs: Any) -> Any:
        """Take a call that a kernel does not serve, or one with a dtype that is not loaded: then
        there is no reason."""
        if unserved_because:
            return super().unserved(*args, unserved_because=unserved_because, **kwargs)
        entrance = self._chosen(args, kwargs)
        if entrance is not None and entrance.is_native(device_of(args, kwargs)):
            return entrance.overload(*args, **kwargs)  # another thread has just loaded it
        return (entrance or self.reference)(*args, **kwargs)

    def load_native(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Entrance:
        """The entrance for a call, with its library loaded. Raises LoadError if there is none."""
        dtype = self._dtype_of(args, kwargs)
        if dtype not in self._builder.PARAMETERS.dtypes:
            raise LoadError(f"op {self._defined.name}: {self._why(dtype)}")
        return self.entrance((dtype,)).load_native(args, kwargs)

    def _chosen(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Entrance | None:
        """The entrance for a call; None if no library is for its dtype: the user is told."""
        dtype = self._dtype_of(args, kwargs)
        if dtype in self._builder.PARAMETERS.dtypes:
            return self.entrance((dtype,))
        if device_of(args, kwargs) != "meta":
            self.refuse(self._why(dtype))
        return None

    def _made(self, values: tuple[Value, ...]) -> Entrance:
        made = Entrance(self._builder.variant(values), self._reference)
        made.overload = self._defined.overload()
        if NATIVE in self._builder.REGISTRATION.overloads:
            made.native = self._defined.overload(NATIVE)
        return made

    def _dtype_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """The dtype of a call, in words; empty if it has none."""
        for place, name in self._deciding:
            value = args[place] if place < len(args) else kwargs.get(name)
            if not isinstance(value, Tensor):
                return str(value).removeprefix("torch.")
            if value.dtype.is_floating_point:
                return str(value.dtype).removeprefix("torch.")
        return ""

    def _why(self, dtype: str) -> str:
        served = ", ".join(self._builder.PARAMETERS.dtypes)
        return f"it has kernels for {served}, not {dtype or 'calls without such a tensor'}"
