"""The library of ``silu_mul``. Imports no torch: commands know the op without it."""

import opkiln


class SiluMulBuilder(opkiln.SYCLOpBuilder):
    NAME = "silu_mul"

    def sources(self):
        return ["silu_mul.cpp"]


kit = opkiln.library(SiluMulBuilder, functions="sycl_op.functions")
