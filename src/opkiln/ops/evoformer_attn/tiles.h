// Shared by the CUDA kernels: tiles of 64 keys or queries in shared memory, and a warp's products with them.
//
// A block has 64 queries (or keys). A warp holds 16 of them as left fragments in registers, and goes through
// the row's keys (or queries) in tiles. Scores and weights exist only as fragments.
//
// The order of keys does not change a sum, so we choose which keys form the 8 columns of an
// instruction. Here a thread's columns in 4 fragments, which cover 32 keys, are 8
// neighbours: it loads their biases at once, 16 bytes per query. `place_of` maps columns to
// keys. Matrices are loaded row by row, so any order costs the same.
#pragma once

#include <math.h>
#include <opkiln/warp_matrix.h>

#include "call.h"

namespace evoformer {

using namespace opkiln::device;

constexpr int kTile = 64;
constexpr int kWarps = 4;
constexpr int kThreads = kWarps * 32;
constexpr unsigned kAll = 0xffffffffu;
constexpr float kLog2e = 1.44269504f;

template <class Element>
struct Work {
  const Element *q, *k, *v;
  const Element* mask;  // [batch, rows, length]; may be null
  const Element* pair;  // [batch, heads, length, length], rows of pair_stride, a multiple of 8; may be null
  float* moments;       // [2, batch, rows, heads, length]: see functions.py
  Strides q_strides, k_strides, v_strides;
  int32_t rows, length, heads, head, tiles, pair_stride;
  int64_t queries;  // batch * rows * heads * length
  float scale;      // includes the factor log2(e)

  Element* out;  // for the forward pass, [batch, rows, length, heads, head]

  // Only for the backward pass
  const Element *grad, *output;
  Strides grad_strides, output_strides;
  float* shifts;  // [batch, rows, heads, length]: a query's share times its sum of grad * output
  Element *q_grad, *k_grad, *v_grad, *pair_grad;
  float* mask_parts;  // [batch, rows, heads, length]; may be null
  float* pair_parts;  // [splits, batch, heads, length, length]; may be null
  int32_t splits;
  float plain_scale;
};

// A block's tile, head and row.
struct Unit {
  int tile, head, row, batch;
  int line;  // index into [batch, rows, heads]

  Unit() = default;
  template <class Element>
  __device__ Unit(const Work<Element>& work, unsigned index) {
    tile = index % static_cast<unsigned>(work.tiles);
    line = index / static_cast<unsigned>(work.tiles);
    head = static_cast<unsigned>(line) % static_cast<unsigned>(work.heads);
    const unsigned both = static_cast<unsigned>(line) / static_cast<unsigned>(work.heads);
    row = both % static_cast<unsigned>(work.rows);
    batch = both / static_cast<unsigned>(work.rows);
  }
};

template <class Element>
__device__ inline const Element* head_of(const Element* x, const Strides& strides, int batch, int row, int head) {
  return x + batch * strides.batch + row * strides.row + head * strides.head;
}

__device__ inline int group_of_lane() { return threadIdx.x % 32 / 4; }
__device__ inline int quarter_of_lane() { return threadIdx.x % 4; }

// ---- tiles -----------------------------------------------------------------------------------------

// The swizzled position of 16 bytes of a row, in a tile whose rows have kChunks of them. The eight rows from
// which a matrix is loaded, in either order, are in different banks.
template <int kChunks>
__device__ inline int slot(int row, int chunk) {
  const int mixed = (row >> 3 ^ row >> 1) & 3;
  return row * kChunks + (chunk ^ (kChunks == 4 ? mixed : mixed << 1 | (row & 1)));
}

// The place in a tile of column n in fragment j (of 4), within the 32 places from 32 * part on.
__device__ inline int place_of(int part, int j, int n) { return part * 32 + n / 2 * 8 + 2 * j + n % 2; }

// Equals slot(place_of(part, j, n), half * 4 + lane / 8) with n = lane % 8. Only `lane` is unknown at compile
// time, so the compiler keeps little more than the first matrix' slot in registers.
template <int kChunks>
__device__ inline int slot_of_rows(int lane, int part, int j, int half) {
  const int first = slot<kChunks>(place_of(0, 0, lane % 8), lane / 8);
  return (first ^ (kChunks / 4 * j) ^ (half * 4)) + (2 * j + 32 * part) * kChunks;
}

// Equals slot(place_of(part, 2 * step + matrix % 2, n), chunk + matrix
// / 2) with n = lane % 8 and matrix = lane / 8. `chunk` is even.
template <int kChunks>
__device__ inline int slot_of_columns(int lane, int part, int step, int chunk) {
  const int first = slot<kChunks>(place_of(0, lane / 8 % 2, lane % 8), lane / 16);
  return (first ^ chunk ^ (kChunks / 2 * step)) + (4 * step + 32 * part) * kChunks;
}

// Copies a head's rows to tiles of 64. Keeps the thread's read position; strides stay in constant memory.
template <int kHead, class Element>
class RowCopies {
 public:
  __device__ RowCopies(const Work<Element>& work, const Element* x, const Strides& strides, int batch, int row,
                       int head, int first) {
    from_ = head_of(x, strides, batch, row, head) + (first + mine()) * strides.place + chunk() * 8;
    left_ = chunk() * 8 < work.head ? work.length - first - mine() : 0;
  }

