// A launch with its arguments checked against the kernel's. Needs CUDA's headers, none of torch's.
#pragma once

#include <cuda_runtime.h>

// A parameter that is marked so is read where it lies, not copied to each thread's stack.
#if defined(__NVCC__)
#define OPKILN_GRID_CONSTANT __grid_constant__
#else
#define OPKILN_GRID_CONSTANT
#endif

namespace opkiln {
namespace device {

// What fits into the parameters of a launch: 4 kB, and since CUDA 12.1 on compute capability 7.0 and
// later, which is all that CUDA 13 knows, 32764 bytes.
#if defined(CUDART_VERSION) && CUDART_VERSION >= 13000
constexpr std::size_t kParameterBytes = 32764;
#else
constexpr std::size_t kParameterBytes = 4096;
#endif

template <class... Parameters>
cudaError_t launch(void (*kernel)(Parameters...), unsigned blocks, unsigned threads,
                   cudaStream_t stream, const Parameters&... parameters) {
  void* arguments[] = {const_cast<void*>(static_cast<const void*>(&parameters))...};
#if defined(__NVCC__) || defined(__HIPCC__)
  return cudaLaunchKernel(reinterpret_cast<const void*>(kernel), dim3(blocks), dim3(threads),
                          arguments, 0, stream);
#else  // the tests' stand-in calls the kernel, and so has to know its type
  return cudaLaunchKernel(kernel, dim3(blocks), dim3(threads), arguments, 0, stream);
#endif
}

}  // namespace device
}  // namespace opkiln
