"""``@opkiln.op`` and ``opkiln.library``: functions whose bodies are references, and sources beside.

    @opkiln.op("bias_gelu.cpp", cuda="bias_gelu.cu")
    def bias_gelu(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(x + bias)

The body serves where no library does, gives the shapes for torch.compile, and the gradient. The
annotations give the schema. The function that takes its name calls the op; a library for a device
is found or built when a tensor of that device first arrives.

    kit = opkiln.library("packing", "packing.cpp", cuda="packing.cu")

    @kit.op()
    def pack(x: torch.Tensor) -> torch.Tensor: ...

    @kit.op(mutates="out")
    def unpack_into(x: torch.Tensor, out: torch.Tensor) -> None: ...

Several functions are then in one native library, compiled at once. Each is an op with a reference,
a gradient and shapes of its own. The first call of any of them loads the library for all. If a
library has many functions, or takes long to compile, make several of it, and one of them for
commands:

    kit = opkiln.library("packing", parts=(rows, columns))
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from typing import Any, ParamSpec, TypeVar, cast

from opkiln.base.model import LIBRARY, check_names, function_name, texts
from opkiln.builder.base import DeclaredFunctions, OpBuilder
from opkiln.errors import SpecError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from opkiln.builder.declaration import DecoratedOp
    from opkiln.builder.parameters import Value

_P = ParamSpec("_P")
_R = TypeVar("_R")


def op(
    *sources: str,
    cuda: str | Iterable[str] = (),
    source: str | Mapping[str, str] | None = None,
    mutates: str | Iterable[str] = (),
    gradient: bool = True,
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
    ``mutates`` names the arguments that the op writes to. ``gradient=False`` says that its result
    is not differentiable: calls by ``torch.ops`` then cost less. ``needs`` may have ``archs`` (the
    least compute capability, "8.0"; "8.0;9.0a" also has 9.0 compiled with the chip's own features),
    ``libraries``, ``include_dirs``, ``cxx_args``, ``nvcc_args`` and ``ldflags``. ``namespace`` is
    that of ``torch.ops``; by default, the package's name.
    ``emulate`` runs the CUDA kernels on the CPU, for CPU tensors, and checks what they do
    (docs/emulator.md).
    ``variants`` lists compile-time parameters and their values, ``{"HEAD": (64, 128)}``: the
    sources see them as macros, and ``@f.variant`` chooses among them. ``tune`` lists such
    parameters that are chosen by measuring, once for each device model and class of shapes.
    ``ahead`` says which variants `opkiln build` and wheels have, ``{"HEAD": (64,)}``; by default,
    all.

    Raises SpecError for a function that cannot be an op.
    """
    from opkiln.builder.builders import Sources, builder_for
    from opkiln.builder.parameters import Parameters

    given = Sources.of(sources, cuda, source)

    def decorate(function: Callable[_P, _R]) -> DecoratedOp[_P, _R]:
        _require_function("@opkiln.op", function)
        name = function.__name__
        parameters = Parameters.of(name, variants or {}, tune or {}, ahead=ahead)
        builder = builder_for(
            name,
            (function.__module__ or "", function.__code__.co_filename),
            given,
            needs or {},
            parameters,
            NAMESPACE=namespace,
            EMULATE=emulate,
            __doc__=function.__doc__,
        )
        return _declare(function, mutates, gradient, builder)

    return decorate


class Library:
    """Functions that share sources. ``builder`` is the class underneath, for all of them."""

    def __init__(self, builder: type[OpBuilder]) -> None:
        self.builder = builder

    def op(
        self, *, mutates: str | Iterable[str] = (), gradient: bool = True
    ) -> Callable[[Callable[_P, _R]], DecoratedOp[_P, _R]]:
        """Make an op of a function of this library; its body is the reference.

        ``mutates`` names the arguments that it writes to. ``gradient=False`` says that its result
        is not differentiable: calls by ``torch.ops`` then cost less. Declare all functions of the
        library before the first call: a library with a function that nobody declares is refused.
        Raises SpecError for a function that cannot be an op.
        """

        if self.builder.PARTS:
            name = self.builder.NAME
            raise SpecError(f"library {name} has parts: its functions are those of its parts")

        def decorate(function: Callable[_P, _R]) -> DecoratedOp[_P, _R]:
            _require_function("@op", function)
            return _declare(function, mutates, gradient, self.builder)

        return decorate

    def __repr__(self) -> str:
        libraries = self.builder.PARTS or (self.builder,)
        names = (function_name(each) for made in libraries for each in made.FUNCTIONS.schemas)
        return f"<library {self.builder.NAME}: {', '.join(names)}>"


