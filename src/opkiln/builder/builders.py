"""The OpBuilder that is made of a decorator's arguments."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from opkiln.base.model import (
    CPU,
    CUDA,
    DECORATOR,
    INLINE_ROOT,
    NATIVE,
    NO_GRAD,
    ROCM,
    OpSpec,
    texts,
)
from opkiln.builder.base import DeclaredFunctions, directory_of, root_of
from opkiln.builder.cuda import CUDAOpBuilder
from opkiln.builder.parameters import Parameters
from opkiln.decision.terms import CHECK
from opkiln.errors import SpecError
from opkiln.settings import settings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


_NEEDS = ("archs", "libraries", "include_dirs", "cxx_args", "nvcc_args", "ldflags")


class Sources(NamedTuple):
    """What an op is compiled from: files, or text, for each kind of device."""

    cpu: tuple[str, ...] = ()
    cuda: tuple[str, ...] = ()
    inline: tuple[tuple[str, str], ...] = ()  # (file name, text)

    @classmethod
    def of(
        cls,
        files: Sequence[str],
        cuda: str | Iterable[str],
        text: str | Mapping[str, str] | None,
        caller: str = "@opkiln.op",
    ) -> Sources:
        """Raises SpecError."""
        files, device = texts(f"{caller}: sources", files), texts(f"{caller}: cuda=", cuda)
        if not files and not device and (text is None or text == {}):
            example = '"my_op.cpp"    # or source="...", or cuda="my_op.cu"'
            raise SpecError(f"{caller} names no source", hint=example)
        if text is None:
            return cls(files, device)
        if files or device:
            raise SpecError(f"{caller} has both files and source=", why="it is one or the other")
        bodies = {CPU: text} if isinstance(text, str) else text
        if not isinstance(bodies, Mapping) or not all(isinstance(v, str) for v in bodies.values()):
            raise SpecError(
                f"{caller}: source= is {repr(text)[:80]}",
                why='it is text, or a dict of texts: {"cpu": ..., "cuda": ...}',
            )
        if unknown := sorted(map(str, set(bodies) - {CPU, CUDA})):
            raise SpecError(f"{caller}: source= names {', '.join(unknown)}, not cpu and cuda")
        names = {CPU: "source.cpp", CUDA: "source.cu"}
        return cls(
            tuple(names[each] for each in bodies if each == CPU),
            tuple(names[each] for each in bodies if each == CUDA),
            tuple((names[each], body) for each, body in bodies.items()),
        )

    @property
    def backends(self) -> tuple[str, ...]:
        return (*((CUDA, ROCM) if self.cuda else ()), *((CPU,) if self.cpu else ()))


class DecoratedBuilder(CUDAOpBuilder):
    """What is the same for all decorated functions."""

    _declared_by = DECORATOR
    PASSES_ON = True
    FILE = ""  # that declares it
    DIRECTORY = ""  # of the Python file, from the root
    SOURCES = Sources()
    NEEDS: Mapping[str, Any]
    PARAMETERS = Parameters("")
    WITHOUT: Mapping[str, tuple[str, ...]] = {}  # functions that a backend's library does not have

    @property
    def _declared_in(self) -> str:
        return self.FILE

    def sources(self) -> list[str]:
        named = self.SOURCES.cpu if self.build_for_cpu else self.SOURCES.cuda
        return list(named) if self.SOURCES.inline else [self._place(each) for each in named]

    def include_paths(self) -> list[str]:
        return [self._place(each) for each in self.NEEDS.get("include_dirs", ())]

    def libraries_args(self) -> Sequence[str]:
        return tuple(self.NEEDS.get("libraries", ()))

    def cxx_args(self) -> Sequence[str]:
        return (*self._macros(), *self.NEEDS.get("cxx_args", ()))

    def nvcc_args(self) -> Sequence[str]:
        # -O is of the host's code, which makes checks and launches; kernels are always optimized.
        given = self.NEEDS.get("nvcc_args", ())
        plain = self.backend != CUDA or any(each.startswith("-O") for each in given)
        return (*(() if plain else ("-O1",)), *self._macros(), *given)

    def extra_ldflags(self) -> Sequence[str]:
        return tuple(self.NEEDS.get("ldflags", ()))

    def filter_ccs(self, ccs: list[str]) -> list[str]:
        if "archs" not in self.NEEDS:
            return ccs
        least, *variants = self.NEEDS["archs"].split(";")
        own = {_number(each): each for each in variants}
        kept = [each for each in ccs if _number(each) >= _number(least)]
        return [own.get(_number(each), each) for each in kept]

    def spec(self) -> OpSpec:
        spec = super().spec()
        if not self.SOURCES.inline:
            return spec
        used = tuple(each for each in self.SOURCES.inline if each[0] in spec.sources)
        return spec._replace(root=INLINE_ROOT, inline=used)

    def kernels(self) -> list[str]:
        lacking = self.WITHOUT.get(CPU if self.build_for_cpu else CUDA, ())
        return [each for each in super().kernels() if each not in lacking]

    def _macros(self) -> tuple[str, ...]:
        return self.PARAMETERS.flags(self.VALUES) if self.VALUES else ()

    def _place(self, path: str) -> str:
        return path if os.path.isabs(path) else os.path.join(self.DIRECTORY, path)


def class_name(op: str) -> str:
    """What the class of an op's builder is called."""
    return "".join(part.capitalize() for part in op.split("_")) + "Builder"


