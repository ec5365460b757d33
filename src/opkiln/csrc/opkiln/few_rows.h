// Multiplies few rows of x by a packed matrix, or the rows of each expert by the expert's matrix.
//
// Memory limits it: each weight is used for a few tokens. So each warp has a ring of chunks on their way, in shared
// memory, as they are packed, and waits for no other warp. Tensor cores multiply, on the transposed problem:
//   sums, 16 outputs x 8 tokens += weights, 16 outputs x 16 columns * x, 16 columns x 8 tokens
// The order of the columns does not change a sum, so we choose which columns form an instruction's 16: four
// threads hold a row, each a run of neighbouring columns, and read the same columns of x, 16 bytes at a time.
//
// The warps of a block share the columns of a row. Their sums meet in shared memory, in a fixed order.
//
// 14336 x 4096 int8 take 18.3 us for a row of bf16 x on an H200, 75% of a copy's speed; 4096 x 4096 take 8.2 us, of
// which 3.9 us are the bytes at that speed, and 2.1 us what this kernel takes for a small matrix. It was 31.6 and
// 10.9 us while a warp loaded its chunks in turns, waited for a scale in each, and divided to find it.
//
// Codes is a format of weight_formats.h, Element the type of x: opk::half or opk::bfloat16.
#pragma once

#include "op.h"
#include "device_index.h"
#include "weight_formats.h"

namespace opkiln {
namespace few_rows {

template <class Codes>
constexpr int kChunk = 4 * Codes::kCount;  // columns that a warp has in flight
constexpr unsigned kAll = 0xffffffffu;

enum class Activation : int32_t { kIdentity, kGelu, kRelu, kSilu };

template <class Element>
struct Work {
  const Element* x;  // [rows, columns]
  const uint32_t* codes;  // [experts, outputs, columns]
  const float* scales;  // null: all 1
  const int32_t* offsets;  // [experts], where the rows of each end; null: one matrix for all rows
  const Element* bias;  // [experts, outputs]; may be null
  Element* out;  // [rows, outputs]
  int32_t rows, outputs, columns;
  // The scale of a chunk in a row: scales[row / rows_of_scale * scales_of_row + place], where place is
  // chunk * inverse / 2^32, or the chunk if inverse is 0.
  int32_t rows_of_scale, scales_of_row;
  uint32_t inverse;
  int32_t experts;
  Activation activation;
};

// Rows [begin, end) of x and the matrix for them. An expert of -1 means that nothing is left to do.
struct Part {
  int32_t begin, end, expert;
};

// Finds part `wanted`. The parts of an expert have kTokens rows, the last one fewer. All lanes of a warp
// search together, 32 experts at a time.
template <int kTokens, class Element>
__device__ inline Part part_of(const Work<Element>& work, int32_t wanted) {
  if (work.offsets == nullptr) {
    const int32_t begin = wanted * kTokens;
    return {begin, begin + kTokens < work.rows ? begin + kTokens : work.rows, 0};
  }
  const int lane = threadIdx.x % 32;
  int32_t before = 0;
  for (int first = 0; first < work.experts; first += 32) {
    const int expert = first + lane;
    const bool there = expert < work.experts;
    const int32_t begin = there && expert > 0 ? work.offsets[expert - 1] : 0;
    const int32_t end = there ? work.offsets[expert] : begin;
    if (there && (end < begin || end > work.rows)) opkiln::device::trap();
    const int32_t parts = (end - begin + kTokens - 1) / kTokens;
    int32_t through = parts;  // parts of all experts up to this one
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int32_t other = __shfl_up_sync(kAll, through, step);
      if (lane >= step) through += other;
    }
    const unsigned reached = __ballot_sync(kAll, before + through > wanted);
    if (reached != 0) {
      const int found = __ffs(static_cast<int>(reached)) - 1;
      const int32_t skipped = before + __shfl_sync(kAll, through - parts, found);
      const int32_t row = __shfl_sync(kAll, begin, found) + (wanted - skipped) * kTokens;
      const int32_t last = __shfl_sync(kAll, end, found);
      return {row, row + kTokens < last ? row + kTokens : last, first + found};
    }
    before += __shfl_sync(kAll, through, 31);
  }
  return {0, 0, -1};
}

__device__ inline float activate(float x, Activation activation) {
  switch (activation) {
    case Activation::kGelu: return 0.5f * x * (1.0f + tanhf(0.7978845608f * (x + 0.044715f * x * x * x)));
    case Activation::kRelu: return x < 0.0f ? 0.0f : x;  // NaN stays
    case Activation::kSilu: return x / (1.0f + expf(-x));
    default: return x;
  }
}

// Chunks of more than 16 bytes for a thread and row go to registers, a few at a time: a ring of them would take the
// room from the cache, which holds x. With rings, fp6 took 5 to 17% longer.
template <class Codes>
constexpr bool kHasRing = Codes::kWords == 4;
constexpr int kStages = 3;  // chunks in a ring; more take longer to start
template <class Codes, int kEights>
constexpr int kMostWarps = kEights == 1 || !kHasRing<Codes> ? 8 : 16;  // of a block; fewer if there are many blocks

// A thread's loaded part of a chunk: rows group and group + 8 of each tile of 16 outputs.
template <class Codes, int kTiles>
struct Loaded {
  uint32_t words[kTiles][2][Codes::kWords];

