"""What the decorator makes of one function. It needs torch; ``op.py`` does without, so that the
name ``opkiln.op`` can be looked up where there is none."""

from __future__ import annotations

import inspect
from typing import Any

from opkiln.authoring import schema as schemas
from opkiln.authoring.builders import Sources, builder_for
from opkiln.authoring.calls import choose_by, function_for
from opkiln.authoring.checking import Comparison
from opkiln.authoring.entrance import Entrance
from opkiln.authoring.parameters import Parameters
from opkiln.authoring.registration import NATIVE, NO_GRAD, Defined
from opkiln.authoring.variants import Variants
from opkiln.errors import SpecError, told_briefly
from opkiln.loading import loader
from opkiln.settings import settings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import TypeVar

    from opkiln.authoring.parameters import Value
    from opkiln.loading.explain import Explanation, Explanations

    _F = TypeVar("_F", bound=Callable[..., Any])


class Declaration:
    """One decorated function."""

    def __init__(
        self,
        function: Callable[..., Any],
        sources: Sources,
        mutates: str | Iterable[str],
        needs: dict[str, Any],
        namespace: str,
        emulate: bool,
        parameters: Parameters,
    ) -> None:
        name = function.__name__
        written = (mutates,) if isinstance(mutates, str) else tuple(mutates)
        schema = schemas.of_function(name, function, written)
        compared = bool(settings.check)
        varied = bool(parameters)  # the variants have libraries, and the op itself has none
        more = (NATIVE,) if compared and not varied else () if written else (NO_GRAD,)
        # What a library's function is taken for.
        native = (NATIVE,) if compared else ("",) if varied else ("", *more)
        self._reference = function
        self.builder = builder_for(function, schema, sources, needs, namespace, native, parameters)
        self.builder.EMULATE = emulate
        owner = (function.__module__, function.__qualname__)
        self._defined = Defined(owner, self.builder.REGISTRATION.namespace, schema, written)
        self._entrance: Entrance | Variants
        if varied:
            self._entrance = Variants(self.builder, function, self._defined)
            self._defined.variants = self._entrance
        else:
            self._entrance = Entrance(self.builder, function, written)
        loader.forget(self.builder().distribution, name)
        self._defined.define(self._entrance, function, more)
        overload = self._defined.overload()
        no_grad = self._defined.overload(NO_GRAD) if NO_GRAD in more else overload
        if isinstance(self._entrance, Entrance):
            self._entrance.overload = overload
            self._entrance.native = self._defined.overload(NATIVE) if compared else None
        self.function = self._made(overload, None if written else no_grad)

    def _made(self, overload: Any, no_grad: Any) -> Any:
        written, variants = self._defined.written, self._defined.variants
        made: Any = function_for(self._reference, overload, no_grad, written, variants)
        made.builder, made.reference, made.overload = self.builder, self._reference, overload
        for each in (self.backward, self.fake, self.vmap, self.variant, self.tune_key,
                     self.check, self.load, self.reload, self.explain):  # fmt: skip
            setattr(made, each.__name__, each)
        return made

    # The attributes of the function

    def backward(self, function: _F) -> _F:
        gradient = self._defined.gradient
        if gradient is None:
            raise SpecError(
                f"op {self.builder.NAME} has no gradient: it writes to its arguments",
                hint="torch.autograd.Function around it",
            )
        gradient.use(function, "output" in inspect.signature(function).parameters)
        return function

    def fake(self, function: _F) -> _F:
        self._defined.fake = function
        return function

    def vmap(self, function: _F) -> _F:
        self._defined.batch_with(function)
        return function

    def variant(self, function: _F) -> _F:
        variants = self._defined.variants
        if variants is None or not self.builder.PARAMETERS.chosen:
            raise SpecError(
                f"op {self.builder.NAME} has no variants to choose from",
                hint='@opkiln.op(..., variants={"HEAD": (64, 128)})',
            )
        variants.choose_by(function)
        choose_by(self.function, function)
        return function

    def tune_key(self, function: _F) -> _F:
        variants = self._defined.variants
        if variants is None or variants.tuning is None:
            raise SpecError(
                f"op {self.builder.NAME} has nothing to tune",
                hint='@opkiln.op(..., tune={"BLOCK": (128, 256)})',
            )
        variants.tuning.key_by(function)
        return function

    @told_briefly
    def check(self, *args: Any, **kwargs: Any) -> Any:
        entrance = self._entrance.load_native(args, kwargs)
        compare = Comparison(self.builder.NAME, self._reference, self._defined.written)
        return compare(entrance.native or entrance.overload, args, kwargs)

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
        variants = self._defined.variants
        if variants is None:
            return found[0]
        return explaining.Explanations(self.builder.NAME, tuple(found), variants.notes)
