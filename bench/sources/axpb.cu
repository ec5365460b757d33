// y = a * x + b: the one kernel that every system of `cuda_cold.py` compiles. No torch header.

#include <cuda_runtime.h>

#include <cstdint>

__global__ void axpb_kernel(const float* x, float* y, int64_t n, float a, float b) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < n) {
    y[i] = a * x[i] + b;
  }
}

// What CUDA has to say against the launch, or null. The device must be current.
const char* axpb_enqueue(const float* x, float* y, int64_t n, float a, float b, void* stream) {
  constexpr int kThreads = 256;
  if (n == 0) {
    return nullptr;
  }
  const auto blocks = static_cast<unsigned>((n + kThreads - 1) / kThreads);
  axpb_kernel<<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(x, y, n, a, b);
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}
