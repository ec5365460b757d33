// Stops a kernel whose arguments are invalid, such as an index of a row that does not exist.
#pragma once

namespace opkiln {
namespace device {

// The next call that waits for the GPU reports the error.
__device__ inline void trap() {
#if defined(__HIPCC__)  // HIP has no __trap
  __builtin_trap();
#else
  __trap();
#endif
}

}  // namespace device
}  // namespace opkiln
