"""The stand-in for one of DeepSpeed's extension modules."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from functools import wraps
from importlib import import_module
from itertools import zip_longest
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from opkiln.compat.deepspeed.table import MODULES
from opkiln.errors import OpkilnError, UnservedFunction, UsageError


class OpModule(ModuleType):
    """The functions that the table has for one of DeepSpeed's modules: they call an op of opkiln.

    Any other function that DeepSpeed's own sources define comes from its own module, which
    opkiln's engine builds when one of them is first used.
    """

    _refusal: OpkilnError | None = None  # why DeepSpeed's module cannot be loaded
    _built: Any = None

    def __init__(
        self,
        name: str,
        build_rest: Callable[[], Any] | None = None,
        list_theirs: Callable[[], tuple[str, ...]] = tuple,
    ) -> None:
        """``build_rest`` gives DeepSpeed's own module, and ``list_theirs`` the names of the
        functions that its sources define."""
        super().__init__(name)
        self._build_rest, self._list_theirs = build_rest, list_theirs
        # Called with DeepSpeed's own module when that has been built.
        self.when_built: list[Callable[[Any], None]] = []
        row = MODULES[name]
        # Where DeepSpeed's tensors will be.
        device = "cuda" if torch.cuda.is_available() else "cpu"
        for each in row.loads.split():
            op = _find(f"ops.{each}")
            if device in op.builder.BACKENDS:
                op.load(device, **({"dtype": row.dtype} if row.dtype else {}))
        places = [_find(each) for each in row.homes.split()]
        homes = [each(self) if isinstance(each, type) else each for each in places]
        for function in row.functions:
            # The home may have it without its ending: that of an optimizer (``create_adam``), or of
            # a dtype (``softmax_fp16``), because a tensor's own dtype decides.
            names = (function, function.rpartition("_")[0])
            signatures = [row.renamed.get(name, name).partition("(") for name in names]
            found, arguments = next(
                (getattr(home, own), arguments)
                for own, _, arguments in signatures for home in homes if hasattr(home, own)
            )  # fmt: skip
            if arguments:
                found = rename_arguments(found, arguments)
            if row.no_grad and callable(found) and not isinstance(found, type):
                found = torch.no_grad()(found)
            setattr(self, function, found)

    def __getattr__(self, name: str) -> Any:
        # Front ends ask for names that no module has (`CUDA_IMPL`). These must not build anything.
        if name.startswith("__") or not any(fnmatchcase(name, p) for p in self._list_theirs()):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        if self._refusal is None:
            try:
                return getattr(self.deepspeed_module(), name)
            except OpkilnError as error:
                self._refusal = error  # a failed build takes minutes, and would fail again
        raise UnservedFunction(
            f"{self.__name__}.{name}: DeepSpeed's own module, which has it, cannot be loaded",
            why=f"{self._refusal.what}\n{self._refusal.why}".strip(),
            hint=self._refusal.hint,
        ) from self._refusal

    def __dir__(self) -> list[str]:
        theirs = (name for name in self._list_theirs() if name.isidentifier())
        return sorted({*super().__dir__(), *theirs})

    def deepspeed_module(self) -> Any:
        """DeepSpeed's own module. Raises OpkilnError if it cannot be loaded."""
        if self._built is None:
            if self._build_rest is None:
                raise UsageError(
                    f"OPKILN_DEEPSPEED does not include `engine` for {self.__name__}",
                    why="the engine would build DeepSpeed's own module",
                    hint="unset OPKILN_DEEPSPEED",
                )
            self._built = self._build_rest()
            for tell in self.when_built:
                tell(self._built)
        return self._built


def _find(place: str) -> Any:
    """The module that a place of the table names, or for ``module:name`` its attribute."""
    module, _, name = place.partition(":")
    found = import_module(module if module.startswith(".") else f"opkiln.{module}", __package__)
    return getattr(found, name) if name else found


def takes(names: str, optional: int = 0) -> Callable[[Any], Callable[..., Any]]:
    """Decorates a function that DeepSpeed calls with arguments of these names, by position.

    The function gets them as attributes of one object, after a method's ``self``. The last
    ``optional`` ones are None if they are left out. Raises TypeError for another number of them.
    """
    fields = names.split()

    def decorate(function: Any) -> Callable[..., Any]:
        before = function.__code__.co_argcount - 1

        @wraps(function)
        def call(*every: Any) -> Any:
            given = every[before:]
            if not len(fields) - optional <= len(given) <= len(fields):
                raise TypeError(f"{function.__name__} takes ({', '.join(fields)})")
            return function(*every[:before], SimpleNamespace(**dict(zip_longest(fields, given))))

        return call

    return decorate


def rename_arguments(function: Callable[..., Any], arguments: str) -> Callable[..., Any]:
    """A function of opkiln, called by position as the table says (``x!, bias)``). Several results
    are a list, as from pybind11. An op that writes to its argument itself has no result."""
    names = arguments.removesuffix(")").split(", ")
    over = next((name.removesuffix("!") for name in names if name.endswith("!")), "")

    def call(given: Any) -> Any:
        found = function(**vars(given))
        if over and found is None:
            return getattr(given, over)
        if over and getattr(given, over).is_contiguous():
            return getattr(given, over).copy_(found)
        return list(found) if isinstance(found, tuple) else found

    call.__name__ = function.__name__
    return takes(" ".join(names).replace("!", ""))(call)
