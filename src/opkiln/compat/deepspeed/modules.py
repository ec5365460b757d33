"""The stand-in for one of DeepSpeed's extension modules, and the smallest of them, ``utils``."""

from __future__ import annotations

from fnmatch import fnmatchcase
from types import ModuleType
from typing import Any, ClassVar

from opkiln.errors import OpkilnError, UnservedFunction, UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor


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


class ByteTensors(OpModule):
    """``utils``: tensors as bytes, and lists of tensors as one tensor.

    Only earlier releases of DeepSpeed have ``flatten`` and ``unflatten``.
    """

    NAME = "utils"

    def cast_to_byte_tensor(self, src_tensor: Tensor | Sequence[Tensor]) -> Tensor | list[Tensor]:
        """The memory of a tensor, or of each of several, as bytes in one dimension. Nothing is
        copied."""
        from torch import Tensor

        from opkiln.ops.utils.flatten import byte_view

        if isinstance(src_tensor, Tensor):
            # DeepSpeed returns a tensor of at most one byte as it is.
            return src_tensor if src_tensor.nbytes <= 1 else byte_view(src_tensor)
        return [tensor if tensor.nbytes <= 1 else byte_view(tensor) for tensor in src_tensor]

    def flatten(self, tensors: Sequence[Tensor]) -> Tensor:
        """A new tensor of one dimension with the elements of all tensors."""
        from opkiln.ops.utils.flatten import flatten

        return flatten(tensors)

    def unflatten(self, flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Views of ``flat`` with the shapes of the tensors."""
        from opkiln.ops.utils.flatten import unflatten

        return unflatten(flat, tensors)