  // `from`: where the thread's words of each row are.
  __device__ void load(const uint4* const (&from)[2 * kTiles], bool there) {
#pragma unroll
    for (int i = 0; i < 2 * kTiles; ++i) {
#pragma unroll
      for (int k = 0; k < Codes::kWords / 4; ++k) {
        set(i, k, there ? __ldcs(from[i] + k) : uint4{0, 0, 0, 0});
      }
    }
  }

  __device__ void set(int i, int k, const uint4& four) {
    uint32_t* to = words[i / 2][i % 2] + 4 * k;
    to[0] = four.x;
    to[1] = four.y;
    to[2] = four.z;
    to[3] = four.w;
  }
};

// A warp's sums for kTiles * 16 outputs and kEights * 8 tokens.
template <class Codes, class Element, int kTiles, int kEights>
struct Sums {
  float at[kTiles][kEights][4] = {};

  // `x`: the thread's first column in the chunk, of each of its tokens. `scales`: of its rows of codes.
  __device__ void add(const Loaded<Codes, kTiles>& loaded, const Element* const (&x)[kEights], bool there,
                      const float (&scales)[2 * kTiles]) {
    float chunk[kTiles][kEights][4] = {};
#pragma unroll
    for (int i = 0; i < Codes::kCount / 8; ++i) {
      uint32_t right[kEights][4];
#pragma unroll
      for (int eight = 0; eight < kEights; ++eight) {
        const uint4 four = there ? *reinterpret_cast<const uint4*>(x[eight] + 8 * i) : uint4{0, 0, 0, 0};
        right[eight][0] = four.x;
        right[eight][1] = four.y;
        right[eight][2] = four.z;
        right[eight][3] = four.w;
        Codes::reorder(right[eight]);
      }
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        uint32_t upper[4], lower[4];
        Codes::eight(loaded.words[tile][0], i, upper);
        Codes::eight(loaded.words[tile][1], i, lower);
#pragma unroll
        for (int step = 0; step < 4; step += 2) {
          const uint32_t left[4] = {upper[step], lower[step], upper[step + 1], lower[step + 1]};
#pragma unroll
          for (int eight = 0; eight < kEights; ++eight) {
            const uint32_t both[2] = {right[eight][step], right[eight][step + 1]};
            device::multiply_add<Element>(chunk[tile][eight], left, both);
          }
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kTiles * kEights * 4; ++i) {
      const int tile = i / (kEights * 4), eight = i / 4 % kEights;
      at[tile][eight][i % 4] += scales[2 * tile + i % 4 / 2] * chunk[tile][eight][i % 4];
    }
  }

  template <int kRow>
  __device__ void store(float (&to)[kEights * 8][kRow]) const {
    const int group = threadIdx.x % 32 / 4, quarter = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < kTiles * kEights * 4; ++i) {
      const int tile = i / (kEights * 4), eight = i / 4 % kEights;
      to[eight * 8 + quarter * 2 + i % 2][tile * 16 + i % 4 / 2 * 8 + group] = Codes::kFactor * at[tile][eight][i % 4];
    }
  }
};

// The sums of a warp in shared memory, when the rings are no longer needed.
template <int kTiles, int kEights>
using WarpSums = float[kEights * 8][kTiles * 16 + 4];  // the 4: the lanes of a warp store to different banks

template <class Codes, class Element, int kTiles, int kEights>
__global__ void __launch_bounds__(kMostWarps<Codes, kEights> * 32, !kHasRing<Codes> ? 2 : kEights == 1 ? 4 : 1)
    few_rows_kernel(const OPK_GRID_CONSTANT Work<Element> work) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  constexpr int kOutputs = kTiles * 16, kTokens = kEights * 8;
  constexpr int kChunk = few_rows::kChunk<Codes>;
#if defined(OPKILN_EMULATED)
  OPKILN_DYNAMIC_SHARED(dynamic, uint4);
#else
  extern __shared__ __align__(128) uint4 dynamic[];
#endif
  __shared__ Part kept;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = lane / 4, quarter = lane % 4;
  const int warps = blockDim.x / 32;
  opk::wait_for_previous();
  const Part part = part_of<kTokens>(work, blockIdx.y);
  if (part.expert < 0) return;
  if (threadIdx.x == 0) kept = part;  // for the end: registers are short
  // Outputs and tokens that do not exist are computed like the last ones, and not stored.
  const int first_output = blockIdx.x * kOutputs, last_output = work.outputs - 1, last_token = part.end - 1;
  const int first_column = (warp * 4 + quarter) * Codes::kCount, step = warps * kChunk;
  const int64_t row_words = work.columns / Codes::kCount * Codes::kWords;
  const uint4* codes[2 * kTiles];
  unsigned scales_of[2 * kTiles];
#pragma unroll
  for (int i = 0; i < 2 * kTiles; ++i) {
    const unsigned row = part.expert * work.outputs + min(first_output + group + 8 * i, last_output);
    codes[i] = reinterpret_cast<const uint4*>(work.codes + row * row_words + (warp * 4 + quarter) * Codes::kWords);
    scales_of[i] = row / static_cast<unsigned>(work.rows_of_scale) * work.scales_of_row;
  }
  const Element* x[kEights];
#pragma unroll
  for (int eight = 0; eight < kEights; ++eight) {
    x[eight] = work.x + int64_t{min(part.begin + group + 8 * eight, last_token)} * work.columns + first_column;
  }
  const int chunks = (work.columns + kChunk - 1) / kChunk;
  const auto scales_at = [&](int chunk, float (&to)[2 * kTiles]) {
    const bool there = work.scales != nullptr && chunk < chunks;
    const uint64_t product = uint64_t{static_cast<unsigned>(chunk)} * work.inverse;
    const unsigned place = work.inverse == 0 ? chunk : static_cast<unsigned>(product >> 32);
#pragma unroll
    for (int i = 0; i < 2 * kTiles; ++i) to[i] = there ? work.scales[scales_of[i] + place] : 1.f;
  };
  const auto advance = [&] {  // by a chunk
#pragma unroll
    for (int i = 0; i < 2 * kTiles; ++i) codes[i] += warps * Codes::kWords;
  };
  Sums<Codes, Element, kTiles, kEights> sums;
  int chunk = warp, column = first_column;  // of the chunk that is next to be added
  const auto add = [&](const Loaded<Codes, kTiles>& loaded, const float (&scales)[2 * kTiles]) {
    sums.add(loaded, x, column < work.columns, scales);
#pragma unroll
    for (int eight = 0; eight < kEights; ++eight) x[eight] += step;
    column += step;
    chunk += warps;
  };
  if constexpr (kHasRing<Codes>) {
    uint4* const ring = dynamic + warp * kStages * 2 * kTiles * 32 + lane;
    int copied = first_column;
    const auto start = [&](int stage) {
#pragma unroll
      for (int i = 0; i < 2 * kTiles; ++i) {
        device::copy_later(ring + (stage * 2 * kTiles + i) * 32, codes[i], copied < work.columns);
      }
      copied += step;
      advance();
      device::end_batch();
    };
#pragma unroll
    for (int i = 0; i < kStages - 1; ++i) start(i);
    float scales[2][2 * kTiles];  // of this chunk, and of the next one
    scales_at(chunk, scales[0]);
    while (chunk < chunks) {
#pragma unroll
      for (int i = 0; i < 2 * kStages; ++i) {
        if (i > 0 && chunk >= chunks) break;
        scales_at(chunk + warps, scales[(i + 1) % 2]);
        device::wait_for_batches<kStages - 2>();
        start((i + kStages - 1) % kStages);
        Loaded<Codes, kTiles> loaded;
#pragma unroll
        for (int k = 0; k < 2 * kTiles; ++k) loaded.set(k, 0, ring[(i % kStages * 2 * kTiles + k) * 32]);
        add(loaded, scales[i % 2]);
      }
    }
  } else {
    constexpr int kBatch = kTiles == 1 ? 2 : 1;
    while (chunk < chunks) {
      Loaded<Codes, kTiles> loaded[kBatch];
      float scales[kBatch][2 * kTiles];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        loaded[i].load(codes, column + i * step < work.columns);
        scales_at(chunk + i * warps, scales[i]);
        advance();
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) add(loaded[i], scales[i]);
    }
  }
  device::wait_for_batches<0>();
  __syncthreads();  // nobody uses the ring any more
  auto* parts = reinterpret_cast<WarpSums<kTiles, kEights>*>(dynamic);
  sums.store(parts[warp]);
  __syncthreads();
  const auto [begin, end, expert] = kept;
  for (int i = threadIdx.x; i < kTokens * kOutputs; i += blockDim.x) {
    const int token = begin + i / kOutputs, column = first_output + i % kOutputs;
    if (token >= end || column >= work.outputs) continue;
    float sum = 0;
#pragma unroll 4
    for (int w = 0; w < warps; ++w) sum += parts[w][i / kOutputs][i % kOutputs];
    if (work.bias != nullptr) sum += float(work.bias[static_cast<int64_t>(expert) * work.outputs + column]);
    work.out[static_cast<int64_t>(token) * work.outputs + column] = Element(activate(sum, work.activation));
  }
