"""The declaration of ``plain``."""

from __future__ import annotations

from opkiln.base.model import ABI_NONE, PLAIN
from opkiln.builder import OpBuilder


class PlainBuilder(OpBuilder):
    """``load()`` gives a ctypes library with ``add``, ``scale`` and ``where``."""

    NAME = "plain"
    KIND = PLAIN
    ABI = ABI_NONE
    FLAGS: tuple[str, ...] = ()

    def sources(self) -> list[str]:
        return ["csrc/add.cpp", "csrc/scale.cpp", "csrc/where.cpp"]

    def include_paths(self) -> list[str]:
        return ["csrc/first", "csrc/include"]

    def cxx_args(self) -> list[str]:
        return list(self.FLAGS)