  // Starts copying a tile. Past the end of the sequence or of the head it writes zeros.
  __device__ void start(uint4* tile, const Strides& strides) const {
    const Element* from = from_;
#pragma unroll
    for (int i = 0; i < kTile / kRows; ++i) {
      copy_later(tile + slot<kChunks>(mine() + i * kRows, chunk()), from, i * kRows < left_);
      from += kRows * strides.place;  // may point past the end, where nothing is read
    }
  }
  __device__ void next_tile(const Strides& strides) {
    from_ += kTile * strides.place;
    left_ -= kTile;
  }
  __device__ void next_row(const Strides& strides) { from_ += strides.row; }

 private:
  // rows that the block copies at a time
  static constexpr int kChunks = kHead / 8, kRows = kThreads / kChunks;
  __device__ static int mine() { return static_cast<int>(threadIdx.x / kChunks); }
  __device__ static int chunk() { return static_cast<int>(threadIdx.x % kChunks); }
  const Element* from_;
  int left_;  // from the thread's first row on
};

// Loads left fragments of 16 rows from global memory.
template <int kHead, class Element>
__device__ inline void load_left(uint32_t (&left)[kHead / 16][4], const Element* from, int64_t stride, int first,
                                 int length, int head) {
#pragma unroll
  for (int step = 0; step < kHead / 16; ++step) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = first + group_of_lane() + i % 2 * 8, chunk = step * 16 + i / 2 * 8;
      const bool there = row < length && chunk < head;
      const Element* at = from + row * stride + chunk + quarter_of_lane() * 2;
      left[step][i] = there ? *reinterpret_cast<const uint32_t*>(at) : 0u;
    }
  }
}

// Loads left fragments of a warp's 16 rows of a tile.
template <int kHead>
__device__ inline void load_left(uint32_t (&left)[kHead / 16][4], const uint4* tile) {
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane % 16;
#pragma unroll
  for (int step = 0; step < kHead / 16; ++step) {
    load_matrices(left[step], tile + slot<kHead / 8>(row, step * 2 + lane / 16));
  }
}

// sums = left * rows', for 32 rows of a tile.
template <class Element, int kHead>
__device__ inline void multiply_by_rows(float (&sums)[4][4], const uint32_t (&left)[kHead / 16][4], const uint4* tile,
                                        int part) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[j][i] = 0;
#pragma unroll
    for (int half = 0; half < kHead / 32; ++half) {
      uint32_t right[4];
      load_matrices(right, tile + slot_of_rows<kHead / 8>(lane, part, j, half));
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        const uint32_t both[2] = {right[2 * step], right[2 * step + 1]};
        multiply_add<Element>(sums[j], left[half * 2 + step], both);
      }
    }
  }
}