#endif
}

#if !defined(__CUDACC_RTC__)
OPK_PLAIN_BEGIN

template <class Codes, int kTiles, int kEights, class Element>
void launch(const Work<Element>& work) {
  constexpr int kTokens = kEights * 8;
  // Whole parts, plus one that may be shorter for each expert that has rows.
  const int shorter = work.experts < work.rows ? work.experts : work.rows;
  const int parts = work.offsets == nullptr ? (work.rows + kTokens - 1) / kTokens : work.rows / kTokens + shorter;
  opk::Launch how;
  how.grid = {(work.outputs + kTiles * 16 - 1) / (kTiles * 16), parts};
  // Warps share a row's columns: enough of them to keep the multiprocessors of a large GPU busy, and no more.
  const uint64_t blocks = how.grid.count();
  int warps = blocks > 384 && kHasRing<Codes> ? 4 : blocks > 132 ? 8 : kMostWarps<Codes, kEights>;
  constexpr size_t kRing = kHasRing<Codes> ? kStages * 2 * kTiles * 32 * sizeof(uint4) : 0;
  constexpr size_t kSums = sizeof(WarpSums<kTiles, kEights>), kBytes = kRing > kSums ? kRing : kSums;
  const auto kernel = few_rows_kernel<Codes, Element, kTiles, kEights>;
  while (warps > 4 && warps * kBytes > opk::most_shared(kernel)) warps /= 2;
  how.block = warps * 32;
  how.shared = warps * kBytes;
  how.overlap = true;
  opk::launch(kernel, how, work);
}

