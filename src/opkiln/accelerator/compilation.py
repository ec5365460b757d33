"""Compilers of Python: ``torch.compile``'s backend, Triton; and automatic mixed precision."""

from __future__ import annotations

from opkiln.accelerator.identity import Identity
from opkiln.accelerator.packages import installed
from opkiln.errors import AcceleratorError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, ClassVar


class Compilation(Identity):
    """The backend is kept in the object; nothing of torch's is changed."""

    COMPILE_BACKEND: ClassVar[str] = "inductor"
    TRITON: ClassVar[bool] = False  # whether Triton has a backend for such devices

    _compile_backend = ""

    def get_compile_backend(self) -> str:
        """What to give ``torch.compile`` as its ``backend``."""
        return self._compile_backend or self.COMPILE_BACKEND

    def set_compile_backend(self, backend: str) -> None:
        """Take another. Raises AcceleratorError where torch has none of this name."""
        import torch._dynamo

        known = torch._dynamo.list_backends(exclude_tags=())
        if backend not in known:
            raise AcceleratorError(
                f"torch.compile has no backend {backend!r}", why="it has: " + ", ".join(known)
            )
        self._compile_backend = backend

    def is_triton_supported(self) -> bool:
        """Whether Triton is installed and compiles for the current device."""
        return self.TRITON and installed("triton")

    def prefer_triton_grouped_mm(self) -> bool:
        """Whether a grouped matrix product is faster in Triton than in torch."""
        return False

    def amp(self) -> Any:
        """The device's module of automatic mixed precision; None where it has none of its own."""
        return getattr(self.module(), "amp", None)
