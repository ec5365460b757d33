// The kernel of packed_gemm, and its launch. few_rows.h has the parts.
#include <opkiln/op.h>

#include "few_rows.h"

using opk::Tensor;
using namespace few_rows;

namespace {

// Chunks under way at a time: 16-byte loads of a thread, 8 to 12 of them.
template <int kTiles>
constexpr int kBatch = kTiles * Codes::kWords >= 12 ? (kTiles == 1 ? 2 : 1) : 4 / kTiles;

template <int kTiles, int kEights>
__global__ void __launch_bounds__(kThreads, 2) few_rows_kernel(const OPK_GRID_CONSTANT Work work) {
  constexpr int kOutputs = kTiles * 16, kTokens = kEights * 8;
  constexpr int kRow = kOutputs + 4;  // so that the lanes of a warp store to different banks
  __shared__ float shared[kWarps][kTokens][kRow];
  __shared__ Part kept;
  opk::wait_for_previous();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = lane / 4, quarter = lane % 4;
  const Part part = part_of<kTokens>(work, blockIdx.y);
  if (part.expert < 0) return;
  if (threadIdx.x == 0) kept = part;  // for the end: registers are short
  const int first_output = blockIdx.x * kOutputs, output = first_output + group;
  const int row_words = work.columns / kCount * Codes::kWords;
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
  Sums<kTiles, kEights> sums;
  for (int i = lane; i < kTokens * kRow; i += 32) (&shared[warp][0][0])[i] = 0;
  __syncwarp();
  for (int first = warp; first < chunks; first += kWarps * kBatch<kTiles>) {
    Loaded<kTiles> loaded[kBatch<kTiles>];
#pragma unroll
    for (int i = 0; i < kBatch<kTiles>; ++i) {
      const int count = (first + i * kWarps) * 4 + quarter;  // of kCount columns
      loaded[i].load(weights, count * Codes::kWords, count * kCount < work.columns);
    }
#pragma unroll
    for (int i = 0; i < kBatch<kTiles>; ++i) {
      const int chunk = first + i * kWarps;
      if (chunk >= chunks) break;
      const int next = chunk / work.chunks_of_scale;
      if (next != group_of_scale) {  // for all lanes: groups begin at the same columns in all rows
        sums.move(shared[warp], scales);
        group_of_scale = next;
        scales_at(next, scales);
      }
      const int column = chunk * kChunk + quarter * kCount;
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
    work.out[static_cast<int64_t>(token) * work.outputs + column] = Element(activated(sum, work.activation));
  }
}

template <int kTiles, int kEights>
void launch(const Work& work) {
  constexpr int kTokens = kEights * 8;
  // Whole parts of rows, and for each expert that has rows one that may be shorter.
  const int shorter = work.experts < work.rows ? work.experts : work.rows;
  const int parts = work.offsets == nullptr ? (work.rows + kTokens - 1) / kTokens : work.rows / kTokens + shorter;
  opk::Launch how;
  how.grid = {(work.outputs + kTiles * 16 - 1) / (kTiles * 16), parts};
  how.block = kThreads;
  how.overlap = true;
  opk::launch(few_rows_kernel<kTiles, kEights>, how, work);
}

}  // namespace

Tensor packed_gemm(const Tensor& x, const Tensor& codes, const opk::optional<Tensor>& scales,
                   const opk::optional<Tensor>& offsets, const opk::optional<Tensor>& bias, int64_t outputs,
                   int64_t group_size, int64_t, int64_t activation) {
  opk::check_dim(x, 2);
  OPK_CHECK(activation >= 0 && activation <= static_cast<int>(Activation::kSilu), "activation is ", activation,
            ", expected 0 to ", static_cast<int>(Activation::kSilu));
  opk::check_contiguous(x, codes);
  opk::check_same_device(x, codes);
  const Tensor* const read[] = {&x, &codes};
  for (const Tensor* each : read) {
    OPK_SERVED(reinterpret_cast<uintptr_t>(each->data()) % 16 == 0, *each, " does not begin at a multiple of 16 bytes");
  }
  const int64_t columns = x.size(1), experts = offsets.has_value() ? offsets->numel() : 1;
  const int64_t row_bytes = columns / kCount * Codes::kWords * 4;
  OPK_CHECK(columns > 0 && columns % kCount == 0, x, " has ", columns, " columns, expected a multiple of ", kCount);
  const bool bytes = codes.dtype() == opk::DType::uint8 || codes.dtype() == opk::DType::int8;
  OPK_CHECK(bytes || (kCount == 8 && codes.dtype() == x.dtype()), codes, " has dtype ", codes.dtype(),
            ", which is not that of these weights");
  const int64_t found = codes.numel() * (bytes ? 1 : 2);
  OPK_CHECK(found == experts * outputs * row_bytes, codes, " has ", found, " bytes, expected ",
            experts * outputs * row_bytes);
  constexpr int64_t kMost = int64_t{1} << 31;
  OPK_CHECK(x.size(0) < kMost - 16 && experts * outputs < kMost - 32 && columns * 16 < kMost, x, " has shape ",
            x.sizes(), ", and there are ", experts * outputs, " outputs, which is too large");
  Work work = {};
  if (scales.has_value()) {
    opk::check_dtype(*scales, opk::DType::float32);
    opk::check_same_device(x, *scales);
    opk::check_contiguous(*scales);
    OPK_CHECK(group_size > 0, "group_size is ", group_size, ", expected at least 1");
    const int64_t groups = (experts * outputs * columns + group_size - 1) / group_size;
    opk::check_shape(*scales, {groups});
    const bool in_rows = group_size % kChunk == 0 && columns % group_size == 0;
    OPK_CHECK(in_rows || group_size % columns == 0, "group_size is ", group_size,
              ", expected whole rows, or a part of ", columns, " columns that is a multiple of ", kChunk);
    work.scales = scales->data<const float>();
    work.rows_of_scale = static_cast<int32_t>(in_rows ? 1 : group_size / columns);
    work.scales_of_row = static_cast<int32_t>(in_rows ? columns / group_size : 1);
    work.chunks_of_scale = static_cast<int32_t>((in_rows ? group_size : columns + kChunk) / kChunk);
  } else {
    work.rows_of_scale = 1;
    work.chunks_of_scale = static_cast<int32_t>(columns / kChunk + 1);
  }
  if (offsets.has_value()) {
    opk::check_dtype(*offsets, opk::DType::int32);
    opk::check_same_device(x, *offsets);
    opk::check_contiguous(*offsets);
    work.offsets = offsets->data<const int32_t>();
  }
  if (bias.has_value()) {
    opk::check_same_dtype(x, *bias);
    opk::check_same_device(x, *bias);
    opk::check_contiguous(*bias);
    OPK_CHECK(bias->numel() == experts * outputs, *bias, " has ", bias->numel(), " elements, expected ",
              experts * outputs);
    work.bias = bias->data<const Element>();
  }
  Tensor out = opk::empty({x.size(0), outputs}, x);
  work.x = x.data<const Element>();
  work.codes = static_cast<const uint32_t*>(codes.data());
  work.out = out.data<Element>();
  work.rows = static_cast<int32_t>(x.size(0));
  work.outputs = static_cast<int32_t>(outputs);
  work.columns = static_cast<int32_t>(columns);
  work.experts = static_cast<int32_t>(experts);
  work.activation = static_cast<Activation>(activation);
  // Eight tokens at a time while most experts have no more. With sixteen, a block has more outputs, which share x.
  if (work.rows <= (offsets.has_value() ? 4 * experts : 8)) {
    launch<1, 1>(work);
  } else {
    launch<2, 2>(work);
  }
  return out;
}

OPKILN_OP(packed_gemm, cuda);
