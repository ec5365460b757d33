"""``opkiln.library``: several functions in one native library, compiled at once.

    kit = opkiln.library("packing", "packing.cpp", cuda="packing.cu")

    @kit.op()
    def pack(x: torch.Tensor) -> torch.Tensor: ...

    @kit.op(mutates="out")
    def unpack_into(x: torch.Tensor, out: torch.Tensor) -> None: ...

Each function is an op as ``@opkiln.op`` makes one, with a reference, a gradient and shapes of its
own. The first call of any of them loads the library for all. If a library has many functions, or
takes long to compile, make several of it, and one of them for commands:

    kit = opkiln.library("packing", parts=(rows, columns))
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from typing import Any, ParamSpec, TypeVar, cast

from opkiln.authoring.builders import Place, Sources, builder_for, builder_of_parts
from opkiln.authoring.parameters import Parameters, texts
from opkiln.errors import SpecError
from opkiln.model import check_names

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from opkiln.authoring.builders import DecoratedBuilder
    from opkiln.authoring.op import DecoratedOp
    from opkiln.authoring.parameters import Value

_P = ParamSpec("_P")
_R = TypeVar("_R")


class Library:
    """Functions that share sources. ``builder`` is the class underneath, for all of them."""

    def __init__(self, builder: type[DecoratedBuilder]) -> None:
        self.builder = builder

    def op(
        self, *, mutates: str | Iterable[str] = ()
    ) -> Callable[[Callable[_P, _R]], DecoratedOp[_P, _R]]:
        """Make an op of a function of this library; its body is the reference.

        ``mutates`` names the arguments that it writes to. Declare all functions of the library
        before the first call: a library with a function that nobody declares is refused. Raises
        SpecError for a function that cannot be an op.
        """

        if self.builder.PARTS:
            name = self.builder.NAME
            raise SpecError(f"library {name} has parts: its functions are those of its parts")

        def decorate(function: Callable[_P, _R]) -> DecoratedOp[_P, _R]:
            if not inspect.isfunction(function):
                raise SpecError(f"@op decorates functions, not {type(function).__name__}")
            from opkiln.authoring.declaration import Declaration

            made = Declaration(function, mutates, self.builder)
            return cast("DecoratedOp[_P, _R]", made.function)

        return decorate

    def __repr__(self) -> str:
        return f"<library {self.builder.NAME}: {', '.join(self.builder.REGISTRATION.names)}>"


def library(
    name: str,
    *sources: str,
    cuda: str | Iterable[str] = (),
    source: str | Mapping[str, str] | None = None,
    needs: Mapping[str, Any] | None = None,
    namespace: str = "",
    emulate: bool = False,
    schemas: Iterable[str] = (),
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

    With ``schemas``, the functions are declared in another module, ``functions``, which is imported
    when the library is loaded. So commands know the library without importing torch. A function
    that does not fit its schema there is an error. ``without`` names functions that the library for
    "cpu" or "cuda" does not have: there the reference serves.

    With ``parts``, it is the name for several libraries, and has nothing of its own. Name each part
    ``<name>__<part>``, so that commands find it. Raises SpecError.
    """
    check_names("any", name)
    caller = sys._getframe(1)
    place = Place(caller.f_globals.get("__name__", ""), caller.f_code.co_filename)
    if parts:
        if not isinstance(parts, (list, tuple)) or not all(isinstance(p, Library) for p in parts):
            raise SpecError(
                f"library {name}: parts= is {repr(parts)[:80]}",
                why="it lists what opkiln.library made",
            )
        return Library(builder_of_parts(name, place, [each.builder for each in parts]))
    listed = texts(f"library {name}: schemas=", schemas)
    if bool(listed) != bool(functions):
        raise SpecError(
            f"library {name}: schemas= and functions= belong together",
            hint=f'opkiln.library("{name}", ..., schemas=(...), functions="my_package.functions")',
        )
    given = Sources.of(sources, cuda, source, "opkiln.library")
    parameters = Parameters.of(name, variants or {}, {}, dtypes, ahead)
    builder = builder_for(name, place, given, needs or {}, namespace, parameters)
    builder.EMULATE = emulate
    builder.FUNCTIONS, builder.SCHEMAS = functions, listed
    builder.REGISTRATION = builder.REGISTRATION._replace(schemas=listed)
    if not isinstance(without or {}, Mapping):
        raise SpecError(f"library {name}: without= is {repr(without)[:80]}, not a dict")
    builder.WITHOUT = {
        device: texts(f"library {name}: without={{{device!r}: ...}}", names)
        for device, names in (without or {}).items()
    }
    return Library(builder)
