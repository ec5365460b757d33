"""The declarations of ``ampere_up``, ``hopper_up`` and ``anywhere``."""

from __future__ import annotations

from typing import Any

from opkiln.base.model import ABI_NONE, CUDA, PLAIN
from opkiln.builder import CUDAOpBuilder


class _Kernel(CUDAOpBuilder):
    """``load()`` gives a ctypes library with ``launch`` and ``answer``."""

    BACKENDS = (CUDA,)
    KIND = PLAIN
    ABI = ABI_NONE
    FLAGS: tuple[str, ...] = ()

    def sources(self) -> list[str]:
        return [f"csrc/{self.NAME}.cu", "csrc/shared.cpp"]

    def include_paths(self) -> list[str]:
        return ["csrc/include"]

    def nvcc_args(self) -> list[str]:
        return list(self.FLAGS)


class AmpereUpBuilder(_Kernel):
    """As rules for other systems are written: pairs come back, and minors must be numbers."""

    NAME = "ampere_up"

    def filter_ccs(self, ccs: list[str]) -> list[Any]:
        kept = []
        for major, minor in (cc.split(".") for cc in ccs):
            if int(major) >= 8 and int(minor) >= 0:
                kept.append([major, minor])
        return kept


class HopperUpBuilder(_Kernel):
    """The newest first: the order of the answer means nothing."""

    NAME = "hopper_up"

    def filter_ccs(self, ccs: list[str]) -> list[str]:
        return [cc for cc in reversed(ccs) if float(cc) >= 9.0]


class AnywhereBuilder(_Kernel):
    """No filter."""

    NAME = "anywhere"
