// The kernel and its launch. Without torch's headers nvcc is done in two seconds.

#include <cuda_runtime.h>

#include <algorithm>

#include "scaled_add.h"

namespace kernels {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMaxBlocks = 1 << 16;  // what is beyond, the loop takes

__global__ void kernel(const float* x, const float* y, float scale, float* out, int64_t count) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += step) {
    out[i] = x[i] + scale * y[i];
  }
}

}  // namespace

const char* scaled_add(const float* x, const float* y, float scale, float* out, int64_t count,
                       void* stream) {
  const int64_t blocks = std::min((count + kThreads - 1) / kThreads, kMaxBlocks);
  kernel<<<static_cast<unsigned>(blocks), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      x, y, scale, out, count);
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace kernels
