// Groups of 16, 32, 64 ... elements, spread over threads so that each thread has elements and needs no bounds
// check. Compilers then put all loads first, with nothing in between. For CUDA and HIP.
//
// A chunk is 16 elements. A warp takes 64 consecutive chunks: thread i takes chunks i and 32 + i. A group of
// up to 32 chunks lies in one half, so a thread's two chunks belong to two groups. A thread has two chunks of
// a larger group, which a warp, a block or a cluster of blocks shares. Two chunks put enough loads in flight,
// and leave enough registers for other warps to run while the thread waits. With one or four chunks,
// stochastic rounding to four bits was 4 to 9% slower on an H200.
#pragma once

#include "group_reduce.h"

// Compilers support sending values between the blocks of a cluster since CUDA 12.1.
#if defined(OPKILN_NVRTC_HOST) || \
    (defined(__CUDACC_VER_MAJOR__) && __CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__ >= 1201)
#define OPKILN_KNOWS_CLUSTERS
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define OPKILN_HAS_CLUSTERS
#endif
#endif

namespace opkiln {

constexpr int kChunkElements = 16;
constexpr int kChunksPerThread = 2;
constexpr unsigned kChunksPerWarp = kWarp * kChunksPerThread;
constexpr unsigned kGroupThreads = 256;  // the most in a block; exactly this many in each block of a cluster
constexpr unsigned kLargestCluster = 8;  // supported by every GPU that has clusters

// A thread's first chunk. Its second is kWarp chunks later.
__device__ inline int64_t first_chunk() {
  const unsigned warp = threadIdx.x / kWarp;
  return static_cast<int64_t>(blockIdx.x) * (blockDim.x * kChunksPerThread) +
      (warp * kChunksPerWarp + threadIdx.x % kWarp);
}

// Shared memory in which the threads of a block combine values.
template <class Value>
struct Shared {
  Value at[kGroupThreads / kWarp * kLargestCluster];  // one per warp
  uint64_t arrived;                                   // the barrier for values from the cluster's blocks
};

__device__ inline bool in_cluster(unsigned log2_chunks) {
#if defined(OPKILN_HAS_CLUSTERS)
  return 1u << log2_chunks > kGroupThreads * kChunksPerThread;
#else
  return false;
#endif
}

// A kernel that calls reduce_groups must call this first: a block may send only after the others have set up
// their barriers. The setup overlaps with loading elements, so it costs no time.
template <class Value>
__device__ void begin_groups(unsigned log2_chunks, Shared<Value>& shared) {
#if defined(OPKILN_HAS_CLUSTERS)
  if (in_cluster(log2_chunks)) {
    const auto arrived = static_cast<uint32_t>(__cvta_generic_to_shared(&shared.arrived));
    if (threadIdx.x == 0) {
      const uint32_t bytes = (1u << log2_chunks) / kChunksPerWarp * sizeof(Value);
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(arrived) : "memory");
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(arrived),
                   "r"(bytes)
                   : "memory");
    }
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
  }
#endif
}

// Combines the values of all warps in a cluster. Each warp sends its value to every block, and each block
// waits for all of them. (Cluster barriers around shared memory flush and clear caches, which costs up to a
// fifth of the bandwidth.)
template <class Value>
__device__ Value reduce_cluster(Value value, unsigned warps, Shared<Value>& shared) {
#if defined(OPKILN_HAS_CLUSTERS)
  constexpr unsigned kHere = kGroupThreads / kWarp;
  const unsigned lane = threadIdx.x % kWarp;
  const auto arrived = static_cast<uint32_t>(__cvta_generic_to_shared(&shared.arrived));
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
  if (lane < warps / kHere) {
    uint32_t rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    Value* const slot = &shared.at[rank * kHere + threadIdx.x / kWarp];
    uint32_t to, barrier;
    asm("mapa.shared::cluster.u32 %0, %1, %2;"
        : "=r"(to)
        : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(slot))), "r"(lane));
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(barrier) : "r"(arrived), "r"(lane));
    static_assert(sizeof(Value) == 4 || sizeof(Value) == 8);
    if constexpr (sizeof(Value) == 4) {
      asm volatile(
          "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(to),
          "r"(*reinterpret_cast<const uint32_t*>(&value)), "r"(barrier)
          : "memory");
    } else {
      const auto* const words = reinterpret_cast<const uint32_t*>(&value);
      asm volatile(
          "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];" ::"r"(
              to),
          "r"(words[0]), "r"(words[1]), "r"(barrier)
          : "memory");
    }
  }
  uint32_t done = 0;
  while (done == 0) {
    asm volatile(
        "{\n\t.reg .pred p;\n\t"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0;\n\t"
        "selp.u32 %0, 1, 0, p;\n\t}"
        : "=r"(done)
        : "r"(arrived)
        : "memory");
  }
  for (unsigned i = lane; i < warps; i += kWarp) {
    value.absorb(shared.at[i]);
  }
  for (unsigned bits = 1; bits < kWarp; bits *= 2) {
    value.absorb(value.exchanged(bits));
  }
#endif
  return value;
}

// Combines the values of `warps` neighbouring warps, a power of two. Within a warp the values must already be
// equal. All threads of the block must call this, and only once.
template <class Value>
__device__ Value reduce_warps(Value value, unsigned warps, Shared<Value>& shared) {
  const unsigned warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  if (lane == 0) {
    shared.at[warp] = value;
  }
  __syncthreads();
  value = shared.at[(warp & ~(warps - 1)) + (lane & (warps - 1))];
  for (unsigned bits = 1; bits < warps; bits *= 2) {
    value.absorb(value.exchanged(bits));
  }
  return value;
}

// Combines, for each of a thread's chunks, the values of its group of 2^log2_chunks chunks. See reduce_team
// for the requirements on Value.
template <class Value>
__device__ void reduce_groups(Value (&values)[kChunksPerThread], unsigned log2_chunks,
                              Shared<Value>& shared) {
  if (log2_chunks <= 5) {
    for (unsigned bits = 1; bits < 1u << log2_chunks; bits *= 2) {
#pragma unroll
      for (Value& value : values) {
        value.absorb(value.exchanged(bits));
      }
    }
    return;
  }
  Value all = values[0];
  all.absorb(values[1]);
#pragma unroll
  for (unsigned bits = 1; bits < kWarp; bits *= 2) {
    all.absorb(all.exchanged(bits));
  }
  if (log2_chunks > 6) {
    const unsigned warps = 1u << (log2_chunks - 6);
    all = in_cluster(log2_chunks) ? reduce_cluster(all, warps, shared)
                                  : reduce_warps(all, warps, shared);
  }
  values[0] = values[1] = all;
}

// Must be called between a warp's writes to shared memory and its reads of them.
__device__ inline void sync_warp() {
#if defined(__HIPCC__)
  __syncthreads();  // all threads of the block call this
#else
  __syncwarp();
#endif
}

}  // namespace opkiln
