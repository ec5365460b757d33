"""Keeps imports cheap: names that are imported when they are used, and immutable records.

A cache hit imports about twenty record classes. A NamedTuple compiles a constructor for each class,
which took 0.1 to 0.25 ms: for all of them, more than the hit itself. A Record is also a tuple with
names (``_fields``, ``_replace``, ``_asdict``), but defining one compiles nothing. Off the hit path,
use NamedTuple.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from operator import itemgetter
from typing import Any, ClassVar, Self, dataclass_transform


@dataclass_transform(frozen_default=True)
class Record(tuple[Any, ...]):
    """Subclass it with annotated fields. Fields with defaults come last."""

    _fields: ClassVar[tuple[str, ...]] = ()
    _defaults: ClassVar[dict[str, Any]] = {}

    def __init_subclass__(cls) -> None:
        names = tuple(cls.__dict__.get("__annotations__", ()))  # noqa: RUF063 (no slow inspect)
        cls._defaults = {name: cls.__dict__[name] for name in names if name in cls.__dict__}
        cls._fields = names
        for index, name in enumerate(names):
            setattr(cls, name, property(itemgetter(index)))

    def __new__(cls, *values: Any, **named: Any) -> Self:
        if named or len(values) != len(cls._fields):
            values = cls._bind(values, named)
        return tuple.__new__(cls, values)

    @classmethod
    def _bind(cls, values: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
        bound = [*values]
        for name in cls._fields[len(values) :]:
            if name in named:
                bound.append(named.pop(name))
            elif name in cls._defaults:
                bound.append(cls._defaults[name])
            else:
                raise TypeError(f"{cls.__name__} is missing the field {name}")
        if named or len(bound) != len(cls._fields):
            raise TypeError(f"{cls.__name__} takes the fields {', '.join(cls._fields)}")
        return tuple(bound)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{type(self).__name__}.{name} cannot be set: records are immutable")

    def __getnewargs__(self) -> tuple[Any, ...]:
        return tuple(self)

    def __repr__(self) -> str:
        shown = ", ".join(f"{n}={v!r}" for n, v in zip(self._fields, self, strict=True))
        return f"{type(self).__name__}({shown})"

    def _asdict(self) -> dict[str, Any]:
        return dict(zip(self._fields, self, strict=True))

    def _replace(self, **changes: Any) -> Self:
        return type(self)(**{**self._asdict(), **changes})


def names(
    module: str, homes: Mapping[str, str]
) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """``__all__``, ``__getattr__`` and ``__dir__`` of a module that imports each name from its home
    module on first use. ``homes`` has the names of each home module, with spaces between them.

    If a name needs torch and there is none, the ModuleNotFoundError has a hint.
    """
    home_of = {name: home for home, listed in homes.items() for name in listed.split()}

    def getattribute(name: str) -> Any:
        home = home_of.get(name)
        if home is None:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        try:
            with imports():
                value = getattr(import_module(home), name)
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            raise ModuleNotFoundError(
                f"{module}.{name} needs torch, which is not installed\nhint: pip install torch",
                name="torch",
            ) from None
        setattr(sys.modules[module], name, value)
        return value

    def listing() -> list[str]:
        return sorted({*vars(sys.modules[module]), *home_of})

    return sorted(home_of), getattribute, listing


@contextmanager
def imports() -> Iterator[None]:
    """Collect no garbage within the block, which imports many modules: in a process with torch, a
    full collection takes longer than the imports."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