// sums += numbers * rows, for 32 rows of a tile. The numbers are
// results of multiply_by_rows, rounded to Element.
template <class Element, int kHead>
__device__ inline void add_product(float (&sums)[kHead / 8][4], const float (&numbers)[4][4], const uint4* tile,
                                   int part) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int step = 0; step < 2; ++step) {
    const float(&low)[4] = numbers[2 * step], (&high)[4] = numbers[2 * step + 1];
    const uint32_t left[4] = {narrow_two<Element>(low[0], low[1]), narrow_two<Element>(low[2], low[3]),
                              narrow_two<Element>(high[0], high[1]), narrow_two<Element>(high[2], high[3])};
#pragma unroll
    for (int chunk = 0; chunk < kHead / 8; chunk += 2) {
      uint32_t right[4];
      load_transposed(right, tile + slot_of_columns<kHead / 8>(lane, part, step, chunk));
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t both[2] = {right[2 * i], right[2 * i + 1]};
        multiply_add<Element>(sums[chunk + i], left, both);
      }
    }
  }
}

// Stores 16 rows, given as fragments, to a tensor [batch, rows, length, heads, head].
template <class Element, int kHead>
__device__ inline void store_rows(Element* to, const float (&sums)[kHead / 8][4], const Work<Element>& work,
                                  const Unit& unit, int first, const float (&factors)[2]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = first + group_of_lane() + i * 8;
    if (row >= work.length) continue;
    const int64_t line = (int64_t{unit.batch} * work.rows + unit.row) * work.length + row;
    Element* const at = to + (line * work.heads + unit.head) * work.head + quarter_of_lane() * 2;
#pragma unroll
    for (int chunk = 0; chunk < kHead / 8; ++chunk) {
      if (chunk * 8 >= work.head) break;
      *reinterpret_cast<uint32_t*>(at + chunk * 8) =
          narrow_two<Element>(sums[chunk][2 * i] * factors[i], sums[chunk][2 * i + 1] * factors[i]);
    }
  }
}

// ---- biases ----------------------------------------------------------------------------------------

// A key's mask, times log2(e). Keys past the end get minus infinity, and so no weight.
template <class Element>
__device__ inline float load_mask(const Work<Element>& work, int batch, int row, int key) {
  if (key >= work.length) return -INFINITY;
  if (work.mask == nullptr) return 0.f;
  return float(work.mask[(int64_t{batch} * work.rows + row) * work.length + key]) * kLog2e;
}

// Loads eight numbers of the pair bias, for a query and neighbouring keys; zeros past the ends.
template <class Element>
__device__ inline void load_pair(uint32_t (&words)[4], const Work<Element>& work, const Element* pair, int query,
                                 int key) {
  uint4 four = {0, 0, 0, 0};
  if (pair != nullptr && query < work.length && key < work.length) {
    four = *reinterpret_cast<const uint4*>(pair + int64_t{query} * work.pair_stride + key);
  }
  words[0] = four.x;
  words[1] = four.y;
  words[2] = four.z;
  words[3] = four.w;
}

// The pair bias of a head, or null.
template <class Element>
__device__ inline const Element* pair_of(const Work<Element>& work, int batch, int head) {
  const int64_t at = (int64_t{batch} * work.heads + head) * work.length * work.pair_stride;
  return work.pair == nullptr ? nullptr : work.pair + at;
}

// Copies rows of `length` numbers, each padded with zeros to `stride`.
template <class Element>
__global__ void __launch_bounds__(256) pad_kernel(const Element* from, Element* to, int64_t total, int32_t length,
                                                  int32_t stride) {
  for (int64_t i = int64_t{blockIdx.x} * 256 + threadIdx.x; i < total; i += int64_t{gridDim.x} * 256) {
    const int64_t row = i / stride;
    const int column = static_cast<int>(i - row * stride);
    to[i] = column < length ? from[row * length + column] : Element(0.f);
  }
}

// Loads a thread's numbers from an array in shared memory, for its
// columns in fragments 2 * half and 2 * half + 1.
__device__ inline float4 load_columns(const float* values, int part, int half) {
  return *reinterpret_cast<const float4*>(values + part * 32 + quarter_of_lane() * 8 + half * 4);
}

