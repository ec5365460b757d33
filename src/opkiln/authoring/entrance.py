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
  libraries pass a call on among themselves (``loading/light.py``), so a dtype costs a call nothing
  in Python, also in a compiled graph. A dtype that is not loaded yet arrives here.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from opkiln import signature
from opkiln.authoring.checking import Comparison
from opkiln.authoring.gradient import with_defaults
from opkiln.authoring.parameters import DTYPE, NATIVE
from opkiln.authoring.variants import Variant, device_of, require_allowed
from opkiln.decision import policy
from opkiln.errors import FallbackWarning, LoadError, SpecError, warn_caller
from opkiln.loading.here import here
from opkiln.settings import settings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from opkiln.authoring.builders import DecoratedBuilder
    from opkiln.authoring.parameters import Value
    from opkiln.authoring.registration import Decorated
    from opkiln.authoring.tuning import Tuning


_MOST_REASONS = 16  # that are told and kept: a program may call with a thousand sizes
_MOST_CALLS = 4096  # that are remembered for one variant


class Entrance:
    """Chooses and loads the libraries of one op, and runs its reference for the calls that none
    serves."""

    def __init__(
        self, builder: type[DecoratedBuilder], reference: Callable[..., Any], defined: Decorated
    ) -> None:
        self._builder, self._defined, self.reference = builder, defined, defined.reference
        self.op, self.parameters = reference.__name__, builder.PARAMETERS
        # Read in each call.
        self._is_plain, self._has_overloads = not self.parameters, self.parameters.are_overloads
        self.compare = Comparison(self.op, reference)
        self._variants: dict[tuple[Value, ...], Variant] = {}
        builder.TELL_TORCH[self.op] = self.variant
        # From the arguments of a call to the values of the parameters that are not tuned.
        self.choose: Callable[..., Any] | None = None
        if self.parameters.by_dtype:
            self.choose = _choose_dtype(defined.schema)
        # The calls of the overloads: a dict for each parameter, one in the other, which is
        # faster than one with tuples. With tuning, the innermost one is by what is tuned for.
        self.calls: dict[Any, Any] = {}
        self.tuning: Tuning | None = None
        if self.parameters.tuned:
            from opkiln.authoring.tuning import Tuning

            self.tuning = Tuning(builder, self.variant)
        self.chosen_names = tuple(name for name, _ in self.parameters.chosen)
        self._defaults: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self.reasons: dict[str, None] = {}  # why calls in this process ran as the reference
        self.refused = 0  # such calls

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_plain:
            return self.variant(())(*args, **kwargs)
        args, kwargs = self._filled(args, kwargs)
        if self.calls:
            try:
                found, call = self._found(args, kwargs), self.calls
                for name in self.chosen_names:
                    call = call[found[name]]
                if self.tuning is not None:
                    call = call[self.tuning.exact(*args, **kwargs)]
            except (KeyError, TypeError):  # not called before, none, or a mistake: see below
                pass
            else:
                return call(*args, **kwargs)  # type: ignore[operator]
        if device_of(args, kwargs) == "meta" or settings.mode == policy.REFERENCE:
            return self.reference(*args, **kwargs)
        variant, why = self._choose(args, kwargs)
        if variant is None:
            self.refuse(why)
            return self.reference(*args, **kwargs)
        return (variant.overload if self._has_overloads else variant)(*args, **kwargs)

    def unserved(self, *args: Any, unserved_because: str, **kwargs: Any) -> Any:
        """Take a call that a kernel does not serve, or one with a dtype that is not loaded: then
        there is no reason."""
        if unserved_because:
            self.refuse(unserved_because)
            return self.reference(*args, **kwargs)
        variant, _ = self._choose(args, kwargs)
        if variant is not None and variant.is_native(device_of(args, kwargs)):
            return variant.overload(*args, **kwargs)  # another thread has just loaded it
        return self(*args, **kwargs)

    def refuse(self, why: str) -> None:
        """Say, once for each reason, that the reference runs. Raises LoadError where it must not"""
        require_allowed(self.op, "reference", why)
        self.refused += 1
        if why not in self.reasons and len(self.reasons) < _MOST_REASONS:
            self.reasons[why] = None
            warn_caller(f"op {self.op} runs as its pure-PyTorch reference: {why}", FallbackWarning)

    def load_native(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Variant:
        """The variant for a call, with its library loaded. Raises LoadError if there is none."""
        variant, why = self._choose(args, kwargs)
        if variant is None:
            raise LoadError(f"op {self.op} has no variant for these arguments", why=why)
        variant.require_native(device_of(args, kwargs))
        return variant

    def matching(self, wanted: Mapping[str, Value]) -> list[Variant]:
        """The variants that have these values. Raises SpecError if there is none."""
        return [self.variant(values) for values in self.parameters.matching(wanted)]

    def reload(self) -> None:
        """Look at the sources of what is loaded again. Raises OpkilnError."""
        for each in list(self._variants.values()):
            each.reload()

    def forget(self) -> None:
        """Have this process forget the libraries: the op is declared anew."""
        with here.lock:
            self.calls.clear()
            self._builder.forget()
            self._variants.clear()

    @property
    def notes(self) -> tuple[str, ...]:
        """What calls in this process came to, for explanations."""
        tuned = () if self.tuning is None else self.tuning.notes
        return (*(f"the reference ran: {each}" for each in self.reasons), *tuned)

    def variant(self, values: tuple[Value, ...]) -> Variant:
        """The variant with these values, known to torch."""
        found = self._variants.get(values)
        if found is not None:
            return found
        with here.lock:
            if values in self._variants:
                return self._variants[values]
            made = Variant(self.op, self._builder.variant(values), self.compare, self.reference)
            compared = NATIVE in self._builder.REGISTRATION.overloads
            if self._has_overloads:
                ending = self.parameters.suffix(values)
                made.overload = self._defined.add(ending, made)
                if compared:
                    made.native = self._defined.add(f"{ending}_{NATIVE}", None)
            else:
                made.overload = self._defined.overload()
                made.native = self._defined.overload(NATIVE) if compared else None
            self._variants[values] = made
            return made

    def _choose(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Variant | None, str]:
        """The variant for a call; or None, and why none serves it. Raises SpecError, and LoadError
        where the reference must not serve."""
        args, kwargs = self._filled(args, kwargs)
        found = self._found(args, kwargs)
        if found is None:
            return None, f"the function of @{self.op}.variant chose none for these arguments"
        values, why = self.parameters.listed(found)
        if why:
            return None, why
        keys: tuple[Any, ...] = values
        lasting = True
        if self.tuning is not None:
            tuned, lasting = self.tuning.best(values, args, kwargs)
            keys, values = (*values, self.tuning.exact(*args, **kwargs)), (*values, *tuned)
        variant = self.variant(values)
        if lasting and self._has_overloads:
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
            # As in ``calls.py``: what calling torch's object does, without its Python method.
            calls[keys[-1]] = getattr(variant.overload, "_op", variant.overload)

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
        if not self.parameters.chosen:
            return {}
        if self.choose is None:
            raise SpecError(
                f"op {self.op} has variants, and nothing chooses one",
                why=f"variants= lists {self.parameters.in_words()}",
                hint=f"@{self.op}.variant on a function that takes the arguments of {self.op} and "
                "returns a value for each name",
            )
        return self.choose(*args, **kwargs)


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
                return {DTYPE: str(value).removeprefix("torch.")}
            if value.dtype.is_floating_point:
                return {DTYPE: str(value.dtype).removeprefix("torch.")}
        return {DTYPE: ""}

    return choose
