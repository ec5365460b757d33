// Blocks and warps as DeepSpeed's reductions ask for them, over the fibers.
#pragma once

#include <cuda_runtime.h>

#include <cstring>

namespace cooperative_groups {

struct thread_block {
  dim3 group_index() const {
    return blockIdx;
  }
  dim3 thread_index() const {
    return threadIdx;
  }
  dim3 group_dim() const {
    return blockDim;
  }
  unsigned size() const {
    return Block::current()->threads();
  }
  void sync() const {
    __syncthreads();
  }
};

inline thread_block this_thread_block() {
  return {};
}

template <int kSize>
struct thread_block_tile {
  unsigned thread_rank() const {
    return Block::current()->rank() % kSize;
  }
  unsigned meta_group_size() const {
    return (Block::current()->threads() + kSize - 1) / kSize;
  }
  template <class T>
  T shfl_xor(T value, unsigned bits) const {
    uint32_t words[sizeof(T) / 4];
    std::memcpy(words, &value, sizeof(T));
    for (uint32_t& word : words) {
      word = Block::current()->exchange(word, bits);
    }
    std::memcpy(&value, words, sizeof(T));
    return value;
  }
};

template <int kSize>
thread_block_tile<kSize> tiled_partition(const thread_block&) {
  return {};
}

}  // namespace cooperative_groups

namespace cg = cooperative_groups;