// A member of a float4 or uint4, by index.
template <class Four>
__device__ inline auto at(const Four& four, int i) {
  return i == 0 ? four.x : i == 1 ? four.y : i == 2 ? four.z : four.w;
}

// Adds the numbers of the four threads that share a row.
__device__ inline float sum_of_row(float value) {
  value += __shfl_xor_sync(kAll, value, 1);
  return value + __shfl_xor_sync(kAll, value, 2);
}

// ---- the host --------------------------------------------------------------------------------------

#if !defined(__CUDACC_RTC__)

// A tensor whose heads can be read 16 bytes at a time: x itself, or a
// copy. If even a copy is not aligned, the reference runs.
inline Tensor align_heads(const Tensor& x) {
  const auto aligned = [](const Tensor& t) {
    bool found = t.stride(-1) == 1 && reinterpret_cast<uintptr_t>(t.data()) % 16 == 0;
    for (int i = 0; i < 4; ++i) found = found && (t.stride(i) % 8 == 0 || t.size(i) == 1);
    return found;
  };
  if (aligned(x)) return x;
  Tensor copy = opk::contiguous(x);
  OPK_SERVED(aligned(copy), x, " does not begin at a multiple of 16 bytes");
  return copy;
}

inline int32_t tiles_of(const Sizes& s) { return static_cast<int32_t>((s.length + kTile - 1) / kTile); }

// The pair bias with rows aligned to 16 bytes: itself, or a padded copy. Undefined if there is none.
inline Tensor align_rows(const MaybeTensor& pair_bias, const Sizes& s) {
  Tensor pair = make_contiguous(pair_bias);
  if (!pair.defined() || pair.numel() == 0) return pair;
  if (s.length % 8 == 0 && reinterpret_cast<uintptr_t>(pair.data()) % 16 == 0) return pair;
  const int64_t stride = (s.length + 7) / 8 * 8, total = pair.numel() / s.length * stride;
  Tensor copy = opk::empty({s.batch, 1, s.heads, s.length, stride}, pair);
  const int64_t blocks = (total + 255) / 256;
  OPK_DISPATCH(pair, Element, (opk::half, opk::bfloat16), {
    opk::launch(pad_kernel<Element>, blocks < 4096 ? blocks : 4096, 256, 0,
                static_cast<const Tensor&>(pair).template data<const Element>(), copy.template data<Element>(), total,
                s.length, stride);
  });
  return copy;
}

inline void check_served(const Sizes& s, const Tensor& q) {
  OPK_SERVED(s.head <= 64 && s.head % 8 == 0, q, " has heads of ", s.head, ", expected a multiple of 8 up to 64");
  OPK_SERVED(s.length < (int64_t{1} << 24), q, " has a length of ", s.length, ", expected less than 2^24");
  OPK_SERVED(s.batch * s.rows * s.heads * tiles_of(s) < (int64_t{1} << 31), q, " has too many rows and heads");
}

// Sets the members that both passes use. The tensors must outlive the result.
template <class Element>
Work<Element> work_of(const Sizes& s, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& mask,
                      const Tensor& pair, double scale) {
  Work<Element> work = {};
  work.q = q.data<const Element>();
  work.k = k.data<const Element>();
  work.v = v.data<const Element>();
  if (mask.defined()) work.mask = static_cast<const Tensor&>(mask).template data<const Element>();
  if (pair.defined()) work.pair = static_cast<const Tensor&>(pair).template data<const Element>();
  work.pair_stride = static_cast<int32_t>((s.length + 7) / 8 * 8);
  work.q_strides = strides_of(q);
  work.k_strides = strides_of(k);
  work.v_strides = strides_of(v);
  work.rows = static_cast<int32_t>(s.rows);
  work.length = static_cast<int32_t>(s.length);
  work.heads = static_cast<int32_t>(s.heads);
  work.head = static_cast<int32_t>(s.head);
  work.tiles = tiles_of(s);
  work.queries = s.batch * s.rows * s.heads * s.length;
  work.scale = static_cast<float>(scale * kLog2E);
  work.plain_scale = static_cast<float>(scale);
  return work;
}

#endif

}  // namespace evoformer
