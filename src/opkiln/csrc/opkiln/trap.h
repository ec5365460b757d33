// Stops a kernel whose arguments make no sense, such as an index without a row.
#pragma once

namespace opkiln {
namespace device {

// The next call that waits for the GPU gets an error.
__device__ inline void trap() {
#if defined(__HIPCC__)  // HIP has no __trap
  __builtin_trap();
#else
  __trap();
#endif
}

}  // namespace device
}  // namespace opkiln
