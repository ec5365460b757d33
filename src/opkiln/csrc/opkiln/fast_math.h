// The hardware's approximations in device code, with errors below 2^-22. They flush subnormals to zero.
// For CUDA, HIP and the emulator.
#pragma once

#include "op/types.h"

namespace opkiln {
namespace device {

// 2 to the power of x; 0 for minus infinity.
__device__ inline float fast_exp2(float x) {
#if defined(__CUDA_ARCH__)
  float out;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
  return out;
#else
  return exp2f(x);
#endif
}

__device__ inline float fast_reciprocal(float x) {
#if defined(__CUDA_ARCH__)
  float out;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
  return out;
#else
  return 1.0f / x;
#endif
}

}  // namespace device
}  // namespace opkiln
