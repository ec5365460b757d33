// Multiplies few rows of x by a packed matrix, or the rows of each expert by the expert's matrix.
//
// Memory bandwidth limits it, because each weight is used for a few tokens. So a
// thread loads codes from global memory straight to registers, 16 bytes at a time, and
// decodes them there. Tensor cores multiply the transposed problem:
//   sums, 16 outputs x 8 tokens += weights, 16 outputs x 16 columns * x, 16 columns x 8 tokens
// The order of the columns does not change a sum, so we choose which columns form an instruction's 16: four
// threads hold a row, each a run of neighbouring columns, and read the same columns of x, 16 bytes at a time.
//
// The warps of a block share the columns of a row. Their sums meet in shared memory, in a fixed order.
//
// Codes is a format of weight_formats.h. Element is the type of x: opk::half or opk::bfloat16.
#pragma once

#include "op.h"
#include "device_index.h"
#include "weight_formats.h"

namespace opkiln {
namespace few_rows {

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * 32;
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
  // The scale of a chunk in a row: scales[row / rows_of_scale * scales_of_row + chunk / chunks_of_scale].
  int32_t rows_of_scale, scales_of_row, chunks_of_scale;
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

// The rows of a matrix that a thread reads: `first` and every eighth row after it.
template <class Word>
struct Rows {
  const Word* first;
  int32_t eight;  // words from a row to the eighth after it
  int32_t left;   // rows left, from `first` on

  // Sixteen bytes of row 8 * i, or zeros if there is no such row.
  template <bool kOnce>
  __device__ uint4 load(int i, int32_t at, bool there) const {
    if (!there || 8 * i >= left) return {0, 0, 0, 0};
    const auto* from = reinterpret_cast<const uint4*>(first + (i * eight + at));
    return kOnce ? __ldcs(from) : *from;
  }
};

// A thread's loaded part of a chunk: rows group and group + 8 of each tile of 16 outputs.
template <class Codes, int kTiles>
struct Loaded {
  uint32_t words[kTiles][2][Codes::kWords];

  __device__ void load(const Rows<uint32_t>& weights, int32_t at, bool there) {
#pragma unroll
    for (int i = 0; i < 2 * kTiles; ++i) {
#pragma unroll
      for (int k = 0; k < Codes::kWords; k += 4) {
        const uint4 four = weights.template load<true>(i, at + k, there);
        uint32_t* to = words[i / 2][i % 2] + k;
        to[0] = four.x;
        to[1] = four.y;
        to[2] = four.z;
        to[3] = four.w;
      }
    }
  }
};

// A warp's sums for kTiles * 16 outputs and kEights * 8 tokens.
template <class Codes, class Element, int kTiles, int kEights>
struct Sums {
  float at[kTiles][kEights][4] = {};

  // `column`: the thread's first column in the chunk.
  __device__ void add(const Loaded<Codes, kTiles>& loaded, const Rows<Element>& tokens, int32_t column, bool there) {
#pragma unroll
    for (int i = 0; i < Codes::kCount / 8; ++i) {
      uint32_t right[kEights][4];
#pragma unroll
      for (int eight = 0; eight < kEights; ++eight) {
        const uint4 x = tokens.template load<false>(eight, column + 8 * i, there);
        right[eight][0] = x.x;
        right[eight][1] = x.y;
        right[eight][2] = x.z;
        right[eight][3] = x.w;
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
            device::multiply_add<Element>(at[tile][eight], left, both);
          }
        }
      }
    }
  }

  // Adds the sums, scaled by output, to this thread's sums in shared memory, and clears them.
  template <int kRow>
  __device__ void move(float (&to)[kEights * 8][kRow], const float (&scales)[kTiles][2]) {
    const int group = threadIdx.x % 32 / 4, quarter = threadIdx.x % 4;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int eight = 0; eight < kEights; ++eight) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          to[eight * 8 + quarter * 2 + i % 2][tile * 16 + i / 2 * 8 + group] +=
              scales[tile][i / 2] * at[tile][eight][i];
          at[tile][eight][i] = 0;
        }
      }
    }
  }
};

