// opk::launch: runs a kernel on torch's current stream.
//
// The same source runs in three ways. nvcc and hipcc compile host and device code
// and launch through their runtimes. OPKILN_NVRTC_HOST marks the host side of device
// code that NVRTC compiled. OPKILN_EMULATED runs the grid on the CPU.
#pragma once

#include "running.h"

OPK_NAMESPACE_BEGIN

// Blocks of a grid, or threads of a block, in each dimension.
struct Extent {
  uint32_t x, y, z;
  Extent(int64_t x_ = 1, int64_t y_ = 1, int64_t z_ = 1) : x(of(x_)), y(of(y_)), z(of(z_)) {}
#if defined(__CUDACC__) || defined(__HIPCC__) || defined(OPKILN_NVRTC_HOST) || defined(OPKILN_EMULATED)
  Extent(const dim3& other) : x(other.x), y(other.y), z(other.z) {}
  operator dim3() const { return dim3(x, y, z); }
#endif
  uint64_t count() const { return uint64_t{x} * y * z; }

 private:
  static uint32_t of(int64_t value) {
    if (__builtin_expect(value < 0 || value > 0x7fffffff, 0)) {
      raise_form("launch: a grid or block cannot have the size %lld", static_cast<long long>(value));
    }
    return static_cast<uint32_t>(value);
  }
};

// opk::launch(kernel, opk::Launch{.grid = n, .block = 256, .cluster = 2}, arguments…);
struct Launch {
  Extent grid = 1;
  Extent block = 1;
  size_t shared = 0;  // bytes of dynamic shared memory for each block
  Extent cluster = 1;  // blocks per cluster: compute capability 9.0 and later
  bool cooperative = false;  // all blocks run at once, so they can wait for each other
  // may begin before the previous kernel ends: the kernel must call opk::wait_for_previous()
  bool overlap = false;
};

template <class T>
struct Same {
  using type = T;
};

[[noreturn]] OPK_COLD inline void raise_launch(const Launch& how, const char* why) {
  raise_form("the kernel could not be launched: %s (grid [%u, %u, %u], block [%u, %u, %u], %llu bytes of "
             "shared memory)",
             why, how.grid.x, how.grid.y, how.grid.z, how.block.x, how.block.y, how.block.z,
             static_cast<unsigned long long>(how.shared));
}

OPK_NAMESPACE_END

OPK_NAMESPACE_BEGIN

// A cache of one number below 256 per kernel and device. Threads read and write its words without a lock; a
// kernel whose slot another one took is looked up again.
class NumberCache {
 public:
  // Returns -1 if the number is not known.
  int find(const void* kernel, int device) const {
    const uint64_t held = __atomic_load_n(&held_[slot(kernel)], __ATOMIC_RELAXED);
    return held >> 8 == name(kernel, device) ? static_cast<int>(held & 0xff) : -1;
  }
  void add(const void* kernel, int device, int number) {
    __atomic_store_n(&held_[slot(kernel)], name(kernel, device) << 8 | static_cast<uint8_t>(number),
                     __ATOMIC_RELAXED);
  }

 private:
  static uint64_t name(const void* kernel, int device) {
    return reinterpret_cast<uintptr_t>(kernel) << 8 | static_cast<uint8_t>(device);
  }
  static size_t slot(const void* kernel) { return reinterpret_cast<uintptr_t>(kernel) / 16 % 64; }
  uint64_t held_[64] = {};
};

OPK_NAMESPACE_END

// Each way of launching defines:
//   template <class... P> void launch_kernel(void (*kernel)(P...), const Launch&, void** arguments)
// where arguments[i] is the address of the i-th argument, a P; and
//   template <class... P> bool runs_as(void (*kernel)(P...), int capability)
// which returns whether the current device runs the kernel's code for this compute capability (90 is 9.0) or
// a later one. The device alone does not decide: the driver also compiles code that was written for an
// earlier capability, which lacks the features of the later one. Code that is declared for one thread counts as
// none: so an image says that it lacks what a kernel needs (warpgroup_matrix.h).
#if defined(OPKILN_EMULATED)
#include "emulated_launch.h"
#define OPK_HAS_LAUNCH 1
#elif defined(OPKILN_NVRTC_HOST)
#include "nvrtc_launch.h"
#define OPK_HAS_LAUNCH 1
#elif defined(__HIPCC__)
#include "hip_launch.h"
#define OPK_HAS_LAUNCH 1
#elif defined(__CUDACC__)
#include "cuda_launch.h"
#define OPK_HAS_LAUNCH 1
#endif

#if defined(OPK_HAS_LAUNCH)
OPK_NAMESPACE_BEGIN

// Whether the current device can run a kernel in clusters.
template <class... P>
bool has_clusters(void (*kernel)(P...)) {
  return runs_as(kernel, 90);
}

// Launches on torch's current stream of the current device, which is the device of the op's first tensor. The
// arguments are converted to the kernel's parameters. An empty grid launches nothing. Raises the driver's
// message if the launch fails. Errors inside the kernel are reported by the next call that waits.
template <class... P>
void launch(void (*kernel)(P...), const Launch& how, const typename Same<P>::type&... arguments) {
  if (how.grid.count() == 0) return;
  void* addresses[sizeof...(P) + 1] = {const_cast<void*>(static_cast<const void*>(&arguments))...};
  launch_kernel(kernel, how, addresses);
}

template <class... P>
void launch(void (*kernel)(P...), Extent grid, Extent block, size_t shared,
            const typename Same<P>::type&... arguments) {
  launch(kernel, Launch{grid, block, shared}, arguments...);
}

// The same, for a kernel that calls opk::wait_for_previous() before it touches memory.
template <class... P>
void launch_overlapping(void (*kernel)(P...), Extent grid, Extent block, size_t shared,
                        const typename Same<P>::type&... arguments) {
  Launch how{grid, block, shared};
  how.overlap = true;
  launch(kernel, how, arguments...);
}

OPK_NAMESPACE_END
#endif
