"""CUDA sources without nvcc: g++ compiles their host code, NVRTC their device code."""
