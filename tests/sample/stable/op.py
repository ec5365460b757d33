"""The declarations of ``stable``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from opkiln.builder import OpBuilder

if TYPE_CHECKING:
    from types import ModuleType


class StableBuilder(OpBuilder):
    """``who`` is 0 for the reference and 1 for the native kernel."""

    NAME = "stable"
    SCHEMAS = (
        "who(Tensor x) -> int",
        "axpy(Tensor x, Tensor y, float alpha) -> Tensor",
        "scale_(Tensor(a!) x, float by) -> ()",
    )
    FLAGS: tuple[str, ...] = ()

    def sources(self) -> list[str]:
        return ["csrc/stable.cpp"]

    def cxx_args(self) -> list[str]:
        # Each copy of this package has a namespace of its own, so that one process can test many.
        return [f"-DSAMPLE_NAMESPACE={self.distribution}", *self.FLAGS]

    def reference(self) -> ModuleType:
        from importlib import import_module

        return import_module(f"{self.distribution}.reference")

    def fake(self) -> object:
        return self.reference().Fake


class LightBuilder(StableBuilder):
    """The same functions with op.h: they compile in a tenth of the time, once for all copies."""

    def sources(self) -> list[str]:
        return ["csrc/light.cpp"]

    def cxx_args(self) -> list[str]:
        return list(self.FLAGS)