// Whether this GPU has the instructions, and the library has code with them.
template <class Codes, class Element>
bool runs_here() {
  return opk::runs_as(few_rows_kernel<Codes, Element, 1, 1>, 80);
}

// Sets the scales: one per `group` consecutive codes, or null for 1. `columns` must be set. Returns false and
// sets nothing if a group is neither whole rows nor a part of a row made of whole chunks.
template <class Codes, class Element>
bool set_scales(Work<Element>& work, const float* scales, int64_t group) {
  constexpr int kChunk = few_rows::kChunk<Codes>;
  const bool in_rows = group % kChunk == 0 && work.columns % group == 0;
  if (!in_rows && group % work.columns != 0) return false;
  work.scales = scales;
  work.rows_of_scale = static_cast<int32_t>(in_rows ? 1 : group / work.columns);
  work.scales_of_row = static_cast<int32_t>(in_rows ? work.columns / group : 1);
  const int64_t chunks = (in_rows ? group : work.columns + kChunk) / kChunk;  // of a scale
  if (scales != nullptr && work.columns / kChunk >= 1 << 16) return false;  // `inverse` would not be exact
  work.inverse = static_cast<uint32_t>(((int64_t{1} << 32) + chunks - 1) / chunks);
  return true;
}

// Runs the product; all of `work` must be set. Eight tokens at a time while most experts have no more. With
// sixteen, a block has more outputs, which share x.
template <class Codes, class Element>
void multiply(const Work<Element>& work) {
  if (work.rows <= (work.offsets ? int64_t{4} * work.experts : 8)) {
    launch<Codes, 1, 1>(work);
  } else {
    launch<Codes, 2, 2>(work);
  }
}

OPK_PLAIN_END
#endif

}  // namespace few_rows
}  // namespace opkiln
