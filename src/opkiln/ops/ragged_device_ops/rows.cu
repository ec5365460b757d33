// Rows by their index: embedding, last tokens, tokens to experts and back.
//
// The rows of the result, or of the tokens, are one row of units of 16 bytes, or of two if their addresses or
// sizes are odd. So threads have equal work whatever the length of a row. What is only moved is moved as
// bytes. No warp intrinsics: hipify turns this file into HIP as it is.

#include <opkiln/op.h>
#include <opkiln/sixteen_bytes.h>

#include "rows.h"

namespace {

using rows::checked;
using rows::kThreads;
using rows::kTurns;
using rows::kUnits;
using rows::Place;

constexpr int64_t kNone = INT64_MIN;  // no row: the result is zero

// Which row of a table each row of a result is.
struct Picked {
  const void* table;
  int64_t count;            // rows of the table
  const void* indices;      // of 32 bits, or 64 if `wide`
  const int32_t* lengths;   // if given, `indices` are starts, and the last of so many rows is picked
  int64_t offset;
  bool wide;

  // Not checked, so that several can be loaded at once.
  __device__ int64_t index(int64_t row) const {
    const int64_t index = wide ? static_cast<const int64_t*>(indices)[row]
                               : static_cast<const int32_t*>(indices)[row];
    if (!lengths) return index + offset;
    return lengths[row] > 0 ? index + lengths[row] - 1 : kNone;
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
  const uint32_t a_row = static_cast<uint32_t>(work.row / static_cast<int64_t>(sizeof(Unit)));
  int64_t from[kTurns];
#pragma unroll
  for (int t = 0; t < kTurns; ++t) {
    const Place place(kUnits, t * kThreads + threadIdx.x, a_row);
    from[t] = place.row < work.rows ? work.from.index(place.row) : kNone;
  }
  Unit held[kTurns];
#pragma unroll
  for (int t = 0; t < kTurns; ++t) {
    const Place place(kUnits, t * kThreads + threadIdx.x, a_row);
    held[t] = Unit{};
    if (from[t] != kNone) {
      const int64_t row = checked(from[t], work.from.count);
      held[t] = static_cast<const Unit*>(work.from.table)[row * a_row + place.unit];
    }
  }
#pragma unroll
  for (int t = 0; t < kTurns; ++t) {
    const Place place(kUnits, t * kThreads + threadIdx.x, a_row);
    if (place.row < work.rows) static_cast<Unit*>(work.out)[place.row * a_row + place.unit] = held[t];
  }
}

struct Spread {
  const void* x;
  void* out;
  const int32_t* slots;
  int64_t tokens, row;  // bytes
  int chosen;
};

// A row is read once, and written for each of its experts.
template <class Unit>
__global__ void __launch_bounds__(kThreads) spread_kernel(const OPK_GRID_CONSTANT Spread work) {
  const uint32_t a_row = static_cast<uint32_t>(work.row / static_cast<int64_t>(sizeof(Unit)));
  Unit held[kTurns];
#pragma unroll
  for (int t = 0; t < kTurns; ++t) {
    const Place place(kUnits, t * kThreads + threadIdx.x, a_row);
    if (place.row < work.tokens) held[t] = static_cast<const Unit*>(work.x)[place.row * a_row + place.unit];
  }
#pragma unroll
  for (int t = 0; t < kTurns; ++t) {
    const Place place(kUnits, t * kThreads + threadIdx.x, a_row);
    if (place.row >= work.tokens) continue;
    for (int j = 0; j < work.chosen; ++j) {
      const int64_t to = checked(work.slots[place.row * work.chosen + j], work.tokens * work.chosen);
      static_cast<Unit*>(work.out)[to * a_row + place.unit] = held[t];
    }
  }
}

constexpr int kSumTurns = 2;  // units of a thread,
constexpr int kSumTerms = 2;  // and terms that are loaded at once
constexpr int kSumUnits = kThreads * kSumTurns;

struct Sum {
  Picked first, second;  // two terms, of two tables; or:
  const int32_t* slots;  // rows of the first table, `terms` for each row of the result
  const float* weights;  // null: 1
  int terms;
  void* out;
  int64_t rows;
  int columns;

