"""A package with one SYCL op, for tensors on the CPU.

    pip install intel-sycl-rt intel-opencl-rt
    export OCL_ICD_FILENAMES=$(python -c 'import sys; print(sys.prefix)')/lib/libintelocl.so

The second line tells OpenCL, through which SYCL reaches a CPU, where its driver is.
"""


def __getattr__(name):
    if name == "silu_mul":  # imports torch
        from sycl_op.functions import silu_mul

        return silu_mul
    raise AttributeError(name)