def library(
    name: str | type[OpBuilder],
    *sources: str,
    cuda: str | Iterable[str] = (),
    source: str | Mapping[str, str] | None = None,
    needs: Mapping[str, Any] | None = None,
    namespace: str = "",
    emulate: bool = False,
    functions: str = "",
    without: Mapping[str, Iterable[str]] | None = None,
    variants: Mapping[str, Sequence[Value]] | None = None,
    dtypes: Sequence[str] = (),
    ahead: Mapping[str, Sequence[Value]] | None = None,
    parts: Sequence[Library] = (),
) -> Library:
    """A library of several ops. ``name`` is what commands know it by; the other arguments are those
    of ``opkiln.op``. ``@kit.op()`` declares each function. With ``variants``, there is a library of
    all functions for each variant, and ``@f.variant`` chooses for each function. With ``dtypes``
    there is one for each dtype, as "bfloat16", and the first call with a dtype loads its library.

    ``functions`` names the module that declares the functions, if it is another one. It is imported
    when the library is loaded; commands read it as text, without importing torch. ``without`` names
    functions that the library for "cpu" or "cuda" does not have: there the reference serves.

    With ``parts``, it is the name for several libraries, and has nothing of its own. Name each part
    ``<name>__<part>``, so that commands find it.

    In place of a name it takes an OpBuilder, which says what the library is compiled from, and
    where it can be used; then ``functions`` is the only other argument. Raises SpecError.
    """
    if isinstance(name, type) and issubclass(name, OpBuilder):
        return _library_of_builder(name, functions)
    from opkiln.builder.builders import Sources, builder_for
    from opkiln.builder.parameters import Parameters

    check_names("any", name)
    caller = sys._getframe(1)
    place = caller.f_globals.get("__name__", ""), caller.f_code.co_filename
    if parts:
        if not isinstance(parts, (list, tuple)) or not all(isinstance(p, Library) for p in parts):
            raise SpecError(
                f"library {name}: parts= is {repr(parts)[:80]}",
                why="it lists what opkiln.library made",
            )
        return Library(_builder_of_parts(name, place[0], [each.builder for each in parts]))
    if not isinstance(without or {}, Mapping):
        raise SpecError(f"library {name}: without= is {repr(without)[:80]}, not a dict")
    builder = builder_for(
        name,
        place,
        Sources.of(sources, cuda, source, "opkiln.library"),
        needs or {},
        Parameters.of(name, variants or {}, {}, dtypes, ahead),
        NAMESPACE=namespace,
        FUNCTIONS=DeclaredFunctions(functions),
        EMULATE=emulate,
        WITHOUT={
            device: texts(f"library {name}: without={{{device!r}: ...}}", names)
            for device, names in (without or {}).items()
        },
    )
    return Library(builder)


def _library_of_builder(builder: type[OpBuilder], functions: str) -> Library:
    if builder.KIND != LIBRARY:
        raise SpecError(
            f"op {builder.NAME} is of kind {builder.KIND}",
            why="torch knows the functions of a library, those of a module are its attributes",
            hint=f"{builder.__name__}().load()",
        )
    builder.FUNCTIONS = DeclaredFunctions(functions)
    return Library(builder)


def _builder_of_parts(name: str, module: str, parts: Sequence[type[OpBuilder]]) -> type[OpBuilder]:
    from opkiln.builder.builders import class_name
    from opkiln.builder.cuda import CUDAOpBuilder

    words = {
        "__module__": module,
        "NAME": name,
        "NAMESPACE": parts[0].NAMESPACE,
        "BACKENDS": parts[0].BACKENDS,
        "PARTS": tuple(parts),
    }
    return type(class_name(name), (CUDAOpBuilder,), words)


def _require_function(decorator: str, function: object) -> None:
    """Raise SpecError for a class or another callable object."""
    if not inspect.isfunction(function):
        raise SpecError(f"{decorator} decorates functions, not {type(function).__name__}")


def _declare(
    function: Callable[_P, _R],
    mutates: str | Iterable[str],
    gradient: bool,
    builder: type[OpBuilder],
) -> DecoratedOp[_P, _R]:
    """What takes the place of a function. Raises SpecError for one that cannot be an op."""
    from opkiln.builder.declaration import DecoratedOp

    return cast("DecoratedOp[_P, _R]", DecoratedOp(function, mutates, gradient, builder)._function)
