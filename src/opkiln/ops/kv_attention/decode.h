// Decode attention: a few new tokens of each sequence attend to its cache of keys and values.
//
// Memory bandwidth limits it: each key and value is used once per group of query heads. So each warp streams
// tiles of 16 keys and 16 values through its own ring in shared memory, with all stages but one in flight,
// and waits for no other warp. Tensor cores compute the transposed problem:
//   scores, 16 keys x 8 queries  = keys, 16 x head  *  queries, head x 8
//   output, head x 8 queries    += values, head x 16  *  weights, 16 keys x 8 queries
// Keys and values fill the 16 rows of the instruction. A group of query heads, times new
// tokens, fills its 8 columns. In both products a thread's sums belong to the same two queries,
// so the running maximum and the sum of weights stay in registers.
//
// Blocks share a long context (blockIdx.x). Up to eight are a cluster, where the GPU has clusters, if they are wide
// or have few keys: each sends its part to the others' shared memory, a share of the columns to each. Others leave
// their parts in scratch memory; the one that a counter says is the last adds them. Parts are added in their order,
// so a result does not depend on which came last.
//
// 1024 keys of 32 or 8 kv heads take 8.9 and 5.8 us on an H200, of which 3.9 and 1.0 us are the bytes at a copy's
// speed. The rest is latency, one thing after the other: the launch, the length, the first keys, the last tile and
// the adding up. A cluster saves 0.9 us of it. Asking the L2 cache for keys before the kernel before has ended, or
// letting the next kernel begin early, made each call 0.3 to 1.7 us longer.
#pragma once

#include <math.h>
#include <opkiln/device_index.h>
#include <opkiln/warp_matrix.h>

#ifndef WARPS  // two blocks of 96 KiB fit on an H100's multiprocessor, one on other GPUs'
#define WARPS (HEAD > 128 ? 2 : 4)
#endif
#ifndef STAGES
#define STAGES ((96 << 10) / (WARPS * kTileBytes))
#endif

namespace decode {

using namespace opkiln::device;
using Element = opk::T;

constexpr bool kPaged = PAGED;  // the cache consists of blocks of tokens in any order
constexpr int kTile = 16;  // keys per tile
constexpr int kChunks = HEAD / 8;  // 16-byte chunks per row
// Eight rows are read at one column at once, so they must be in different banks. Rows whose length is a
// multiple of 128 bytes have their chunks permuted; other rows are padded by one chunk.
constexpr bool kPermuted = kChunks % 8 == 0;
constexpr int kRowChunks = kPermuted ? kChunks : kChunks + 1;
constexpr int kTileChunks = kTile * kRowChunks;
constexpr int kCopies = kTile * kChunks / 32;  // 16-byte copies per lane, for keys or values
constexpr int kTileBytes = 2 * kTileChunks * 16;  // keys and values
constexpr int kWarps = WARPS;  // of a block; a wide one has twice as many
constexpr int kMostWarps = kPaged ? kWarps : 2 * kWarps;  // paged blocks are slower when they are wide
constexpr int kThreads = kWarps * 32;
constexpr int kStages = STAGES;
constexpr int kSteps = HEAD / 16;  // of 16 dimensions
constexpr int kRingBytes = kStages * kWarps * kTileBytes;
constexpr int kMostBlocks = 8;  // of a cluster
constexpr int kClusteredKeys = 512;  // of a narrow block: four with 8192 took 11% longer as a cluster
constexpr int kWideBlocks = 64;  // a grid of so few has wide blocks: one for each multiprocessor
constexpr int kOutRow = HEAD + 4;  // floats; the 4 keep the rows of one column in different banks
constexpr unsigned kAll = 0xffffffffu;
static_assert(kStages >= 2 && kTile * kChunks % 32 == 0);

struct Strides {
  int64_t batch, head, token;
};

struct Work {
  const Element* q;
  const Element *k, *v;  // the new tokens; null if the cache already has them
  Element *k_cache, *v_cache;
  const int32_t* lengths;  // tokens in the cache before this call
  const int32_t* table;  // the block of each block_size tokens; null unless PAGED
  const float* slopes;  // null without ALiBi
  int32_t* counters;  // zero before and after a launch
  float* parts;  // [unit, split, row, HEAD], then (maximum, sum of weights) of [unit, split, row]
  Element* out;  // [batch, token, query head, HEAD]
  Strides q_strides, new_strides, cache_strides;
  int64_t table_stride;
  int32_t capacity, block_size, blocks, tokens, group, heads, row_blocks, splits;
  float scale;  // includes log2(e), because weights are powers of two
  bool causal;
  bool clustered;  // the blocks of a unit are a cluster
};

__device__ inline int block_warps() { return kPaged ? kWarps : int(blockDim.x) / 32; }

// The keys of a block, and how many blocks have any.
struct Share {
  int splits, begin, end;

