"""A sample package: one torch-free CUDA op, in a .cu and a .cpp, with a CPU version."""
