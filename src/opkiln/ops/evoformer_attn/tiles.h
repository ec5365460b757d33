// What the CUDA kernels share: tiles of 64 keys or queries in shared memory, and products of a warp with them.
//
// A block has 64 queries (or keys), a warp 16 of them, as left fragments in registers. It goes through the keys (or
// queries) of the row in tiles. Scores and weights exist as fragments alone.
//
// Which keys make the 8 columns of an instruction is our choice: a sum does not depend on their order. Here a thread's
// columns in 4 fragments, which have 32 keys together, are 8 neighbours. So it loads their biases at once, 16 bytes
// of each query. `place_of` says which key a column is; matrices are loaded row by row, so any order costs the same.
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
  const Element* mask;  // [batch, rows, length], or null
  const Element* pair;  // [batch, heads, length, length], rows of pair_stride, a multiple of 8; or null
  float* moments;       // [2, batch, rows, heads, length]: see functions.py
  Strides q_strides, k_strides, v_strides;
  int32_t rows, length, heads, head, tiles, pair_stride;
  int64_t queries;  // batch * rows * heads * length
  float scale;      // times log2(e)

  Element* out;  // of the forward pass, [batch, rows, length, heads, head]

  // Of the backward pass
  const Element *grad, *output;
  Strides grad_strides, output_strides;
  float* shifts;  // [batch, rows, heads, length]: the share of a query times its sum of grad * output
  Element *q_grad, *k_grad, *v_grad, *pair_grad;
  float* mask_parts;  // [batch, rows, heads, length], or null
  float* pair_parts;  // [splits, batch, heads, length, length], or null
  int32_t splits;
  float plain_scale;
};

// Which tile of which head and row a block has.
struct Unit {
  int tile, head, row, batch;
  int line;  // of [batch, rows, heads]

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

// The two numbers in a register.
template <class Element>
__device__ inline float number(uint32_t word, int which) {
  if constexpr (opk::dtype_of<Element> == opk::DType::float16) {
    return opk::bits::half_to_float(static_cast<uint16_t>(which == 0 ? word : word >> 16));
  } else {
    return opk::bits::to_float(which == 0 ? word << 16 : word & 0xffff0000u);
  }
}

__device__ inline int group_of_lane() { return threadIdx.x % 32 / 4; }
__device__ inline int quarter_of_lane() { return threadIdx.x % 4; }

// ---- tiles -----------------------------------------------------------------------------------------

// Where 16 bytes of a row are in a tile of rows with kChunks of them. The eight rows that a matrix is loaded from,
// in either order, are in different banks.
template <int kChunks>
__device__ inline int slot(int row, int chunk) {
  const int mixed = (row >> 3 ^ row >> 1) & 3;
  return row * kChunks + (chunk ^ (kChunks == 4 ? mixed : mixed << 1 | (row & 1)));
}

// The place in a tile of column n in fragment j (of 4) of the 32 places from 32 * part on.
__device__ inline int place_of(int part, int j, int n) { return part * 32 + n / 2 * 8 + 2 * j + n % 2; }

// slot(place_of(part, j, n), half * 4 + lane / 8), where n is lane % 8. Only `lane` is not known to the compiler: it
// keeps the slot of the first matrix in a register, and few others.
template <int kChunks>
__device__ inline int slot_of_rows(int lane, int part, int j, int half) {
  const int first = slot<kChunks>(place_of(0, 0, lane % 8), lane / 8);
  return (first ^ (kChunks / 4 * j) ^ (half * 4)) + (2 * j + 32 * part) * kChunks;
}

// slot(place_of(part, 2 * step + matrix % 2, n), chunk + matrix / 2), where n is lane % 8, and matrix is lane / 8.
// `chunk` is even.
template <int kChunks>
__device__ inline int slot_of_columns(int lane, int part, int step, int chunk) {
  const int first = slot<kChunks>(place_of(0, lane / 8 % 2, lane % 8), lane / 16);
  return (first ^ chunk ^ (kChunks / 2 * step)) + (4 * step + 32 * part) * kChunks;
}

// Copies of a head's rows to tiles of 64. It knows where the thread reads; strides stay in constant memory.
template <int kHead, class Element>
class RowCopies {
 public:
  __device__ RowCopies(const Work<Element>& work, const Element* x, const Strides& strides, int batch, int row,
                       int head, int first) {
    from_ = head_of(x, strides, batch, row, head) + (first + mine()) * strides.place + chunk() * 8;
    left_ = chunk() * 8 < work.head ? work.length - first - mine() : 0;
  }

