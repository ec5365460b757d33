// Cooperative groups: the block, tiles of a warp, the threads that are active, and the grid.
#pragma once

#include "language.h"

namespace cooperative_groups {

namespace details {

OPKILN_INLINE unsigned rank_in_block() {
  return (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
}

}  // namespace details

class thread_block {
 public:
  static OPKILN_INLINE void sync() {
    __syncthreads();
  }
  static unsigned thread_rank() {
    return details::rank_in_block();
  }
  static unsigned num_threads() {
    return blockDim.x * blockDim.y * blockDim.z;
  }
  static unsigned size() {
    return num_threads();
  }
  static dim3 group_index() {
    return blockIdx;
  }
  static dim3 thread_index() {
    return threadIdx;
  }
  static dim3 dim_threads() {
    return blockDim;
  }
  static dim3 group_dim() {
    return blockDim;
  }
};

class grid_group {
 public:
  static bool is_valid() {
    return true;
  }
  static OPKILN_INLINE void sync() {
    ::opk::emulator::sync_grid();
  }
  static unsigned long long block_rank() {
    return (static_cast<unsigned long long>(blockIdx.z) * gridDim.y + blockIdx.y) * gridDim.x +
        blockIdx.x;
  }
  static unsigned long long num_blocks() {
    return static_cast<unsigned long long>(gridDim.x) * gridDim.y * gridDim.z;
  }
  static unsigned long long thread_rank() {
    return block_rank() * thread_block::num_threads() + details::rank_in_block();
  }
  static unsigned long long num_threads() {
    return num_blocks() * thread_block::num_threads();
  }
  static unsigned long long size() {
    return num_threads();
  }
  static dim3 group_dim() {
    return gridDim;
  }
};

// Some lanes of a warp, in order.
class coalesced_group {
 public:
  explicit coalesced_group(unsigned mask) : mask_(mask) {}

  unsigned thread_rank() const {
    return static_cast<unsigned>(__popc(mask_ & ((1u << details::rank_in_block() % 32) - 1)));
  }
  unsigned num_threads() const {
    return static_cast<unsigned>(__popc(mask_));
  }
  unsigned size() const {
    return num_threads();
  }
  OPKILN_INLINE void sync() const {
    __syncwarp(mask_);
  }
  template <class T>
  OPKILN_INLINE T shfl(T value, unsigned rank) const {
    return __shfl_sync(mask_, value, lane_of(rank));
  }
  template <class T>
  OPKILN_INLINE T shfl_up(T value, unsigned delta) const {
    const unsigned rank = thread_rank();
    return __shfl_sync(mask_, value, lane_of(rank < delta ? rank : rank - delta));
  }
  template <class T>
  OPKILN_INLINE T shfl_down(T value, unsigned delta) const {
    const unsigned rank = thread_rank();
    return __shfl_sync(mask_, value, lane_of(rank + delta < num_threads() ? rank + delta : rank));
  }
  template <class T>
  OPKILN_INLINE T shfl_xor(T value, unsigned bits) const {
    const unsigned rank = thread_rank() ^ bits;
    return __shfl_sync(mask_, value, lane_of(rank < num_threads() ? rank : thread_rank()));
  }
  OPKILN_INLINE bool any(int predicate) const {
    return __any_sync(mask_, predicate) != 0;
  }
  OPKILN_INLINE bool all(int predicate) const {
    return __all_sync(mask_, predicate) != 0;
  }
  OPKILN_INLINE unsigned ballot(int predicate) const {
    return pack_ranks(__ballot_sync(mask_, predicate));
  }
  template <class T>
  OPKILN_INLINE unsigned match_any(T value) const {
    return pack_ranks(__match_any_sync(mask_, value));
  }

 protected:
  // The lane of the group's thread with this rank.
  int lane_of(unsigned rank) const {
    unsigned left = mask_;
    for (unsigned i = 0; i < rank; ++i) {
      left &= left - 1;
    }
    return __ffs(static_cast<int>(left)) - 1;
  }
  // Converts a mask of lanes to a mask of ranks.
  unsigned pack_ranks(unsigned lanes) const {
    unsigned out = 0, next = 0;
    for (unsigned lane = 0; lane < 32; ++lane) {
      if ((mask_ >> lane & 1) != 0) {
        out |= (lanes >> lane & 1) << next++;
      }
    }
    return out;
  }

  unsigned mask_;
};

template <unsigned kSize, class Parent = void>
class thread_block_tile : public coalesced_group {
  static_assert(kSize > 0 && kSize <= 32 && (kSize & (kSize - 1)) == 0,
                "the emulator has tiles of 1, 2, 4, 8, 16 and 32 threads");

 public:
  thread_block_tile() : coalesced_group(mask_here()) {}
  static constexpr unsigned num_threads() {
    return kSize;
  }
  static constexpr unsigned size() {
    return kSize;
  }
  unsigned thread_rank() const {
    return details::rank_in_block() % kSize;
  }
  unsigned meta_group_rank() const {
    return details::rank_in_block() / kSize;
  }
  unsigned meta_group_size() const {
    return (thread_block::num_threads() + kSize - 1) / kSize;
  }
  template <class T>
  OPKILN_INLINE T shfl(T value, unsigned rank) const {
    return __shfl_sync(mask_, value, static_cast<int>(rank), kSize);
  }
  template <class T>
  OPKILN_INLINE T shfl_up(T value, unsigned delta) const {
    return __shfl_up_sync(mask_, value, delta, kSize);
  }
  template <class T>
  OPKILN_INLINE T shfl_down(T value, unsigned delta) const {
    return __shfl_down_sync(mask_, value, delta, kSize);
  }
  template <class T>
  OPKILN_INLINE T shfl_xor(T value, unsigned bits) const {
    return __shfl_xor_sync(mask_, value, static_cast<int>(bits), kSize);
  }

 private:
  static unsigned mask_here() {
    const unsigned lane = details::rank_in_block() % 32;
    return (kSize == 32 ? 0xffffffffu : (1u << kSize % 32) - 1) << (lane & ~(kSize - 1));
  }
};

OPKILN_INLINE thread_block this_thread_block() {
  return {};
}
OPKILN_INLINE grid_group this_grid() {
  return {};
}
OPKILN_INLINE coalesced_group coalesced_threads() {
  return coalesced_group(__activemask());
}
template <unsigned kSize, class Parent>
thread_block_tile<kSize, Parent> tiled_partition(const Parent&) {
  return {};
}
template <class Group>
OPKILN_INLINE void sync(const Group& group) {
  group.sync();
}

template <class T>
struct plus {
  T operator()(T a, T b) const {
    return a + b;
  }
};
template <class T>
struct less {
  T operator()(T a, T b) const {
    return b < a ? b : a;
  }
};
template <class T>
struct greater {
  T operator()(T a, T b) const {
    return a < b ? b : a;
  }
};

// Every thread gets the result. Values are combined in a butterfly, as on a GPU.
template <unsigned kSize, class Parent, class T, class Op>
OPKILN_INLINE T reduce(const thread_block_tile<kSize, Parent>& tile, T value, Op op) {
  for (unsigned bits = kSize / 2; bits > 0; bits /= 2) {
    value = op(value, tile.shfl_xor(value, bits));
  }
  return value;
}

template <class R = void>
__attribute__((error("the emulator does not run thread block clusters"))) R this_cluster();

}  // namespace cooperative_groups