  __device__ Share(const Work& work, int total) {
    const int step = block_warps() * kTile, steps = (total + step - 1) / step;
    const int each = max((steps + work.splits - 1) / work.splits, 1);
    splits = max((steps + each - 1) / each, 1);
    begin = blockIdx.x * each * step;
    end = min(begin + each * step, total);
  }
};

// The position of a row's chunk in its tile.
__device__ inline int slot(int row, int chunk) {
  return row * kRowChunks + (kPermuted ? chunk ^ (row & 7) : chunk);
}

// The addresses of the keys and values of one sequence and one head.
struct Rows {
  const Element *k, *v, *k_new, *v_new;
  const int32_t* table;
  int64_t stride, new_stride;
  int block_size, blocks, old, total, lane;

  __device__ Rows(const Work& work, int batch, int head)
      : table(work.table), stride(work.cache_strides.token), new_stride(work.new_strides.token),
        block_size(work.block_size), blocks(work.blocks), lane(threadIdx.x % 32) {
    const int64_t cached = (kPaged ? 0 : batch * work.cache_strides.batch) + head * work.cache_strides.head;
    const int64_t fresh = batch * work.new_strides.batch + head * work.new_strides.head;
    k = work.k_cache + cached;
    v = work.v_cache + cached;
    k_new = work.k + fresh;
    v_new = work.v + fresh;
    if (kPaged) table += batch * work.table_stride;
    old = work.lengths[batch];
    const int added = work.k != nullptr ? work.tokens : 0;
    if (old < 0 || old > work.capacity - added) opkiln::device::trap();
    total = old + added;
  }

  __device__ int check_block(int block) const {
    if (block < 0 || block >= blocks) opkiln::device::trap();
    return block;
  }

  // The row of the cache that holds a position.
  __device__ int cache_row(int position) const {
    return kPaged ? check_block(table[position / block_size]) * block_size + position % block_size : position;
  }

  // The blocks that hold the tile at this position, one for each of lanes 0 to 15 and again 16 to 31. Looked
  // up two tiles ahead, and not used before, because a use would wait for the load.
  __device__ int look_up_block(int first) const {
    const int position = first + lane % kTile;
    return kPaged && position < old ? table[position / block_size] : 0;
  }

