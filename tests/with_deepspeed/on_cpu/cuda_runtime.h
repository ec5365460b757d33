// As much of CUDA's runtime as kernels with shuffles use, for a C++ compiler: a block's threads are
// fibers of one thread of the host, which take turns at barriers and shuffles, and blocks run one
// after the other. A kernel in which some threads wait for others that never come is ended with a
// message. Behind it are the real kernels.
#pragma once

#include <ucontext.h>

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __shared__ static
#define __launch_bounds__(...)

struct dim3 {
  explicit dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
  unsigned x, y, z;
};

inline dim3 threadIdx, blockIdx, blockDim, gridDim;

class Block {
 public:
  Block(dim3 shape, std::function<void()> kernel)
      : kernel_(std::move(kernel)),
        shape_(shape),
        fibers_(shape.x * shape.y * shape.z),
        warps_((fibers_.size() + 31) / 32) {
    for (unsigned i = 0; i < fibers_.size(); ++i) {
      Fiber& fiber = fibers_[i];
      fiber.stack.resize(64 * 1024);
      getcontext(&fiber.context);
      fiber.context.uc_stack = {fiber.stack.data(), 0, fiber.stack.size()};
      fiber.context.uc_link = &scheduler_;
      makecontext(&fiber.context, &Block::enter, 0);
      ++warps_[i / 32].threads;
    }
    all_.threads = static_cast<unsigned>(fibers_.size());
  }

  void run() {
    current() = this;
    for (unsigned left = static_cast<unsigned>(fibers_.size()); left > 0;) {
      moved_ = false;
      for (unsigned i = 0; i < fibers_.size(); ++i) {
        if (!fibers_[i].done) {
          rank_ = i;
          threadIdx = dim3(i % shape_.x, i / shape_.x % shape_.y, i / shape_.x / shape_.y);
          swapcontext(&scheduler_, &fibers_[i].context);
          left -= fibers_[i].done;
        }
      }
      if (!moved_) {
        std::fprintf(stderr, "runtime error: threads wait for some that do not come\n");
        std::abort();
      }
    }
  }

  void wait_for_all() {
    wait(all_);
  }

  uint32_t exchange(uint32_t value, unsigned bits) {
    const unsigned thread = rank_;
    Barrier& warp = warps_[thread / 32];
    // Two turns of values: a thread may be at the next shuffle while others read this one's.
    const unsigned turn = warp.turn % 2;
    fibers_[thread].value[turn] = value;
    wait(warp);
    const unsigned other = thread ^ bits;  // of a thread that is not there: the own value
    return fibers_[other < fibers_.size() ? other : thread].value[turn];
  }

  // Of this thread in its block.
  unsigned rank() const {
    return rank_;
  }

  unsigned threads() const {
    return static_cast<unsigned>(fibers_.size());
  }

  static Block*& current() {
    static Block* block = nullptr;
    return block;
  }

 private:
  struct Fiber {
    ucontext_t context;
    std::vector<char> stack;
    uint32_t value[2];
    bool done = false;
  };
  struct Barrier {
    unsigned threads = 0, waiting = 0, turn = 0;
  };

  static void enter() {
    Block& block = *current();
    block.kernel_();
    block.fibers_[block.rank_].done = true;
    block.moved_ = true;
  }

  void wait(Barrier& barrier) {
    const unsigned thread = rank_, turn = barrier.turn;
    moved_ = true;
    if (++barrier.waiting == barrier.threads) {
      barrier.waiting = 0;
      ++barrier.turn;
      return;
    }
    while (barrier.turn == turn) {
      swapcontext(&fibers_[thread].context, &scheduler_);
    }
    moved_ = true;
  }

  std::function<void()> kernel_;
  dim3 shape_;
  unsigned rank_ = 0;
  std::vector<Fiber> fibers_;
  std::vector<Barrier> warps_;
  Barrier all_;
  ucontext_t scheduler_;
  bool moved_ = false;
};

inline void __syncthreads() {
  Block::current()->wait_for_all();
}

inline uint32_t __shfl_xor_sync(uint32_t, uint32_t value, int bits, int) {
  return Block::current()->exchange(value, static_cast<unsigned>(bits));
}

using cudaStream_t = void*;
enum cudaError_t { cudaSuccess, cudaErrorInvalidValue };

inline const char* cudaGetErrorString(cudaError_t) {
  return "invalid value";
}

template <class... Parameters, std::size_t... kIndex>
void call(void (*kernel)(Parameters...), void** arguments, std::index_sequence<kIndex...>) {
  kernel(*static_cast<const Parameters*>(arguments[kIndex])...);
}

// CUDA takes the kernel's address alone; here its type says what the arguments are.
template <class... Parameters>
cudaError_t cudaLaunchKernel(void (*kernel)(Parameters...), dim3 blocks, dim3 threads,
                             void** arguments, std::size_t, cudaStream_t) {
  if (blocks.x == 0 || threads.x == 0 || threads.x > 1024) {
    return cudaErrorInvalidValue;
  }
  gridDim = blocks;
  blockDim = threads;
  for (unsigned i = 0; i < blocks.x * blocks.y * blocks.z; ++i) {
    blockIdx = dim3(i % blocks.x, i / blocks.x % blocks.y, i / blocks.x / blocks.y);
    Block(threads, [&] {
      call(kernel, arguments, std::index_sequence_for<Parameters...>());
    }).run();
  }
  return cudaSuccess;
}

inline float __uint_as_float(uint32_t bits) {
  return std::bit_cast<float>(bits);
}
inline uint32_t __float_as_uint(float value) {
  return std::bit_cast<uint32_t>(value);
}

struct uint2 {
  uint32_t x, y;
};

// Four of the eight bytes of two words, by their numbers in the selector's digits.
inline uint32_t __byte_perm(uint32_t low, uint32_t high, uint32_t selector) {
  const uint64_t bytes = static_cast<uint64_t>(high) << 32 | low;
  uint32_t out = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t digit = selector >> (4 * i) & 7;
    out |= static_cast<uint32_t>(bytes >> (8 * digit) & 255) << (8 * i);
  }
  return out;
}