// Chunks in flight: 8 to 12 loads of 16 bytes per thread.
template <class Codes, int kTiles>
constexpr int kBatch = kTiles * Codes::kWords >= 12 ? (kTiles == 1 ? 2 : 1) : 4 / kTiles;

template <class Codes, class Element, int kTiles, int kEights>
__global__ void __launch_bounds__(kThreads, 2) few_rows_kernel(const OPK_GRID_CONSTANT Work<Element> work) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  constexpr int kOutputs = kTiles * 16, kTokens = kEights * 8;
  constexpr int kChunk = few_rows::kChunk<Codes>, kBatch = few_rows::kBatch<Codes, kTiles>;
  constexpr int kRow = kOutputs + 4;  // padding, so that the lanes of a warp store to different banks
  __shared__ float shared[kWarps][kTokens][kRow];
  __shared__ Part kept;
  opk::wait_for_previous();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = lane / 4, quarter = lane % 4;
  const Part part = part_of<kTokens>(work, blockIdx.y);
  if (part.expert < 0) return;
  if (threadIdx.x == 0) kept = part;  // in shared memory until the end, to save registers
  const int first_output = blockIdx.x * kOutputs, output = first_output + group;
  const int row_words = work.columns / Codes::kCount * Codes::kWords;
  const unsigned row = part.expert * work.outputs + output;
  const Rows<uint32_t> weights{work.codes + int64_t{row} * row_words, 8 * row_words, work.outputs - output};
  const Rows<Element> tokens{work.x + static_cast<int64_t>(part.begin + group) * work.columns, 8 * work.columns,
                             part.end - part.begin - group};
  const auto scales_at = [&](int place, float (&scales)[kTiles][2]) {
#pragma unroll
    for (int i = 0; i < 2 * kTiles; ++i) {
      scales[i / 2][i % 2] = Codes::kFactor;
      if (work.scales == nullptr || 8 * i >= weights.left) continue;
      const unsigned first = (row + 8 * i) / static_cast<unsigned>(work.rows_of_scale) * work.scales_of_row;
      scales[i / 2][i % 2] *= work.scales[first + place];
    }
  };
  const int chunks = (work.columns + kChunk - 1) / kChunk;
  float scales[kTiles][2];
  int group_of_scale = warp < chunks ? warp / work.chunks_of_scale : 0;
  scales_at(group_of_scale, scales);
  Sums<Codes, Element, kTiles, kEights> sums;
  for (int i = lane; i < kTokens * kRow; i += 32) (&shared[warp][0][0])[i] = 0;
  __syncwarp();
  for (int first = warp; first < chunks; first += kWarps * kBatch) {
    Loaded<Codes, kTiles> loaded[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int count = (first + i * kWarps) * 4 + quarter;  // in units of Codes::kCount columns
      loaded[i].load(weights, count * Codes::kWords, count * Codes::kCount < work.columns);
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int chunk = first + i * kWarps;
      if (chunk >= chunks) break;
      const int next = chunk / work.chunks_of_scale;
      if (next != group_of_scale) {  // in all lanes at once: groups begin at the same columns in all rows
        sums.move(shared[warp], scales);
        group_of_scale = next;
        scales_at(next, scales);
      }
      const int column = chunk * kChunk + quarter * Codes::kCount;
      sums.add(loaded[i], tokens, column, column < work.columns);
    }
  }
  sums.move(shared[warp], scales);
  __syncthreads();
  const auto [begin, end, expert] = kept;
  for (int i = threadIdx.x; i < kTokens * kOutputs; i += kThreads) {
    const int token = begin + i / kOutputs, column = first_output + i % kOutputs;
    if (token >= end || column >= work.outputs) continue;
    float sum = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += shared[w][i / kOutputs][i % kOutputs];
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
  how.block = kThreads;
  how.overlap = true;
  opk::launch(few_rows_kernel<Codes, Element, kTiles, kEights>, how, work);
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
  work.chunks_of_scale = static_cast<int32_t>((in_rows ? group : work.columns + kChunk) / kChunk);
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
