// Moves tokens as rows of bytes: a thread moves a unit of up to 16 bytes, for any row length. Many threads
// keep many loads in flight. No warp intrinsics, so hipify turns this file into HIP unchanged.

#include <opkiln/op.h>
#include <opkiln/sixteen_bytes.h>

#include "tokens.h"

namespace {

using opkiln::device::store_once;

constexpr int kThreads = 128;
constexpr int kTurns = 2;  // units per thread when merging
constexpr int kUnits = kThreads * kTurns;
constexpr int kMoved = 2;  // units per thread when gathering or scattering
constexpr int kMostRows = 1024;  // per block when merging
constexpr int64_t kFewBlocks = 512;  // too few to fill a large GPU

// Gathers or scatters whole rows. Threads follow the rows of the kept tokens, in the order of memory. With one unit per
// thread, too little was on its way while indices were: a gather took 1.1 times as long.
template <class Unit, bool kScatter>
__global__ void __launch_bounds__(kThreads) move_kernel(const OPK_GRID_CONSTANT Tokens l) {
  opk::wait_for_previous();
  const uint32_t a_row = static_cast<uint32_t>(l.row / static_cast<int64_t>(sizeof(Unit)));
  const uint32_t inner = static_cast<uint32_t>(l.batch_first ? l.kept : l.batch);
  const int64_t begin = int64_t{blockIdx.x} * kMoved * kThreads + threadIdx.x;
  Unit units[kMoved];
  Unit* to[kMoved];
#pragma unroll
  for (int t = 0; t < kMoved; ++t) {
    const int64_t at = begin + t * kThreads, row = opkiln::device::divide(at, a_row);
    to[t] = nullptr;
    if (row >= l.batch * l.kept) continue;
    const uint32_t place = static_cast<uint32_t>(at - row * a_row);
    const uint32_t outer = static_cast<uint32_t>(row) / inner, rest = static_cast<uint32_t>(row) - outer * inner;
    const uint32_t sequence = l.batch_first ? outer : rest, kept = l.batch_first ? rest : outer;
    char* const near = (kScatter ? l.part : l.out).at(sequence, kept);
    if (kScatter) units[t] = *(reinterpret_cast<const Unit*>(near) + place);  // overlaps with loading the index
    const int64_t index = opkiln::device::check_index(l.indices[int64_t{sequence} * l.kept + kept], l.count);
    char* const far = l.all.at(sequence, index);
    if (!kScatter) units[t] = *(reinterpret_cast<const Unit*>(far) + place);
    to[t] = reinterpret_cast<Unit*>(kScatter ? far : near) + place;
  }
#pragma unroll
  for (int t = 0; t < kMoved; ++t) {
    if (to[t] != nullptr) store_once(to[t], units[t]);
  }
}

// Reads each row of the result from its source, and writes it once. A block has neighbouring tokens of
// one sequence, and searches all indices of the sequence for them.
template <class Unit>
__global__ void __launch_bounds__(kThreads, 16) merge_kernel(const OPK_GRID_CONSTANT Tokens l,
                                                                        int32_t a_block) {
  opk::wait_for_previous();
  __shared__ int32_t places[kMostRows];  // index in `part`, or -1
  const int64_t blocks = (l.count + a_block - 1) / a_block;
  const int64_t b = opkiln::device::divide(blockIdx.x, static_cast<uint32_t>(blocks));
  const int64_t first = (blockIdx.x - b * blocks) * a_block;
  const int32_t rows = static_cast<int32_t>(l.count - first < a_block ? l.count - first : a_block);
  for (int32_t i = threadIdx.x; i < rows; i += kThreads) places[i] = -1;
  __syncthreads();
  for (int64_t begin = threadIdx.x; begin < l.kept; begin += kUnits) {
    int64_t index[kTurns];
#pragma unroll
    for (int t = 0; t < kTurns; ++t) {
      const int64_t k = begin + t * kThreads;
      if (k < l.kept) index[t] = l.indices[b * l.kept + k];
    }
#pragma unroll
    for (int t = 0; t < kTurns; ++t) {
      const int64_t k = begin + t * kThreads;
      if (k >= l.kept) continue;
      const int64_t at = opkiln::device::check_index(index[t], l.count) - first;
      if (at >= 0 && at < rows) places[at] = static_cast<int32_t>(k);
    }
  }
  __syncthreads();
  const uint32_t a_row = static_cast<uint32_t>(l.row / static_cast<int64_t>(sizeof(Unit)));
  const int64_t all = int64_t{rows} * a_row;
  for (int64_t begin = threadIdx.x; begin < all; begin += kUnits) {
    Unit units[kTurns];
#pragma unroll
    for (int t = 0; t < kTurns; ++t) {
      const int64_t at = begin + t * kThreads;
      units[t] = Unit{};
      if (at < all) {
        const int64_t row = opkiln::device::divide(at, a_row);
        const int32_t place = places[row];
        const Side& side = place < 0 ? l.all : l.part;
        if (side.data != nullptr) {
          const char* const from = side.at(b, place < 0 ? first + row : place);
          units[t] = *(reinterpret_cast<const Unit*>(from) + (at - row * a_row));
        }
      }
    }
#pragma unroll
    for (int t = 0; t < kTurns; ++t) {
      const int64_t at = begin + t * kThreads;
      if (at < all) {
        const int64_t row = opkiln::device::divide(at, a_row);
        store_once(reinterpret_cast<Unit*>(l.out.at(b, first + row)) + (at - row * a_row), units[t]);
      }
    }
  }
}

// The largest unit that divides every row and its address.
int unit_of(const Tokens& tokens) {
  uint64_t all = 16 | static_cast<uint64_t>(tokens.row);
  for (const Side& side : {tokens.all, tokens.part, tokens.out}) {
    all |= reinterpret_cast<uintptr_t>(side.data);
    all |= static_cast<uint64_t>(side.batch) | static_cast<uint64_t>(side.token);
  }
  const int widest = static_cast<int>(all & -all);
  return widest == 8 ? 4 : widest;
}

void launch_move(void (*kernel)(Tokens), const Tokens& tokens, int unit) {
  OPK_SERVED(tokens.batch * tokens.kept < 1LL << 31 && tokens.row / unit < 1LL << 31, "indices has ",
             tokens.batch * tokens.kept, " tokens of ", tokens.row, " bytes, which is too many");
  const int64_t units = tokens.batch * tokens.kept * (tokens.row / unit);
  opk::launch_overlapping(kernel, (units + kMoved * kThreads - 1) / (kMoved * kThreads), kThreads, 0, tokens);
}

template <bool kScatter>
void move(const Tokens& tokens) {
  switch (const int unit = unit_of(tokens)) {
    case 16: return launch_move(move_kernel<uint4, kScatter>, tokens, unit);
    case 4: return launch_move(move_kernel<uint32_t, kScatter>, tokens, unit);
    case 2: return launch_move(move_kernel<uint16_t, kScatter>, tokens, unit);
    default: return launch_move(move_kernel<uint8_t, kScatter>, tokens, unit);
  }
}

void gather(const Tokens& tokens) { move<false>(tokens); }

void scatter(const Tokens& tokens) { move<true>(tokens); }

void launch_merge(void (*kernel)(Tokens, int32_t), const Tokens& tokens, int unit) {
  OPK_SERVED(tokens.kept < 1LL << 31 && tokens.row / unit < 1LL << 31, "indices has rows of ", tokens.kept,
             " tokens of ", tokens.row, " bytes, which is too many");
  // At least four turns of all threads, and at least four times as many bytes as the indices have, because
  // every block reads those (from the L2 cache). Fewer if there would be too few blocks.
  const int64_t turn = (4 * int64_t{kUnits} * unit + tokens.row - 1) / tokens.row;
  const int64_t worth = tokens.kept * 16 / tokens.row;
  const int64_t share = tokens.batch * tokens.count / kFewBlocks;
  const int64_t most = share < kMostRows ? share : kMostRows, wanted = turn > worth ? turn : worth;
  const int64_t a_block = wanted < most ? wanted : most < 1 ? 1 : most;
  const int64_t blocks = (tokens.count + a_block - 1) / a_block;
  opk::launch_overlapping(kernel, tokens.batch * blocks, kThreads, 0, tokens, static_cast<int32_t>(a_block));
}

void merge(const Tokens& tokens) {
  switch (const int unit = unit_of(tokens)) {
    case 16: return launch_merge(merge_kernel<uint4>, tokens, unit);
    case 4: return launch_merge(merge_kernel<uint32_t>, tokens, unit);
    case 2: return launch_merge(merge_kernel<uint16_t>, tokens, unit);
    default: return launch_merge(merge_kernel<uint8_t>, tokens, unit);
  }
}

}  // namespace

OPKILN_OP(token_gather, cuda);
OPKILN_OP(token_scatter, cuda);
OPKILN_OP(token_scatter_, cuda);
OPKILN_OP(token_spread, cuda);
OPKILN_OP(token_clear, cuda);
