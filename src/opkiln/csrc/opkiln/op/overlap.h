// The device side of launches with `overlap`.
#pragma once

#include "types.h"

#if defined(__CUDACC__) || defined(__HIPCC__) || defined(__CUDACC_RTC__) || defined(OPKILN_EMULATED)
OPK_NAMESPACE_BEGIN

// Waits until the kernels before this one in its stream have ended and their writes are visible. A kernel
// that is launched with `overlap` may begin while the last of them still runs, so every thread must call this
// before it touches a tensor's memory. Work that is done before the call costs no time. It does nothing in
// other launches, and on GPUs before compute capability 9.0.
__device__ __forceinline__ void wait_for_previous() {
#if defined(OPKILN_EMULATED)
  emulator::wait_for_previous();
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

OPK_NAMESPACE_END
#endif
