// Linear layers with int8 weights on host memory. The loops are plain, so that the compiler vectorizes them.

#include <opkiln/floats.h>

#include "int8_linear.h"

namespace {

using int8_linear::Few;
using int8_linear::Weights;

constexpr int kPart = 256;  // weights that are widened at a time
constexpr int kFewRows = 8;  // with more rows, dequantized weights are faster

// Widens `count` weights from `element` on to floats.
void widen_weights(const Weights& weights, int64_t element, int64_t count, float* values) {
  for (int64_t i = 0; i < count;) {
    const int64_t group = int8_linear::group_of(weights, element + i);
    const int64_t end = (group + 1) * weights.group - element, last = end < count ? end : count;
    const float scale = weights.scales[group];
    const int8_t* const from = weights.data + element;
    for (; i < last; ++i) values[i] = static_cast<float>(from[i]) * scale;
  }
}

template <class T>
void dequantize_as(const Weights& weights, T* out) {
  opk::parallel_for(0, weights.rows * weights.columns, opk::kGrainBytes / 4, [&](int64_t first, int64_t last) {
    float values[kPart];
    for (int64_t at = first; at < last; at += kPart) {
      const int64_t count = last - at < kPart ? last - at : kPart;
      widen_weights(weights, at, count, values);
      opkiln::store_floats(values, out + at, count);
    }
  });
}

float dot(const float* a, const float* b, int64_t count) {
  constexpr int kMany = 32;
  float sums[kMany] = {};
  int64_t i = 0;
  for (; i + kMany <= count; i += kMany) {
    for (int k = 0; k < kMany; ++k) sums[k] += a[i + k] * b[i + k];
  }
  for (; i < count; ++i) sums[0] += a[i] * b[i];
  for (int k = 1; k < kMany; ++k) sums[0] += sums[k];
  return sums[0];
}

template <class T>
void multiply_as(const Few& few) {
  const Weights& weights = few.weights;
  const int64_t columns = weights.columns, all = few.rows * columns;
  struct Buffer {
    float* values;
    ~Buffer() { delete[] values; }
  } const x{new float[static_cast<size_t>(all)]};
  opkiln::load_floats(static_cast<const T*>(few.x), x.values, all);
  opk::parallel_for(0, weights.rows, 1 + opk::kGrainBytes / 8 / columns, [&](int64_t first, int64_t last) {
    float part[kPart];
    for (int64_t output = first; output < last; ++output) {
      float sums[kFewRows] = {};
      for (int64_t column = 0; column < columns; column += kPart) {
        const int64_t count = columns - column < kPart ? columns - column : kPart;
        widen_weights(weights, output * columns + column, count, part);
        for (int row = 0; row < few.rows; ++row) sums[row] += dot(part, x.values + row * columns + column, count);
      }
      const float bias = few.bias ? opkiln::as_float(static_cast<const T*>(few.bias)[output]) : 0;
      for (int row = 0; row < few.rows; ++row) {
        opkiln::set_from(sums[row] + bias, static_cast<T*>(few.out) + row * weights.rows + output);
      }
    }
  });
}

}  // namespace

void int8_linear::dequantize(const Weights& weights, void* out, opkiln::ElementType type) {
  OPK_ELEMENT(type, T, (float, opkiln::BFloat16, opkiln::Float16), dequantize_as(weights, static_cast<T*>(out)));
}

bool int8_linear::multiply(const Few& few) {
  if (few.rows > kFewRows) return false;
  OPK_ELEMENT(few.type, T, (float, opkiln::BFloat16, opkiln::Float16), multiply_as<T>(few));
  return true;
}

OPKILN_OP(int8_linear::dequantize_int8, cpu);
OPKILN_OP(int8_linear::int8_linear, cpu);
