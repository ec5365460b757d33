"""The builder of ``device``."""

from __future__ import annotations

from opkiln.builder import CUDAOpBuilder


class DeviceBuilder(CUDAOpBuilder):
    """``load()`` gives a ctypes.CDLL with ``answer`` and, for CUDA, ``launch``."""

    NAME = "device"
    ABI = "none"
    KIND = "plain"
    BACKENDS = ("cuda", "cpu")
    LEAST = 0
    FLAGS: tuple[str, ...] = ()

    def sources(self) -> list[str]:
        return ["answer.cpp"] if self.build_for_cpu else ["kernel.cu", "answer.cpp"]

    def nvcc_args(self) -> tuple[str, ...]:
        return self.FLAGS

    def filter_ccs(self, ccs: list[str]) -> list[list[str]]:
        split = [cc.split(".") for cc in ccs]
        return [cc for cc in split if int(cc[0]) >= self.LEAST]
