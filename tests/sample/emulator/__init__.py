"""A package with one op: CUDA kernels that run on the CPU, right ones and wrong ones."""
