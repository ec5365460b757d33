"""What the decorator makes of one function. It needs torch; ``op.py`` does without, so that the
name ``opkiln.op`` can be looked up where there is none."""

from __future__ import annotations

import inspect
from typing import Any

from opkiln.authoring.builders import NATIVE, NO_GRAD
from opkiln.authoring.calls import function_for
from opkiln.authoring.checking import Comparison
from opkiln.authoring.entrance import Entrance
from opkiln.authoring.parameters import texts
from opkiln.authoring.registration import Decorated
from opkiln.errors import LoadError, SpecError, told_briefly
from opkiln.loading import loader
from opkiln.loading import schema as schemas
from opkiln.loading.schema import require_returns_at_once

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import TypeVar

    from opkiln.authoring.builders import DecoratedBuilder
    from opkiln.authoring.parameters import Value
    from opkiln.authoring.variants import Dtypes, Variants
    from opkiln.loading.explain import Explanation, Explanations

    _F = TypeVar("_F", bound=Callable[..., Any])


class Declaration:
    """One decorated function."""

    def __init__(
        self,
        function: Callable[..., Any],
        mutates: str | Iterable[str],
        builder: type[DecoratedBuilder],
    ) -> None:
        written = texts(f"op {function.__name__}: mutates=", mutates)
        schema = schemas.of_function(function.__name__, function, written)
        self._reference, self.builder = function, builder
        builder.declare(schema, function)
        self._defined = Decorated(builder.REGISTRATION, schema, function)
        self._variants = None
        self._entrance: Entrance | Dtypes | Variants
        if not builder.PARAMETERS:
            self._entrance = Entrance(builder, function)
        else:
            from opkiln.authoring.variants import Dtypes, Variants

            if builder.PARAMETERS.are_overloads:
                self._entrance = self._variants = Variants(builder, function, self._defined)
                self._defined.on_retiring = self._variants.retire
            else:
                self._entrance = Dtypes(builder, function, self._defined)
        builder()._claim_name()
        parameters, distribution = builder.PARAMETERS, builder().distribution
        # Whatever is loaded was declared with other functions, or from other sources.
        for name in (builder.NAME, *(parameters.library((each,)) for each in parameters.dtypes)):
            loader.forget(distribution, name)
        compared = NATIVE in builder.REGISTRATION.overloads
        more = NATIVE if compared and self._variants is None else NO_GRAD
        self._defined.tell_all(self._entrance, more, self._entrance.unserved)
        overload = self._defined.overload()
        if isinstance(self._entrance, Entrance):
            self._entrance.overload = overload
            self._entrance.native = self._defined.overload(NATIVE) if compared else None
        no_grad = overload if more == NATIVE else self._defined.overload(NO_GRAD)
        made: Any = function_for(
            function, overload, None if written else no_grad, written, self._variants
        )
        made.builder, made.reference, made.overload = builder, function, overload
        for each in (self.backward, self.fake, self.vmap, self.variant, self.tune_key,
                     self.check, self.load, self.reload, self.explain):  # fmt: skip
            setattr(made, each.__name__, each)
        self.function = made

    def _declare(self, part: str, ending: str, function: _F) -> _F:
        """Keep a function where whoever asks for the op's functions finds it."""
        setattr(self.builder.DECLARED[part], self._defined.name + ending, function)
        return function

    def _require_fits(
        self, function: Callable[..., Any], before: Sequence[str] = (), named: Sequence[str] = ()
    ) -> None:
        """Raise SpecError if a function cannot take the op's arguments, with these before them, or
        does not return at once."""
        require_returns_at_once(self.builder.NAME, function)
        arguments = self._defined.overload()._schema.arguments
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

    # The attributes of the function

    def backward(self, function: _F) -> _F:
        gradient = self._defined.gradient
        if gradient is None:
            raise SpecError(
                f"op {self.builder.NAME} has no gradient: it writes to its arguments",
                hint="torch.autograd.Function around it",
            )
        require_returns_at_once(self.builder.NAME, function)
        wants_output = "output" in inspect.signature(function).parameters
        results = self._defined.overload()._schema.returns
        if all(str(each.type) == "Tensor" for each in results):
            grads = [f"grad{number or ''}" for number in range(len(results))]
            self._require_fits(function, grads, ["output"] if wants_output else [])
        gradient.use(function, wants_output)
        return self._declare("autograd", "_backward", function)

    def fake(self, function: _F) -> _F:
        self._require_fits(function)
        self._declare("fake", "", function)
        self._defined.forget()
        return function

    def vmap(self, function: _F) -> _F:
        self._require_fits(function, ["info", "in_dims"])
        self._defined.batch_with(function)
        return self._declare("rules", "_vmap", function)

    def variant(self, function: _F) -> _F:
        variants = self._variants
        if variants is None or not self.builder.PARAMETERS.chosen:
            raise SpecError(
                f"op {self.builder.NAME} has no variants to choose from",
                hint='@opkiln.op(..., variants={"HEAD": (64, 128)})',
            )
        self._require_fits(function)
        variants.choose = self.function.__globals__["choose_"] = function
        return self._declare("rules", "_variant", function)

    def tune_key(self, function: _F) -> _F:
        variants = self._variants
        if variants is None or variants.tuning is None:
            raise SpecError(
                f"op {self.builder.NAME} has nothing to tune",
                hint='@opkiln.op(..., tune={"BLOCK": (128, 256)})',
            )
        self._require_fits(function)
        variants.tuning.author_key = function
        return self._declare("rules", "_tune_key", function)

    @told_briefly
    def check(self, *args: Any, **kwargs: Any) -> Any:
        entrance = self._entrance.load_native(args, kwargs)
        compare = Comparison(self._reference.__name__, self._reference)
        before = self._entrance.refused
        result = compare(entrance.native or entrance.overload, args, kwargs)
        if self._entrance.refused > before:
            why = next(reversed(self._entrance.reasons), "")
            raise LoadError(f"op {self.builder.NAME}: no kernel serves these arguments", why=why)
        return result

    @told_briefly
    def load(self, device: str = "cpu", **values: Value) -> bool:
        loaded = [each.load(device) for each in self._entrance.matching(values)]
        return all(each is not None and each.artifact is not None for each in loaded)

    @told_briefly
    def reload(self) -> None:
        self._entrance.reload()

    def explain(self, device: str = "cpu", **values: Value) -> Explanation | Explanations:
        from opkiln.loading import explain as explaining

        found = [explaining.explain(each.builder_of(device).op())
                 for each in self._entrance.matching(values)]  # fmt: skip
        notes = self._entrance.notes
        if not self.builder.PARAMETERS:
            return found[0]._replace(notes=notes)
        return explaining.Explanations(self.builder.NAME, tuple(found), notes)
