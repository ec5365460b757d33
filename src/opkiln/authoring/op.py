"""``@opkiln.op``: a Python function whose body is the reference, and sources beside it.

    @opkiln.op("bias_gelu.cpp", cuda="bias_gelu.cu")
    def bias_gelu(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(x + bias)

The body serves where no library does, gives the shapes for torch.compile, and the gradient. The
annotations give the schema. The function that takes its name calls the op; a library for a device
is found or built when a tensor of that device first arrives.
"""

from __future__ import annotations

import inspect
from typing import Any, Generic, ParamSpec, Protocol, TypeVar, cast

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
    from collections.abc import Callable, Iterable, Mapping

    from opkiln.builder.base import OpBuilder
    from opkiln.loading.explain import Explanation

_P = ParamSpec("_P")
_R = TypeVar("_R")
_R_co = TypeVar("_R_co", covariant=True)
_F = TypeVar("_F", bound="Callable[..., Any]")


class DecoratedOp(Protocol, Generic[_P, _R_co]):
    """What the decorator gives: the function to call, with these attributes."""

    __name__: str
    builder: type[OpBuilder]  # the class underneath: sources, flags, load(), is_compatible()
    reference: Callable[..., Any]  # the function that was decorated
    overload: Any  # torch's object for the op: torch.ops.<namespace>.<name>.default

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R_co: ...

    def backward(self, function: _F) -> _F:
        """Give a gradient instead of that of the reference: ``function(*grads, *inputs)`` returns
        one gradient for each argument, None for those that have none. With a parameter ``output``
        it is also given the result."""

    def fake(self, function: _F) -> _F:
        """Give the shapes of the results instead of running the reference on fake tensors."""

    def vmap(self, function: _F) -> _F:
        """Give a batching rule, ``function(info, in_dims, *args)`` -> (result, out_dims)."""

    def check(self, *args: _P.args, **kwargs: _P.kwargs) -> _R_co:
        """Call native and reference and compare. Raises DifferenceError, and LoadError if there is
        no native version for these arguments."""

    def load(self, device: str = "cpu") -> bool:
        """Load the library for a device now; whether there is one. Raises OpkilnError."""

    def reload(self) -> None:
        """Look at the sources again, and take in what changed. Raises OpkilnError."""

    def explain(self, device: str = "cpu") -> Explanation:
        """Why the op is served as it is on this device."""


def op(
    *sources: str,
    cuda: str | Iterable[str] = (),
    source: str | Mapping[str, str] | None = None,
    mutates: str | Iterable[str] = (),
    needs: Mapping[str, Any] | None = None,
    namespace: str = "",
    emulate: bool = False,
) -> Callable[[Callable[_P, _R]], DecoratedOp[_P, _R]]:
    """Make an op of a function; its body is the reference.

    ``sources`` are C++ files for the CPU, ``cuda`` files for CUDA and ROCm, relative to the Python
    file. ``source`` is text instead: C++ for the CPU, or ``{"cpu": ..., "cuda": ...}``.
    ``mutates`` names the arguments that the op writes to. ``needs`` may have ``archs`` (the least
    compute capability, "8.0"), ``libraries``, ``include_dirs``, ``cxx_args``, ``nvcc_args`` and
    ``ldflags``. ``namespace`` is that of ``torch.ops``; by default, the package's name. ``emulate``
    runs the CUDA kernels on the CPU, for CPU tensors, and checks what they do (docs/emulator.md).

    Raises SpecError for a function that cannot be an op.
    """
    given = Sources.of(sources, cuda, source)

    def decorate(function: Callable[_P, _R]) -> DecoratedOp[_P, _R]:
        if not inspect.isfunction(function):
            raise SpecError(f"@opkiln.op decorates functions, not {type(function).__name__}")
        made = _Declaration(function, given, mutates, dict(needs or {}), namespace, emulate)
        return cast("DecoratedOp[_P, _R]", made.function)

    return decorate


class _Declaration:
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


def decorated(value: object) -> type[OpBuilder] | None:
    """The builder of a decorated function; None for anything else."""
    found = getattr(value, "builder", None) if inspect.isfunction(value) else None
    return found if isinstance(found, type) else None
