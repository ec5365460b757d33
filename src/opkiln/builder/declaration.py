"""What the decorator makes of one function. It needs torch; ``library.py`` does without, so that
the name ``opkiln.op`` can be looked up where there is none."""

from __future__ import annotations

import inspect
from typing import Any, ParamSpec, TypeVar

from opkiln.base.model import texts
from opkiln.builder.calls import function_for
from opkiln.builder.entrance import Entrance
from opkiln.errors import LoadError, SpecError, told_briefly
from opkiln.loading import schema as schemas
from opkiln.loading.schema import require_returns_at_once

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import Protocol

    from opkiln.builder.base import OpBuilder
    from opkiln.builder.parameters import Value
    from opkiln.loading.explain import Explanation, Explanations

    _F = TypeVar("_F", bound=Callable[..., Any])
else:

    class Protocol:
        """Stands for typing's: making a class of that takes 2 ms, which a hit need not wait for."""

        def __class_getitem__(cls, _: Any) -> type:
            return cls


_P = ParamSpec("_P")
_R_co = TypeVar("_R_co", covariant=True)


class DecoratedOp(Protocol[_P, _R_co]):
    """What the decorator gives: the function to call, with these attributes."""

    __name__: str
    builder: type[OpBuilder]  # the class underneath: sources, flags, load(), is_compatible()
    reference: Callable[..., Any]  # the function that was decorated
    overload: Any  # torch's object for the op: torch.ops.<namespace>.<name>.default
    _entrance: Entrance
    _function: Callable[..., Any]  # the function to call

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R_co:
        result: _R_co = self._function(*args, **kwargs)
        return result

    def backward(self, function: _F) -> _F:
        """Give a gradient instead of that of the reference: ``function(*grads, *inputs)`` returns
        one gradient for each argument, None for those that have none. With a parameter ``output``
        it is also given the result."""
        entrance = self._entrance
        if not entrance.has_gradient:
            why = "it writes to its arguments" if entrance.mutates else "gradient=False says so"
            raise SpecError(
                f"op {self.builder.NAME} has no gradient: {why}",
                hint="torch.autograd.Function around it",
            )
        from opkiln.builder.gradient import takes_output

        require_returns_at_once(self.builder.NAME, function)
        results = self.overload._schema.returns
        if all(str(each.type) == "Tensor" for each in results):
            grads = [f"grad{number or ''}" for number in range(len(results))]
            self._require_fits(function, grads, ["output"] if takes_output(function) else [])
        entrance.find_gradient().replace(function)
        return self._declare("backward", function)

    def fake(self, function: _F) -> _F:
        """Give the shapes of the results instead of running the reference on fake tensors."""
        self._require_fits(function)
        self._entrance.author_fake = function
        return self._declare("fake", function)

    def vmap(self, function: _F) -> _F:
        """Give a batching rule, ``function(info, in_dims, *args)`` -> (result, out_dims)."""
        self._require_fits(function, ["info", "in_dims"])
        self._entrance.batch_with(function)
        return self._declare("vmap", function)

    def variant(self, function: _F) -> _F:
        """Give the function that chooses a variant: it takes the op's arguments and returns a value
        for each name of ``variants=``, as a dict; None if the reference is to run."""
        parameters = self.builder.PARAMETERS
        if not parameters or not parameters.chosen or parameters.by_dtype:
            raise SpecError(
                f"op {self.builder.NAME} has no variants to choose from",
                hint='@opkiln.op(..., variants={"HEAD": (64, 128)})',
            )
        self._require_fits(function)
        self._entrance.choose = self._function.__globals__["choose_"] = function
        return self._declare("variant", function)

    def tune_key(self, function: _F) -> _F:
        """Give the classes of shapes that ``tune=`` chooses for: the function takes the op's
        arguments and returns numbers or text, alone or in a tuple."""
        tuning = self._entrance.tuning
        if tuning is None:
            raise SpecError(
                f"op {self.builder.NAME} has nothing to tune",
                hint='@opkiln.op(..., tune={"BLOCK": (128, 256)})',
            )
        self._require_fits(function)
        tuning.author_key = function
        return self._declare("tune_key", function)

    @told_briefly
    def check(self, *args: _P.args, **kwargs: _P.kwargs) -> _R_co:
        """Call native and reference and compare. Raises DifferenceError, and LoadError if there is
        no native version for these arguments."""
        entrance = self._entrance
        variant, before = entrance.load_native(args, kwargs), entrance.refused
        result: _R_co = entrance.compare(variant.native or variant.overload, args, kwargs)
        if entrance.refused > before:
            why = next(reversed(entrance.reasons), "")
            raise LoadError(f"op {self.builder.NAME}: no kernel serves these arguments", why=why)
        return result

    @told_briefly
    def load(self, device: str = "cpu", **values: Value) -> bool:
        """Load the library for a device now; whether there is one. Of an op with variants, all that
        have these values; whether each has one. Raises OpkilnError."""
        loaded = [each.load(device) for each in self._entrance.matching(values)]
        return all(each is not None and each.artifact is not None for each in loaded)

    @told_briefly
    def reload(self) -> None:
        """Look at the sources again, and take in what changed. Raises OpkilnError."""
        self._entrance.reload()

    def explain(self, device: str = "cpu", **values: Value) -> Explanation | Explanations:
        """Why the op is served as it is on this device; of an op with variants, each that has these
        values."""
        from opkiln.loading import explain as explaining

        found = [explaining.explain(each.builder_of(device).op())
                 for each in self._entrance.matching(values)]  # fmt: skip
        notes = self._entrance.notes
        if not self.builder.PARAMETERS:
            return found[0]._replace(notes=notes)
        return explaining.Explanations(self.builder.NAME, tuple(found), notes)

    def _declare(self, part: str, function: _F) -> _F:
        """Keep a function where whoever asks for the op's functions finds it."""
        self.builder.FUNCTIONS.parts[part][self._entrance.name] = function
        return function

    def _require_fits(
        self, function: Callable[..., Any], before: Sequence[str] = (), named: Sequence[str] = ()
    ) -> None:
        """Raise SpecError if a function cannot take the op's arguments, with these before them, or
        does not return at once."""
        require_returns_at_once(self.builder.NAME, function)
        arguments = self.overload._schema.arguments
        first = [*before, *(each.name for each in arguments if not each.kwarg_only)]
        rest = [*(each.name for each in arguments if each.kwarg_only), *named]
        try:
            inspect.signature(function).bind(*first, **dict.fromkeys(rest))
        except TypeError as error:
            parameters = ", ".join([*first, *(["*", *rest] if rest else [])])
            raise SpecError(
                f"op {self.builder.NAME}: {function.__name__} cannot take what it is called with",
                why=str(error),
                hint=f"def {function.__name__}({parameters}):",
            ) from None


class Declaration(DecoratedOp[_P, _R_co]):
    """One decorated function."""

    __name__: str

    def __init__(
        self,
        function: Callable[_P, _R_co],
        mutates: str | Iterable[str],
        gradient: bool,
        builder: type[OpBuilder],
    ) -> None:
        name = function.__name__
        written = texts(f"op {name}: mutates=", mutates)
        schema = schemas.schema_of(name, function, written)
        builder.declare(name, schema, function)
        entrance = self._entrance = Entrance(builder, schema, function, has_gradient=gradient)
        builder()._claim_name()
        entrance.tell_all()
        self.builder, self.reference, self.overload = builder, function, entrance.overload()
        made: Any = function_for(function, entrance)
        made.builder, made.reference, made.overload = builder, function, self.overload
        for each in (self.backward, self.fake, self.vmap, self.variant, self.tune_key,
                     self.check, self.load, self.reload, self.explain):  # fmt: skip
            setattr(made, each.__name__, each)
        self._function = made
