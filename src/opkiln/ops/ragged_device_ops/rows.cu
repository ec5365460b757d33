// Moves rows by index: embedding, last tokens, tokens to experts and back.
//
// The rows of the result, or of the tokens, form one row of units of 16 bytes, or of two if addresses or
// sizes are not aligned. So threads get equal work for any row length. Rows that are only moved are treated
// as bytes. No warp intrinsics, so hipify turns this file into HIP unchanged.

#include <opkiln/op.h>
#include <opkiln/sixteen_bytes.h>

#include "rows.h"

namespace {

using opkiln::device::store_once;
using rows::kThreads;
using rows::Place;

constexpr int64_t kNone = INT64_MIN;  // no row: the result is zero

// Maps the rows of a result to rows of a table.
struct Picked {
  const void* table;
  int64_t count;            // rows of the table
  const void* indices;      // 32-bit, or 64-bit if `wide`
  const int32_t* lengths;   // if set, `indices` are starts, and the last of `lengths` rows is picked
  int64_t offset;
  bool wide;

  // Does not check the index, so that several can be loaded at once.
  __device__ int64_t index(int64_t row) const {
    const int64_t index = wide ? static_cast<const int64_t*>(indices)[row]
                               : static_cast<const int32_t*>(indices)[row];
    if (!lengths) return index + offset;
    if (lengths[row] <= 0) return kNone;
    return index < 0 ? count : index + lengths[row] - 1;  // `count` is out of range
  }
};

struct Copy {
  Picked from;
  void* out;
  int64_t rows;
  int64_t row;  // bytes
};

template <class Unit>
__global__ void __launch_bounds__(kThreads) copy_kernel(const OPK_GRID_CONSTANT Copy work) {
  opk::wait_for_previous();
  const uint32_t a_row = static_cast<uint32_t>(work.row / static_cast<int64_t>(sizeof(Unit)));
  const Place place(a_row);
  if (place.row >= work.rows) return;
  const int64_t from = work.from.index(place.row);
  Unit held = {};
  if (from != kNone) {
    held = *(static_cast<const Unit*>(work.from.table) +
             opkiln::device::check_index(from, work.from.count) * a_row + place.unit);
  }
  store_once(static_cast<Unit*>(work.out) + place.row * a_row + place.unit, held);
}

struct Spread {
  const void* x;
  void* out;
  const int32_t* slots;
  int64_t tokens, row;  // bytes
  int chosen;
};

constexpr int kSlots = 4;  // slots that are loaded at once, before the copies are written

// Reads a row once, and writes it for each of its experts.
template <class Unit>
__global__ void __launch_bounds__(kThreads) spread_kernel(const OPK_GRID_CONSTANT Spread work) {
  opk::wait_for_previous();
  const uint32_t a_row = static_cast<uint32_t>(work.row / static_cast<int64_t>(sizeof(Unit)));
  const Place place(a_row);
  if (place.row >= work.tokens) return;
  const Unit held = *(static_cast<const Unit*>(work.x) + place.row * a_row + place.unit);
  for (int first = 0; first < work.chosen; first += kSlots) {
    int to[kSlots];
#pragma unroll
    for (int j = 0; j < kSlots; ++j) {
      to[j] = first + j < work.chosen ? work.slots[place.row * work.chosen + first + j] : 0;
    }
#pragma unroll
    for (int j = 0; j < kSlots; ++j) opkiln::device::check_index(to[j], work.tokens * work.chosen);
#pragma unroll
    for (int j = 0; j < kSlots; ++j) {
      if (first + j < work.chosen) store_once(static_cast<Unit*>(work.out) + int64_t{to[j]} * a_row + place.unit, held);
    }
  }
}

// One element, with the interface of Sixteen.
template <class T>
struct One {
  static constexpr int kCount = 1;
  T value;
  __device__ float operator[](int) const { return float(value); }
};

template <class T>
__device__ inline void narrow(One<T>& out, const float* sums) { out.value = T(sums[0]); }

template <class T>
__device__ inline void narrow(opkiln::device::Sixteen<T>& out, const float* sums) {
#pragma unroll
  for (int i = 0; i < opkiln::device::Sixteen<T>::kCount; i += 2) out.set_two(i, sums[i], sums[i + 1]);
}

// The sum of two rows of two tables.
struct Sum {
  Picked first, second;
  void* out;
  int64_t rows;
  int columns;
};

template <class Pack>
__global__ void __launch_bounds__(kThreads) sum_kernel(const OPK_GRID_CONSTANT Sum work) {
  opk::wait_for_previous();
  const uint32_t a_row = static_cast<uint32_t>(work.columns / Pack::kCount);
  const Place place(a_row);
  if (place.row >= work.rows) return;
  const int64_t one = work.first.index(place.row), two = work.second.index(place.row);
  opkiln::device::check_index(one, work.first.count), opkiln::device::check_index(two, work.second.count);
  const Pack a = *(static_cast<const Pack*>(work.first.table) + one * a_row + place.unit);
  const Pack b = static_cast<const Pack*>(work.second.table)[two * a_row + place.unit];
  float sums[Pack::kCount];
#pragma unroll
  for (int i = 0; i < Pack::kCount; ++i) sums[i] = a[i] + b[i];
  Pack out;
  narrow(out, sums);
  store_once(static_cast<Pack*>(work.out) + place.row * a_row + place.unit, out);
}

// The weighted sum of `terms` rows of a table.
struct Weighted {
  const void* table;
  int64_t count;
  const int32_t* slots;
  const float* weights;  // null: all 1
  int terms;
  void* out;
  int64_t rows;
  int columns;
};

// Loads the slots and weights of kTerms terms together, then up to four rows at a time.
template <class Pack, int kTerms>
__global__ void __launch_bounds__(kThreads, kTerms == 2 ? 16 : 8) weighted_kernel(const OPK_GRID_CONSTANT Weighted work) {
  opk::wait_for_previous();
  constexpr int kAtOnce = kTerms < 4 ? kTerms : 4;
  const uint32_t a_row = static_cast<uint32_t>(work.columns / Pack::kCount);
  const Place place(a_row);
  if (place.row >= work.rows) return;
  const Pack* const table = static_cast<const Pack*>(work.table) + place.unit;
  float sums[Pack::kCount] = {};
#pragma unroll 1
  for (int first = 0; first < work.terms; first += kTerms) {
    const int64_t start = place.row * work.terms + first;
    int from[kTerms];  // missing terms repeat the first row, which is in a cache
    float weights[kTerms];
#pragma unroll
    for (int i = 0; i < kTerms; ++i) from[i] = work.slots[first + i < work.terms ? start + i : start];
#pragma unroll
    for (int i = 0; i < kTerms; ++i) {
      weights[i] = work.weights && first + i < work.terms ? work.weights[start + i] : 1.0f;
    }
#pragma unroll
    for (int i = 0; i < kTerms; ++i) opkiln::device::check_index(from[i], work.count);
#pragma unroll
    for (int some = 0; some < kTerms; some += kAtOnce) {
      Pack held[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) held[i] = table[int64_t{from[some + i]} * a_row];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (first + some + i < work.terms) {
#pragma unroll
          for (int e = 0; e < Pack::kCount; ++e) sums[e] += weights[some + i] * held[i][e];
        }
      }
    }
  }
  Pack out;
  narrow(out, sums);
  store_once(static_cast<Pack*>(work.out) + place.row * a_row + place.unit, out);
}

