// Norms of rows on host memory. A row stays in the cache between the steps, so memory is read once.

#include <opkiln/blocks.h>
#include <opkiln/op.h>

#include "norms.h"

namespace {

using opkiln::Vec;
using opkiln::whole_registers;

inline float scalar(float value) { return value; }
inline float scalar(opkiln::BFloat16 value) { return opkiln::widen(value); }
inline float scalar(opkiln::Float16 value) { return opkiln::widen(value); }
inline void put(float value, float* to) { *to = value; }
inline void put(float value, opkiln::BFloat16* to) { *to = opkiln::narrow_bfloat16(value); }
inline void put(float value, opkiln::Float16* to) { *to = opkiln::narrow_float16(value); }

inline float sum_of_lanes(Vec value) {
  float lanes[Vec::kLanes], sum = 0;
  value.store(lanes);
  for (float each : lanes) sum += each;
  return sum;
}

// The sum of a row, or of the squares of its distances from the mean. Four sums, so that no addition
// waits for the one before.
template <bool kSquares, class T>
float sum_of_row(const T* row, int64_t columns, float mean) {
  constexpr int64_t kLanes = Vec::kLanes;
  const Vec middle = Vec::all(mean);
  Vec sums[4] = {Vec::all(0), Vec::all(0), Vec::all(0), Vec::all(0)};
  const auto take = [&](Vec& sum, int64_t at) {
    const Vec x = Vec::load(row + at) - middle;
    sum = kSquares ? multiply_add(x, x, sum) : sum + x;
  };
  int64_t at = 0;
  for (; at + 4 * kLanes <= columns; at += 4 * kLanes) {
    opkiln::prefetch_ahead(row + at);
    for (int k = 0; k < 4; ++k) take(sums[k], at + k * kLanes);
  }
  for (; at + kLanes <= columns; at += kLanes) take(sums[0], at);
  float sum = sum_of_lanes((sums[0] + sums[1]) + (sums[2] + sums[3]));
  for (; at < columns; ++at) {
    const float x = scalar(row[at]) - mean;
    sum += kSquares ? x * x : x;
  }
  return sum;
}

// x + input_bias + residual, rounded as it is stored: the norm is of what the caller gets.
template <class T>
void add_row(const T* x, const T* residual, const T* shift, T* to, int64_t columns) {
  const int64_t whole = whole_registers(columns);
  for (int64_t at = 0; at < whole; at += Vec::kLanes) {
    Vec sum = Vec::load(x + at);
    if (shift) sum = sum + Vec::load(shift + at);
    (sum + Vec::load(residual + at)).store(to + at);
  }
  for (int64_t at = whole; at < columns; ++at) {
    put(scalar(x[at]) + (shift ? scalar(shift[at]) : 0.0f) + scalar(residual[at]), to + at);
  }
}

// `next` is the row that is read next. The steps before this one wait for memory, and this one does not.
template <bool kAround, class T>
void scale_row(const T* row, const T* weight, const T* bias, T* to, int64_t columns, float mean,
               float scale, const T* next) {
  const Vec middle = Vec::all(mean), factor = Vec::all(scale);
  const int64_t whole = whole_registers(columns);
  for (int64_t at = 0; at < whole; at += Vec::kLanes) {
    __builtin_prefetch(next + at);
    Vec out = (Vec::load(row + at) - middle) * factor;
    if (weight) out = out * Vec::load(weight + at);
    if (bias) out = out + Vec::load(bias + at);
    if (kAround) {
      out.store_around(to + at);
    } else {
      out.store(to + at);
    }
  }
  for (int64_t at = whole; at < columns; ++at) {
    float out = (scalar(row[at]) - mean) * scale;
    if (weight) out *= scalar(weight[at]);
    if (bias) out += scalar(bias[at]);
    put(out, to + at);
  }
}

template <class T>
void normalize_rows(const Norm& n, int64_t first, int64_t last) {
  const auto row_of = [&](const void* tensor, int64_t row) {
    return tensor ? static_cast<const T*>(tensor) + row * n.columns : nullptr;
  };
  const bool large = n.rows * n.columns * static_cast<int64_t>(sizeof(T)) >= opkiln::kAroundBytes;
  for (int64_t row = first; row < last; ++row) {
    const T* from = row_of(n.x, row);
    T* const out = const_cast<T*>(row_of(n.out, row));
    if (n.residual) {
      T* const sum = n.sum ? const_cast<T*>(row_of(n.sum, row)) : out;
      add_row(from, row_of(n.residual, row), row_of(n.input_bias, 0), sum, n.columns);
      from = sum;
    }
    const float count = static_cast<float>(n.columns);
    const float mean = n.centred ? sum_of_row<false>(from, n.columns, 0) / count : 0;
    const float square = sum_of_row<true>(from, n.columns, mean) / count;
    const float scale = 1.0f / __builtin_sqrtf(square + n.eps);
    const bool around =
        large && from != out && reinterpret_cast<uintptr_t>(out) % (Vec::kLanes * sizeof(T)) == 0;
    (around ? scale_row<true, T> : scale_row<false, T>)(
        from, row_of(n.weight, 0), row_of(n.bias, 0), out, n.columns, mean, scale,
        row_of(n.x, row + 1 < last ? row + 1 : row));
  }
  opkiln::settle_stores();
}

void normalize(const Norm& norm) {
  const int64_t bytes = norm.columns * opkiln::size_of(norm.type) * 2;
  const int64_t grain = opk::kGrainBytes / bytes > 0 ? opk::kGrainBytes / bytes : 1;
  opk::parallel_for(0, norm.rows, grain, [&](int64_t first, int64_t last) {
    OPK_ELEMENT(norm.type, T, (float, opkiln::BFloat16, opkiln::Float16), normalize_rows<T>(norm, first, last));
  });
}

}  // namespace

OPKILN_OP(rms_norm, cpu);
OPKILN_OP(layer_norm, cpu);
OPKILN_OP(pre_rms_norm, cpu);
OPKILN_OP(pre_layer_norm, cpu);
OPKILN_OP(post_rms_norm, cpu);
OPKILN_OP(post_layer_norm, cpu);