  __device__ const void* table(int term) const { return slots || term == 0 ? first.table : second.table; }
  __device__ int64_t count(int term) const { return slots || term == 0 ? first.count : second.count; }
  __device__ int64_t index(int64_t row, int term) const {
    if (slots) return slots[row * terms + term];
    return term == 0 ? first.index(row) : second.index(row);
  }
  __device__ float weight(int64_t row, int term) const { return weights ? weights[row * terms + term] : 1.0f; }
};

// One element, like Sixteen.
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

template <class Pack>
__global__ void __launch_bounds__(kThreads) sum_kernel(const OPK_GRID_CONSTANT Sum work) {
  const uint32_t a_row = static_cast<uint32_t>(work.columns / Pack::kCount);
  float sums[kSumTurns][Pack::kCount] = {};
  for (int first = 0; first < work.terms; first += kSumTerms) {
    int64_t from[kSumTerms][kSumTurns];
#pragma unroll
    for (int i = 0; i < kSumTerms; ++i) {
#pragma unroll
      for (int t = 0; t < kSumTurns; ++t) {
        const Place place(kSumUnits, t * kThreads + threadIdx.x, a_row);
        const bool is_there = place.row < work.rows && first + i < work.terms;
        from[i][t] = is_there ? work.index(place.row, first + i) : kNone;
      }
    }
    Pack held[kSumTerms][kSumTurns];
#pragma unroll
    for (int i = 0; i < kSumTerms; ++i) {
#pragma unroll
      for (int t = 0; t < kSumTurns; ++t) {
        const Place place(kSumUnits, t * kThreads + threadIdx.x, a_row);
        if (from[i][t] != kNone) {
          const int64_t row = checked(from[i][t], work.count(first + i));
          held[i][t] = static_cast<const Pack*>(work.table(first + i))[row * a_row + place.unit];
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kSumTerms; ++i) {
#pragma unroll
      for (int t = 0; t < kSumTurns; ++t) {
        const Place place(kSumUnits, t * kThreads + threadIdx.x, a_row);
        if (from[i][t] != kNone) {
          const float weight = work.weight(place.row, first + i);
#pragma unroll
          for (int e = 0; e < Pack::kCount; ++e) sums[t][e] += weight * held[i][t][e];
        }
      }
    }
  }
#pragma unroll
  for (int t = 0; t < kSumTurns; ++t) {
    const Place place(kSumUnits, t * kThreads + threadIdx.x, a_row);
    if (place.row >= work.rows) continue;
    Pack out;
    narrow(out, sums[t]);
    static_cast<Pack*>(work.out)[place.row * a_row + place.unit] = out;
  }
}

OPK_PLAIN_BEGIN

using opk::Tensor;
using rows::MaybeTensor;

int64_t bytes_of(const Tensor& x) { return x.size(1) * opkiln::size_of(opk::element_of(x)); }

void launch_copy(const Copy& work) {
  const bool packed = rows::is_packed(work.row, {work.from.table, work.out});
  const int64_t blocks = rows::blocks_of(work.rows, work.row / (packed ? 16 : 2), kUnits);
  opk::launch(packed ? copy_kernel<rows::Sixteen> : copy_kernel<uint16_t>, blocks, kThreads, 0, work);
}

template <class T>
void launch_sum(const Sum& work) {
  using opkiln::device::Sixteen;
  const int64_t row = work.columns * int64_t{sizeof(T)};
  if (rows::is_packed(row, {work.first.table, work.second.table, work.out})) {
    const int64_t blocks = rows::blocks_of(work.rows, work.columns / Sixteen<T>::kCount, kSumUnits);
    return opk::launch(sum_kernel<Sixteen<T>>, blocks, kThreads, 0, work);
  }
  opk::launch(sum_kernel<One<T>>, rows::blocks_of(work.rows, work.columns, kSumUnits), kThreads, 0, work);
}

void sum(const Sum& work, opkiln::ElementType type) {
  switch (type) {
    case opkiln::ElementType::kFloat: return launch_sum<float>(work);
    case opkiln::ElementType::kFloat16: return launch_sum<opk::half>(work);
    case opkiln::ElementType::kBFloat16: return launch_sum<opk::bfloat16>(work);
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
  sum({words, places, nullptr, nullptr, 2, out.data(), tokens.size(0), static_cast<int>(weight.size(1))},
      opk::element_of(weight));
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
  const int64_t blocks = rows::blocks_of(work.tokens, work.row / (packed ? 16 : 2), kUnits);
  opk::launch(packed ? spread_kernel<rows::Sixteen> : spread_kernel<uint16_t>, blocks, kThreads, 0, work);
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
  const Picked all{table.data(), rows.size(0), nullptr, nullptr, 0, false};
  sum({all, all, places.data<const int32_t>(), weights ? factors.data<float>() : nullptr,
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