OPK_PLAIN_BEGIN

using opk::Tensor;
using rows::MaybeTensor;

int64_t bytes_of(const Tensor& x) { return x.size(1) * opkiln::size_of(opk::element_of(x)); }

void launch_copy(const Copy& work) {
  const bool packed = rows::is_packed(work.row, {work.from.table, work.out});
  const int64_t blocks = rows::blocks_of(work.rows, work.row / (packed ? 16 : 2));
  opk::launch_overlapping(packed ? copy_kernel<uint4> : copy_kernel<uint16_t>, blocks, kThreads, 0, work);
}

template <class T>
void launch_sum(const Sum& work) {
  using opkiln::device::Sixteen;
  const bool packed =
      rows::is_packed(work.columns * int64_t{sizeof(T)}, {work.first.table, work.second.table, work.out});
  const int64_t blocks = rows::blocks_of(work.rows, work.columns / (packed ? Sixteen<T>::kCount : 1));
  opk::launch_overlapping(packed ? sum_kernel<Sixteen<T>> : sum_kernel<One<T>>, blocks, kThreads, 0, work);
}

template <class T>
void launch_weighted(const Weighted& work) {
  using opkiln::device::Sixteen;
  const bool packed = rows::is_packed(work.columns * int64_t{sizeof(T)}, {work.table, work.out});
  const int64_t blocks = rows::blocks_of(work.rows, work.columns / (packed ? Sixteen<T>::kCount : 1));
  opk::launch_overlapping(!packed           ? weighted_kernel<One<T>, 8>
              : work.terms <= 2 ? weighted_kernel<Sixteen<T>, 2>
                                : weighted_kernel<Sixteen<T>, 8>,
              blocks, kThreads, 0, work);
}

void sum(const Sum& work, opkiln::ElementType type) {
  switch (type) {
    case opkiln::ElementType::kFloat: return launch_sum<float>(work);
    case opkiln::ElementType::kFloat16: return launch_sum<opk::half>(work);
    case opkiln::ElementType::kBFloat16: return launch_sum<opk::bfloat16>(work);
  }
}