  // Starts copying a tile.
  __device__ void start(uint4* tile, int first, int block) const {
    const int rows = kPaged ? check_block(block) * block_size + (first + lane % kTile) % block_size : 0;
    if (first + kTile <= old) {
#pragma unroll
      for (int i = 0; i < kCopies; ++i) {
        const int row = (i * 32 + lane) / kChunks, chunk = (i * 32 + lane) % kChunks;
        const int64_t from = (kPaged ? __shfl_sync(kAll, rows, row) : first + row) * stride + chunk * 8;
        uint4* to = tile + slot(row, chunk);
        copy_later(to, k + from, true);
        copy_later(to + kTileChunks, v + from, true);
      }
      return;
    }
    // The end of the sequence: new tokens are read from the caller's tensors, followed by zeros.
#pragma unroll 1
    for (int i = 0; i < kCopies; ++i) {
      const int row = (i * 32 + lane) / kChunks, chunk = (i * 32 + lane) % kChunks;
      const int from = kPaged ? __shfl_sync(kAll, rows, row) : first + row, fresh = first + row - old;
      const bool there = first + row < total;
      const Element *key = k, *value = v;
      if (there) {
        const int64_t offset = chunk * 8 + (fresh < 0 ? from * stride : fresh * new_stride);
        key = (fresh < 0 ? k : k_new) + offset;
        value = (fresh < 0 ? v : v_new) + offset;
      }
      uint4* to = tile + slot(row, chunk);
      copy_later(to, key, there);
      copy_later(to + kTileChunks, value, there);
    }
  }
};

// A thread's columns: two queries of each eight, with their running maximum and sum of weights.
template <int kEights>
struct Columns {
  float greatest[kEights][2], sum[kEights][2], slope[kEights][2];
  int limit[kEights][2];  // the first position that the query does not see

  __device__ Columns(const Work& work, int head, int first_row, int total) {
    const int last_row = work.tokens * work.group - 1;
#pragma unroll
    for (int i = 0; i < kEights * 2; ++i) {
      const int row = min(first_row + i / 2 * 8 + int(threadIdx.x % 4) * 2 + i % 2, last_row);
      const int token = row / work.group;
      greatest[i / 2][i % 2] = -INFINITY;
      sum[i / 2][i % 2] = 0;
      limit[i / 2][i % 2] = work.causal ? total - work.tokens + token + 1 : total;
      // Includes log2(e), because weights are powers of two.
      slope[i / 2][i % 2] =
          work.slopes ? work.slopes[head * work.group + row % work.group] * 1.44269504f : 0.f;
    }
  }
};

// Loads queries as right fragments, one register pair per 16 dimensions. Rows that do not exist are zero.
template <int kEights>
__device__ inline void load_queries(uint32_t (&queries)[kEights][kSteps][2], const Work& work, int batch,
                                    int head, int first_row) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int eight = 0; eight < kEights; ++eight) {
    const int row = first_row + eight * 8 + lane / 4;
    const bool there = row < work.tokens * work.group;
    const Element* from = work.q;
    if (there) {
      from += batch * work.q_strides.batch + (head * work.group + row % work.group) * work.q_strides.head +
          row / work.group * work.q_strides.token + lane % 4 * 2;
    }
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        queries[eight][step][i] =
            there ? *reinterpret_cast<const uint32_t*>(from + step * 16 + i * 8) : 0u;
      }
    }
  }
}

// Adds one tile to a warp's output.
template <int kEights>
__device__ inline void attend(const uint4* tile, int first, int all_visible, const Work& work,
                              const uint32_t (&queries)[kEights][kSteps][2], Columns<kEights>& columns,
                              float (&out)[kSteps][kEights][4]) {
  const int lane = threadIdx.x % 32;
  float sums[2][kEights][4] = {};  // of even and odd steps: an instruction does not wait for the one before it
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    uint32_t keys[4];
    load_matrices(keys, tile + slot(lane % 16, step * 2 + lane / 16));
#pragma unroll
    for (int eight = 0; eight < kEights; ++eight) {
      multiply_add<Element>(sums[step % 2][eight], keys, queries[eight][step]);
    }
  }
  float (&scores)[kEights][4] = sums[0];
  uint32_t weights[kEights][2];
  float shrink[kEights][2];
