// Reductions over teams of threads, for CUDA and HIP. A team is a power of two of neighbouring threads in a
// block, so a group of any size gets as many threads as it needs.
#pragma once

#include "op/types.h"

namespace opkiln {

constexpr unsigned kWarp = 32;  // AMD's warps of 64 threads count as two

struct Team {
  unsigned size;   // a power of two that divides the block
  unsigned lane;   // index of this thread in its team
  unsigned index;  // index of the team in its block
  unsigned count;  // number of teams in a block

  __device__ explicit Team(unsigned log2_size)
      : size(1u << log2_size),
        lane(threadIdx.x & (size - 1)),
        index(threadIdx.x >> log2_size),
        count(blockDim.x >> log2_size) {}
};

// Returns the value of the lane whose index differs in these bits. All threads of the warp must call this.
__device__ inline uint32_t exchange(uint32_t value, unsigned bits) {
#if defined(OPKILN_EMULATED)
  // A shuffle does not order memory in the emulator: the values must be read before they are sent.
  __syncwarp();
#endif
#if defined(__HIP_PLATFORM_AMD__) || defined(__HIP_PLATFORM_HCC__)
  return static_cast<uint32_t>(__shfl_xor(static_cast<int>(value), static_cast<int>(bits), 32));
#else
  return __shfl_xor_sync(0xffffffffu, value, static_cast<int>(bits), 32);
#endif
}

__device__ inline float exchange(float value, unsigned bits) {
  return __uint_as_float(exchange(__float_as_uint(value), bits));
}

// Combines the values of a team; each of its threads gets the result. `Value` has exchanged(bits), made of
// `exchange`, and absorb(other), which must be commutative. All threads of the block must call this. Teams
// larger than a warp may call it only once: `shared`, with one value per warp of the block, is not cleared.
template <class Value>
__device__ Value reduce_team(Value value, const Team& team, Value* shared) {
  const unsigned within = team.size < kWarp ? team.size : kWarp;
  for (unsigned bits = 1; bits < within; bits *= 2) {
    value.absorb(value.exchanged(bits));
  }
  if (team.size > kWarp) {
    const unsigned warps = team.size / kWarp, warp = threadIdx.x / kWarp;
    if (threadIdx.x % kWarp == 0) {
      shared[warp] = value;
    }
    __syncthreads();
    // Every warp of the team combines all the warps' values, one per lane.
    value = shared[team.index * warps + threadIdx.x % warps];
    for (unsigned bits = 1; bits < warps; bits *= 2) {
      value.absorb(value.exchanged(bits));
    }
  }
  return value;
}

}  // namespace opkiln
