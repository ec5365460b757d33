// Indices in device code: checks that stop the kernel, and fast division.
#pragma once

#include "op/types.h"

namespace opkiln {
namespace device {

// Stops the kernel. The next call that waits for the GPU reports the error.
__device__ inline void trap() {
#if defined(__HIPCC__)  // HIP has no __trap
  __builtin_trap();
#else
  __trap();
#endif
}

__device__ inline int64_t check_index(int64_t index, int64_t count) {
  if (index < 0 || index >= count) trap();
  return index;
}

// A quotient of numbers that are not negative. A 64-bit division takes four times as long as a 32-bit one.
template <class Divisor>
__device__ inline int64_t divide(int64_t value, Divisor by) {
  return (value >> 32) == 0 ? static_cast<uint32_t>(value) / static_cast<uint32_t>(by) : value / by;
}

}  // namespace device
}  // namespace opkiln