#pragma unroll
  for (int eight = 0; eight < kEights; ++eight) {
    float(&score)[4] = scores[eight];
#pragma unroll
    for (int i = 0; i < 4; ++i) score[i] = (score[i] + sums[1][eight][i]) * work.scale;
    if (work.slopes) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int behind = columns.limit[eight][i % 2] - 1 - (first + lane / 4 + i / 2 * 8);
        score[i] -= columns.slope[eight][i % 2] * float(behind);
      }
    }
    if (first + kTile > all_visible) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (first + lane / 4 + i / 2 * 8 >= columns.limit[eight][i % 2]) score[i] = -INFINITY;
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float most = fmaxf(score[i], score[i + 2]);
#pragma unroll
      for (int step = 4; step < 32; step *= 2) most = fmaxf(most, __shfl_xor_sync(kAll, most, step));
      most = fmaxf(most, columns.greatest[eight][i]);
      const float base = most == -INFINITY ? 0.f : most;  // no key is visible yet
      shrink[eight][i] = fast_exp2(columns.greatest[eight][i] - base);
      columns.greatest[eight][i] = most;
      score[i] = fast_exp2(score[i] - base);
      score[i + 2] = fast_exp2(score[i + 2] - base);
      columns.sum[eight][i] = columns.sum[eight][i] * shrink[eight][i] + (score[i] + score[i + 2]);
    }
    weights[eight][0] = transpose(narrow_two<Element>(score[0], score[1]));
    weights[eight][1] = transpose(narrow_two<Element>(score[2], score[3]));
  }
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    uint32_t values[4];
    const int matrix = lane / 8;
    load_transposed(values, tile + kTileChunks + slot(lane % 8 + matrix / 2 * 8, step * 2 + matrix % 2));
#pragma unroll
    for (int eight = 0; eight < kEights; ++eight) {
#pragma unroll
      for (int i = 0; i < 4; ++i) out[step][eight][i] *= shrink[eight][i % 2];
      multiply_add<Element>(out[step][eight], values, weights[eight]);
    }
  }
}

struct alignas(8) Four {
  Element at[4];
};

__device__ inline void store_out(const Work& work, int batch, int head, int row, int column, float4 value,
                                 float factor) {
  const int64_t token = int64_t{batch} * work.tokens + row / work.group;
  const int64_t line = token * work.heads * work.group + head * work.group + row % work.group;
  const Four rounded = {{Element(value.x * factor), Element(value.y * factor), Element(value.z * factor),
                         Element(value.w * factor)}};
  *reinterpret_cast<Four*>(work.out + line * HEAD + column * 4) = rounded;
}

__device__ inline void add(float4& sum, float factor, const float4& value) {
  sum.x += factor * value.x;
  sum.y += factor * value.y;
  sum.z += factor * value.z;
  sum.w += factor * value.w;
}

// Writes the new tokens of this block's part of the context to the cache.
__device__ inline void append(const Work& work, const Rows& rows, int begin, int end) {
  const int first = max(begin, rows.old);
  for (int i = threadIdx.x; i < (min(end, work.capacity) - first) * kChunks; i += block_warps() * 32) {
    const int position = first + i / kChunks, chunk = i % kChunks * 8;
    const int64_t from = (position - rows.old) * rows.new_stride + chunk;
    const int64_t to = rows.cache_row(position) * rows.stride + chunk;
    const uint4 key = *reinterpret_cast<const uint4*>(rows.k_new + from);
    const uint4 value = *reinterpret_cast<const uint4*>(rows.v_new + from);
    *reinterpret_cast<uint4*>(const_cast<Element*>(rows.k) + to) = key;
    *reinterpret_cast<uint4*>(const_cast<Element*>(rows.v) + to) = value;
  }
}

// Says that this thread of a cluster's block has come here; what it wrote to shared memory before is done.
__device__ inline void arrive_in_cluster() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}

// Waits until all threads of the cluster have come there.
__device__ inline void wait_for_cluster() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// A place in shared memory, in another block of the cluster.
template <class T>
__device__ inline T* in_other(T* place, int block) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm("mapa.u64 %0, %0, %1;" : "+l"(place) : "r"(block));
#endif
  return place;
}

}  // namespace decode