  // Starts the copies of a tile. What is behind the end of the sequence, or of the head, is zero.
  __device__ void start(uint4* tile, const Strides& strides) const {
    const Element* from = from_;
#pragma unroll
    for (int i = 0; i < kTile / kRows; ++i) {
      copy_later(tile + slot<kChunks>(mine() + i * kRows, chunk()), from, i * kRows < left_);
      from += kRows * strides.place;  // what is not there is not read
    }
  }
  __device__ void next_tile(const Strides& strides) {
    from_ += kTile * strides.place;
    left_ -= kTile;
  }
  __device__ void next_row(const Strides& strides) { from_ += strides.row; }

 private:
  static constexpr int kChunks = kHead / 8, kRows = kThreads / kChunks;  // rows that the block copies at a time
  __device__ static int mine() { return static_cast<int>(threadIdx.x / kChunks); }
  __device__ static int chunk() { return static_cast<int>(threadIdx.x % kChunks); }
  const Element* from_;
  int left_;  // rows from the thread's first on
};

// Left fragments of 16 rows from global memory.
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

// Left fragments of a warp's 16 rows of a tile.
template <int kHead>
__device__ inline void load_left(uint32_t (&left)[kHead / 16][4], const uint4* tile) {
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane % 16;
#pragma unroll
  for (int step = 0; step < kHead / 16; ++step) {
    load_matrices(left[step], tile + slot<kHead / 8>(row, step * 2 + lane / 16));
  }
}

// sums = left * rows' for 32 rows of a tile.
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

// sums += numbers * rows for 32 rows of a tile; the numbers are what multiply_by_rows gives, and are rounded.
template <class Element, int kHead>
__device__ inline void add_product(float (&sums)[kHead / 8][4], const float (&numbers)[4][4], const uint4* tile,
                                   int part) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int step = 0; step < 2; ++step) {
    const float(&low)[4] = numbers[2 * step], (&high)[4] = numbers[2 * step + 1];
    const uint32_t left[4] = {packed<Element>(low[0], low[1]), packed<Element>(low[2], low[3]),
                              packed<Element>(high[0], high[1]), packed<Element>(high[2], high[3])};
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
          packed<Element>(sums[chunk][2 * i] * factors[i], sums[chunk][2 * i + 1] * factors[i]);
    }
  }
}

// ---- biases ----------------------------------------------------------------------------------------

// The mask's number for a key, times log2(e); minus infinity behind the end, so such keys have no weight.
template <class Element>
__device__ inline float masked(const Work<Element>& work, int batch, int row, int key) {
  if (key >= work.length) return -INFINITY;
  if (work.mask == nullptr) return 0.f;
  return float(work.mask[(int64_t{batch} * work.rows + row) * work.length + key]) * kLog2e;
}

// Eight numbers of the pair bias, for a query and neighbouring keys; zeros behind the ends.
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

// Rows of `length` numbers, each padded with zeros to `stride`.
template <class Element>
__global__ void __launch_bounds__(256) pad_kernel(const Element* from, Element* to, int64_t total, int32_t length,
                                                  int32_t stride) {
  for (int64_t i = int64_t{blockIdx.x} * 256 + threadIdx.x; i < total; i += int64_t{gridDim.x} * 256) {
    const int64_t row = i / stride;
    const int column = static_cast<int>(i - row * stride);
    to[i] = column < length ? from[row * length + column] : Element(0.f);
  }
}

// A thread's numbers of an array in shared memory that belong to its columns in fragments 2 * half and 2 * half + 1.
__device__ inline float4 of_columns(const float* values, int part, int half) {
  return *reinterpret_cast<const float4*>(values + part * 32 + quarter_of_lane() * 8 + half * 4);
}

// One of a float4's or uint4's members.
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

// A tensor whose heads are read in pieces of 16 bytes: itself, or a copy. If that would not help, the reference runs.
inline Tensor with_aligned_heads(const Tensor& x) {
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

// The pair bias with rows that begin at multiples of 16 bytes: itself, or a padded copy; no tensor if there is none.
inline Tensor with_aligned_rows(const MaybeTensor& pair_bias, const Sizes& s) {
  Tensor pair = whole(pair_bias);
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

// The members that both passes have. The tensors that they point to must stay.
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
