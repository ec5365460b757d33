// DeepSpeed's headers ask for the driver's; the kernels use nothing of it.
#pragma once

#include <cuda_runtime.h>

#define __forceinline__ inline
#define __align__(bytes)

struct uint4 {
  uint32_t x, y, z, w;
};
struct int4 {
  int32_t x, y, z, w;
};
struct int2 {
  int32_t x, y;
};
struct float2 {
  float x, y;
};

constexpr int warpSize = 32;

using std::isnan;

inline int min(int a, int b) {
  return a < b ? a : b;
}
inline int max(int a, int b) {
  return a > b ? a : b;
}

// `kernel<<<grid, block, 0, stream>>>(arguments)`, which a C++ compiler does not know.
template <class... Parameters>
auto launched(dim3 grid, dim3 block, void (*kernel)(Parameters...)) {
  return [=](Parameters... parameters) {
    void* arguments[] = {const_cast<void*>(static_cast<const void*>(&parameters))...};
    cudaLaunchKernel(kernel, grid, block, arguments, 0, nullptr);
  };
}
