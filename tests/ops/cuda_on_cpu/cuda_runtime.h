// As much of CUDA's runtime as the catalogue's kernels use, for a C++ compiler: a block's threads are
// threads of the host, and blocks run one after the other. Behind it are the real kernels.
#pragma once

#include <barrier>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <thread>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __shared__ static
#define __launch_bounds__(...)

struct dim3 {
  explicit dim3(unsigned x = 1) : x(x) {}
  unsigned x;
};

inline thread_local dim3 threadIdx, blockIdx, gridDim;
inline thread_local std::barrier<>* block_barrier;

inline void __syncthreads() {
  block_barrier->arrive_and_wait();
}

// Calls the kernel as every thread of every block.
template <class Kernel>
void run_grid(dim3 blocks, dim3 threads, const Kernel& kernel) {
  std::barrier barrier(threads.x);
  std::vector<std::jthread> running;
  for (unsigned thread = 0; thread < threads.x; ++thread) {
    running.emplace_back([&, thread] {
      threadIdx.x = thread;
      gridDim.x = blocks.x;
      block_barrier = &barrier;
      for (blockIdx.x = 0; blockIdx.x < blocks.x; ++blockIdx.x) {
        kernel();
        barrier.arrive_and_wait();
      }
    });
  }
}

using cudaStream_t = void*;
enum cudaError_t { cudaSuccess, cudaErrorInvalidValue };

inline const char* cudaGetErrorString(cudaError_t) {
  return "invalid value";
}

inline int launches = 0;

template <class... Parameters, std::size_t... kIndex>
void call(void (*kernel)(Parameters...), void** arguments, std::index_sequence<kIndex...>) {
  kernel(*static_cast<const Parameters*>(arguments[kIndex])...);
}

// CUDA takes the kernel's address alone; here its type says what the arguments are.
template <class... Parameters>
cudaError_t cudaLaunchKernel(void (*kernel)(Parameters...), dim3 blocks, dim3 threads,
                             void** arguments, std::size_t, cudaStream_t) {
  ++launches;
  if (blocks.x == 0 || threads.x == 0) {
    return cudaErrorInvalidValue;
  }
  run_grid(blocks, threads, [&] {
    call(kernel, arguments, std::index_sequence_for<Parameters...>());
  });
  return cudaSuccess;
}

inline float __uint_as_float(uint32_t bits) {
  return std::bit_cast<float>(bits);
}
inline uint32_t __float_as_uint(float value) {
  return std::bit_cast<uint32_t>(value);
}