def builder_for(
    name: str,
    place: tuple[str, str],
    sources: Sources,
    needs: Mapping[str, Any],
    parameters: Parameters,
    **words: Any,
) -> type[DecoratedBuilder]:
    """A builder class, without functions yet. ``place`` is the module and the file that declare it,
    ``words`` are more of its attributes. Raises SpecError."""
    module, file = place
    directory = directory_of(file)
    root = root_of(module, directory)
    # What a library's function is registered as. An op with variants has no library: its variants
    # have. If every call is to be compared, that is an overload of its own.
    overloads = ("",) if parameters.are_overloads else ("", NO_GRAD)
    words = {
        "__module__": module,
        "NAME": name,
        "BACKENDS": sources.backends,
        "FUNCTIONS": DeclaredFunctions(),
        "FILE": file,
        "DIRECTORY": "" if directory == root else os.path.relpath(directory, root),
        "SOURCES": sources,
        "NEEDS": _checked_needs(name, needs),
        "PARAMETERS": parameters,
        "OVERLOADS": (NATIVE,) if settings.mode == CHECK else overloads,
        "_made": {},
        **words,
    }
    made: type[DecoratedBuilder] = type(class_name(name), (DecoratedBuilder,), words)
    made()._checked_namespace('@opkiln.op(..., namespace="my_package")')
    return made


def _checked_needs(op: str, needs: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(needs, Mapping):
        raise SpecError(f"op {op}: needs= is {repr(needs)[:80]}, not a dict")
    if unknown := sorted(map(str, set(needs) - set(_NEEDS))):
        raise SpecError(
            f"op {op}: needs= has {', '.join(unknown)}", why=f"it may have {', '.join(_NEEDS)}"
        )
    checked: dict[str, Any] = {
        name: texts(f"op {op}: needs={{{name!r}: ...}}", each)
        for name, each in needs.items()
        if name != "archs"
    }
    if "archs" in needs:
        checked["archs"] = str(needs["archs"])
        try:
            for each in checked["archs"].split(";"):
                _number(each)
        except ValueError as error:
            raise SpecError(
                f"op {op}: needs= has archs {checked['archs'][:80]!r}",
                why="it is the least compute capability that the op runs on; after it, variants",
                hint='needs={"archs": "8.0;9.0a"}',
            ) from error
    return checked


def _number(capability: str) -> tuple[int, int]:
    major, _, minor = capability.partition(".")
    return int(major), int("".join(filter(str.isdigit, minor)) or 0)
