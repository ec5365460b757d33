"""What stands in for an extension module of DeepSpeed's."""

from __future__ import annotations

from types import ModuleType
from typing import Any, ClassVar

from opkiln.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


class OpModule(ModuleType):
    """The functions that DeepSpeed's front ends call, as methods, over an op of opkiln's.

    ``REST`` names functions that no op of opkiln's has: DeepSpeed's own module serves those, and is
    built by opkiln's engine when one of them is asked for.
    """

    NAME: ClassVar[str]
    REST: ClassVar[tuple[str, ...]] = ()

    def __init__(self, rest: Callable[[], Any] | None = None) -> None:
        super().__init__(self.NAME, self.__doc__)
        self._build_rest = rest
        self._rest: Any = None

    def __getattr__(self, name: str) -> Any:
        if name in type(self).REST:
            return getattr(self.rest(), name)
        raise AttributeError(f"module {self.NAME!r} has no attribute {name!r}")

    def __dir__(self) -> list[str]:
        own = (name for name in dir(type(self)) if name not in dir(OpModule))
        return sorted({*super().__dir__(), *own, *self.REST})

    def rest(self) -> Any:
        """DeepSpeed's own module. Raises UsageError where the settings leave the engine out."""
        if self._rest is None:
            if self._build_rest is None:
                raise UsageError(
                    f"{self.NAME}: {', '.join(self.REST)} are functions of DeepSpeed's own module",
                    why="OPKILN_DEEPSPEED leaves `engine`, which would build it, out",
                    hint="unset OPKILN_DEEPSPEED",
                )
            self._rest = self._build_rest()
        return self._rest
