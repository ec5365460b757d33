// CUDA's device language for a C++ compiler: what nvcc knows without any #include. Included by op.h if
// OPKILN_EMULATED is defined, and by the headers in cuda/, which stand in for the toolkit's.
#pragma once

#include <cassert>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "runtime.h"

#define __global__
#define __device__
#define __host__
#define __constant__
#define __managed__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __cluster_dims__(...) \
  __attribute__((aligned(OPKILN_the_emulator_has_no_thread_block_clusters)))
#define __grid_constant__
#define __align__(bytes) alignas(bytes)
// A thread_local variable in a function is also static: one for all fibers of a thread.
// The runtime recognizes it by its place in the library's TLS block.
#define __shared__ thread_local

// C++ has no way to accept `extern __shared__ T name[];`. Builds
// translate it to this macro, which may also be written by hand.
#define OPKILN_DYNAMIC_SHARED(name, ...) \
  __VA_ARGS__* const name = static_cast<__VA_ARGS__*>(::opk::emulator::dynamic_shared())

// Tensor cores, clusters and the like are programmed in inline PTX, which runs only on a GPU.
#define asm OPKILN_the_emulator_does_not_run_inline_PTX

static constexpr int warpSize = 32;

OPKILN_INLINE void __syncthreads() {
  ::opk::emulator::sync_block(false, ::opk::emulator::Vote::kNone);
}
OPKILN_INLINE int __syncthreads_count(int predicate) {
  return ::opk::emulator::sync_block(predicate != 0, ::opk::emulator::Vote::kCount);
}
OPKILN_INLINE int __syncthreads_and(int predicate) {
  return ::opk::emulator::sync_block(predicate != 0, ::opk::emulator::Vote::kAnd);
}
OPKILN_INLINE int __syncthreads_or(int predicate) {
  return ::opk::emulator::sync_block(predicate != 0, ::opk::emulator::Vote::kOr);
}

OPKILN_INLINE void __threadfence() {
  ::opk::emulator::fence();
}
OPKILN_INLINE void __threadfence_block() {
  ::opk::emulator::fence();
}
OPKILN_INLINE void __threadfence_system() {
  ::opk::emulator::fence();
}

OPKILN_INLINE void __nanosleep(unsigned) {}
[[noreturn]] OPKILN_INLINE void __trap() {
  ::opk::emulator::stop("the kernel calls __trap()");
}
OPKILN_INLINE void __brkpt() {}
OPKILN_INLINE void __prof_trigger(int) {}

// A clock that only orders events.
OPKILN_INLINE long long clock64() {
  static long long ticks = 0;
  return ++ticks;
}
OPKILN_INLINE int clock() {
  return static_cast<int>(clock64());
}

#include "warp.h"

#include "atomics.h"

#include "numbers.h"

#include "refused.h"
