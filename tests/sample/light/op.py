"""The library of ``light``."""

from __future__ import annotations

import opkiln


class LightBuilder(opkiln.OpBuilder):
    NAME = "light"

    def sources(self) -> list[str]:
        return ["csrc/light.cpp", "csrc/more.cpp", "csrc/scaled_add.cpp"]


kit = opkiln.library(LightBuilder, functions=f"{__name__.partition('.')[0]}.functions")
