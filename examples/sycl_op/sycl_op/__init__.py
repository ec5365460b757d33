"""A package with one SYCL op, for tensors on the CPU.

    pip install intel-sycl-rt intel-opencl-rt
    export OCL_ICD_FILENAMES=$(python -c 'import sys; print(sys.prefix)')/lib/libintelocl.so

The second line tells OpenCL, through which SYCL reaches a CPU, where its driver is.
"""

from opkiln import SYCLOpBuilder


class SiluMulBuilder(SYCLOpBuilder):
    NAME = "silu_mul"
    SCHEMAS = ("silu_mul(Tensor x, Tensor y) -> Tensor",)

    def sources(self):
        return ["silu_mul.cpp"]

    def reference(self):
        from sycl_op import reference

        return reference

    def fake(self):
        from sycl_op import fake

        return fake


def silu_mul(x, y):
    """x * sigmoid(x) * y"""
    return SiluMulBuilder.functions().silu_mul(x, y)
