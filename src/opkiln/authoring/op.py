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

from opkiln.authoring.builders import Place, Sources, builder_for
from opkiln.authoring.parameters import Parameters
from opkiln.errors import SpecError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from opkiln.authoring.parameters import Value
    from opkiln.builder.base import OpBuilder
    from opkiln.loading.explain import Explanation, Explanations

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

    def variant(self, function: _F) -> _F:
        """Give the function that chooses a variant: it takes the op's arguments and returns a value
        for each name of ``variants=``, as a dict; None if the reference is to run."""

    def tune_key(self, function: _F) -> _F:
        """Give the classes of shapes that ``tune=`` chooses for: the function takes the op's
        arguments and returns numbers or text, alone or in a tuple."""

    def check(self, *args: _P.args, **kwargs: _P.kwargs) -> _R_co:
        """Call native and reference and compare. Raises DifferenceError, and LoadError if there is
        no native version for these arguments."""

    def load(self, device: str = "cpu", **values: Value) -> bool:
        """Load the library for a device now; whether there is one. Of an op with variants, all that
        have these values; whether each has one. Raises OpkilnError."""

    def reload(self) -> None:
        """Look at the sources again, and take in what changed. Raises OpkilnError."""

    def explain(self, device: str = "cpu", **values: Value) -> Explanation | Explanations:
        """Why the op is served as it is on this device; of an op with variants, each that has these
        values."""


def op(
    *sources: str,
    cuda: str | Iterable[str] = (),
    source: str | Mapping[str, str] | None = None,
    mutates: str | Iterable[str] = (),
    needs: Mapping[str, Any] | None = None,
    namespace: str = "",
    emulate: bool = False,
    variants: Mapping[str, Sequence[Value]] | None = None,
    tune: Mapping[str, Sequence[Value]] | None = None,
    ahead: Mapping[str, Sequence[Value]] | None = None,
) -> Callable[[Callable[_P, _R]], DecoratedOp[_P, _R]]:
    """Make an op of a function; its body is the reference.

    ``sources`` are C++ files for the CPU, ``cuda`` files for CUDA and ROCm, relative to the Python
    file. ``source`` is text instead: C++ for the CPU, or ``{"cpu": ..., "cuda": ...}``.
    ``mutates`` names the arguments that the op writes to. ``needs`` may have ``archs`` (the least
    compute capability, "8.0"), ``libraries``, ``include_dirs``, ``cxx_args``, ``nvcc_args`` and
    ``ldflags``. ``namespace`` is that of ``torch.ops``; by default, the package's name. ``emulate``
    runs the CUDA kernels on the CPU, for CPU tensors, and checks what they do (docs/emulator.md).
    ``variants`` lists compile-time parameters and their values, ``{"HEAD": (64, 128)}``: the
    sources see them as macros, and ``@f.variant`` chooses among them. ``tune`` lists such
    parameters that are chosen by measuring, once for each device model and class of shapes.
    ``ahead`` says which variants `opkiln build` and wheels have, ``{"HEAD": (64,)}``; by default,
    all.

    Raises SpecError for a function that cannot be an op.
    """
    given = Sources.of(sources, cuda, source)

    def decorate(function: Callable[_P, _R]) -> DecoratedOp[_P, _R]:
        if not inspect.isfunction(function):
            raise SpecError(f"@opkiln.op decorates functions, not {type(function).__name__}")
        from opkiln.authoring.declaration import Declaration

        name = function.__name__
        parameters = Parameters.of(name, variants or {}, tune or {}, ahead=ahead)
        builder = builder_for(
            name, Place.of(function), given, needs or {}, namespace, parameters, function.__doc__
        )
        builder.EMULATE = emulate
        return cast("DecoratedOp[_P, _R]", Declaration(function, mutates, builder).function)

    return decorate