void sum(const Weighted& work, opkiln::ElementType type) {
  switch (type) {
    case opkiln::ElementType::kFloat: return launch_weighted<float>(work);
    case opkiln::ElementType::kFloat16: return launch_weighted<opk::half>(work);
    case opkiln::ElementType::kBFloat16: return launch_weighted<opk::bfloat16>(work);
  }
}

Tensor ragged_embedding(const Tensor& tokens, const Tensor& weight, const MaybeTensor& positions,
                        const MaybeTensor& position_weight, int64_t position_offset) {
  rows::check_rows(weight);
  opk::check_dim(tokens, 1);
  const bool wide = tokens.dtype() == opk::DType::int64;
  OPK_CHECK(wide || tokens.dtype() == opk::DType::int32, tokens, " has dtype ", tokens.dtype(),
            ", expected int32 or int64");
  opk::check_same_device(weight, tokens);
  OPK_CHECK(positions.has_value() == position_weight.has_value(),
            "positions and position_weight are given together, or neither");
  const Tensor ids = opk::contiguous(tokens), table = opk::contiguous(weight);
  Tensor out = opk::empty({tokens.size(0), weight.size(1)}, weight);
  const Picked words{table.data(), weight.size(0), ids.data(), nullptr, 0, wide};
  if (!positions) {
    launch_copy({words, out.data(), tokens.size(0), bytes_of(weight)});
    return out;
  }
  rows::check_indices(*positions, weight);
  opk::check_shape(*positions, {tokens.size(0)});
  opk::check_same_dtype(weight, *position_weight);
  opk::check_same_device(weight, *position_weight);
  opk::check_dim(*position_weight, 2);
  opk::check_shape(*position_weight, {position_weight->size(0), weight.size(1)});
  const Tensor at = opk::contiguous(*positions), other = opk::contiguous(*position_weight);
  const Picked places{other.data(), other.size(0), at.data(), nullptr, position_offset, false};
  sum(Sum{words, places, out.data(), tokens.size(0), static_cast<int>(weight.size(1))}, opk::element_of(weight));
  return out;
}

Tensor logits_gather(const Tensor& x, const Tensor& starts, const Tensor& lengths) {
  rows::check_rows(x);
  opk::check_dim(starts, 1);
  rows::check_indices(starts, x);
  rows::check_indices(lengths, x);
  opk::check_shape(lengths, {starts.size(0)});
  const Tensor table = opk::contiguous(x), first = opk::contiguous(starts), count = opk::contiguous(lengths);
  Tensor out = opk::empty({starts.size(0), x.size(1)}, x);
  const Picked last{table.data(), x.size(0), first.data(), count.data<const int32_t>(), 0, false};
  launch_copy({last, out.data(), starts.size(0), bytes_of(x)});
  return out;
}

Tensor moe_scatter(const Tensor& x, const Tensor& slots) {
  rows::check_rows(x);
  opk::check_dim(slots, 2);
  rows::check_indices(slots, x);
  opk::check_shape(slots, {x.size(0), slots.size(1)});
  const Tensor given = opk::contiguous(x), places = opk::contiguous(slots);
  Tensor out = opk::empty({slots.numel(), x.size(1)}, x);
  const Spread work{given.data(), out.data(), places.data<const int32_t>(), x.size(0), bytes_of(x),
                    static_cast<int>(slots.size(1))};
  const bool packed = rows::is_packed(work.row, {work.x, work.out});
  const int64_t blocks = rows::blocks_of(work.tokens, work.row / (packed ? 16 : 2));
  opk::launch_overlapping(packed ? spread_kernel<uint4> : spread_kernel<uint16_t>, blocks, kThreads, 0, work);
  return out;
}

Tensor moe_gather(const Tensor& rows, const Tensor& slots, const MaybeTensor& weights) {
  rows::check_rows(rows);
  opk::check_dim(slots, 2);
  rows::check_indices(slots, rows);
  Tensor factors;
  if (weights) {
    opk::check_dtype(*weights, opk::DType::float32);
    opk::check_shape(*weights, slots.sizes());
    opk::check_same_device(rows, *weights);
    factors = opk::contiguous(*weights);
  }
  const Tensor table = opk::contiguous(rows), places = opk::contiguous(slots);
  Tensor out = opk::empty({slots.size(0), rows.size(1)}, rows);
  sum(Weighted{table.data(), rows.size(0), places.data<const int32_t>(), weights ? factors.data<float>() : nullptr,
               static_cast<int>(slots.size(1)), out.data(), slots.size(0), static_cast<int>(rows.size(1))},
      opk::element_of(rows));
  return out;
}

OPK_PLAIN_END

}  // namespace

OPKILN_OP(ragged_embedding, cuda);
OPKILN_OP(logits_gather, cuda);
OPKILN_OP(moe_scatter, cuda);
OPKILN_OP(moe_gather, cuda);
