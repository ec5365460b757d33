"""The libraries of ``stable``."""

from __future__ import annotations

import opkiln


class StableBuilder(opkiln.OpBuilder):
    NAME = "stable"
    FLAGS: tuple[str, ...] = ()

    def sources(self) -> list[str]:
        return ["csrc/stable.cpp"]

    def cxx_args(self) -> list[str]:
        # Each copy of this package has a namespace of its own, so that one process can test many.
        return [f"-DSAMPLE_NAMESPACE={self.distribution}", *self.FLAGS]


class LightBuilder(StableBuilder):
    """The same functions with op.h: they compile in a tenth of the time, once for all copies."""

    def sources(self) -> list[str]:
        return ["csrc/light.cpp"]

    def cxx_args(self) -> list[str]:
        return list(self.FLAGS)


kit = opkiln.library(StableBuilder, functions=f"{__name__.partition('.')[0]}.reference")
