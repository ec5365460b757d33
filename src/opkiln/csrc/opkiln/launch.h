// A launch whose arguments are checked against the kernel's parameters. Needs CUDA's headers, but not
// torch's.
#pragma once

#include <cuda_runtime.h>

// A parameter with this mark is read in place, not copied to each thread's stack.
#if defined(__NVCC__)
#define OPKILN_GRID_CONSTANT __grid_constant__
#else
#define OPKILN_GRID_CONSTANT
#endif

namespace opkiln {
namespace device {

// The largest parameters of a launch: 4 kB. Since CUDA 12.1 it is 32764 bytes on compute capability
// 7.0 and later, which is all that CUDA 13 supports.
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
#else  // the tests' stand-in calls the kernel, so it must know the kernel's type
  return cudaLaunchKernel(kernel, dim3(blocks), dim3(threads), arguments, 0, stream);
#endif
}

}  // namespace device
}  // namespace opkiln
