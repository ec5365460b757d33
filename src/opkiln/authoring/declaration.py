"""What the decorator makes of one function. It needs torch; ``op.py`` does without, so that the
name ``opkiln.op`` can be looked up where there is none."""

from __future__ import annotations

import inspect
from typing import Any

from opkiln.authoring import schema as schemas
from opkiln.authoring.builders import Sources, builder_for
from opkiln.authoring.calls import function_for
from opkiln.authoring.checking import Comparison
from opkiln.authoring.entrance import Entrance, device_of
from opkiln.authoring.registration import NATIVE, NO_GRAD, Defined
from opkiln.errors import SpecError, told_briefly
from opkiln.loading import loader
from opkiln.settings import settings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import TypeVar

    from opkiln.loading.explain import Explanation

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
    ) -> None:
        name = function.__name__
        written = (mutates,) if isinstance(mutates, str) else tuple(mutates)
        schema = schemas.of_function(name, function, written)
        compared = bool(settings.check)
        more = (NATIVE,) if compared else () if written else (NO_GRAD,)
        native = (NATIVE,) if compared else ("", *more)  # what a library's function is taken for
        self._reference = function
        self.builder = builder_for(function, schema, sources, needs, namespace, native)
        self.builder.EMULATE = emulate
        owner = (function.__module__, function.__qualname__)
        self._defined = Defined(owner, self.builder.REGISTRATION.namespace, schema, written)
        self._entrance = Entrance(self.builder, function, written)
        loader.forget(self.builder().distribution, name)
        self._defined.define(self._entrance, function, more)
        self._entrance.overload = self._defined.overload()
        self._entrance.native = self._defined.overload(NATIVE) if compared else None
        self.function = self._made(compared)

    def _made(self, compared: bool) -> Any:
        overload = self._defined.overload()
        written = self._defined.written
        no_grad = None if written else overload if compared else self._defined.overload(NO_GRAD)
        made: Any = function_for(self._reference, overload, no_grad, written)
        made.builder, made.reference, made.overload = self.builder, self._reference, overload
        for each in (self.backward, self.fake, self.vmap, self.check, self.load, self.reload,
                     self.explain):  # fmt: skip
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

    @told_briefly
    def check(self, *args: Any, **kwargs: Any) -> Any:
        device = device_of(args, kwargs)
        self._entrance.load_native(device)
        compare = Comparison(self.builder.NAME, self._reference, self._defined.written)
        return compare(self._entrance.native or self._defined.overload(), args, kwargs)

    @told_briefly
    def load(self, device: str = "cpu") -> bool:
        loaded = self._entrance.load(device)
        return loaded is not None and loaded.artifact is not None

    @told_briefly
    def reload(self) -> None:
        self._entrance.reload()

    def explain(self, device: str = "cpu") -> Explanation:
        from opkiln.loading import explain as explaining

        return explaining.explain(self._entrance.builder_of(device).op())
