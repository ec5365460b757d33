"""The stand-in for one of DeepSpeed's extension modules."""

from __future__ import annotations

from fnmatch import fnmatchcase
from types import ModuleType
from typing import Any, ClassVar

import torch

from opkiln.compat.deepspeed.table import MODULES
from opkiln.errors import OpkilnError, UnservedFunction, UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


class OpModule(ModuleType):
    """The functions that DeepSpeed's front ends call, as methods that call an op of opkiln.

    Any other function that DeepSpeed's own sources define is that of its own module. opkiln's
    engine builds it when one of them is first used.
    """

    NAME: ClassVar[str]
    list_theirs: Callable[[], tuple[str, ...]] = staticmethod(tuple)  # what their sources define
    _refusal: OpkilnError | None = None  # why their module cannot be had

    def __init__(self, rest: Callable[[], Any] | None = None) -> None:
        super().__init__(self.NAME, self.__doc__)
        self._build_rest = rest
        self._rest: Any = None
        self._load()

    def _load(self) -> None:
        """Load the op's library, and take the functions that are not methods."""

    def _take(self, *homes: Any, no_grad: bool = True) -> None:
        """Take those functions of the table that are not methods from the first of ``homes`` that
        has them. One for a dtype (``softmax_fp16``) may be there without it: a tensor's own dtype
        decides, whatever the name."""
        for name in MODULES[self.NAME].functions:
            if hasattr(type(self), name):
                continue
            names = (name, name.rpartition("_")[0])
            function = next(
                getattr(home, each) for each in names for home in homes if hasattr(home, each)
            )
            setattr(self, name, torch.no_grad()(function) if no_grad else function)

    def __getattr__(self, name: str) -> Any:
        # Front ends ask for names that no module has (`CUDA_IMPL`). These must not build anything.
        if name.startswith("__") or not any(fnmatchcase(name, p) for p in self.list_theirs()):
            raise AttributeError(f"module {self.NAME!r} has no attribute {name!r}")
        if self._refusal is None:
            try:
                return getattr(self.rest(), name)
            except OpkilnError as error:
                self._refusal = error  # a failed build takes minutes, and would fail again
        raise UnservedFunction(
            f"{self.NAME}.{name} is a function of DeepSpeed's own module, which is not to be had",
            why=f"{self._refusal.what}\n{self._refusal.why}".strip(),
            hint=self._refusal.hint,
        ) from self._refusal

    def __dir__(self) -> list[str]:
        own = (name for name in dir(type(self)) if name not in dir(OpModule))
        theirs = (name for name in self.list_theirs() if name.isidentifier())
        return sorted({*super().__dir__(), *own, *theirs})

    def rest(self) -> Any:
        """DeepSpeed's own module. Raises OpkilnError if it cannot be had."""
        if self._rest is None:
            if self._build_rest is None:
                raise UsageError(
                    f"OPKILN_DEEPSPEED does not include `engine` for {self.NAME}",
                    why="the engine would build DeepSpeed's own module",
                    hint="unset OPKILN_DEEPSPEED",
                )
            self._rest = self._build_rest()
        return self._rest


def likely_device() -> str:
    """Where DeepSpeed's tensors will be: the library for that device is loaded at once."""
    return "cuda" if torch.cuda.is_available() else "cpu"
